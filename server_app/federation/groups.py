"""The server's view of the groups: which nodes host them, and typed questions to all of them at once.

Axis letters: G groups, Q questions, K options, J answers.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from appa_flwr.core.errors import UserError
from appa_flwr.protocol import wire
from server_app.federation import faults
from server_app.federation.foreign import listed, plain
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import GroupKeys

if TYPE_CHECKING:
    from server_app.federation.secure_sums import SecureSums

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

SAME_REWARD = 8  # different answers that can hardly all earn the same
JOIN_PAUSE = 0.5  # seconds between two roll calls while groups are still joining
JOIN_SECONDS = 15.0  # for the reply to the last of them: a node asks for messages every three, and then starts
MOST_NAMES = 1000  # of a deployed node, which hosts one group

log = logging.getLogger("appa.server")


class Federation:
    """All groups behind a Grid; replies are matched to groups by the name they carry, from the group's own node."""

    def __init__(
        self, grid: OverlapGrid, *, min_groups: int, timeout: float, keys: GroupKeys | None = None, survey: str = ""
    ) -> None:
        """`survey` is the path of the run's survey, which a simulation's nodes read."""
        self.grid, self._survey = grid, survey if grid.simulated else ""
        self._keys = keys
        self.groups: tuple[str, ...] = ()
        # groups whose owners keep survey answers to themselves, and refuse probes for ceilings
        self.without_truth: tuple[str, ...] = ()
        self.without_probes: tuple[str, ...] = ()
        self.without_mean: tuple[str, ...] = ()
        self.secure: SecureSums | None = None  # where the server sees the groups' sums alone
        self.totals: wire.Totals | None = None  # of answers to held-out questions, in a simulation
        self._nodes: tuple[int, ...] = ()
        self._node_of: dict[str, int] = {}
        self._unrelated_nodes: set[int] = set()  # nodes that host no group of the run
        self._nodes_without_key: set[int] = set()  # nodes with the key of no group
        self._restarted: set[int] = set()  # nodes that have restarted, or hung while the others were set up
        self._setup: dict[str, RecordDict] = {}  # what a node must have been sent before it can score
        self.min_groups, self._timeout = min_groups, timeout
        self._vote_shape: tuple[int, ...] = ()
        self._errors: Counter[int] = Counter()  # of the last question, by code

    @property
    def simulated(self) -> bool:
        """True where all groups are in one simulation with the server."""
        return self.grid.simulated

    def nodes_of(self, groups: Collection[str]) -> tuple[int, ...]:
        """Nodes that host one of these groups, in the order of the groups of the run."""
        return tuple(dict.fromkeys(self._node_of[name] for name in self.present if name in groups))

    @property
    def present(self) -> tuple[str, ...]:
        """The groups that have joined; others of the run may do so yet."""
        return tuple(name for name in self.groups if name in self._node_of)

    @property
    def reachable(self) -> tuple[str, ...]:
        """The groups that have joined, without those whose node is waited for no longer."""
        return tuple(name for name in self.present if self._node_of[name] not in self.grid.stuck)

    @property
    def seconds(self) -> dict[str, float]:
        """Group -> how long its node took to answer the last question; groups that did not answer are not there."""
        after = self.grid.answered_after
        return {name: after[self._node_of[name]] for name in self.present if self._node_of[name] in after}

    def hosted(self, node: int) -> list[str]:
        """The groups of the run at a node."""
        return [name for name in self.present if self._node_of[name] == node]

    def readmit(self) -> None:
        """Have groups take part that are late, or whose node has restarted."""
        if not self.simulated:
            self._readmit()

    def ask_each(
        self,
        kind: str,
        contents: Mapping[int, RecordDict],
        *,
        iteration: int = 0,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Message]:
        """Node -> its own message of a kind; the replies that are no errors."""
        self._errors.clear()
        asked = [self.grid.create_message(content, kind, node, str(iteration)) for node, content in contents.items()]
        replies = self.grid.send_and_receive(asked, timeout=self._timeout, meanwhile=meanwhile)
        for reply in replies:
            if reply.has_error():
                self._read(reply)  # it says why
        return [reply for reply in replies if not reply.has_error()]

    def gather(self, expected: Sequence[str], *, patience: float) -> None:
        """Call the roll until every expected group is there, or enough of them when patience ends.

        Args:
            expected: group names that should join, and may still do so later; empty: all that are there.
            patience: seconds to wait for them; deployed, a node that was asked late has a few more to answer.

        Raises:
            UserError: two nodes speak for the same group, or fewer groups than `min_groups`.
        """
        deadline = time.monotonic() + patience
        node_of: dict[str, int] = {}
        while True:
            online = set(self.grid.get_node_ids())
            node_of = {name: node for name, node in node_of.items() if node in online}
            # A node that has answered is not asked again: deployed, each question starts a process there.
            left = self._timeout if self.simulated else max(JOIN_SECONDS, deadline - time.monotonic())
            node_of |= self._roll_call(online - set(node_of.values()), known=node_of, timeout=left)
            complete = set(expected) <= set(node_of) if expected else len(node_of) >= self.min_groups
            if complete or time.monotonic() > deadline:
                break
            time.sleep(JOIN_PAUSE)
        kept = {name: node for name, node in node_of.items() if not expected or name in expected}
        missing = [name for name in expected if name not in kept]
        # A fixed order of groups, whatever order the nodes answered in: sums over groups must not depend on it.
        self.groups, self._node_of = tuple(expected) or tuple(sorted(kept)), kept
        if len(kept) < self.min_groups:
            others = [name for name in node_of if name not in kept]
            raise UserError(
                f"{len(kept)} groups joined ({', '.join(self.present) or 'none'}); "
                f"run.min-groups = {self.min_groups}"
                + (f"; missing: {', '.join(missing)}" if missing else "")
                + (f"; there, but not in `groups`: {listed(others)}" if others else "")
            )
        if missing:
            log.warning("groups that did not join: %s", ", ".join(missing))
        self._nodes = tuple(sorted(set(kept.values())))
        self.grid.members = self._nodes

    def _roll_call(self, nodes: Collection[int], *, known: Mapping[str, int], timeout: float) -> dict[str, int]:
        """Ask these nodes for their groups: group -> node.

        Raises:
            UserError: two nodes, of these or of those that are known, speak for one group.
        """
        node_of: dict[str, int] = {}
        for node, names in self._groups_at(nodes, timeout=timeout).items():
            for name in names:
                if node_of.setdefault(name, node) != node or known.get(name, node) != node:
                    raise UserError(f"two nodes speak for group '{name}'; each group needs exactly one")
        return node_of

    def _groups_at(self, nodes: Collection[int], *, timeout: float = math.inf) -> dict[int, list[str]]:
        """The groups that these nodes speak for, with their keys; without nodes that did not answer.

        A node without any group's key is not asked: it could make the server wait.
        """
        keys, allowed = self._keys, {node: frozenset[str]() for node in nodes}
        if keys is not None:
            allowed |= {info.node_id: keys.names(info) for info in self.grid.get_nodes() if info.node_id in allowed}
            without_key = {node for node, names in allowed.items() if not names}
            for node in sorted(without_key - self._nodes_without_key):
                log.warning("node %s has the key of no group; it is left out", node)
            self._nodes_without_key |= without_key
            nodes = [node for node in nodes if node not in without_key]
        found: dict[int, list[str]] = {}
        for reply in self._ask(wire.ROLL_CALL, wire.pack_roll_call(self._survey), nodes=tuple(nodes), timeout=timeout):
            node, names = reply.metadata.src_node_id, [group.group for group in self._read(reply)]
            if keys is not None:
                mine, why = [name for name in names if name in allowed[node]], "without its key"
            else:
                mine, why = [name for name in names if self.simulated or plain(name) == name], "which is no name"
            if mine:
                found[node] = mine
            if strange := set(names) - set(mine):
                log.warning("node %s speaks for %s %s; it is left out", node, listed(sorted(strange)), why)
        return found

    def _readmit(self) -> None:
        """Readmit groups that are late, or whose node has restarted: it is sent what all were sent.

        A restarted group's table is as it was; a late one has not trained PluralLLM. A node that Flower knows by its
        key keeps its id; another one gets a new id, which may speak for a group only while the group's own node is not
        there.
        """
        online = self.grid.online()
        gone = {name: node for name, node in self._node_of.items() if node not in online}
        back = {name: node for name, node in self._node_of.items() if node in self._restarted & online}
        late = set(self.groups) - set(self._node_of)
        if (gone or late) and (fresh := online - set(self._node_of.values()) - self._unrelated_nodes):
            for node, names in self._groups_at(fresh).items():
                if not set(names) & set(self.groups):
                    self._unrelated_nodes.add(node)  # other nodes that cannot be used yet are asked again
                free = {*gone, *late} - set(back)
                back |= dict.fromkeys(set(names) & free, node)
                if taken := sorted(set(names) & set(self.groups) - free):
                    log.warning("another node speaks for group '%s', whose own is there; it is left out", listed(taken))
        for node in sorted(set(back.values())):
            names = [name for name, host in back.items() if host == node]
            if all(self._set_up(node, kind) for kind in self._setup):
                log.warning("%s: %s", "joined" if late & set(names) else "back", ", ".join(names))
                self._node_of |= dict.fromkeys(names, node)
                self._restarted.discard(node)
        self._nodes = tuple(sorted(set(self._node_of.values())))
        self.grid.members = self._nodes

    def _set_up(self, node: int, kind: str) -> bool:
        replies = self._ask(kind, self._setup[kind], nodes=(node,))
        return any([self._read(reply) for reply in replies])

    def _ask(
        self,
        kind: str,
        content: RecordDict,
        *,
        nodes: Sequence[int] | None = None,
        timeout: float = math.inf,
    ) -> list[Message]:
        """One message to every node that hosts a group, or to those given; the replies that came."""
        messages = self._messages(kind, content, nodes=nodes)
        return self.grid.send_and_receive(messages, timeout=min(timeout, self._timeout))

    def _messages(
        self, kind: str, content: RecordDict, *, nodes: Sequence[int] | None = None, iteration: int = 0
    ) -> list[Message]:
        self._errors.clear()
        asked = self._nodes if nodes is None else nodes
        return [self.grid.create_message(content, kind, node, str(iteration)) for node in asked]

    def send_catalogue(self, catalogue: wire.Catalogue) -> dict[str, int]:
        """Hand out the public questions; how many training questions each group has answered."""
        self._vote_shape = catalogue.option_QK.shape
        replies = self._send_setup(wire.CATALOGUE, wire.pack_catalogue(catalogue))
        self._require(replies, "take the catalogue of questions")
        self.without_truth, self.without_probes, self.without_mean = (
            tuple(name for name, reply in replies.items() if not reply.counts.get(what))
            for what in ("truth", "probes", "mean")
        )
        given = {name: reply.held_out_HK for name, reply in replies.items() if reply.held_out_HK is not None}
        self.totals = _totals(given, catalogue) if given and self.simulated else None
        return {name: reply.counts.get("answered", 0) for name, reply in replies.items()}

    def send_targets(
        self, weights: ArrayRecord, *, fault: Callable[[wire.GroupReply], str | None]
    ) -> Mapping[str, wire.GroupReply]:
        """Hand out the frozen PluralLLM; the replies hold sums of its scores against each group's own answers.

        Args:
            weights: of the frozen PluralLLM.
            fault: what is wrong with a reply, None where it can be used.
        """
        content = wire.pack_weights(weights)
        if self.totals is not None:
            content.update(wire.pack_totals(self.totals))
        replies = faults.without(self._send_setup(wire.TARGETS, content), fault)
        self._require(replies, "write a target table")
        return replies

    def setup_digest(self, kind: str) -> str:
        """Hash of what all nodes have been sent of this kind; empty before."""
        return wire.digest(self._setup[kind]) if kind in self._setup else ""

    def _send_setup(self, kind: str, content: RecordDict) -> dict[str, wire.GroupReply]:
        """Send all nodes what scoring needs; one that does not answer gets it again once it does."""
        self._setup[kind] = content
        replies = self._ask(kind, content)
        self._restarted |= set(self._nodes) - {reply.metadata.src_node_id for reply in replies}
        return self._replies(replies)

    def votes(self, *, needed: bool = True, distributions: bool = False) -> FloatArray | None:
        """Every group's votes (G, Q, K); groups without usable votes on the catalogue's questions are left out.

        `distributions` asks for these, whatever the run's SFT learns; only groups whose owners allow it send them.
        Where fewer vote than `run.min-groups`, there are none, if they are not needed.

        Raises:
            UserError: they are needed.
        """
        asked = wire.pack_distributions_asked() if distributions else RecordDict()
        replies = self._replies(self._ask(wire.VOTE, asked))
        usable = faults.without(replies, lambda reply: faults.of_votes(reply.votes_QK, self._vote_shape))
        given = [reply.votes_QK for reply in usable.values() if reply.votes_QK is not None]
        if not needed and len(given) < self.min_groups:
            return None
        self._require(usable, "vote")
        return np.stack(given)

    def score(
        self, request: wire.ScoreRequest, *, iteration: int = 0, meanwhile: Callable[[], None] | None = None
    ) -> dict[tuple[str, str], FloatArray]:
        """Let the groups score answers; see `rewards` below.

        Args:
            request: the answers, and by which metrics.
            iteration: a label of the messages.
            meanwhile: computed here while the groups score.
        """
        messages = self.score_messages(request, iteration=iteration)
        replies = self.grid.send_and_receive(messages, timeout=self._timeout, meanwhile=meanwhile)
        return self.rewards(request, replies)

    def score_messages(self, request: wire.ScoreRequest, *, iteration: int = 0) -> list[Message]:
        """The request as a message to each node; groups that have restarted since the last one are back first."""
        self.readmit()
        return self._messages(wire.SCORE, wire.pack_score_request(request), iteration=iteration)

    def rewards(self, request: wire.ScoreRequest, replies: Iterable[Message]) -> dict[tuple[str, str], FloatArray]:
        """(metric, side) -> rewards (G, J) in [0, 1], a row of NaN for a group that did not answer.

        A group whose reply is an error, or holds rewards of wrong number, outside [0, 1], NaN (against targets) or
        above 0 for an answer nobody could read, counts as missing, with a warning that names it.

        Raises:
            UserError: fewer groups answered than `run.min-groups`.
        """
        unreadable_J: BoolArray = np.logical_and.reduce(np.isnan(request.prediction_JK), axis=1)
        keys = [(metric, side) for side in request.sides for metric in request.metrics]
        by_group = faults.without(self._replies(replies), lambda reply: faults.of_rewards(reply, keys, unreadable_J))
        self._require(by_group, "score the answers")
        if len(np.unique(request.prediction_JK[~unreadable_J], axis=0)) >= SAME_REWARD:
            faults.warn_alike(by_group, keys, ~unreadable_J)
        missing = np.full(unreadable_J.size, np.nan)
        return {
            key: np.stack([by_group[name].rewards[key] if name in by_group else missing for name in self.groups])
            for key in keys
        }

    def _replies(self, replies: Iterable[Message]) -> dict[str, wire.GroupReply]:
        """Known groups' replies by name; what cannot be used is warned about and left out."""
        found: dict[str, list[wire.GroupReply]] = {name: [] for name in self.groups}
        for reply in replies:
            node, away = reply.metadata.src_node_id, []
            for group in self._read(reply):
                if self._node_of.get(group.group) == node:
                    found[group.group].append(group)
                else:  # or any node could speak for a group, or silence it by answering for it too
                    away.append(group.group)
            if away:
                log.warning("node %s answers for %s and does not host it; that is left out", node, listed(away))
        # nobody can tell which of two is the group's own
        wrong = {name: "more than one answer" if of else "no answer" for name, of in found.items() if len(of) != 1}
        faults.warn_missing(wrong)
        return {name: answers[0] for name, answers in found.items() if name not in wrong}

    def _read(self, reply: Message) -> tuple[wire.GroupReply, ...]:
        node = reply.metadata.src_node_id
        if reply.has_error():
            self._errors[reply.error.code] += 1
            if reply.error.code == wire.FORGOTTEN:
                self._restarted.add(node)
            log.warning("node %s: %s", node, reply.error.reason)
            return ()
        names = reply.content.get("groups", ConfigRecord()).get("names")
        if not self.simulated and isinstance(names, list) and len(names) > MOST_NAMES:
            log.warning("node %s: it says %s names, at most %s are read", node, len(names), MOST_NAMES)
            return ()
        try:
            return wire.unpack_replies(reply.content)
        except ValueError as error:
            log.warning("node %s: %s", node, error)
            return ()

    def _require(self, present: Mapping[str, object], what: str) -> None:
        if len(present) < self.min_groups:
            raise UserError(
                f"only {len(present)} of {len(self.groups)} groups ({', '.join(present) or 'none'}) could {what}; "
                f"run.min-groups = {self.min_groups}. " + (self.why_refused() or "The groups' own logs say why")
            )

    def why_refused(self) -> str:
        """How many nodes refused the last question, and why."""
        refused = (
            f"{self._errors[code]} nodes refused: {why}" for code, why in wire.REFUSALS.items() if self._errors[code]
        )
        return "; ".join(refused)


def _totals(given: Mapping[str, FloatArray], catalogue: wire.Catalogue) -> wire.Totals:
    """The sum of these groups' answers to held-out questions."""
    held_out_Q = catalogue.held_out_Q
    answer_QK, count_Q = np.zeros(catalogue.option_QK.shape), np.zeros(len(held_out_Q), dtype=np.int64)
    for answer_HK in given.values():
        # float32, as a group's own share is when it takes that out
        answer_QK[held_out_Q] += np.nan_to_num(answer_HK).astype(np.float32)
        count_Q[held_out_Q] += ~np.isnan(answer_HK).any(axis=1)
    return wire.Totals(answer_QK, count_Q, tuple(given))
