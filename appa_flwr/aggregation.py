"""Rules that turn the groups' rewards into the one reward PPO trains on, and the paper's equations they consist of.

Legend: G groups, J rollouts.

The equations are pure functions of arrays. A rule puts them together with what all rules share: leaving out missing
groups, the Fairness Index, and each group's history of alignment. A new rule is a subclass of `Rule`, its parameters
being its fields, and an entry in `RULES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from appa_flwr import ranges
from appa_flwr.errors import UserError, unknown_name
from appa_flwr.fairness import BoolArray, FloatArray, fairness_index, present_groups
from appa_flwr.ranges import EMA_DECAY, FAIRNESS_THRESHOLD, MAX_COV, MIN_MEAN, TEMPERATURE

_ALPHA_LOST_IN_ROUNDING = float(np.finfo(np.float64).eps)


def alpha_aggregate(reward_GJ: npt.ArrayLike, *, alpha: float) -> FloatArray:
    """Equation 2, alpha aggregation (Park et al.): Agg_alpha(r_j) = (1/alpha) log mean_g exp(alpha r_gj).

    -inf is the minimum, 0 the mean, inf the maximum. Around the extreme c = max r (alpha > 0) or min r (alpha < 0) it
    equals c + log1p(mean expm1(alpha (r - c))) / alpha, where no exponent is positive: nothing overflows and a small
    alpha loses no digits. The result (J,) lies between the lowest and the highest reward of each rollout.

    Raises:
        ValueError: rewards that are not (G, J) and finite, or alpha is nan.
    """
    reward_GJ = _finite("reward_GJ", reward_GJ)
    if _is_mean(alpha):
        return np.asarray(reward_GJ.mean(axis=0))
    extreme_J, exponent_GJ = _around_extreme(reward_GJ, alpha)
    return np.asarray(extreme_J + np.log1p(np.expm1(exponent_GJ).mean(axis=0)) / alpha)


def alpha_weights(reward_GJ: npt.ArrayLike, *, alpha: float) -> FloatArray:
    """Groups' influence under Equation 2: d Agg_alpha / d r_gj = exp(alpha r_gj) / sum_g' exp(alpha r_g'j).

    Its mean over rollouts (G,), which sums to 1; groups that tie for an extreme share it. Raises as `alpha_aggregate`.
    """
    reward_GJ = _finite("reward_GJ", reward_GJ)
    if _is_mean(alpha):
        return np.full(len(reward_GJ), 1.0 / len(reward_GJ))
    share_GJ = np.exp(_around_extreme(reward_GJ, alpha)[1])
    return np.asarray((share_GJ / share_GJ.sum(axis=0)).mean(axis=1))


def adaptive_aggregate(
    reward_GJ: npt.ArrayLike,
    weight_G: npt.ArrayLike,
    *,
    fairness: float,
    fairness_threshold: float = FAIRNESS_THRESHOLD,
) -> FloatArray:
    """Equation 3, adaptive aggregation: mean_g r_gj where FI >= tau, else log mean_g exp(alpha_g r_gj).

    `weight_G` is the paper's alpha_g from `reversed_softmax`, `fairness` its FI, `fairness_threshold` its tau.

    Raises:
        ValueError: shapes that do not fit, numbers that are not finite, or a threshold outside its range.
    """
    reward_GJ = _finite("reward_GJ", reward_GJ)
    weight_G = _finite("weight_G", weight_G, axes=1, groups=len(reward_GJ))
    ranges.check("fairness_threshold", fairness_threshold, ranges.FairnessThreshold)
    if fairness >= fairness_threshold:
        return np.asarray(reward_GJ.mean(axis=0))
    # alpha_g is near 1/G, so exp(.) is near 1 and its mean would keep few digits of the rewards.
    return np.asarray(np.log1p(np.expm1(weight_G[:, None] * reward_GJ).mean(axis=0)))


def historical_alignment(history_G: npt.ArrayLike, reward_GJ: npt.ArrayLike, *, decay: float = EMA_DECAY) -> FloatArray:
    """Equation 5, historical alignment: h_g^t = lambda h_g^(t-1) + (1 - lambda) mean_j r_gj, with h_g^0 = 0.

    `history_G` is h^(t-1), `reward_GJ` the alignment rewards of iteration t, `decay` the paper's lambda.

    Raises:
        ValueError: shapes that do not fit, numbers that are not finite, or a decay outside its range.
    """
    reward_GJ = _finite("reward_GJ", reward_GJ)
    history_G = _finite("history_G", history_G, axes=1, groups=len(reward_GJ))
    ranges.check("decay", decay, ranges.EmaDecay)
    return np.asarray(decay * history_G + (1.0 - decay) * reward_GJ.mean(axis=1))


def reversed_softmax(history_G: npt.ArrayLike, *, temperature: float = TEMPERATURE) -> FloatArray:
    """Equation 6, reversed softmax: alpha_g^t = exp((1 - h_g^(t-1)) / T) / sum_g' exp((1 - h_g'^(t-1)) / T).

    (G,), largest for the group with the lowest history; sums to 1.

    Raises:
        ValueError: a history that is not (G,) and finite, or a temperature outside its range.
    """
    history_G = _finite("history_G", history_G, axes=1)
    ranges.check("temperature", temperature, ranges.Temperature)
    logit_G = (1.0 - history_G) / temperature
    weight_G = np.exp(logit_G - logit_G.max())
    return np.asarray(weight_G / weight_G.sum())


def _finite(name: str, values: npt.ArrayLike, *, axes: int = 2, groups: int | None = None) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    fits = array.ndim == axes and array.size > 0 and groups in (None, len(array))
    if not fits or not np.isfinite(array).all():
        wanted = ("G" if groups is None else str(groups), "J")[:axes]
        raise ValueError(f"{name} must be finite and of shape ({', '.join(wanted)}), got shape {array.shape}")
    return array


def _is_mean(alpha: float) -> bool:
    ranges.check("alpha", alpha, ranges.Alpha)
    # Under one rounding unit the difference to the mean (at most alpha / 8 for rewards in [0, 1]) has no digits left.
    return abs(alpha) < _ALPHA_LOST_IN_ROUNDING


def _around_extreme(reward_GJ: FloatArray, alpha: float) -> tuple[FloatArray, FloatArray]:
    """The extreme c (J,), and alpha (r - c) (G, J): 0 where a group attains it, else negative."""
    extreme_J = reward_GJ.max(axis=0) if alpha > 0 else reward_GJ.min(axis=0)
    gap_GJ = reward_GJ - extreme_J
    # A huge alpha drives an exponent to -inf, whose exp is the right 0; an infinite one times 0 would be nan.
    with np.errstate(over="ignore", invalid="ignore"):
        return extreme_J, np.where(gap_GJ == 0.0, 0.0, alpha * gap_GJ)


@dataclass(frozen=True, eq=False)
class State:
    """What a rule carries from one iteration to the next; its arrays are read-only.

    Attributes:
        history_G: (G,) moving average of each group's mean alignment reward, the paper's h; 0 before the first answer.
        answered_G: (G,) True for a group that has ever answered.
    """

    history_G: FloatArray
    answered_G: BoolArray

    def __post_init__(self) -> None:
        for name, dtype in (("history_G", np.float64), ("answered_G", np.bool_)):
            frozen = np.array(getattr(self, name), dtype=dtype)
            frozen.setflags(write=False)
            object.__setattr__(self, name, frozen)
        if self.history_G.ndim != 1 or self.history_G.shape != self.answered_G.shape or self.history_G.size == 0:
            shapes = f"{self.history_G.shape} and {self.answered_G.shape}"
            raise ValueError(f"history_G and answered_G must both be (G,) with G >= 1, got {shapes}")


@dataclass(frozen=True, eq=False)
class Result:
    """One iteration's outcome.

    Attributes:
        aggregate_J: (J,) the reward of each rollout.
        state: to be passed to the next iteration.
        fairness_index: of this iteration's alignment rewards, in [0, 1].
        weight_G: (G,) the groups' weights, 0 for a missing group; sums to 1. `appa`: the paper's alpha_g, also where
            it fell back; `average`: equal; `min` and `alpha`: `alpha_weights`.
        fell_back: whether the fairness threshold turned the rule into a plain mean; None for rules without a threshold.
    """

    aggregate_J: FloatArray
    state: State
    fairness_index: float
    weight_G: FloatArray
    fell_back: bool | None


class Combination(NamedTuple):
    """What a rule makes of the present groups' rewards; fields as in `Result`."""

    aggregate_J: FloatArray
    weight_G: FloatArray
    fell_back: bool | None = None


class Rule(BaseModel, ABC):
    """An aggregation rule with its parameters set; pure, the state goes in and comes out.

    Its fields are parameters that every rule has, so that fairness and history can be plotted for all of them alike;
    only `appa` acts on the history, the others record it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", **ranges.STRICT)
    name: ClassVar[str]
    ema_decay: ranges.EmaDecay = EMA_DECAY
    min_mean: ranges.MinMean = MIN_MEAN
    max_cov: ranges.MaxCov = MAX_COV

    @abstractmethod
    def combine(self, reward_GJ: FloatArray, history_G: FloatArray, fairness: float) -> Combination:
        """The rule itself: what the present groups' training rewards (G, J) are worth.

        It may look at their history (G,) before this iteration and at the Fairness Index of the alignment rewards.
        """

    def init(self, num_groups: int) -> State:
        """The state before the first iteration: no history, nobody has answered (h^0 = 0).

        Raises:
            ValueError: fewer than one group.
        """
        if num_groups < 1:
            raise ValueError(f"num_groups must be at least 1, got {num_groups}")
        return State(history_G=np.zeros(num_groups), answered_G=np.zeros(num_groups, dtype=bool))

    def apply(self, state: State, reward_GJ: npt.ArrayLike, training_reward_GJ: npt.ArrayLike) -> Result:
        """Aggregate one iteration's rewards (Algorithm appa).

        The alignment rewards feed fairness and history, the training rewards get aggregated. A missing group is a row
        of NaN in both: the result is that of the others alone, and its history stays. A group's first answer, where
        others have answered in earlier iterations, finds it with the mean of their histories instead of 0, which would
        outweigh them all (design section 3). Both rewards are (G, J), the alignment rewards in [0, 1].

        Raises:
            ValueError: shapes that differ from each other or from the state, infinite values, a row that is NaN only
                in part or in one array only, or no group at all.
        """
        reward_GJ = np.asarray(reward_GJ, dtype=np.float64)
        training_reward_GJ = np.asarray(training_reward_GJ, dtype=np.float64)
        present_G = present_groups(reward_GJ)
        if reward_GJ.shape != training_reward_GJ.shape or reward_GJ.shape[:1] != state.history_G.shape:
            raise ValueError(
                f"rewards {reward_GJ.shape}, training rewards {training_reward_GJ.shape} and state "
                f"{state.history_G.shape} do not fit together"
            )
        if not np.array_equal(present_G, present_groups(training_reward_GJ)):
            raise ValueError("a group must be missing (a row of NaN) in both rewards or in neither")

        fairness = fairness_index(reward_GJ, min_mean=self.min_mean, max_cov=self.max_cov)
        history_G = _history_before(state, present_G)
        aggregate_J, present_weight_G, fell_back = self.combine(
            training_reward_GJ[present_G], history_G[present_G], fairness
        )
        weight_G = np.zeros(present_G.size)
        weight_G[present_G] = present_weight_G
        after_G = history_G.copy()
        after_G[present_G] = historical_alignment(history_G[present_G], reward_GJ[present_G], decay=self.ema_decay)
        next_state = State(history_G=after_G, answered_G=state.answered_G | present_G)
        return Result(aggregate_J, next_state, fairness, weight_G, fell_back)


def _history_before(state: State, present_G: BoolArray) -> FloatArray:
    """History as this iteration starts from it: a late joiner gets the mean of those who answered before it."""
    joining_G = present_G & ~state.answered_G
    if not joining_G.any() or not state.answered_G.any():
        return state.history_G
    return np.where(joining_G, state.history_G[state.answered_G].mean(), state.history_G)


def _by_alpha(reward_GJ: FloatArray, alpha: float) -> Combination:
    return Combination(alpha_aggregate(reward_GJ, alpha=alpha), alpha_weights(reward_GJ, alpha=alpha))


class Average(Rule):
    """The mean over the groups (section "Aggregation Strategies"); Equation 2 at alpha = 0."""

    name = "average"

    def combine(self, reward_GJ: FloatArray, history_G: FloatArray, fairness: float) -> Combination:  # noqa: D102
        return _by_alpha(reward_GJ, 0.0)


class Minimum(Rule):
    """The reward of each rollout's worst-off group (same section); Equation 2 at alpha = -inf."""

    name = "min"

    def combine(self, reward_GJ: FloatArray, history_G: FloatArray, fairness: float) -> Combination:  # noqa: D102
        return _by_alpha(reward_GJ, -np.inf)


class Alpha(Rule):
    """Park et al.'s rule, Equation 2 at any `alpha`."""

    name = "alpha"
    alpha: ranges.Alpha

    def combine(self, reward_GJ: FloatArray, history_G: FloatArray, fairness: float) -> Combination:  # noqa: D102
        return _by_alpha(reward_GJ, self.alpha)


class Appa(Rule):
    """The paper's rule, Equations 3 and 6."""

    name = "appa"
    temperature: ranges.Temperature = TEMPERATURE
    fairness_threshold: ranges.FairnessThreshold = FAIRNESS_THRESHOLD

    def combine(self, reward_GJ: FloatArray, history_G: FloatArray, fairness: float) -> Combination:  # noqa: D102
        weight_G = reversed_softmax(history_G, temperature=self.temperature)
        aggregate_J = adaptive_aggregate(
            reward_GJ, weight_G, fairness=fairness, fairness_threshold=self.fairness_threshold
        )
        return Combination(aggregate_J, weight_G, fairness >= self.fairness_threshold)


RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Average, Minimum, Alpha, Appa)}
"""Rules by the name they have in config and reports."""


def parameters(name: str) -> tuple[str, ...]:
    """Names of the parameters that `make(name, ...)` takes.

    Raises:
        UserError: an unknown rule.
    """
    if name not in RULES:
        raise unknown_name("rule", name, valid=RULES)
    return tuple(RULES[name].model_fields)


def make(name: str, **params: Any) -> Rule:
    """The rule of that name, to be used as `state = rule.init(G)`, `result = rule.apply(state, rewards, training)`.

    `params` are numbers, the fields of that rule; only `alpha` of rule `alpha` has no default.

    Raises:
        UserError: an unknown rule or parameter, a missing `alpha`, or a value that is no number or out of range.
    """
    valid = parameters(name)
    for key in params:
        if key not in valid:
            raise unknown_name(f"parameter of rule {name!r}", key, valid=valid)
    try:
        return RULES[name].model_validate(params)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "missing":
            raise UserError(f"rule {name!r} needs parameter {first['loc'][0]!r}, a number") from None
        raise UserError(f"parameter {first['loc'][0]!r} of rule {name!r} {ranges.complaint(error)}") from None
