"""A group's half of secure sums: it prepares, masks and unmasks, and refuses what would open its own part.

Bonawitz et al. 2017 with double masks. Group g sends x_g + PRG(b_g) + sum_h +-PRG(s_gh), where both of a pair know its
seed s_gh and b_g is g's own. If g has answered, the others give their shares of b_g; if not, of its s_gh; each group
gives one kind only, so a late reply of a group that counted as missing stays under its own mask.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from appa_flwr.secure import refusals, shamir
from appa_flwr.secure.messages import Masked, Prepared, Task, Unmasking
from appa_flwr.secure.primitives import KEY_BYTES, Words, agree, derive, framed, public_key, seal, stream, unseal
from appa_flwr.secure.refusals import Refused
from appa_flwr.secure.roster import Roster

Remember = Callable[[str, bytes], bytes | None]
"""Writes a value down under a name, for good, unless one stands there; the one that stood there before."""

SELF_MASK, PAIR_SEEDS = "self mask", "pair seeds"


def pair_secrets(name: str, private: bytes, roster: Roster) -> dict[str, bytes]:
    """What this group shares with each of those that hold its shares: the costly part, once for a roster.

    Raises:
        Refused: its key does not stand in the roster under its name: others would mask with somebody else's.
    """
    if roster.key_of.get(name) != public_key(private):
        raise Refused(refusals.NOT_ON_ROSTER)
    return {holder: agree(private, roster.key_of[holder]) for holder in roster.holders(name)}


class Member:
    """One group of a roster.

    Args:
        name: its own.
        pairs: from `pair_secrets`.
        roster: the one that the owner's policy names (`pinned_roster`).
        least_cohort: the fewest groups that the owner's policy lets it be summed with, itself included.
        remember: outlives this process, and is one for all processes of this group.
    """

    def __init__(
        self, name: str, pairs: Mapping[str, bytes], roster: Roster, *, least_cohort: int, remember: Remember
    ) -> None:
        self.name, self._pairs, self._roster, self._remember = name, pairs, roster, remember
        self._least, self._holders = roster.least(least_cohort), roster.holders(name)

    def prepare(self, session: str, rounds: Sequence[int]) -> list[Prepared]:
        """What is sent ahead of these rounds; asked again, the same seeds under fresh keys."""
        prepared = []
        for number in rounds:
            key = secrets.token_bytes(KEY_BYTES)
            seeds = b"".join(self._keys(other, session, number)[0] for other in self._roster.neighbours(self.name))
            boxes = self._shared(key, PAIR_SEEDS, session, number)
            prepared.append(Prepared(seal(key, seeds, about(PAIR_SEEDS, session, number, self.name)), boxes))
        return prepared

    def mask(self, task: Task, words: Words) -> Masked:
        """The group's numbers under all masks, once for a round.

        Raises:
            Refused: see each check.
            ValueError: another number of words than the task's.
        """
        if words.shape != (task.count,):
            raise ValueError(f"{words.shape} words for a task of {task.count}")
        if not {self.name} <= set(task.cohort) <= set(self._roster.names):
            raise Refused(refusals.STRANGERS)  # groups that the server has invented
        self._check_number(task.cohort)
        digest = task.digest(self._roster)
        # Two parts under the same masks give their difference away; and two cohorts of one round, a single part.
        if self._remember(_name("mask", task), digest) is not None:
            raise Refused(refusals.MASKED_BEFORE)
        own_seed = secrets.token_bytes(KEY_BYTES)
        hidden = words + stream(own_seed, nonce(digest), task.count)
        for other in self._roster.neighbours(self.name):
            if other in task.cohort:
                part = stream(self._keys(other, task.session, task.round)[0], nonce(digest), task.count)
                hidden = hidden + part if self.name < other else hidden - part
        return Masked(hidden, self._shared(own_seed, SELF_MASK, task.session, task.round, digest))

    def unmask(self, task: Task, request: Unmasking) -> dict[str, bytes]:
        """Group -> this one's share of its self mask, or of its pairs' seeds; one view of who has answered a round.

        Raises:
            Refused: see each check.
        """
        digest, answered = task.digest(self._roster), request.answered
        if not {self.name} <= set(answered) <= set(task.cohort):
            raise Refused(refusals.STRANGERS)  # a sum without it is none of its business, and may be a trap
        self._check_number(answered)
        if self._remember(_name("mask", task), digest) != digest:
            raise Refused(refusals.NOT_ANSWERED)  # a task with another request or cohort
        view = hashlib.sha256(digest + framed(*sorted(answered))).digest()
        # One group's self mask and its pairs' seeds, from two views, open its part.
        if self._remember(_name("unmask", task), view) not in (None, view):
            raise Refused(refusals.OTHER_VIEW)
        shares = {}
        for owner in self._holders:
            kind = SELF_MASK if owner in answered else PAIR_SEEDS
            bound = about(kind, task.session, task.round, owner, self.name, digest if kind == SELF_MASK else b"")
            # A share of the other kind, of another round or for somebody else does not open; the rest still counts.
            with suppress(ValueError):
                key = self._keys(owner, task.session, task.round)[1]
                shares[owner] = unseal(key, request.boxes.get(owner, b""), bound)
        return shares

    def _check_number(self, groups: Sequence[str]) -> None:
        """Few groups hide nothing in their sum; few neighbours, and a server that tells each another view isolates it.

        Raises:
            Refused: they are too few.
        """
        if len(set(groups)) < self._least:
            raise Refused(refusals.FEW)
        if len(set(groups) & set(self._holders)) < self._roster.threshold(self.name):
            raise Refused(refusals.FEW)

    def _keys(self, other: str, session: str, number: int) -> tuple[bytes, bytes]:
        """The seed of this pair's mask in a round, and the key of the boxes between the two."""
        made = derive(self._pairs[other], self._roster.sha256, session, str(number), length=2 * KEY_BYTES)
        return made[:KEY_BYTES], made[KEY_BYTES:]

    def _shared(self, secret: bytes, kind: str, session: str, number: int, digest: bytes = b"") -> dict[str, bytes]:
        """A secret's shares, each in a box for its holder."""
        points = {holder: self._roster.point_of[holder] for holder in self._holders}
        share_at = shamir.split(secret, list(points.values()), threshold=self._roster.threshold(self.name))
        return {
            holder: seal(
                self._keys(holder, session, number)[1],
                share_at[point],
                about(kind, session, number, self.name, holder, digest),
            )
            for holder, point in points.items()
        }


def nonce(digest: bytes) -> bytes:
    """The nonce of a task's masks: a seed that is revealed for one task makes no mask of another."""
    return digest[:12]


def about(kind: str, session: str, number: int, owner: str, holder: str = "", digest: bytes = b"") -> bytes:
    """What a box is bound to."""
    return framed(kind, session, str(number), owner, holder, digest.hex())


def _name(step: str, task: Task) -> str:
    return framed(step, task.session, str(task.round)).hex()
