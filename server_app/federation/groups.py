"""The groups as the server sees them: who is there, and typed questions to all of them at once.

Axis letters: G groups, Q questions, K options, J answers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, Message, RecordDict

from appa_flwr import wire
from appa_flwr.errors import UserError
from server_app.federation.grid import OverlapGrid
from server_app.federation.keys import GroupKeys

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# A node whose app hangs is waited for so many times as long as such a message took when all answered, and this long at
# least; deployed only, since in a simulation nobody hangs and a busy machine may take its time.
PATIENCE, LEAST_SECONDS = 10.0, 60.0
SAME_REWARD = 8  # different answers that can hardly all earn the same
JOIN_PAUSE = 0.5  # seconds between two roll calls while groups are still joining

log = logging.getLogger("appa.server")


class Federation:
    """All groups behind a Grid; replies are matched to groups by the name they carry, from the group's own node."""

    def __init__(self, grid: OverlapGrid, *, min_groups: int, timeout: float, keys: GroupKeys | None = None) -> None:
        self.grid = grid
        self._keys = keys
        self.groups: tuple[str, ...] = ()
        self.simulated = False  # until every group has said so
        # whose owners keep answers to themselves, and let nobody probe for ceilings
        self.without_truth: tuple[str, ...] = ()
        self.without_probes: tuple[str, ...] = ()
        self._nodes: tuple[int, ...] = ()
        self._homes: dict[str, int] = {}
        self._strangers: set[int] = set()  # nodes on which no group of the run lives
        self._keyless: set[int] = set()  # nodes with the key of no group
        self._forgetful: set[int] = set()  # nodes that have restarted
        self._briefing: dict[str, RecordDict] = {}  # what a node must have been sent before it can score
        self._min_groups, self._timeout = min_groups, timeout
        self._vote_shape: tuple[int, ...] = ()
        self._errors: Counter[int] = Counter()  # of the last question, by code
        self._took: dict[str, float] = {}  # most seconds until all had answered, by kind of message

    def homes(self, groups: Collection[str]) -> tuple[int, ...]:
        """Nodes that host one of these groups, in the order of the groups of the run."""
        return tuple(dict.fromkeys(self._homes[name] for name in self.present if name in groups))

    @property
    def present(self) -> tuple[str, ...]:
        """The groups that have joined; others of the run may do so yet."""
        return tuple(name for name in self.groups if name in self._homes)

    def gather(self, expected: Sequence[str], *, patience: float) -> None:
        """Call the roll until every expected group is there, or enough of them when patience ends.

        Args:
            expected: group names that should join, and may still do so later; empty: whoever is there.
            patience: seconds to wait for them.

        Raises:
            UserError: two nodes speak for the same group, or fewer groups than `min_groups`.
        """
        deadline = time.monotonic() + patience
        homes: dict[str, int] = {}
        while True:
            online = set(self.grid.get_node_ids())
            homes = {name: node for name, node in homes.items() if node in online}
            # Whoever has answered is not asked again: deployed, each question starts a process at the group's.
            homes |= self._roll_call(online - set(homes.values()), known=homes)
            complete = set(expected) <= set(homes) if expected else len(homes) >= self._min_groups
            if complete or time.monotonic() > deadline:
                break
            time.sleep(JOIN_PAUSE)
        kept = {name: node for name, node in homes.items() if not expected or name in expected}
        missing = [name for name in expected if name not in kept]
        # A fixed order of groups, whatever order the nodes answered in: sums over groups must not depend on it.
        self.groups, self._homes = tuple(expected) or tuple(sorted(kept)), kept
        if len(kept) < self._min_groups:
            others = [name for name in homes if name not in kept]
            raise UserError(
                f"{len(kept)} groups joined ({', '.join(self.present) or 'none'}); "
                f"federation.min-groups = {self._min_groups}"
                + (f"; missing: {', '.join(missing)}" if missing else "")
                + (f"; there, but not in `groups`: {', '.join(others)}" if others else "")
            )
        if missing:
            log.warning("groups that did not join: %s", ", ".join(missing))
        self._nodes = tuple(sorted(set(kept.values())))
        self.grid.members = self._nodes

    def _roll_call(self, nodes: Collection[int], *, known: Mapping[str, int]) -> dict[str, int]:
        """Ask these nodes who lives there: group -> node.

        Raises:
            UserError: two nodes, of these or of those that are known, speak for one group.
        """
        homes: dict[str, int] = {}
        for node, names in self._residents(nodes).items():
            for name in names:
                if homes.setdefault(name, node) != node or known.get(name, node) != node:
                    raise UserError(f"two nodes speak for group '{name}'; each group needs exactly one")
        return homes

    def _residents(self, nodes: Collection[int]) -> dict[int, list[str]]:
        """The groups that these nodes speak for, with their keys; without nodes that did not answer.

        A node without any group's key is not asked: it could make the server wait.
        """
        keys, allowed = self._keys, {node: frozenset[str]() for node in nodes}
        if keys is not None:
            allowed |= {info.node_id: keys.names(info) for info in self.grid.get_nodes() if info.node_id in allowed}
            keyless = {node for node, names in allowed.items() if not names}
            for node in sorted(keyless - self._keyless):
                log.warning("node %s has the key of no group; it is left out", node)
            self._keyless |= keyless
            nodes = [node for node in nodes if node not in keyless]
        found: dict[int, list[str]] = {}
        for reply in self._ask(wire.ROLL_CALL, RecordDict(), nodes=tuple(nodes)):
            node = reply.metadata.src_node_id
            for name in (group.group for group in self._read(reply)):
                if keys is None or name in allowed[node]:
                    found.setdefault(node, []).append(name)
                else:
                    log.warning("node %s speaks for %s without its key; it is left out", node, name)
        return found

    def _welcome_back(self) -> None:
        """Let groups score that are late, or whose node has restarted: it gets what all were sent.

        A restarted group's table is as it was; a late one has not trained PluralLLM. A node that Flower knows by its
        key keeps its id; another one gets a new id, which may speak for a group only while the group's own node is not
        there.
        """
        online = self.grid.online()
        gone = {name: node for name, node in self._homes.items() if node not in online}
        back = {name: node for name, node in self._homes.items() if node in self._forgetful & online}
        late = set(self.groups) - set(self._homes)
        if (gone or late) and (fresh := online - set(self._homes.values()) - self._strangers):
            for node, names in self._residents(fresh).items():
                if not set(names) & set(self.groups):
                    self._strangers.add(node)  # whoever else cannot be used yet is asked again
                for name in set(names) & set(self.groups):
                    if name not in {*gone, *late} or name in back:
                        log.warning("another node speaks for group '%s', whose own is there; it is left out", name)
                    else:
                        back[name] = node
        for node in sorted(set(back.values())):
            names = [name for name, home in back.items() if home == node]
            if all(self._briefed(node, kind) for kind in self._briefing):
                log.warning("%s: %s", "joined" if late & set(names) else "back", ", ".join(names))
                self._homes |= dict.fromkeys(names, node)
                self._forgetful.discard(node)
        self._nodes = tuple(sorted(set(self._homes.values())))
        self.grid.members = self._nodes

    def _briefed(self, node: int, kind: str) -> bool:
        replies = self._ask(kind, self._briefing[kind], nodes=(node,))
        return any([self._read(reply) for reply in replies])

    def hosted(self, nodes: Collection[int]) -> str:
        """The groups at these nodes, for messages."""
        return ", ".join(name for name in self.present if self._homes[name] in nodes)

    def _ask(
        self,
        kind: str,
        content: RecordDict,
        *,
        nodes: Sequence[int] | None = None,
        iteration: int = 0,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Message]:
        """One message to every node that hosts a group, or to those given; the replies that came."""
        self._errors.clear()
        asked = self._nodes if nodes is None else nodes
        messages = [self.grid.create_message(content, kind, node, str(iteration)) for node in asked]
        patience = self._timeout
        if not self.simulated and kind in self._took:
            patience = min(patience, max(LEAST_SECONDS, PATIENCE * self._took[kind]))
        started = time.monotonic()
        replies = self.grid.send_and_receive(messages, timeout=patience, meanwhile=meanwhile)
        if messages and len(replies) == len(messages):
            self._took[kind] = max(self._took.get(kind, 0.0), time.monotonic() - started)
        return replies

    def sums(self, request: wire.SumsRequest, *, nodes: Sequence[int]) -> dict[int, wire.SumsReply]:
        """Ask nodes for a step of the sums over groups; node -> its reply, without those that did not give one."""
        found = {}
        for reply in self._ask(wire.POPULATION, wire.pack_sums_request(request), nodes=nodes):
            node = reply.metadata.src_node_id
            if reply.has_error():
                log.warning("%s: %s", self.hosted([node]), reply.error.reason)
                continue
            try:
                found[node] = wire.unpack_sums_reply(reply.content)
            except ValueError as error:
                log.warning("%s: %s", self.hosted([node]), error)
        return found

    def send_catalogue(self, catalogue: wire.Catalogue) -> dict[str, int]:
        """Hand out the public questions; how many training questions each group has answered."""
        self._vote_shape = catalogue.option_QK.shape
        self._briefing[wire.CATALOGUE] = wire.pack_catalogue(catalogue)
        replies = self._replies(self._ask(wire.CATALOGUE, self._briefing[wire.CATALOGUE]))
        self._require(replies, "take the catalogue of questions")
        self.simulated = all(reply.counts.get("simulated") for reply in replies.values())
        self.without_truth, self.without_probes = (
            tuple(name for name, reply in replies.items() if not reply.counts.get(what)) for what in ("truth", "probes")
        )
        return {name: reply.counts.get("answered", 0) for name, reply in replies.items()}

    def send_targets(
        self, weights: ArrayRecord, *, fault: Callable[[wire.GroupReply], str | None]
    ) -> Mapping[str, wire.GroupReply]:
        """Hand out the frozen PluralLLM; the replies hold sums of its scores against each group's own answers.

        Args:
            weights: of the frozen PluralLLM.
            fault: what is wrong with a reply, None where it can be used.
        """
        self._briefing[wire.TARGETS] = wire.pack_weights(weights)
        replies = self._without(self._replies(self._ask(wire.TARGETS, self._briefing[wire.TARGETS])), fault)
        self._require(replies, "write a target table")
        return replies

    def votes(self, *, needed: bool = True) -> FloatArray | None:
        """Every group's votes (G, Q, K); groups without usable votes on the catalogue's questions are left out.

        Where fewer vote than `federation.min-groups`, there are none, if they are not needed.

        Raises:
            UserError: they are needed.
        """
        given: dict[str, FloatArray] = {}
        for name, reply in self._replies(self._ask(wire.VOTE, RecordDict())).items():
            votes_QK = reply.votes_QK
            if votes_QK is None or votes_QK.shape != self._vote_shape:
                log.warning("group %s counts as missing: no votes of shape %s", name, self._vote_shape)
            # One group must not outvote the others: no option is worth more than the first of K ranks.
            elif not ((votes_QK >= 0) & (votes_QK <= self._vote_shape[-1])).all():
                log.warning("group %s counts as missing: votes outside [0, %s]", name, self._vote_shape[-1])
            else:
                given[name] = votes_QK
        if not needed and len(given) < self._min_groups:
            return None
        self._require(given, "vote")
        return np.stack(list(given.values()))

    def score(
        self, request: wire.ScoreRequest, *, iteration: int = 0, meanwhile: Callable[[], None] | None = None
    ) -> dict[tuple[str, str], FloatArray]:
        """Let the groups score answers; see `server_app.federation.rewards.Groups`.

        Groups that have restarted since are back first. A group whose reply is an error, or holds rewards of wrong
        number, outside [0, 1], NaN (against targets) or above 0 for an answer nobody could read, counts as missing,
        with a warning that names it.

        Raises:
            UserError: fewer groups answered than `federation.min-groups`.
        """
        if not self.simulated:
            self._welcome_back()
        unreadable_J: BoolArray = np.logical_and.reduce(np.isnan(request.prediction_JK), axis=1)
        keys = [(metric, side) for side in request.sides for metric in request.metrics]
        content = wire.pack_score_request(request)
        by_group = self._without(
            self._replies(self._ask(wire.SCORE, content, iteration=iteration, meanwhile=meanwhile)),
            lambda reply: next((f for key in keys if (f := _fault(reply.rewards.get(key), unreadable_J, key))), None),
        )
        self._require(by_group, "score the answers")
        answers = request.prediction_JK[~unreadable_J]
        if len(np.unique(answers, axis=0)) >= SAME_REWARD:
            for name, reply in by_group.items():
                if any(np.ptp(reply.rewards[key][~unreadable_J]) == 0.0 for key in keys if key[1] == wire.TARGET_SIDE):
                    log.warning("group %s gives all answers the same reward", name)
        missing = np.full(unreadable_J.size, np.nan)
        return {
            key: np.stack([by_group[name].rewards[key] if name in by_group else missing for name in self.groups])
            for key in keys
        }

    @staticmethod
    def _without(
        by_group: Mapping[str, wire.GroupReply], fault: Callable[[wire.GroupReply], str | None]
    ) -> dict[str, wire.GroupReply]:
        """The replies in which no fault is found; a warning names the others."""
        sound = {}
        for name, reply in by_group.items():
            if (reason := fault(reply)) is None:
                sound[name] = reply
            else:
                log.warning("group %s counts as missing: %s", name, reason)
        return sound

    def _replies(self, replies: Iterable[Message]) -> dict[str, wire.GroupReply]:
        """Known groups' replies by name; what cannot be used is warned about and left out."""
        found: dict[str, list[wire.GroupReply]] = {name: [] for name in self.groups}
        for reply in replies:
            for group in self._read(reply):
                if group.group not in found:
                    log.warning("a reply for group '%s', which is not in this run, is left out", group.group)
                elif reply.metadata.src_node_id != self._homes.get(group.group):
                    # Or any node could speak for a group, or silence it by answering for it too.
                    log.warning("a reply for group '%s' from a node that is not its home is left out", group.group)
                else:
                    found[group.group].append(group)
        for name, answers in found.items():
            if not answers:
                log.warning("group %s did not answer", name)
            elif len(answers) > 1:  # nobody can tell which of them is the group's own
                log.warning("group %s counts as missing: it answered %s times", name, len(answers))
        return {name: answers[0] for name, answers in found.items() if len(answers) == 1}

    def _read(self, reply: Message) -> tuple[wire.GroupReply, ...]:
        if reply.has_error():
            self._errors[reply.error.code] += 1
            if reply.error.code == wire.FORGOTTEN:
                self._forgetful.add(reply.metadata.src_node_id)
            log.warning("node %s: %s", reply.metadata.src_node_id, reply.error.reason)
            return ()
        try:
            return wire.unpack_replies(reply.content)
        except ValueError as error:
            log.warning("node %s: %s", reply.metadata.src_node_id, error)
            return ()

    def _require(self, present: Mapping[str, object], what: str) -> None:
        if len(present) < self._min_groups:
            refused = [
                f"{self._errors[code]} nodes refused: {why}"
                for code, why in wire.REFUSALS.items()
                if self._errors[code]
            ]
            raise UserError(
                f"only {len(present)} of {len(self.groups)} groups ({', '.join(present) or 'none'}) could {what}; "
                f"federation.min-groups = {self._min_groups}. " + ("; ".join(refused) or "The groups' own logs say why")
            )


def _fault(reward_J: FloatArray | None, unreadable_J: BoolArray, key: tuple[str, str]) -> str | None:
    metric, side = key
    if reward_J is None:
        return f"no {metric} rewards"
    if reward_J.shape != unreadable_J.shape:
        return f"{metric} rewards of shape {reward_J.shape} for {unreadable_J.size} answers"
    known_J = ~np.isnan(reward_J)
    if side == wire.TARGET_SIDE and not known_J.all():
        return f"{metric} rewards hold NaN"
    if ((reward_J[known_J] < 0) | (reward_J[known_J] > 1)).any():
        return f"{metric} rewards outside [0, 1]"
    if (reward_J[unreadable_J & known_J] > 0).any():
        return f"{metric} rewards above 0 for answers that nobody can read"
    return None
