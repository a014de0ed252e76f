"""Who takes part in a run: which nodes host its groups, whether these hold what they need, and word from them.

Nodes are other parties: each speaks for its own groups alone, and what it says is read with care.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, RecordDict

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import messages, refusals
from appa_flwr.protocol.asks import Catalogue
from appa_flwr.protocol.messages import Reply
from appa_flwr.secure.masks import OTHER_COHORT
from appa_flwr.secure.roster import LEAST_GROUPS
from server_app.federation.ask import HalfOpened, TooFew
from server_app.federation.foreign import listed, plain
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import GroupKeys

JOIN_PAUSE = 0.5  # seconds between two greetings while groups are still joining
JOIN_SECONDS = 15.0  # for the reply to the last of them: a node asks for messages every three, and then starts
SETTLING_SECONDS = 3.0  # after a group has joined, in which others may, where the run does not name its groups
MOST_NAMES = 1000  # of a deployed node, which hosts one group
MOST_ROUNDS = 1 << 62  # of a run: a higher number leaves no room for the next

log = logging.getLogger("appa.server")


class Members:
    """The groups of a run as parties.

    Attributes:
        names: the groups of the run, whether or not they have joined.
        seconds_waited: seconds in which the server waited for the groups and had nothing else to do.
    """

    def __init__(self, grid: OverlapGrid, config: Config, *, keys: GroupKeys | None = None, survey: str = "") -> None:
        """`survey` is the path of the run's survey, which simulated nodes read."""
        self.grid, self.config, self._keys = grid, config, keys
        self._survey = survey if grid.simulated else ""
        self.names: tuple[str, ...] = ()
        self.seconds_waited = 0.0
        self._setup: dict[str, RecordDict] = {}  # what a node must have been sent before it is asked
        self._digests: dict[str, str] = {}  # of that
        self._node_of: dict[str, int] = {}
        self._may: dict[str, frozenset[str]] = {}
        self._roster_of: dict[str, str] = {}
        self._roster, self._round = "", 0  # of secure sums: the roster that most have pinned, the last round
        self._stale: set[int] = set()  # nodes that must be set up again
        self._out: set[int] = set()  # nodes that take no part
        self._errors: dict[int, int] = {}  # node -> code of its error reply to the last message

    @property
    def simulated(self) -> bool:
        """True where all groups are in one simulation with the server."""
        return self.grid.simulated

    @property
    def plain(self) -> bool:
        """True where the server sees each group's numbers; otherwise it learns their sums."""
        return self.config.run.sums == "plain"

    @property
    def present(self) -> tuple[str, ...]:
        """The groups that have joined; others of the run may do so yet."""
        return tuple(name for name in self.names if name in self._node_of)

    @property
    def seconds(self) -> dict[str, float]:
        """Group -> how long its node took to answer the last message; groups that did not answer are not there."""
        after = self.grid.answered_after
        return {name: after[self._node_of[name]] for name in self.present if self._node_of[name] in after}

    def without(self, name: str) -> tuple[str, ...]:
        """The groups whose owners let no such numbers leave; `name` is a word of `may-leave`."""
        if name == "predictions" and not self.plain:  # in a sum they tell no more than votes
            name = "votes"
        return tuple(group for group in self.present if name not in self._may.get(group, ()))

    # --- joining ----------------------------------------------------------------------------------------------------

    def gather(self, expected: Sequence[str], *, patience: float) -> None:
        """Greet nodes until every expected group is there, or enough of them when patience ends.

        Args:
            expected: group names that should join, and may still do so later; empty: all that are there, once nobody
                has joined for `SETTLING_SECONDS`.
            patience: seconds to wait for them; deployed, a node that was asked late has a few more to answer.

        Raises:
            UserError: two nodes speak for the same group, or too few groups are there.
        """
        arrived = time.monotonic()
        deadline, settling = arrived + patience, 0.0 if self.simulated else SETTLING_SECONDS
        greeted: set[int] = set()
        while True:
            online = self.grid.online()
            self._node_of = {name: node for name, node in self._node_of.items() if node in online}
            greeted &= online
            # A node that has answered is not asked again: deployed, each question starts a process there.
            left = self.config.run.reply_timeout if self.simulated else max(JOIN_SECONDS, deadline - time.monotonic())
            for node, names in self._greet(online - greeted, timeout=left).items():
                greeted.add(node)
                arrived = time.monotonic() if names else arrived
                for name in names:
                    if self._node_of.setdefault(name, node) != node:
                        raise UserError(f"two nodes speak for group '{name}'; each group needs exactly one")
            settled = len(self._node_of) >= self._least and time.monotonic() - arrived >= settling
            if (self._node_of.keys() >= set(expected) if expected else settled) or time.monotonic() > deadline:
                break
            time.sleep(JOIN_PAUSE)
        others = [name for name in self._node_of if expected and name not in expected]
        self._node_of = {name: node for name, node in self._node_of.items() if name not in others}
        self._agree_on_roster()
        # A fixed order of groups, whatever order the nodes answered in: sums over groups must not depend on it.
        self.names = tuple(expected) or tuple(sorted(self._node_of))
        self._out |= greeted - set(self._node_of.values())
        missing = [name for name in self.names if name not in self._node_of]
        if len(self._node_of) < self._least:
            raise UserError(
                f"{len(self._node_of)} groups joined ({', '.join(self.present) or 'none'}); "
                f"run.min-groups = {self.config.run.min_groups}"
                + ("" if self.plain else f", and secure sums are over at least {LEAST_GROUPS}")
                + (f"; missing: {', '.join(missing)}" if missing else "")
                + (f"; there, but not in `groups`: {listed(others)}" if others else "")
            )
        if missing:
            log.warning("groups that did not join: %s", ", ".join(missing))

    def _greet(self, nodes: Collection[int], *, timeout: float) -> dict[int, tuple[str, ...]]:
        """Ask nodes for their groups: node -> those for which it may speak, and which may take part."""
        allowed = self._named_by_key(nodes)
        hello = messages.pack_hello(self.config.run_name, self._survey)
        replies = self._tell(messages.HELLO, dict.fromkeys(allowed, hello), timeout=timeout, roster=str, round=int)
        return {node: self._met(node, reply, allowed[node]) for node, reply in replies.items()}

    def _met(self, node: int, reply: Reply, keyed: frozenset[str] | None) -> tuple[str, ...]:
        roster, last_round = reply.fields["roster"], reply.fields["round"]
        mine = tuple(
            name
            for name in reply.groups
            if (name in keyed if keyed is not None else self.simulated or plain(name) == name)
        )
        if strange := sorted(set(reply.groups) - set(mine)):
            why = "which is no name" if keyed is None else "without its key"
            log.warning("node %s speaks for %s %s; it is left out", node, listed(strange), why)
        if last_round >= MOST_ROUNDS:
            log.warning("node %s says to have masked more rounds than there are; it is left out", node)
            return ()
        if self._roster and roster != self._roster:
            _warn_of_roster(mine)
            return ()
        self._round = max(self._round, last_round)
        self._roster_of |= dict.fromkeys(mine, roster)
        return mine

    def _named_by_key(self, nodes: Collection[int]) -> dict[int, frozenset[str] | None]:
        """Nodes that may be asked -> the groups by whose keys Flower knows them; None where names are not checked.

        A node without any group's key is not asked: it could make the server wait.
        """
        joining = set(nodes) - self._out
        if self._keys is None:
            return dict.fromkeys(sorted(joining))
        named = {info.node_id: self._keys.names(info) for info in self.grid.get_nodes() if info.node_id in joining}
        for node in sorted(node for node, names in named.items() if not names):
            log.warning("node %s has the key of no group; it is left out", node)
            self._out.add(node)
        return {node: names for node, names in named.items() if names}

    def _agree_on_roster(self) -> None:
        """Take the roster that most groups have pinned; whoever has another one could add to no sum."""
        if self.plain or self.simulated:
            return
        pinned = Counter(sorted(roster for name in self._node_of if (roster := self._roster_of[name])))
        self._roster = pinned.most_common(1)[0][0] if pinned else ""
        others = [name for name in self._node_of if self._roster_of[name] != self._roster or not self._roster]
        _warn_of_roster(others)
        for name in others:
            del self._node_of[name]

    def _bring_back(self) -> None:
        """Have groups take part that are late, or whose node has restarted: all are set up again side by side.

        A node that Flower knows by its key keeps its id; another one gets a new id, which may speak for a group only
        while the group's own node is not there. A group that cannot be set up is tried again before the next request.
        """
        online = self.grid.online()
        away = {name for name in self.names if self._node_of.get(name) not in online}
        hosts = set(self._node_of.values())
        fresh = online - hosts - self._out if away else frozenset()
        if not (again := fresh | (self._stale & hosts & online)):
            return
        ready: dict[str, int] = {}
        for node, names in self._greet(again, timeout=self.config.run.reply_timeout).items():
            ours = [name for name in names if name in self.names]
            if not ours:
                self._out.add(node)
            for name in ours:
                if self._node_of.get(name) == node or name in away - ready.keys():
                    ready[name] = node
                else:
                    log.warning("another node speaks for group '%s', whose own is there; it is left out", name)
        for kind in self._setup:
            done = self._set_up(kind, ready)
            ready = {name: node for name, node in ready.items() if name in done}
        if ready:
            log.warning("back: %s", ", ".join(sorted(ready)))
        self._node_of |= ready
        self._stale -= set(ready.values())

    # --- what all are sent ------------------------------------------------------------------------------------------

    def send_catalogue(self, catalogue: Catalogue) -> dict[str, int]:
        """Hand out the public questions; how many training questions each group has answered.

        Raises:
            TooFew: too few groups take part.
        """
        answered = self._send_all(messages.CATALOGUE, messages.pack_catalogue(catalogue))
        self._require(answered, "take the catalogue of questions")
        return {name: answered[name] for name in self.names if name in answered}

    def send_targets(self, weights: ArrayRecord) -> None:
        """Hand out the frozen PluralLLM, from which each group makes its target table.

        Raises:
            TooFew: too few groups have one.
        """
        self._require(self._send_all(messages.TARGETS, messages.pack_weights(weights)), "write a target table")

    def _send_all(self, kind: str, content: RecordDict) -> dict[str, int]:
        self._setup[kind], self._digests[kind] = content, messages.digest(content)
        return self._set_up(kind, self._hosts())

    def _set_up(self, kind: str, hosts: Mapping[str, int]) -> dict[str, int]:
        """Send these groups' nodes what they need; the groups that have it, with their numbers of training answers.

        A node that has failed is tried again later; one whose owner refuses, or that hangs twice, is not.
        """
        nodes = set(hosts.values())
        fields: dict[str, Any] = {"answered": (int,), "may": (str,)} if kind == messages.CATALOGUE else {}
        replies = self._tell(kind, dict.fromkeys(sorted(nodes), self._setup[kind]), **fields)
        answered: dict[str, int] = {}
        for node, reply in replies.items():
            counts = reply.fields.get("answered", [0] * len(reply.groups))
            own = {name: counts[place] for place, name in self._own(node, reply, hosts)}
            answered |= own
            if kind == messages.CATALOGUE:
                self._may |= dict.fromkeys(own, frozenset(reply.fields["may"]))
        failed = nodes - replies.keys()
        refused = {node for node in failed if self._errors.get(node, 0) > refusals.UNKNOWN_MESSAGE}
        hung = (failed & self._stale) - self._errors.keys()
        self._out |= refused | hung
        self._node_of = {name: node for name, node in self._node_of.items() if node not in self._out}
        if not self.simulated:  # where nothing restarts
            self._stale = (self._stale | failed) - self._out
        return answered

    def _hosts(self) -> dict[str, int]:
        """Group -> its node, of groups that can be asked."""
        return {name: node for name in self.present if (node := self._node_of[name]) not in self._stale}

    # --- messages ---------------------------------------------------------------------------------------------------

    def _tell(
        self,
        kind: str,
        contents: Mapping[int, RecordDict],
        *,
        timeout: float | None = None,
        meanwhile: Callable[[], None] | None = None,
        label: int = 0,
        numbers: tuple[type[Any], int] | None = None,
        **fields: Any,
    ) -> dict[int, Reply]:
        """Send nodes their messages of a kind; the replies that follow the protocol. What others say is logged."""
        sent = [self.grid.create_message(content, kind, node, str(label)) for node, content in contents.items()]
        patience = self.config.run.reply_timeout if timeout is None else timeout
        replies: dict[int, Reply] = {}
        self._errors = {node: code for node, code in self._errors.items() if node not in contents}
        for message in self.grid.send_and_receive(sent, timeout=patience, meanwhile=meanwhile):
            node = message.metadata.src_node_id
            if message.has_error():
                self._errors[node] = message.error.code
                if message.error.code == refusals.FORGOTTEN and not self.simulated:
                    self._stale.add(node)
                log.warning("node %s: %s", node, message.error.reason)
                continue
            try:
                reply = messages.unpack_reply(message.content, numbers=numbers, **fields)
                if not self.simulated and len(reply.groups) > MOST_NAMES:
                    raise ValueError(f"it names {len(reply.groups)} groups, at most {MOST_NAMES} are read")
                if len(reply.fields.get("answered", reply.groups)) != len(reply.groups):
                    raise ValueError("it does not count the answers of each of its groups")
            except ValueError as error:
                log.warning("node %s: %s", node, error)
            else:
                replies[node] = reply
        self.seconds_waited += self.grid.seconds_waited
        return replies

    def _own(self, node: int, reply: Reply, hosts: Mapping[str, int]) -> Iterator[tuple[int, str]]:
        """The groups of a reply that live at its node, with their places in it."""
        # or any node could speak for a group, or silence it by answering for it too
        if away := [name for name in reply.groups if hosts.get(name) != node]:
            log.warning("node %s answers for %s and does not host it; that is left out", node, listed(away))
        return ((place, name) for place, name in enumerate(reply.groups) if hosts.get(name) == node)

    @property
    def _least(self) -> int:
        """Fewest groups that must answer."""
        return self.config.run.min_groups if self.plain else max(self.config.run.min_groups, LEAST_GROUPS)

    def _require(self, there: Collection[str], what: str) -> None:
        """Raise an error where so few groups could do what was asked, with the others' reasons."""
        if len(there) >= self._least:
            return
        codes = Counter(self._errors.values())
        refused = "; ".join(
            f"{codes[code]} nodes refused: {why}" for code, why in refusals.REFUSALS.items() if codes[code]
        )
        lost = codes[refusals.SECURE[OTHER_COHORT]]
        raise (HalfOpened if lost else TooFew)(
            f"only {len(there)} of {len(self.names)} groups ({', '.join(there) or 'none'}) could {what}, and "
            f"{self._least} must (run.min-groups). {refused or 'Their own logs say why'}"
        )


def _warn_of_roster(names: Collection[str]) -> None:
    if names:
        log.warning(
            "%s: no pinned roster, or not the one of most groups; left out of this run. Give its owner the roster's "
            "file, and run `appa group pin` there",
            listed(names),
        )
