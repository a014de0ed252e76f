"""What server and groups send each other for a secure sum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from appa_flwr.secure.primitives import Words, framed
from appa_flwr.secure.roster import Roster


@dataclass(frozen=True)
class Task:
    """One sum, as the server asks for it.

    Attributes:
        session: in which round numbers count, such as a run's id.
        round: its number; a group masks each once.
        cohort: names of all groups that are asked.
        request: hash of what the numbers answer.
        count: how many words each group sends.
    """

    session: str
    round: int
    cohort: tuple[str, ...]
    request: str
    count: int

    def digest(self, roster: Roster) -> bytes:
        """All of it and the roster: masks of two tasks that differ in anything have nothing in common."""
        parts = (roster.sha256, self.session, str(self.round), self.request, str(self.count), *self.cohort)
        return hashlib.sha256(framed(*parts)).digest()


@dataclass(frozen=True)
class Prepared:
    """What a group sends ahead, so that a round in which it drops out can be finished.

    Attributes:
        sealed_seeds: the seeds of its pairs' masks in this round, in the order of its neighbours.
        boxes: holder -> a share of the key to them, for the holder's eyes.
    """

    sealed_seeds: bytes
    boxes: Mapping[str, bytes]


@dataclass(frozen=True, eq=False)
class Masked:
    """A group's first reply in a round.

    Attributes:
        words: its numbers under all masks.
        boxes: holder -> a share of its self mask's seed, for the holder's eyes.
    """

    words: Words
    boxes: Mapping[str, bytes]


@dataclass(frozen=True)
class Unmasking:
    """The second request of a round, to one group.

    Attributes:
        answered: the groups whose words the sum is over.
        boxes: group whose secret this one holds a share of -> the box with it: of its self mask where it has answered,
            of its pairs' seeds where it has not.
    """

    answered: tuple[str, ...]
    boxes: Mapping[str, bytes]
