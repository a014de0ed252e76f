"""The paper's rules (average, minimum, Park et al.'s alpha aggregation and APPA), and a mix of two objectives.

They differ from the paper so:

1. A group that does not answer is left out and keeps its history; one that joins late starts with the others' mean
   history, not with 0.
2. By default the threshold never falls back to the mean, and the temperature is lower (`appa-printed` has the paper's).
3. `alpha` takes any α of Park et al.'s rule, and `mix` is our own.

The base class `Rule` leaves out missing groups, computes fairness and updates histories. To add a rule, subclass it
with the rule's parameters as fields, and add it to `RULES`; or keep the class in your own module
(`appa_flwr.analysis.rule_choice`).

Legend: G groups, J rollouts.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict
from scipy.special import softmax

from appa_flwr.analysis import equations
from appa_flwr.config import sections
from appa_flwr.config.sections import APPA_DEFAULTS
from appa_flwr.core.arrays import BoolArray, FloatArray
from appa_flwr.core.errors import UserError

WEIGHT_STEP = 3.0
"""eta: increase of a group's log-weight in one iteration if its mean reward is 1 below the mean over groups."""

MAX_LOG_WEIGHT_GAP = 12.0
"""Largest gap between a group's log-weight and the highest one: exp(-12) is nearly 0, but the group can recover."""

WEIGHTS_TOLERANCE = 1e-6  # largest difference of the sum of weights from 1


@dataclass(frozen=True, eq=False)
class State:
    """State of a rule between iterations; rules never change its arrays, but make new ones.

    Attributes:
        history_G: (G,) moving average of each group's mean alignment reward, the paper's h; 0 before the first answer.
        answered_G: (G,) True for a group that has ever answered.
        memory_G: (G,) numbers that the rule keeps for itself; 0 under a rule that keeps none.
    """

    history_G: FloatArray
    answered_G: BoolArray
    memory_G: FloatArray


@dataclass(frozen=True, eq=False)
class Result:
    """Result of one iteration.

    Attributes:
        aggregate_J: (J,) the reward of each rollout.
        state: input of the next iteration.
        fairness_index: of this iteration's alignment rewards, in [0, 1].
        weight_G: (G,) the groups' weights, 0 for a missing group; sums to 1. `appa`: the paper's alpha_g, which is not
            used if the iteration fell back to the mean; `min` and `alpha`: `alpha_weights`; `mix`: the weights of its
            weighted mean.
        fell_back: whether the fairness threshold turned the rule into a plain mean; None for rules without a threshold.
    """

    aggregate_J: FloatArray
    state: State
    fairness_index: float
    weight_G: FloatArray
    fell_back: bool | None


class Combination(NamedTuple):
    """A rule's result for the present groups' rewards; fields as in `Result`.

    `memory_G` are the rule's own numbers for the next iteration; None keeps those of the context.
    """

    aggregate_J: FloatArray
    weight_G: FloatArray
    fell_back: bool | None = None
    memory_G: FloatArray | None = None


class RuleContext(NamedTuple):
    """Inputs of a rule other than training rewards, for present groups only.

    Histories and the rule's memory are those before this iteration; `mean_G` and `fairness` are the means and the
    Fairness Index of its alignment rewards.
    """

    history_G: FloatArray
    memory_G: FloatArray
    mean_G: FloatArray
    fairness: float


class Rule(BaseModel, ABC):
    """An aggregation rule with its parameters; `apply` takes a state and returns the next state.

    Every rule updates histories (with `ema_decay`), even if it does not use them, so that all runs report them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    ema_decay: sections.EmaDecay = APPA_DEFAULTS.ema_decay

    @abstractmethod
    def combine(self, reward_GJ: FloatArray, context: RuleContext) -> Combination:
        """Combine the present groups' training rewards (G, J) into one reward (J,)."""

    def init(self, num_groups: int) -> State:
        """State before the first iteration: all histories are 0 (h^0 = 0), and no group has answered."""
        zero_G = np.zeros(num_groups)
        return State(history_G=zero_G, answered_G=np.zeros(num_groups, dtype=bool), memory_G=zero_G)

    def apply(self, state: State, reward_GJ: npt.ArrayLike, training_reward_GJ: npt.ArrayLike) -> Result:
        """Aggregate one iteration's rewards (Algorithm 1).

        Fairness Index and histories are computed from the alignment rewards; the training rewards are combined. A
        missing group is a row of NaN in both: it has no effect, and keeps its history. A group that joins late starts
        with the mean of the others' histories and memories, since a history of 0 would give it nearly all weight.
        Both rewards are (G, J), the alignment rewards in [0, 1].

        Raises:
            ValueError: shapes that differ from each other or from the state, infinite values, a row that is NaN only
                in part or in one array only, or no group at all.
            UserError: a user's rule does not return a finite reward for each rollout, finite numbers for each group,
                and weights that sum to 1.
        """
        reward_GJ = np.asarray(reward_GJ, dtype=np.float64)
        training_reward_GJ = np.asarray(training_reward_GJ, dtype=np.float64)
        present_G = _present_groups(state, reward_GJ, training_reward_GJ)
        fairness = equations.fairness_index(reward_GJ)
        history_G = _with_late_joiners(state.history_G, state, present_G)
        memory_G = _with_late_joiners(state.memory_G, state, present_G)
        mean_G = reward_GJ[present_G].mean(axis=1)
        context = RuleContext(history_G[present_G], memory_G[present_G], mean_G, fairness)
        combined = self.combine(training_reward_GJ[present_G], context)
        if not isinstance(combined, Combination):
            raise UserError(f"{self._title}: `combine` gives {type(combined).__name__}, and has to give a Combination")
        fell_back = None if combined.fell_back is None else bool(combined.fell_back)
        aggregate_J = self._finite("rewards", combined.aggregate_J, size=reward_GJ.shape[1])
        weight_G = np.zeros(present_G.size)
        weight_G[present_G] = self._finite("weights", combined.weight_G, size=len(mean_G))
        if not math.isclose(weight_G.sum(), 1.0, abs_tol=WEIGHTS_TOLERANCE):
            raise UserError(f"{self._title}: gives weights that sum to {weight_G.sum():g}; they have to sum to 1")
        if combined.memory_G is not None:
            memory_G[present_G] = self._finite("memory", combined.memory_G, size=len(mean_G))
        history_G[present_G] = equations.historical_alignment(
            history_G[present_G], reward_GJ[present_G], decay=self.ema_decay
        )
        next_state = State(history_G, state.answered_G | present_G, memory_G)
        return Result(aggregate_J, next_state, fairness, weight_G, fell_back)

    @property
    def _title(self) -> str:
        return f'rule "{type(self).__module__}:{type(self).__name__}"'

    def _finite(self, what: str, values: npt.ArrayLike, *, size: int) -> FloatArray:
        """Convert a rule's values to an array (size,); raises UserError with the rule's name if they do not fit."""
        array = np.asarray(values, dtype=np.float64)
        if array.shape != (size,) or not np.isfinite(array).all():
            wrong = f"{what} of shape {array.shape}, {np.isfinite(array).sum()} of them finite"
            raise UserError(f"{self._title}: gives {wrong}; it has to give ({size},), all finite")
        return array


def _present_groups(state: State, reward_GJ: FloatArray, training_reward_GJ: FloatArray) -> BoolArray:
    """Mask (G,) of the groups that answered; raises ValueError as `Rule.apply` does."""
    shapes = reward_GJ.shape, training_reward_GJ.shape, state.history_G.shape
    if reward_GJ.ndim != 2 or shapes[0] != shapes[1] or shapes[0][:1] != shapes[2]:
        raise ValueError("rewards {}, training rewards {} and state {} do not fit together".format(*shapes))
    both_GJ = np.hstack([reward_GJ, training_reward_GJ])
    absent_G = np.isnan(both_GJ).all(axis=1)
    if absent_G.all():
        raise ValueError("no group answered: every row of rewards is NaN")
    wrong_G = ~absent_G & ~np.isfinite(both_GJ).all(axis=1)
    if wrong_G.any():
        rows = ", ".join(map(str, np.flatnonzero(wrong_G)))
        raise ValueError(f"rewards must be finite, or NaN in a whole row of both arrays; wrong row(s): {rows}")
    return np.asarray(~absent_G)


def _with_late_joiners(values_G: FloatArray, state: State, present_G: BoolArray) -> FloatArray:
    """Give each group that joins late the mean history or memory of the groups that answered before (G,)."""
    joining_G = present_G & ~state.answered_G
    if not joining_G.any() or not state.answered_G.any():
        return values_G.copy()
    return np.where(joining_G, values_G[state.answered_G].mean(), values_G)


def _by_alpha(reward_GJ: FloatArray, alpha: float) -> Combination:
    weight_G = equations.alpha_weights(reward_GJ, alpha=alpha)
    return Combination(equations.alpha_aggregate(reward_GJ, alpha=alpha), weight_G)


class Average(Rule):
    """The mean over the groups (section "Aggregation Strategies"); Equation 2 at alpha = 0."""

    def combine(self, reward_GJ: FloatArray, context: RuleContext) -> Combination:  # noqa: D102
        return _by_alpha(reward_GJ, 0.0)


class Minimum(Rule):
    """The reward of each rollout's worst-off group (same section); Equation 2 at alpha = -inf."""

    def combine(self, reward_GJ: FloatArray, context: RuleContext) -> Combination:  # noqa: D102
        return _by_alpha(reward_GJ, -np.inf)


class Alpha(Rule):
    """Park et al.'s rule, Equation 2 at any `alpha`."""

    alpha: sections.Alpha

    def combine(self, reward_GJ: FloatArray, context: RuleContext) -> Combination:  # noqa: D102
        return _by_alpha(reward_GJ, self.alpha)


class Appa(Rule):
    """The paper's rule, Equations 3 and 6."""

    temperature: sections.Temperature = APPA_DEFAULTS.temperature
    fairness_threshold: sections.FairnessThreshold = APPA_DEFAULTS.fairness_threshold

    def combine(self, reward_GJ: FloatArray, context: RuleContext) -> Combination:  # noqa: D102
        weight_G = equations.reversed_softmax(context.history_G, temperature=self.temperature)
        aggregate_J = equations.adaptive_aggregate(
            reward_GJ, weight_G, fairness=context.fairness, fairness_threshold=self.fairness_threshold
        )
        return Combination(aggregate_J, weight_G, context.fairness >= self.fairness_threshold)


class Mix(Rule):
    """Weights (1 - c) / G plus c times group DRO's weights, c = `worst_share`: optimises (1 - c) mean + c minimum.

    Group DRO is exponentiated gradient (Sagawa et al. 2020, Algorithm 1, with rewards instead of losses): each
    iteration multiplies a group's weight by exp(eta (mean reward of the present groups - the group's mean reward)). So
    weights stop changing only when these rewards are equal. The memory holds the logarithms of these weights, up to a
    constant.
    """

    worst_share: sections.WorstShare = APPA_DEFAULTS.worst_share

    def combine(self, reward_GJ: FloatArray, context: RuleContext) -> Combination:  # noqa: D102
        moved_G = context.memory_G + WEIGHT_STEP * (context.mean_G.mean() - context.mean_G)
        log_weight_G = np.maximum(moved_G, moved_G.max() - MAX_LOG_WEIGHT_GAP)
        weight_G = (1 - self.worst_share) / len(log_weight_G) + self.worst_share * np.asarray(softmax(log_weight_G))
        return Combination(weight_G @ reward_GJ, weight_G, memory_G=log_weight_G)


RULES: dict[str, type[Rule] | Rule] = {
    "average": Average,
    "min": Minimum,
    "alpha": Alpha,
    "appa": Appa,
    "appa-printed": Appa(temperature=0.1, fairness_threshold=0.99),  # as the paper prints them (APPA table)
    "mix": Mix,
}
"""Rules by their names in config and reports; no config changes the values that an instance sets."""
