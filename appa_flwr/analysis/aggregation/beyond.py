"""A rule beside the paper's, a weighted mean of the groups' rewards, and the bound on weights.

Legend: G groups, J rollouts.
"""

from __future__ import annotations

import numpy as np
from scipy.special import softmax

from appa_flwr.analysis.aggregation.rule import Combination, Past, Rule
from appa_flwr.analysis.fairness import FloatArray
from appa_flwr.config import ranges
from appa_flwr.config.ranges import WEIGHT_STEP, WORST_SHARE

MAX_LEAD = 12.0
"""No group falls further behind the first in log-weight: exp(-12) is nothing, and it has a way back."""


def capped(weight_G: FloatArray, *, cap: float) -> FloatArray:
    """Weights of at most `cap / G`: what is above goes to the others in proportion, again until none is above.

    Args:
        weight_G: (G,) weights that sum to 1.
        cap: 0 = none; of 1 or less all weights are equal.
    """
    most = cap / len(weight_G)
    if not cap or weight_G.max() <= most:
        return weight_G
    if cap <= 1:
        return np.full_like(weight_G, 1 / len(weight_G))
    held_G = np.zeros(len(weight_G), dtype=bool)
    found_G = weight_G
    while (above_G := (found_G > most) & ~held_G).any():
        held_G |= above_G
        left, rest = 1 - most * held_G.sum(), weight_G[~held_G].sum()
        free_G = weight_G * left / rest if rest > 0 else np.full_like(weight_G, left / (~held_G).sum())
        found_G = np.where(held_G, most, free_G)
    return found_G


class Mix(Rule):
    """A share c of group DRO's weights, and every group at least (1 - c) / G: it climbs (1 - c) mean + c minimum.

    Group DRO is exponentiated gradient (Sagawa et al. 2020, Algorithm 1, with rewards for losses): a group's weight
    grows by exp(eta times what its reward is short of the mean) in each iteration. So weights settle only where the
    worst groups are equal. With a cap no weight exceeds cap / G, and that optimum is given up where it needs more.
    """

    name = "mix"
    weight_step: ranges.WeightStep = WEIGHT_STEP
    weight_cap: ranges.WeightCap = 0.0
    worst_share: ranges.WorstShare = WORST_SHARE

    def lead(self, lead_G: FloatArray, mean_G: FloatArray) -> FloatArray:  # noqa: D102
        moved_G = lead_G + self.weight_step * (mean_G.mean() - mean_G)
        return np.asarray(np.maximum(moved_G, moved_G.max() - MAX_LEAD))

    def combine(self, reward_GJ: FloatArray, past: Past) -> Combination:  # noqa: D102
        fallen_G = np.asarray(softmax(past.lead_G))
        weight_G = capped((1 - self.worst_share) / len(fallen_G) + self.worst_share * fallen_G, cap=self.weight_cap)
        return Combination(weight_G @ reward_GJ, weight_G)
