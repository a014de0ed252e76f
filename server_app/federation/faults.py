"""Faults in groups' replies: whoever has one counts as missing, and the others stay.

Axis letters: Q questions, K options, J answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from appa_flwr.protocol import wire
from server_app.federation.foreign import listed, plain

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

log = logging.getLogger("appa.server")


def without(
    by_group: Mapping[str, wire.GroupReply], fault: Callable[[wire.GroupReply], str | None]
) -> dict[str, wire.GroupReply]:
    """The replies in which `fault` finds none; a warning names the others."""
    faults = {name: reason for name, reply in by_group.items() if (reason := fault(reply)) is not None}
    warn_missing(faults)
    return {name: reply for name, reply in by_group.items() if name not in faults}


def warn_missing(faults: Mapping[str, str]) -> None:
    """Warn which groups count as missing: one line a reason, however many they are."""
    groups: dict[str, list[str]] = {}
    for name, reason in faults.items():
        groups.setdefault(reason, []).append(name)
    for reason, names in groups.items():
        some = "group %s counts" if len(names) == 1 else "groups %s count"
        log.warning(f"{some} as missing: %s", listed(names), plain(reason))


def of_rewards(reply: wire.GroupReply, keys: Sequence[tuple[str, str]], unreadable_J: BoolArray) -> str | None:
    """What is wrong with a group's rewards by (metric, side), None = nothing; on the truth side NaN is unknown."""
    found = (_of_reward(reply.rewards.get(key), unreadable_J, key) for key in keys)
    return next((fault for fault in found if fault is not None), None)


def _of_reward(reward_J: FloatArray | None, unreadable_J: BoolArray, key: tuple[str, str]) -> str | None:
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


def warn_alike(by_group: Mapping[str, wire.GroupReply], keys: Sequence[tuple[str, str]], readable_J: BoolArray) -> None:
    """Name the groups that give all readable answers one reward by their target tables."""
    of_targets = [key for key in keys if key[1] == wire.TARGET_SIDE]
    if alike := [
        name
        for name, reply in by_group.items()
        if any(np.ptp(reply.rewards[key][readable_J]) == 0.0 for key in of_targets)
    ]:
        log.warning("group %s gives all answers the same reward", listed(alike))


def of_votes(votes_QK: FloatArray | None, shape: tuple[int, ...]) -> str | None:
    """What is wrong with a group's votes, None = nothing."""
    if votes_QK is None or votes_QK.shape != shape:
        return f"no votes of shape {shape}"
    # One group must not outvote the others: no option is worth more than the first of K ranks.
    if not ((votes_QK >= 0) & (votes_QK <= shape[-1])).all():
        return f"votes outside [0, {shape[-1]}]"
    return None
