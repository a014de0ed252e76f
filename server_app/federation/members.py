"""Members of a run: find the nodes that host its groups, set these nodes up, and send them messages.

Nodes are other parties. A node may speak only for its own groups, and its replies are checked.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Error, RecordDict

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import messages, refusals
from appa_flwr.protocol.asks import Catalogue
from appa_flwr.protocol.messages import Reply
from server_app.federation.ask import TooFew
from server_app.federation.foreign import listed
from server_app.federation.grid import Meanwhile, OverlapGrid
from server_app.federation.group_keys import GroupKeys, names_of

JOIN_PAUSE = 0.5  # seconds between two greetings while groups are still joining
JOIN_SECONDS = 15.0  # for the reply to the last greeting: a node polls every three seconds, then starts a process
MOST_FAILURES = 2  # most failures to set up a node: each may take a whole reply timeout
MOST_NAMES = 1000  # most groups in a reply of a deployed node, which hosts one group

FIELDS: Mapping[str, Mapping[str, Any]] = {messages.CATALOGUE: {"answered": (int,), "may": (str,)}}
"""Kind of message -> fields of its replies beside the groups, see `messages.unpack_reply`."""

log = logging.getLogger("appa.server")


@dataclass
class Node:
    """State of a node, as known to the server."""

    groups: tuple[str, ...] = ()  # groups that the node may speak for, whether or not they are in the run
    answered: Mapping[str, int] = field(default_factory=dict)  # its groups in the run -> answered training questions
    may: frozenset[str] = frozenset()  # kinds of numbers that its owner lets leave
    held: int = 0  # 0 if the node must be greeted, else 1 plus the number of setup messages that it holds
    failures: int = 0  # failed setup messages since the node was last set up completely
    error: int = 0  # code of its error reply to the last message; 0 if there was none
    out: bool = False  # the node is left out and gets no messages


class Members:
    """The groups of a run and the nodes that host them.

    `keys` are the groups' public keys, if the run checks them; `survey` is the path of the run's survey, which
    simulated nodes read; `answers` is the folder for replies.

    Attributes:
        names: the groups of the run, whether or not they have joined.
    """

    def __init__(
        self,
        grid: OverlapGrid,
        config: Config,
        *,
        keys: GroupKeys | None = None,
        survey: str = "",
        answers: Path | None = None,
    ) -> None:
        self.grid, self.config, self._keys = grid, config, keys
        self._survey, self._answers = survey if grid.simulated else "", answers
        self.names: tuple[str, ...] = ()
        self._node_of: dict[str, int] = {}
        self._nodes: dict[int, Node] = defaultdict(Node)
        self._busy: frozenset[int] = frozenset()  # late nodes, which keep their groups and are not asked
        self._catalogue: Catalogue | None = None
        self._setup: dict[str, RecordDict] = {}  # messages that a node needs before it is asked for numbers
        self._digests: dict[str, str] = {}  # of the setup messages

    @property
    def simulated(self) -> bool:
        """True if all groups are in one simulation with the server."""
        return self.grid.simulated

    @property
    def present(self) -> tuple[str, ...]:
        """The groups that have joined; other groups of the run may join later."""
        return tuple(name for name in self.names if name in self._node_of)

    @property
    def seconds_waited(self) -> float:
        """Seconds of the last request that the server spent idle, waiting for the groups."""
        return self.grid.seconds_waited

    def without(self, name: str) -> tuple[str, ...]:
        """The groups whose owners do not let these numbers leave; `name` is a word of `may-leave`."""
        return tuple(group for group in self.present if name not in self._nodes[self._node_of[group]].may)

    # --- joining ----------------------------------------------------------------------------------------------------

    def gather(self, expected: Sequence[str], *, patience: float) -> None:
        """Greet nodes until all expected groups have joined, or until `patience` seconds have passed and enough have.

        `expected` names the groups that should join, now or later, and is empty in a simulation for all groups.

        Raises:
            UserError: a deployment names no groups, two nodes speak for the same group, or too few groups joined.
        """
        if not (expected or self.simulated):
            raise UserError("groups: name the groups that take part; no other group may join a deployment")
        self.names = tuple(expected)
        deadline = time.monotonic() + patience
        while True:
            left = max(JOIN_SECONDS, deadline - time.monotonic())  # a node that is greeted late has time to reply
            self._meet(timeout=self.config.run.reply_timeout if self.simulated else left)
            if len(self._node_of) >= (len(expected) or self.config.run.min_groups) or time.monotonic() > deadline:
                break
            time.sleep(JOIN_PAUSE)
        # The order of groups is fixed: results must not depend on the order in which nodes replied.
        self.names = self.names or tuple(sorted(self._node_of))
        missing = [name for name in self.names if name not in self._node_of]
        others = [name for node in self._nodes.values() for name in node.groups if name not in self.names]
        if len(self._node_of) < self.config.run.min_groups:
            raise UserError(
                f"{len(self._node_of)} groups joined ({', '.join(self.present) or 'none'}); "
                f"run.min-groups = {self.config.run.min_groups}"
                + (f"; missing: {', '.join(missing)}" if missing else "")
                + (f"; joined, but not in `groups`: {listed(others)}" if others else "")
            )
        if missing:
            log.warning("groups that did not join: %s", ", ".join(missing))

    def _meet(self, *, timeout: float) -> None:
        """Greet nodes that may host missing groups, and nodes that must be set up again.

        A node that Flower knows by its key keeps its id. Any other node gets a new id, and may speak for a group only
        while the group's own node is offline.
        """
        online, self._busy = self.grid.online(), self.grid.busy()
        self._node_of = {name: node for name, node in self._node_of.items() if node in online}
        hosts, away = set(self._node_of.values()), not self.names or len(self._node_of) < len(self.names)
        # Hosts that have been greeted are not greeted again: each message to a deployed node starts a process there.
        nodes = [node for node in online - self._busy if (not self._nodes[node].held if node in hosts else away)]
        for node, groups in self._greet(nodes, timeout=timeout).items():
            names = [name for name in groups if not self.names or name in self.names]
            self._nodes[node].out, self._nodes[node].held = not names, max(self._nodes[node].held, 1)
            self._node_of = {name: host for name, host in self._node_of.items() if host != node or name in names}
            for name in names:
                if self._node_of.setdefault(name, node) == node:
                    continue
                if not self._setup:
                    raise UserError(f"two nodes speak for group '{name}'; each group needs exactly one")
                log.warning("group '%s' has a node already; another node that speaks for it is left out", name)

    def _greet(self, nodes: Collection[int], *, timeout: float) -> dict[int, tuple[str, ...]]:
        """Ask nodes for their groups: node -> groups that it may speak for, empty if it cannot take part."""
        keyed, groups_of = self._names_by_key(nodes), dict[int, tuple[str, ...]]()
        hello = messages.pack_hello(self._survey)
        replies = self._send(messages.HELLO, dict.fromkeys(keyed, hello), timeout=timeout)
        for node, reply in replies.items():
            allowed = keyed[node]
            groups_of[node] = tuple(name for name in reply.groups if allowed is None or name in allowed)
            self._nodes[node].groups = groups_of[node]
            if strange := sorted(set(reply.groups) - set(groups_of[node])):
                log.warning("node %s speaks for %s without its key; that claim is ignored", node, listed(strange))
        return groups_of

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

    def _prepare(self) -> None:
        """Set up, in parallel, all nodes that joined late or have restarted.

        A node that fails or hangs is tried again before the next request, `MOST_FAILURES` times in all. A node whose
        owner refuses is not tried again.
        """
        self._meet(timeout=self.config.run.reply_timeout)
        for place, (kind, content) in enumerate(self._setup.items(), start=1):
            hosts = {*self._node_of.values()} - self._busy
            lacking = sorted(node for node in hosts if self._nodes[node].held == place)
            replies = self._send(kind, dict.fromkeys(lacking, content))
            for number in lacking:
                node = self._nodes[number]
                if (reply := replies.get(number)) is None:
                    node.held, node.failures = 0, node.failures + 1
                    node.out = node.error > refusals.FORGOTTEN or node.failures >= MOST_FAILURES
                    continue
                node.held, own = place + 1, list(self._own(number, reply))
                node.failures = node.failures if place < len(self._setup) else 0
                if kind == messages.CATALOGUE:
                    node.answered = {name: reply.fields["answered"][row] for row, name in own}
                    node.may = frozenset(reply.fields["may"])
        self._node_of = {name: node for name, node in self._node_of.items() if not self._nodes[node].out}

    def _hosts(self) -> dict[str, int]:
        """Group -> its node, for groups that can be asked for numbers now."""
        node_of = {name: node for name in self.present if (node := self._node_of[name]) not in self._busy}
        return {name: node for name, node in node_of.items() if self._nodes[node].held > len(self._setup)}

    # --- messages ---------------------------------------------------------------------------------------------------

    def _send(
        self,
        kind: str,
        contents: Mapping[int, RecordDict],
        *,
        timeout: float | None = None,
        meanwhile: Meanwhile = None,
        numbers: bool = False,
    ) -> dict[int, Reply]:
        """Send messages of one kind; return the replies that follow the protocol, and log all other replies."""
        patience = self.config.run.reply_timeout if timeout is None else timeout
        replies: dict[int, Reply] = {}
        for node in contents:
            self._nodes[node].error = 0
        for node, content in self.grid.send(kind, contents, timeout=patience, meanwhile=meanwhile).items():
            if isinstance(content, Error):
                self._nodes[node].error = content.code
                if content.code == refusals.FORGOTTEN:
                    self._nodes[node].held = 0
                log.warning("node %s: %s", node, content.reason)
                continue
            try:
                replies[node] = self._read(content, numbers, FIELDS.get(kind, {}))
            except ValueError as error:
                log.warning("node %s: %s", node, error)
        return replies

    def _read(self, content: RecordDict, numbers: bool, fields: Mapping[str, Any]) -> Reply:
        reply = messages.unpack_reply(content, numbers=numbers, **fields)
        if not self.simulated and len(reply.groups) > MOST_NAMES:
            raise ValueError(f"the reply names {len(reply.groups)} groups; the limit is {MOST_NAMES}")
        if len(reply.fields.get("answered", reply.groups)) != len(reply.groups):
            raise ValueError("the reply does not count the answers of each group")
        return reply

    def _own(self, node: int, reply: Reply) -> Iterator[tuple[int, str]]:
        """The groups of a reply that its node hosts, with their places in the reply."""
        # otherwise any node could speak for another node's group, or silence the group by sending faulty numbers
        if away := [name for name in reply.groups if self._node_of.get(name) != node]:
            log.warning("node %s answers for %s, which it does not host; that answer is ignored", node, listed(away))
        return ((place, name) for place, name in enumerate(reply.groups) if self._node_of.get(name) == node)

    def _require(self, there: Collection[str], what: str) -> None:
        """Raise an error if too few groups could do what was asked, with the reasons of the other nodes."""
        if len(there) >= (least := self.config.run.min_groups):
            return
        codes = Counter(node.error for node in self._nodes.values())
        refused = "; ".join(
            f"{codes[code]} nodes refused: {why}" for code, why in refusals.REFUSALS.items() if codes[code]
        )
        raise TooFew(
            f"only {len(there)} of {len(self.names)} groups ({', '.join(there) or 'none'}) could {what}; "
            f"at least {least} must (run.min-groups). {refused or 'The logs of the groups give the reasons'}"
        )
