"""Rules that turn the groups' rewards into the one reward PPO trains on.

Legend: G groups, J rollouts.

A rule sees what the present groups sent and says what each rollout is worth. Everything around it is shared
by all rules: leaving out missing groups, the Fairness Index, and each group's history of alignment. A new
rule is one function from `Round` to `Combination` and one line in `RULES`; its keyword-only parameters,
annotated with `Valid`, become the parameters that `make` accepts and checks.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import numpy as np
import numpy.typing as npt

from appa_flwr.errors import UserError
from appa_flwr.fairness import MAX_COV, MIN_MEAN, fairness_index, present_groups
from appa_flwr.naming import unknown_name

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

EMA_DECAY = 0.8
"""The paper's lambda (its table of APPA hyperparameters)."""

TEMPERATURE = 0.1
"""The paper's T (the same table)."""

FAIRNESS_THRESHOLD = 0.99
"""The paper's tau (the same table)."""

_ALPHA_LOST_IN_ROUNDING = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class State:
    """What a rule carries from one iteration to the next; its arrays are read-only.

    Attributes:
        history_G: (G,) moving average of each group's mean alignment reward, the paper's h; 0 before the
            first answer.
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
            raise ValueError(
                f"history_G and answered_G must both be (G,) with G >= 1, got {self.history_G.shape} and "
                f"{self.answered_G.shape}"
            )


@dataclass(frozen=True, eq=False)
class Result:
    """One iteration's outcome.

    Attributes:
        aggregate_J: (J,) the reward of each rollout.
        state: to be passed to the next iteration.
        fairness_index: of this iteration's alignment rewards, in [0, 1].
        weight_G: (G,) the groups' weights, 0 for a missing group. `appa`: the paper's alpha_g, also where
            it fell back; `average`: equal; `min` and `alpha`: d aggregate / d reward, averaged over
            rollouts. Sums to 1.
        fell_back: whether the fairness threshold turned the rule into a plain mean; None for rules without
            a threshold.
    """

    aggregate_J: FloatArray
    state: State
    fairness_index: float
    weight_G: FloatArray
    fell_back: bool | None


@dataclass(frozen=True, eq=False)
class Round:
    """What a rule function sees of an iteration; here G counts the present groups only, at least one.

    Attributes:
        training_reward_GJ: (G, J) rewards to aggregate.
        history_G: (G,) history before this iteration.
        fairness_index: of this iteration's alignment rewards.
    """

    training_reward_GJ: FloatArray
    history_G: FloatArray
    fairness_index: float


@dataclass(frozen=True, eq=False)
class Combination:
    """What a rule function answers; fields as in `Result`, with G the present groups."""

    aggregate_J: FloatArray
    weight_G: FloatArray
    fell_back: bool | None = None


@dataclass(frozen=True)
class Valid:
    """The values a parameter may take.

    Attributes:
        text: the range in words, for the error message.
        holds: whether a number lies in it.
    """

    text: str
    holds: Callable[[float], bool]


_Decay = Annotated[float, Valid("at least 0 and under 1", lambda value: 0.0 <= value < 1.0)]
_Positive = Annotated[float, Valid("above 0", lambda value: 0.0 < value < math.inf)]
_NotNegative = Annotated[float, Valid("at least 0", lambda value: value >= 0.0)]
_SmallMean = Annotated[float, Valid("at least 0 and under 1", lambda value: 0.0 <= value < 1.0)]
_Number = Annotated[float, Valid("a number, -inf and inf included", lambda value: not math.isnan(value))]


@dataclass(frozen=True)
class Tracking:
    """Parameters every rule has, so that fairness and history can be plotted for all of them alike.

    Attributes:
        ema_decay: of the history, the paper's lambda. Only `appa` acts on the history; the others record it.
        min_mean: safeguard of the Fairness Index.
        max_cov: safeguard of the Fairness Index.
    """

    ema_decay: _Decay = EMA_DECAY
    min_mean: _SmallMean = MIN_MEAN
    max_cov: _Positive = MAX_COV


@dataclass(frozen=True)
class Rule:
    """An aggregation rule with its parameters set; pure, the state goes in and comes out.

    Attributes:
        name: its key in `RULES`.
        tracking: parameters of fairness and history.
        combine: the rule itself.
    """

    name: str
    tracking: Tracking
    combine: Callable[[Round], Combination]

    def init(self, num_groups: int) -> State:
        """The state before the first iteration: no history, nobody has answered (h^0 = 0).

        Raises:
            ValueError: fewer than one group.
        """
        if num_groups < 1:
            raise ValueError(f"num_groups must be at least 1, got {num_groups}")
        return State(history_G=np.zeros(num_groups), answered_G=np.zeros(num_groups, dtype=bool))

    def apply(self, state: State, reward_GJ: npt.ArrayLike, training_reward_GJ: npt.ArrayLike) -> Result:
        """Aggregate one iteration's rewards.

        Source: Algorithm appa and Equations fi, ema, reversed-softmax, adaptive-aggregation; missing groups
        and late joiners by design section 3. The alignment rewards feed fairness and history, the training
        rewards get aggregated. A missing group is a row of NaN in both: the result is that of the others
        alone, and its history stays. A group's first answer, where others have answered in earlier
        iterations, finds it with the mean of their histories instead of 0, which would outweigh them all.

        Args:
            state: from `init` or the previous result.
            reward_GJ: alignment rewards (G, J) in [0, 1].
            training_reward_GJ: rewards with the format score mixed in (G, J).

        Returns:
            The aggregated rewards, the next state and what the report shows of the iteration.

        Raises:
            ValueError: shapes that differ from each other or from the state, infinite values, a row that is
                NaN only in part or in one array only, or no group at all.
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

        fairness = fairness_index(reward_GJ, min_mean=self.tracking.min_mean, max_cov=self.tracking.max_cov)
        before_G = _history_before(state, present_G)
        combination = self.combine(
            Round(
                training_reward_GJ=training_reward_GJ[present_G],
                history_G=before_G[present_G],
                fairness_index=fairness,
            )
        )
        weight_G = np.zeros(present_G.size)
        weight_G[present_G] = combination.weight_G
        decay = self.tracking.ema_decay
        after_G = before_G.copy()
        after_G[present_G] = decay * before_G[present_G] + (1.0 - decay) * reward_GJ[present_G].mean(axis=1)
        return Result(
            aggregate_J=combination.aggregate_J,
            state=State(history_G=after_G, answered_G=state.answered_G | present_G),
            fairness_index=fairness,
            weight_G=weight_G,
            fell_back=combination.fell_back,
        )


def _history_before(state: State, present_G: BoolArray) -> FloatArray:
    """History as this iteration starts from it: a late joiner gets the mean of those who answered before
    it.
    """
    joining_G = present_G & ~state.answered_G
    if not joining_G.any() or not state.answered_G.any():
        return state.history_G
    return np.where(joining_G, state.history_G[state.answered_G].mean(), state.history_G)


def _average(now: Round) -> Combination:
    """Mean over the groups. Source: section "Aggregation Strategies"."""
    num_groups = now.training_reward_GJ.shape[0]
    return Combination(now.training_reward_GJ.mean(axis=0), np.full(num_groups, 1.0 / num_groups))


def _minimum(now: Round) -> Combination:
    """Reward of the worst-off group of each rollout; groups that tie share its weight. Source: the same
    section.
    """
    return _extreme(now.training_reward_GJ, now.training_reward_GJ.min(axis=0))


def _fixed_alpha(now: Round, *, alpha: _Number) -> Combination:
    """Park et al.'s aggregation, Equation consensus-aggregation: (1/alpha) log mean_g exp(alpha r_g).

    -inf is the minimum, 0 the mean, +inf the maximum. Around the extreme c = max r (alpha > 0) or min r
    (alpha < 0) it equals c + log1p(mean expm1(alpha (r - c))) / alpha, where no exponent is positive:
    nothing overflows and a small alpha loses no digits.
    """
    reward_GJ = now.training_reward_GJ
    # Under one rounding unit the difference to the mean, at most alpha / 8 for rewards in [0, 1], cannot be
    # represented.
    if abs(alpha) < _ALPHA_LOST_IN_ROUNDING:
        return _average(now)
    extreme_J = reward_GJ.max(axis=0) if alpha > 0 else reward_GJ.min(axis=0)
    if math.isinf(alpha):
        return _extreme(reward_GJ, extreme_J)
    with np.errstate(over="ignore"):  # a huge alpha drives an exponent to -inf, whose exp is the right 0
        exponent_GJ = alpha * (reward_GJ - extreme_J)
    aggregate_J = extreme_J + np.log1p(np.expm1(exponent_GJ).mean(axis=0)) / alpha
    share_GJ = np.exp(exponent_GJ)
    return Combination(aggregate_J, (share_GJ / share_GJ.sum(axis=0)).mean(axis=1))


def _extreme(reward_GJ: FloatArray, extreme_J: FloatArray) -> Combination:
    """The extreme reward of each rollout, its unit gradient shared equally among the groups that attain
    it.
    """
    attains_GJ = reward_GJ == extreme_J
    return Combination(extreme_J, (attains_GJ / attains_GJ.sum(axis=0)).mean(axis=1))


def _appa(
    now: Round,
    *,
    temperature: _Positive = TEMPERATURE,
    fairness_threshold: _NotNegative = FAIRNESS_THRESHOLD,
) -> Combination:
    """The paper's rule, Equations reversed-softmax and adaptive-aggregation.

    Weights are the softmax of (1 - h) / T over the groups; the aggregate is log mean_g exp(alpha_g r_g),
    computed as log1p(mean expm1(.)), or the plain mean where the Fairness Index reaches the threshold
    (never, if that is above 1).
    """
    logit_G = (1.0 - now.history_G) / temperature
    weight_G = np.exp(logit_G - logit_G.max())
    weight_G /= weight_G.sum()
    fell_back = now.fairness_index >= fairness_threshold
    if fell_back:
        aggregate_J = now.training_reward_GJ.mean(axis=0)
    else:
        # alpha_g is near 1/G, so exp(.) is near 1 and its mean would keep few digits of the rewards.
        aggregate_J = np.log1p(np.expm1(weight_G[:, None] * now.training_reward_GJ).mean(axis=0))
    return Combination(aggregate_J, weight_G, fell_back)


RULES: dict[str, Callable[..., Combination]] = {
    "average": _average,
    "min": _minimum,
    "alpha": _fixed_alpha,
    "appa": _appa,
}
"""Rules by the name they have in config and reports."""


def make(name: str, **params: Any) -> Rule:
    """The rule of that name.

    Args:
        name: a key of `RULES`.
        **params: numbers. Every rule takes `ema_decay`, `min_mean` and `max_cov` (see `Tracking`); `alpha`
            needs `alpha` (any number, -inf and inf included, 0 is the mean); `appa` takes `temperature` and
            `fairness_threshold`.

    Returns:
        The rule, to be used as `state = rule.init(G)`, then `result = rule.apply(state, rewards,
        training_rewards)`.

    Raises:
        UserError: an unknown rule or parameter, a missing `alpha`, or a value that is no number or out of
            range.
    """
    if name not in RULES:
        raise unknown_name("rule", name, valid=RULES)
    rule = RULES[name]
    tracking_ranges, rule_ranges = _ranges(Tracking), _ranges(rule)
    ranges = {**rule_ranges, **tracking_ranges}
    checked = {key: _checked(name, key, value, ranges=ranges) for key, value in params.items()}
    needed = [key for key, parameter in inspect.signature(rule).parameters.items() if _is_required(parameter)]
    for key in needed:
        if key not in checked:
            raise UserError(f"rule {name!r} needs parameter {key!r}: {ranges[key].text}")
    return Rule(
        name=name,
        tracking=Tracking(**{key: value for key, value in checked.items() if key in tracking_ranges}),
        combine=functools.partial(rule, **{key: value for key, value in checked.items() if key in rule_ranges}),
    )


def _ranges(function: Callable[..., Any]) -> dict[str, Valid]:
    """Parameters of a rule function, or fields of `Tracking`, with the values they may take."""
    hints = get_type_hints(function, include_extras=True)
    return {key: hint.__metadata__[0] for key, hint in hints.items() if hasattr(hint, "__metadata__")}


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is inspect.Parameter.empty


def _checked(rule: str, key: str, value: Any, *, ranges: Mapping[str, Valid]) -> float:
    """The value as a float, if the rule has the parameter and the value is a number in its range."""
    if key not in ranges:
        raise unknown_name(f"parameter of rule {rule!r}", key, valid=ranges)
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise UserError(f"parameter {key!r} of rule {rule!r} must be a number, {ranges[key].text}, got {value!r}")
    number = float(value)
    if not ranges[key].holds(number):
        raise UserError(f"parameter {key!r} of rule {rule!r} must be {ranges[key].text}, got {value!r}")
    return number
