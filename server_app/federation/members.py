"""Members of a run: find the nodes that host its groups, set these nodes up, and send them messages.

Nodes are other parties. A node may speak only for its own groups, and its replies are checked.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.text import NAMES
from appa_flwr.protocol import messages, refusals
from appa_flwr.protocol.messages import Reply
from appa_flwr.survey.types import noise_sentence
from server_app import log
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import GroupKeys, names_of
from server_app.federation.replies import TooFew
from server_app.federation.sanitize import listed

JOIN_PAUSE = 0.5  # seconds between two greetings while groups are still joining
JOIN_SECONDS = 15.0  # for the reply to the last greeting: a node polls every three seconds, then starts a process
LONGEST_WAIT = 30.0  # seconds between two tries of a request that too few groups have answered
LONGEST_PAUSE = 8  # of a node whose set-up fails, as a power of two, in requests
HEAD_BYTES, NAME_BYTES, NUMBER_BYTES = 1 << 16, 256, 8  # of a reply: in all, for a group's name, for each number

MOST_NOISE = 1e12  # of what a node may claim; weights can be large

FIELDS: Mapping[str, Mapping[str, Any]] = {
    messages.CATALOGUE: {"answered": (int,), "may": (str,), "noise": (float,)},
    messages.TARGETS: {"by_mean": (int,)},
}
"""Kind of message -> fields of its replies beside the groups, see `messages.unpack_reply`."""


UNKNOWN = -1
"""`Node.taken` of a node that must be greeted: it is new, has restarted, or failed to take a setup message."""


@dataclass
class Node:
    """A node, as known to the server."""

    taken: int = UNKNOWN  # setup messages that it has taken; 0 = it has been greeted
    out: bool = False  # it hosts no group of the run, lacks the key or refuses: no message any more
    groups: tuple[str, ...] = ()  # groups that the node may speak for, whether or not they are in the run
    answered: Mapping[str, int] = field(default_factory=dict)  # its groups in the run -> answered training questions
    may: frozenset[str] = frozenset()  # kinds of numbers that its owner lets leave
    noise: tuple[float, ...] = ()  # epsilon and standard deviation, as its owner claims; empty for exact answers
    by_mean: Mapping[str, int] = field(default_factory=dict)  # its groups in the run -> questions predicted by the mean
    failures: int = 0  # failed setup messages since the node was last set up completely
    pause: int = 0  # requests until it is set up again
    error: int = 0  # code of its error reply to the last message; 0 if there was none


class Members:
    """The groups of a run and the nodes that host them.

    `keys` are the groups' public keys, if the run checks them; `survey` is the path of the run's survey, which
    simulated nodes read.
    """

    def __init__(self, grid: OverlapGrid, config: Config, *, keys: GroupKeys | None, survey: str) -> None:
        self.grid, self.config, self._keys = grid, config, keys
        self._survey = survey if grid.simulated else ""
        self.names: tuple[str, ...] = ()  # the groups of the run, whether or not they have joined
        self._node_of: dict[str, int] = {}
        self._nodes: dict[int, Node] = defaultdict(Node)
        self._late: frozenset[int] = frozenset()  # nodes that keep their groups, and get no message before they answer
        self.setup: dict[str, RecordDict] = {}  # messages that a node needs before it is asked for numbers
        self.num_questions = 0  # of the catalogue

    @property
    def present(self) -> tuple[str, ...]:
        """The groups that have joined; other groups of the run may join later."""
        return tuple(name for name in self.names if name in self._node_of)

    @property
    def least(self) -> int:
        """Fewest groups that must answer: `run.min-groups`, or half of the run's groups if that is 0."""
        return self.config.run.min_groups or (len(self.names) + 1) // 2

    def hosts(self) -> dict[str, int]:
        """Group -> its node, for groups that can be asked for numbers now."""
        able = {node for node in {*self._node_of.values()} - self._late if self._nodes[node].taken == len(self.setup)}
        return {name: self._node_of[name] for name in self.present if self._node_of[name] in able}

    def answered(self) -> dict[str, int]:
        """Group -> how many training questions it has answered, for groups that can be asked for numbers now."""
        counts = {name: self._nodes[node].answered.get(name) for name, node in self.hosts().items()}
        return {name: count for name, count in counts.items() if count is not None}

    def without(self, word: str) -> tuple[str, ...]:
        """The groups whose owners do not let these numbers leave; `word` is one of `may-leave`."""
        return tuple(group for group in self.present if word not in self._nodes[self._node_of[group]].may)

    def noise(self) -> str:
        """What the owners say of noise in their answers, which nobody can check; empty if none says anything."""
        claims = {group: self._nodes[self._node_of[group]].noise for group in self.present}
        return listed([f"{group}: {noise_sentence(*claim)}" for group, claim in claims.items() if claim], NAMES)

    def by_mean(self) -> str:
        """The groups whose answers PluralLLM cannot be conditioned on; empty if there are none."""
        counts = {group: self._nodes[self._node_of[group]].by_mean.get(group, 0) for group in self.present}
        known = [f"{group} ({count} of {self.num_questions} questions)" for group, count in counts.items() if count]
        return listed(known, NAMES)

    # --- joining ----------------------------------------------------------------------------------------------------

    def gather(self, expected: Sequence[str], *, patience: float) -> None:
        """Greet nodes until all expected groups have joined, or until `patience` seconds have passed and enough have.

        `expected` names the groups that should join, now or later.

        Raises:
            UserError: no group is expected, two nodes speak for the same group, or too few groups joined.
        """
        if not expected:
            raise UserError("groups: name the groups that take part; no other group may join a deployment")
        # The order of groups is fixed: results must not depend on the order in which nodes replied.
        self.names = tuple(expected)
        deadline = time.monotonic() + patience
        while True:
            left = max(JOIN_SECONDS, deadline - time.monotonic())  # a node that is greeted late has time to reply
            self._meet(timeout=self.config.run.reply_timeout if self.grid.simulated else left)
            if len(self._node_of) >= len(expected) or time.monotonic() > deadline:
                break
            time.sleep(JOIN_PAUSE)
        missing = [name for name in self.names if name not in self._node_of]
        others = [name for node in self._nodes.values() for name in node.groups if name not in self.names]
        if len(self._node_of) < self.least:
            raise UserError(
                f"{len(self._node_of)} groups joined ({', '.join(self.present) or 'none'}), and at least {self.least} "
                "must (run.min-groups)"
                + (f"; missing: {', '.join(missing)}" if missing else "")
                + (f"; joined, but not in `groups`: {listed(others)}" if others else "")
            )
        if missing:
            log.warning("groups that did not join: %s", listed(missing, NAMES))

    def _meet(self, *, timeout: float) -> None:
        """Greet nodes that may host missing groups, and nodes that must be set up again.

        A node that Flower knows by its key keeps its id. Any other node gets a new id, and may speak for a group only
        while the group's own node is offline.
        """
        online, self._late = frozenset(self.grid.get_node_ids()), self.grid.late()
        self._node_of = {name: node for name, node in self._node_of.items() if node in online}
        hosts, away = set(self._node_of.values()), len(self._node_of) < len(self.names)
        # Hosts that have been greeted are not greeted again: each message to a deployed node starts a process there.
        unknown = {node for node in online if self._nodes[node].taken == UNKNOWN}
        able = {node for node in online - self._late if not self._nodes[node].pause}
        keyed = self._names_by_key([node for node in able if (node in unknown if node in hosts else away)])
        hosted, known = defaultdict[int, set[str]](set), frozenset(self.names)
        for name, number in self._node_of.items():
            hosted[number].add(name)
        for number, reply in self._send(messages.HELLO, messages.pack_hello(self._survey), keyed, timeout=timeout):
            node, allowed = self._nodes[number], keyed[number]
            node.groups = tuple(name for name in reply.groups if allowed is None or name in allowed)
            if strange := sorted(set(reply.groups) - set(node.groups)):
                log.warning("node %s speaks for %s without its key; that claim is ignored", number, listed(strange))
            names = [name for name in node.groups if name in known]
            node.out, node.taken = not names, max(node.taken, 0)
            for name in hosted[number].difference(names):
                del self._node_of[name]
            for name in names:
                if self._node_of.setdefault(name, number) == number:
                    continue
                if not self.setup:
                    raise UserError(f"two nodes speak for group '{name}'; each group needs exactly one")
                log.warning("group '%s' has a node already; another node that speaks for it is left out", name)

    def _names_by_key(self, nodes: Collection[int]) -> dict[int, frozenset[str] | None]:
        """Nodes that may be greeted -> the groups whose keys they have; None if the run does not check keys."""
        joining = sorted(node for node in nodes if not self._nodes[node].out)
        if self._keys is None:
            return dict.fromkeys(joining)
        keyed = {info.node_id: names_of(info, self._keys) for info in self.grid.get_nodes() if info.node_id in joining}
        for node in sorted(node for node, names in keyed.items() if not names):
            log.warning("node %s has no group's key; the node is left out", node)
            self._nodes[node].out = True  # it could make the server wait
        return {node: names for node, names in keyed.items() if names}

    # --- setting up -------------------------------------------------------------------------------------------------

    def prepare(self, *, again: bool = False) -> None:
        """Set up, in parallel, all nodes that joined late or have restarted, before a request or one that is repeated.

        A node that fails or hangs is tried again before the next request, then after 2, 4, 8, ... requests, since each
        try may take a whole reply timeout. A node whose owner refuses is not tried again.
        """
        for node in self._nodes.values():
            node.error, node.pause = node.error if again else 0, max(0, node.pause - 1)
        self._meet(timeout=self.config.run.reply_timeout)
        for place, (kind, content) in enumerate(self.setup.items()):
            hosts = {*self._node_of.values()} - self._late
            lacking = {number for number in hosts if self._nodes[number].taken == place}
            for number, reply in self._send(kind, content, lacking):
                lacking.remove(number)
                self._take(kind, number, reply)
            for number in sorted(lacking):
                self._note_failure(number)
        nodes = self._nodes
        self._node_of = {n: k for n, k in self._node_of.items() if not (nodes[k].out or nodes[k].pause)}

    def _note_failure(self, number: int) -> None:
        """Plan the next try to set up a node, or none if its owner refuses, and log it."""
        node, groups = self._nodes[number], listed(self._nodes[number].groups)
        node.failures += 1
        if node.error > refusals.FORGOTTEN:
            node.out = True
            log.warning("node %s (%s) refuses, and takes no part", number, groups)
            return
        node.taken = UNKNOWN
        node.pause = 2 ** min(node.failures - 1, LONGEST_PAUSE) if node.failures > 1 else 0
        when = f"after {node.pause} more requests" if node.pause else "before the next request"
        log.warning(
            "node %s (%s): its set-up failed (%d in a row); tried again %s", number, groups, node.failures, when
        )

    def _take(self, kind: str, number: int, reply: Reply) -> None:
        """Note a node's reply to a setup message."""
        node, own = self._nodes[number], list(self.own(number, reply))
        node.taken += 1
        if node.taken == len(self.setup):
            node.failures = 0
        if kind == messages.CATALOGUE:
            node.answered = {name: reply.fields["answered"][row] for row, name in own}
            node.may = frozenset(reply.fields["may"])
            node.noise = tuple(reply.fields["noise"])
        elif kind == messages.TARGETS:
            node.by_mean = {name: reply.fields["by_mean"][row] for row, name in own}

    # --- messages ---------------------------------------------------------------------------------------------------

    def _send(
        self, kind: str, content: RecordDict, nodes: Collection[int], *, timeout: float | None = None
    ) -> list[tuple[int, Reply]]:
        """Send a message to these nodes; return the replies that follow the protocol."""
        patience = self.config.run.reply_timeout if timeout is None else timeout
        return list(self.read(self.grid.send_and_receive(self.messages(kind, content, nodes), timeout=patience)))

    def messages(self, kind: str, content: RecordDict, nodes: Collection[int], *, numbers: int = 0) -> list[Message]:
        """A message of this kind to each node, in the order of the nodes' ids; each group may reply `numbers`."""
        self.grid.most_bytes = HEAD_BYTES + (NAME_BYTES + NUMBER_BYTES * numbers) * len(self.names)
        for node in nodes:
            self._nodes[node].error = 0
        return [self.grid.create_message(content, kind, node) for node in sorted(nodes)]

    def read(self, replies: Iterable[Message]) -> Iterator[tuple[int, Reply]]:
        """Nodes and their replies that follow the protocol; all other replies are logged."""
        for message in replies:
            number, kind = message.metadata.src_node_id, message.metadata.message_type
            node = self._nodes[number]
            if message.has_error():
                node.error = message.error.code
                if node.error == refusals.FORGOTTEN:
                    node.taken = UNKNOWN
                log.warning("node %s: %s", number, message.error.reason)
                continue
            try:
                yield number, self._checked(message.content, kind)
            except ValueError as error:
                log.warning("node %s: %s", number, error)

    def _checked(self, content: RecordDict, kind: str) -> Reply:
        reply = messages.unpack_reply(content, numbers=kind == messages.ASK, **FIELDS.get(kind, {}))
        most = self.num_questions
        for counts in (reply.fields[name] for name in ("answered", "by_mean") if name in reply.fields):
            if len(counts) != len(reply.groups) or not all(0 <= n <= most for n in counts):
                raise ValueError(f"the reply does not count for each group, from 0 to {most}")
        noise = reply.fields.get("noise", ())
        if len(noise) not in (0, 2) or not all(0.0 < value <= MOST_NOISE for value in noise):
            raise ValueError("the reply does not state epsilon and standard deviation of a noise")
        return reply

    def own(self, node: int, reply: Reply) -> Iterator[tuple[int, str]]:
        """The groups of a reply that its node hosts, with their places in the reply."""
        # otherwise any node could speak for another node's group, or silence the group by sending faulty numbers
        if away := [name for name in reply.groups if self._node_of.get(name) != node]:
            log.warning("node %s answers for %s, which it does not host; that answer is ignored", node, listed(away))
        return ((place, name) for place, name in enumerate(reply.groups) if self._node_of.get(name) == node)

    def refusing(self, groups: Collection[str]) -> frozenset[str]:
        """Those of the groups whose owners have refused the last request."""
        hosts = {name: self._nodes[self._node_of[name]] for name in groups if name in self._node_of}
        return frozenset(name for name, node in hosts.items() if node.error > refusals.FORGOTTEN)

    def pauses(self, missing: Collection[str], what: str) -> Iterator[float]:
        """Pause before each new try while too few groups could do what was asked; gives the seconds left.

        `missing` are the groups that could not, which the caller updates. Ends after `run.reply-timeout`, or when no
        other groups can come: in a simulation, and where too many owners refuse.
        """
        ends, pause = time.monotonic() + self.config.run.reply_timeout, JOIN_PAUSE
        while len(self.names) - len(missing) < self.least <= len(self.names) - len(self.refusing(missing)):
            left = ends - time.monotonic()
            if left <= 0 or self.grid.simulated:
                return
            log.warning(
                "%d of %d groups could %s, and at least %d must (run.min-groups); asked again for %.0f s",
                *(len(self.names) - len(missing), len(self.names), what, self.least, left),
            )
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_WAIT)
            yield max(0.0, ends - time.monotonic())

    def require(self, there: Collection[str], what: str) -> None:
        """Raise TooFew if too few groups could do what was asked, with the reasons of the other nodes."""
        if len(there) >= self.least:
            return
        codes = Counter(node.error for node in self._nodes.values())
        reasons = [f"{codes[code]} nodes refused: {why}" for code, why in refusals.REFUSALS.items() if codes[code]]
        if late := len(self.grid.late()):
            reasons.append(f"{late} nodes have not answered in time (run.reply-timeout)")
        raise TooFew(
            f"only {len(there)} of {len(self.names)} groups ({listed(there, NAMES) or 'none'}) could {what}; at least "
            f"{self.least} must (run.min-groups). {'; '.join(reasons) or 'The logs of the groups give the reasons'}"
        )
