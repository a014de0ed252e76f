"""Scores of answers over the groups, from single rewards or from their sums.

Axis letters: G groups, J answers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np

from appa_flwr.analysis.alignment import GROUPS_TO_COMPARE, alignment_scores
from appa_flwr.analysis.equations import fairness_index
from appa_flwr.core.arrays import BoolArray, FloatArray
from appa_flwr.protocol import asks
from appa_flwr.protocol.asks import ScoreRequest
from appa_flwr.run.records import ScoreRecord
from appa_flwr.secure.rule_sums import fairness_of_sums
from server_app.federation.ask import Replies, TooFew
from server_app.federation.groups import Groups

_Scores = tuple[float, float, Mapping[str, float], Callable[[BoolArray], float]]
"""Avg AS, Min AS, the groups' own scores, and the Fairness Index as a function of the answers that count (J,)."""


def scores(groups: Groups, request: ScoreRequest) -> dict[tuple[str, str], tuple[ScoreRecord, FloatArray | None]]:
    """(metric, side) -> the groups' scores of answers; raises the errors of `Groups.ask`.

    Under sums, groups whose owners allow it also give their own scores.

    Returns:
        The scores, NaN where unknown; and every group's rewards (G, J), NaN where a group has none, or None under sums.
    """
    replies, own_replies = groups.ask(request.ask(asks.REWARDS)), None
    if not groups.plain:
        with suppress(TooFew):  # too few owners let the own score of their group leave
            own_replies = groups.ask(request.ask(asks.OWN_SCORES))
    readable_J, result = request.readable_J, {}
    for metric, side in request.keys:
        name, reward_GJ = f"{metric} {side}", None
        if groups.plain:
            reward_GJ = replies.rows(f"{name} reward", groups.names)
            reward_GJ = np.where(replies.rows(f"{name} known", groups.names) == 1.0, reward_GJ, np.nan)
            avg_as, min_as, own, fairness = _of_rewards(reward_GJ, groups.names)
        else:
            avg_as, min_as, own, fairness = _of_sums(replies, own_replies, name)
        record = ScoreRecord(
            fi=fairness(np.ones_like(readable_J)),
            avg_as=avg_as,
            min_as=min_as,
            per_group={group: own.get(group, math.nan) for group in groups.names},
            fi_readable=fairness(readable_J) if readable_J.any() else math.nan,
        )
        result[metric, side] = record, reward_GJ
    return result


def _of_rewards(reward_GJ: FloatArray, names: Sequence[str]) -> _Scores:
    def fairness(used_J: BoolArray) -> float:
        return fairness_index(reward_GJ[:, used_J], min_groups=GROUPS_TO_COMPARE)

    if np.isnan(reward_GJ).all():
        return math.nan, math.nan, {}, fairness
    scored = alignment_scores(reward_GJ)
    return scored.avg_as, scored.min_as, dict(zip(names, scored.per_group_G.tolist(), strict=True)), fairness


def _of_sums(replies: Replies, own: Replies | None, name: str) -> _Scores:
    sum_J, square_J, count_J = (replies.sum(f"{name} {what}") for what in ("reward", "square", "known"))
    count_J, number = np.round(count_J), round(float(replies.sum(f"{name} groups")[0]))

    def fairness(used_J: BoolArray) -> float:
        used_J = used_J & (count_J >= GROUPS_TO_COMPARE)
        return fairness_of_sums(sum_J[used_J], square_J[used_J], groups=count_J[used_J])

    known: dict[str, float] = {}
    if own is not None:
        known = {group: float(score) for group, (score, has) in zip(own.groups, own.each(name), strict=True) if has}
    avg_as = float(replies.sum(f"{name} own")[0]) / number if number else math.nan
    min_as = min(known.values()) if known and len(known) >= number else math.nan
    return avg_as, min_as, known, fairness
