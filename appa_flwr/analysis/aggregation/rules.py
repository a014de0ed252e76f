"""The rules: average, minimum, Park et al.'s alpha aggregation and APPA, as in the paper; and a mix of two objectives.

Legend: G groups, J rollouts.
"""

from __future__ import annotations

import numpy as np
from scipy.special import softmax

from appa_flwr.analysis.aggregation.equations import (
    adaptive_aggregate,
    alpha_aggregate,
    alpha_weights,
    reversed_softmax,
)
from appa_flwr.analysis.aggregation.rule import Combination, Past, Rule
from appa_flwr.analysis.fairness import FloatArray
from appa_flwr.config import ranges
from appa_flwr.config.ranges import (
    FAIRNESS_THRESHOLD,
    PAPER_FAIRNESS_THRESHOLD,
    PAPER_TEMPERATURE,
    TEMPERATURE,
    WORST_SHARE,
)

WEIGHT_STEP = 3.0
"""eta: what a reward that is short by 1 adds to a group's log-weight in one iteration."""

MAX_LOG_WEIGHT_GAP = 12.0
"""Between any group's log-weight and the largest: exp(-12) is next to nothing, and the group can still come back."""


def _by_alpha(reward_GJ: FloatArray, alpha: float) -> Combination:
    return Combination(alpha_aggregate(reward_GJ, alpha=alpha), alpha_weights(reward_GJ, alpha=alpha))


class Average(Rule):
    """The mean over the groups (section "Aggregation Strategies"); Equation 2 at alpha = 0."""

    name = "average"

    def combine(self, reward_GJ: FloatArray, past: Past) -> Combination:  # noqa: D102
        return _by_alpha(reward_GJ, 0.0)


class Minimum(Rule):
    """The reward of each rollout's worst-off group (same section); Equation 2 at alpha = -inf."""

    name = "min"

    def combine(self, reward_GJ: FloatArray, past: Past) -> Combination:  # noqa: D102
        return _by_alpha(reward_GJ, -np.inf)


class Alpha(Rule):
    """Park et al.'s rule, Equation 2 at any `alpha`."""

    name = "alpha"
    alpha: ranges.Alpha

    def combine(self, reward_GJ: FloatArray, past: Past) -> Combination:  # noqa: D102
        return _by_alpha(reward_GJ, self.alpha)


class Appa(Rule):
    """The paper's rule, Equations 3 and 6."""

    name = "appa"
    temperature: ranges.Temperature = TEMPERATURE
    fairness_threshold: ranges.FairnessThreshold = FAIRNESS_THRESHOLD

    def combine(self, reward_GJ: FloatArray, past: Past) -> Combination:  # noqa: D102
        weight_G = reversed_softmax(past.history_G, temperature=self.temperature)
        aggregate_J = adaptive_aggregate(
            reward_GJ, weight_G, fairness=past.fairness, fairness_threshold=self.fairness_threshold
        )
        return Combination(aggregate_J, weight_G, past.fairness >= self.fairness_threshold)


class PrintedAppa(Rule):
    """`Appa` at the temperature and threshold that the paper prints (APPA table)."""

    name = "appa-printed"

    def combine(self, reward_GJ: FloatArray, past: Past) -> Combination:  # noqa: D102
        printed = Appa(temperature=PAPER_TEMPERATURE, fairness_threshold=PAPER_FAIRNESS_THRESHOLD)
        return printed.combine(reward_GJ, past)


class Mix(Rule):
    """A share c of group DRO's weights, and every group at least (1 - c) / G: it optimises (1 - c) mean + c minimum.

    Group DRO is exponentiated gradient (Sagawa et al. 2020, Algorithm 1, with rewards for losses): a group's weight
    grows by exp(eta times what its reward is short of the mean) in each iteration. So weights settle only where the
    worst groups are equal.
    """

    name = "mix"
    worst_share: ranges.WorstShare = WORST_SHARE

    def log_weights(self, log_weight_G: FloatArray, mean_G: FloatArray) -> FloatArray:  # noqa: D102
        moved_G = log_weight_G + WEIGHT_STEP * (mean_G.mean() - mean_G)
        return np.asarray(np.maximum(moved_G, moved_G.max() - MAX_LOG_WEIGHT_GAP))

    def combine(self, reward_GJ: FloatArray, past: Past) -> Combination:  # noqa: D102
        dro_weight_G = np.asarray(softmax(past.log_weight_G))
        weight_G = (1 - self.worst_share) / len(dro_weight_G) + self.worst_share * dro_weight_G
        return Combination(weight_G @ reward_GJ, weight_G)
