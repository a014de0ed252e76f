"""Secure sums over the groups, as the server asks for them: one path for all that is summed.

Each takes two messages. Rounds are sealed ahead, many at a time, so that one in which groups drop out is finished
without them.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import Message, RecordDict

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import sum_messages as messages
from appa_flwr.protocol import wire
from appa_flwr.secure import summing, terms
from appa_flwr.secure.messages import Prepared, Task
from appa_flwr.secure.roster import Roster, read_roster, roster_file
from appa_flwr.secure.summing import TooFew
from server_app.federation.groups import Federation

AHEAD = 32  # rounds that are sealed at a time
ATTEMPTS = 2  # at a sum, the second without those that have failed the first

log = logging.getLogger("appa.server")

_T = TypeVar("_T")
Shapes = Mapping[str, tuple[int, ...]]


class Incomplete(Exception):
    """A sum that was to be over all who were asked, and is not: nobody has unmasked it; `groups` have answered."""

    def __init__(self, groups: tuple[str, ...]) -> None:
        super().__init__(groups)
        self.groups = groups


@dataclass(frozen=True, eq=False)
class Summed:
    """A sum over groups.

    Attributes:
        sums: by name.
        groups: over whom, in the roster's order.
        standings: group -> what it gave to be kept.
        released: group -> numbers of its own that its owner lets out.
    """

    sums: terms.Terms
    groups: tuple[str, ...]
    standings: Mapping[str, bytes]
    released: Mapping[str, Mapping[str, float]]

    def mean(self, name: str) -> terms.FloatArray:
        """Of the groups' numbers."""
        return self.sums[name] / len(self.groups)


class SecureSums:
    """The groups of a run as their sums; `start` gathers the keys once the roll has been called.

    Attributes:
        seconds_waited: in which the server had nothing else to do, over all sums.
    """

    def __init__(self, federation: Federation, config: Config) -> None:
        self._federation, self._config = federation, config
        self._session = secrets.token_hex(16)  # of this session of the server: its rounds count from 1 again
        self._round = 0
        self.seconds_waited = 0.0
        self._data = b""
        self._roster: Roster | None = None
        self._prepared: dict[str, dict[int, Prepared]] = {}

    @property
    def roster(self) -> Roster:
        """Who may take part."""
        assert self._roster is not None  # `start` has been called
        return self._roster

    def start(self) -> str:
        """Gather the groups' keys and their roster; what is to be said of it.

        A roster's file that most groups hand over counts; where none does, one is made of the keys.

        Raises:
            UserError: they make no roster, or too few groups stand in it.
        """
        key_of: dict[str, bytes] = {}
        files: Counter[bytes] = Counter()
        for node, (keys, data) in self._read(self._ask(wire.KEYS, RecordDict()), messages.unpack_public_keys):
            key_of |= {name: keys[name] for name in self._federation.hosted(node) if name in keys}
            files.update([data] if data else [])
        self._data = files.most_common(1)[0][0] if files else roster_file(key_of).encode()
        self._roster = read_roster(self._data, source="the groups' roster")
        if strangers := sorted(set(self._federation.present) - set(self._roster.names)):
            log.warning("not on the roster, and in no sum: %s", ", ".join(strangers))
        least = self._roster.least(0)
        if len(self._cohort(1)) < least:
            raise TooFew(self._too_few(len(self._cohort(1)), "have sealed rounds ahead"))
        return f"secure sums over {len(self._roster.names)} groups, at least {least} of them in each"

    @property
    def expected(self) -> tuple[str, ...]:
        """The groups of the roster that would be asked now."""
        there = set(self._federation.reachable)
        return tuple(name for name in self.roster.names if name in there)

    @property
    def names(self) -> tuple[str, ...]:
        """All groups of the run."""
        return self._federation.groups

    def total(
        self,
        what: str,
        content: RecordDict,
        shapes: Shapes,
        *,
        standings: Mapping[str, bytes] | None = None,
        among: Collection[str] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Summed:
        """A sum over the groups that answer.

        Args:
            what: one of the sums of `appa_flwr.protocol.sum_messages`.
            content: what the groups' numbers depend on.
            shapes: name of each array -> its shape.
            standings: group -> what it gave with an earlier sum.
            among: the groups to ask, where it is to be over all of these or none.
            meanwhile: computed here while the groups do theirs.

        Raises:
            TooFew: fewer groups answered than the roster asks for, or `run.min-groups`; nothing has changed.
            Incomplete: enough, but not all of `among`.
        """
        self._federation.readmit()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._attempt(what, content, shapes, standings or {}, among, meanwhile)
            except TooFew as error:
                if attempt == ATTEMPTS:
                    raise
                log.warning("%s; asked again in another round", error)
                meanwhile = None
        raise AssertionError("no attempt")

    def _attempt(
        self,
        what: str,
        content: RecordDict,
        shapes: Shapes,
        standings: Mapping[str, bytes],
        among: Collection[str] | None,
        meanwhile: Callable[[], None] | None,
    ) -> Summed:
        self._round += 1
        cohort = tuple(name for name in self._cohort(self._round) if among is None or name in among)
        if len(cohort) < self.roster.least(0):
            raise TooFew(self._too_few(len(cohort), "can be asked"))
        count = sum(math.prod(shape) for shape in shapes.values())
        world = messages.world_of(self._config, *map(self._federation.setup_digest, (wire.CATALOGUE, wire.TARGETS)))
        task = Task(self._session, self._round, cohort, messages.request_of(what, content, world), count)

        def asked(names: Sequence[str]) -> RecordDict:
            mine = {name: standings[name] for name in names if name in standings}
            return messages.pack_asked(messages.Asked(task, what, content, world, mine, self._data))

        def parts_of(reply: RecordDict) -> dict[str, messages.Part]:
            return messages.unpack_parts(reply, self.roster)

        replies = self._ask(wire.MASK, asked, groups=cohort, meanwhile=meanwhile)
        parts = {
            name: part
            for name, part in self._by_group(replies, parts_of).items()
            if summing.usable(self.roster, task, name, part.masked)
        }
        if missing := sorted(set(cohort) - set(parts)):
            log.warning("%s: not in the sum of round %s: %s", what, task.round, ", ".join(missing))
        if len(parts) < max(self.roster.least(0), self._federation.min_groups):
            raise TooFew(self._too_few(len(parts), "answered"))
        if among is not None and set(parts) != set(among):
            raise Incomplete(tuple(sorted(parts)))
        masked = {name: part.masked for name, part in parts.items()}
        prepared = {name: self._prepared[name][task.round] for name in cohort}
        requests = summing.unmasking(self.roster, task, prepared, masked)

        def unmasking(names: Sequence[str]) -> RecordDict:
            return messages.pack_unmasking(task, {name: requests[name] for name in names}, self._data)

        replies = self._ask(wire.UNMASK, unmasking, groups=tuple(requests))
        shares = self._by_group(replies, messages.unpack_shares)
        words = summing.total(self.roster, task, prepared, masked, shares)
        for name in cohort:
            self._prepared[name] = {r: of for r, of in self._prepared[name].items() if r > task.round}
        return Summed(
            terms.unpack(words, shapes, groups=len(parts)),
            tuple(sorted(parts)),
            {name: part.standing for name, part in parts.items()},
            {name: part.released for name, part in parts.items()},
        )

    def _cohort(self, number: int) -> tuple[str, ...]:
        """The groups that are there and have sealed a round ahead; those that have not are asked to, once."""
        lacking = [name for name in self.expected if number not in self._prepared.get(name, {})]
        if lacking:
            last = (number - 1) // AHEAD * AHEAD + AHEAD
            asked = messages.Ahead(self._session, number, last - number + 1, self._data)

            def read(reply: RecordDict) -> dict[str, list[Prepared]]:
                return messages.unpack_prepared(reply, self.roster)

            replies = self._ask(wire.PREPARE, messages.pack_ahead(asked), groups=lacking)
            for name, rounds in self._by_group(replies, read).items():
                if len(rounds) == asked.count:
                    self._prepared[name] = dict(enumerate(rounds, start=number))
        return tuple(name for name in self.expected if number in self._prepared.get(name, {}))

    def _ask(
        self,
        kind: str,
        content: RecordDict | Callable[[Sequence[str]], RecordDict],
        *,
        groups: Collection[str] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Message]:
        asked = set(self._federation.present if groups is None else groups)
        of_node = {
            node: [name for name in self._federation.hosted(node) if name in asked]
            for node in self._federation.nodes_of(asked)
        }
        contents = {node: content if isinstance(content, RecordDict) else content(of_node[node]) for node in of_node}
        replies = self._federation.ask_each(kind, contents, iteration=self._round, meanwhile=meanwhile)
        self.seconds_waited += self._federation.grid.seconds_waited
        return replies

    def _read(self, replies: Iterable[Message], unpack: Callable[[RecordDict], _T]) -> list[tuple[int, _T]]:
        """Node -> its reply; what cannot be used is warned about and left out."""
        found = []
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                found.append((node, unpack(reply.content)))
            except (ValueError, UserError) as error:
                log.warning("node %s: %s", node, error)
        return found

    def _by_group(self, replies: Iterable[Message], unpack: Callable[[RecordDict], Mapping[str, _T]]) -> dict[str, _T]:
        """Group -> its part of its own node's reply."""
        return {
            name: by_group[name]
            for node, by_group in self._read(replies, unpack)
            for name in self._federation.hosted(node)
            if name in by_group
        }

    def _too_few(self, number: int, what: str) -> str:
        least = max(self.roster.least(0), self._federation.min_groups)
        why = self._federation.why_refused() or "The groups' own logs say why"
        return f"secure sum: {number} of the roster's {len(self.roster.names)} groups {what}, and {least} must. {why}"
