"""The server's half of secure sums: it passes boxes on, and takes the masks off the sum; it never sees a part."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from appa_flwr.core.errors import UserError
from appa_flwr.secure import member, shamir
from appa_flwr.secure.messages import Masked, Prepared, Task, Unmasking
from appa_flwr.secure.primitives import KEY_BYTES, Words, stream, unseal
from appa_flwr.secure.roster import Roster

Shares = Mapping[str, Mapping[str, bytes]]
"""Holder -> whose secret -> the share."""


class TooFew(UserError):
    """A round that cannot be finished; it is repeated with those who answer, under a new number."""


def usable(roster: Roster, task: Task, name: str, masked: Masked) -> bool:
    """True if a group's first reply fits the task; one that does not counts as missing."""
    fits = masked.words.dtype == np.uint64 and masked.words.shape == (task.count,)
    return fits and name in task.cohort and set(masked.boxes) == set(roster.holders(name))


def unmasking(
    roster: Roster, task: Task, prepared: Mapping[str, Prepared], masked: Mapping[str, Masked]
) -> dict[str, Unmasking]:
    """The second request to each group that has answered.

    Args:
        roster: of this session.
        task: the round's.
        prepared: what each group of the cohort has sent ahead of this round.
        masked: the usable first replies.

    Raises:
        TooFew: no group would unmask a sum over so few.
    """
    if len(masked) < roster.least(0):
        raise TooFew(f"secure sum: {len(masked)} of {len(roster.names)} groups answered, {roster.least(0)} are needed")
    answered = tuple(sorted(masked))
    box_of = {owner: masked[owner].boxes if owner in masked else prepared[owner].boxes for owner in task.cohort}
    return {
        name: Unmasking(answered, {o: box_of[o][name] for o in roster.holders(name) if o in box_of})
        for name in answered
    }


def total(
    roster: Roster, task: Task, prepared: Mapping[str, Prepared], masked: Mapping[str, Masked], shares: Shares
) -> Words:
    """The sum over the groups in `masked`; arguments as in `unmasking`, and its replies.

    Raises:
        TooFew: too few shares of some group's secret came back.
        UserError: shares that do not belong together.
    """
    nonce, count = member.nonce(task.digest(roster)), task.count
    found = np.zeros(count, dtype=np.uint64)
    for name, reply in masked.items():
        found += reply.words - stream(_secret(roster, name, shares), nonce, count)
    for gone in set(task.cohort) - set(masked):
        bound = member.about(member.PAIR_SEEDS, task.session, task.round, gone)
        others = roster.neighbours(gone)
        if not masked.keys() & set(others):
            continue
        try:
            seeds = unseal(_secret(roster, gone, shares), prepared[gone].sealed_seeds, bound)
        except ValueError:
            raise UserError(f"secure sum: what {gone} has sent ahead does not open with its shares") from None
        for place, other in enumerate(others):
            if other in masked:
                mask = stream(seeds[place * KEY_BYTES : (place + 1) * KEY_BYTES], nonce, count)
                found += mask if gone < other else -mask
    return found


def _secret(roster: Roster, owner: str, shares: Shares) -> bytes:
    given = {roster.point_of[h]: shares[h][owner] for h in roster.holders(owner) if owner in shares.get(h, {})}
    if len(given) < roster.threshold(owner):
        raise TooFew(f"secure sum: {len(given)} shares for {owner} came back, {roster.threshold(owner)} are needed")
    try:
        return shamir.join(dict(list(given.items())[: roster.threshold(owner)]))
    except ValueError as error:
        raise UserError(f"secure sum: {owner}: {error}") from None
