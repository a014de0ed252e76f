"""The rules of the paper: average, minimum, Park et al.'s alpha aggregation, and APPA.

Legend: G groups, J rollouts.
"""

from __future__ import annotations

import numpy as np

from appa_flwr.analysis.aggregation.equations import (
    adaptive_aggregate,
    alpha_aggregate,
    alpha_weights,
    reversed_softmax,
)
from appa_flwr.analysis.aggregation.rule import Combination, Past, Rule
from appa_flwr.analysis.fairness import FloatArray
from appa_flwr.config import ranges
from appa_flwr.config.ranges import FAIRNESS_THRESHOLD, TEMPERATURE


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
