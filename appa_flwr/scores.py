"""Alignment scores: what the tables of results show for one policy under one metric.

Legend: G groups, Q questions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appa_flwr.fairness import FloatArray, fairness_of_cells
from appa_flwr.ranges import MAX_COV, MIN_MEAN

_GROUPS_TO_COMPARE = 2


@dataclass(frozen=True, eq=False)
class Scores:
    """One policy's result under one metric, in [0, 1]; `per_group_G` is NaN for a group without a single reward."""

    per_group_G: FloatArray
    avg_as: float
    min_as: float
    fairness_index: float


def alignment_scores(reward_GQ: npt.ArrayLike, *, min_mean: float = MIN_MEAN, max_cov: float = MAX_COV) -> Scores:
    """Equations 18 and 19, alignment scores: AS_g = mean_q r_gq, Avg AS = mean_g AS_g, Min AS = min_g AS_g.

    In a sparse survey a group is averaged over the questions it has, and the Fairness Index (Equation 4) over the
    questions that at least two groups have, since one group alone cannot be treated unequally. Rewards (G, Q) in [0, 1]
    are NaN where a group has no target for a question; a group without any takes no part in the mean and the minimum.

    Raises:
        ValueError: not (G, Q), infinite, or not a single reward.
    """
    reward_GQ = np.asarray(reward_GQ, dtype=np.float64)
    fairness = fairness_of_cells(reward_GQ, min_groups=_GROUPS_TO_COMPARE, min_mean=min_mean, max_cov=max_cov)
    present_GQ = ~np.isnan(reward_GQ)
    if not present_GQ.any():
        raise ValueError("there is no reward to average: every cell is NaN")
    has_any_G = present_GQ.any(axis=1)
    per_group_G = np.full(reward_GQ.shape[0], np.nan)
    per_group_G[has_any_G] = reward_GQ[has_any_G].mean(axis=1, where=present_GQ[has_any_G])
    return Scores(per_group_G, float(np.nanmean(per_group_G)), float(np.nanmin(per_group_G)), fairness)
