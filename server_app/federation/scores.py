"""Scores of answers over the groups.

Axis letters: G groups, J answers.
"""

import math

import numpy as np

from appa_flwr.analysis.alignment import GROUPS_TO_COMPARE, alignment_scores
from appa_flwr.analysis.equations import fairness_index
from appa_flwr.core.arrays import BoolArray, FloatArray
from appa_flwr.protocol.asks import ScoreRequest
from appa_flwr.run.records import ScoreRecord
from server_app.federation.groups import Groups


def scores(groups: Groups, request: ScoreRequest) -> dict[tuple[str, str], tuple[ScoreRecord, FloatArray]]:
    """(metric, side) -> the groups' scores of answers; raises the errors of `Groups.ask`.

    Returns:
        The scores, NaN where unknown; and every group's rewards (G, J), NaN where a group has none.
    """
    replies, result = groups.ask(request.ask()), {}
    for metric, side in request.keys:
        reward_GJ = replies.rows(f"{metric} {side} reward", groups.names)
        reward_GJ = np.where(replies.rows(f"{metric} {side} known", groups.names) == 1.0, reward_GJ, np.nan)
        result[metric, side] = _record(reward_GJ, request.readable_J, groups.names), reward_GJ
    return result


def _record(reward_GJ: FloatArray, readable_J: BoolArray, names: tuple[str, ...]) -> ScoreRecord:
    def fairness(used_J: BoolArray) -> float:
        return fairness_index(reward_GJ[:, used_J], min_groups=GROUPS_TO_COMPARE)

    avg_as, min_as, per_group = math.nan, math.nan, dict.fromkeys(names, math.nan)
    if not np.isnan(reward_GJ).all():
        scored = alignment_scores(reward_GJ)
        avg_as, min_as = scored.avg_as, scored.min_as
        per_group = dict(zip(names, scored.per_group_G.tolist(), strict=True))
    return ScoreRecord(
        fi=fairness(np.ones_like(readable_J)),
        avg_as=avg_as,
        min_as=min_as,
        per_group=per_group,
        fi_readable=fairness(readable_J) if readable_J.any() else math.nan,
    )
