"""Aggregation rules computed from sums over groups: a group's terms, and the server's result. J rollouts.

Equal to the plain rules while the cohort is unchanged. In an iteration in which a group joins or leaves, the weights of
rule appa are relative to the previous iteration's groups, and normalised to sum to 1 to first order.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from appa_flwr.config import Config
from appa_flwr.config.ranges import MAX_COV, MIN_MEAN
from appa_flwr.config.sections import APPASection
from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import refusals
from appa_flwr.protocol.refusals import Refused
from appa_flwr.secure.masks import Facts, fact
from appa_flwr.secure.roster import LEAST_GROUPS, MOST_GROUPS

LARGEST_MOVE = 14.0  # of an exponent: sums have a resolution of 2^-52, so exp(-14) has a relative error near 1e-10


def check_rule(rule: str, settings: APPASection) -> None:
    """Raise a UserError if a rule cannot be computed from sums."""
    if rule not in ("average", "alpha", "appa"):
        hint = f"average, appa and alpha, which is near the minimum at appa.alpha={-LARGEST_MOVE:g}"
        raise UserError(f"rule={rule} takes single groups' rewards, which no sum holds; run.sums=secure has {hint}")
    moves = {
        "alpha": ("appa.alpha in size", abs(settings.alpha)),
        "appa": ("(1 - appa.ema-decay) / appa.temperature", (1 - settings.ema_decay) / settings.temperature),
    }
    key, move = moves.get(rule, ("", 0.0))
    if move > LARGEST_MOVE:
        raise UserError(f"rule={rule}: {key} is {move:g}; run.sums=secure has digits for at most {LARGEST_MOVE:g}")


def check_config(config: Config, *, groups: int | None = None) -> None:
    """Raise a UserError if a run with run.sums = "secure" needs more than sums; `groups` is the number of groups."""
    if config.run.sums == "plain":
        return
    for rule in config.rules:
        check_rule(rule, config.appa)
    number = MOST_GROUPS if groups is None else groups
    if config.sft.target == "mean":
        what = "sft.target=mean: it is made of training answers themselves; predicted-mean is of predictions"
    elif config.task == "opa" and config.sft.target == "majority":
        what = "sft.target=majority and task=opa: the most frequent ranking is no sum; votes is the mean rank"
    elif config.run.phases == "serve":
        what = "run.phases=serve: the service gives other trainers single groups' rewards"
    elif not LEAST_GROUPS <= number <= MOST_GROUPS:
        what = f"{number} groups: sums are over {LEAST_GROUPS} to {MOST_GROUPS}"
    else:
        return
    raise UserError(f"run.sums=secure cannot be with {what}; change it, or choose run.sums=plain")


def before(facts: Facts, *, run: str, rule: str, reference: float, completed: Sequence[str]) -> float | None:
    """Return a group's history after the last completed task in which it took part; None before its first task.

    `completed` holds the digest of each earlier iteration's task, in hexadecimal digits. Raises Refused if an iteration
    does not continue the last one or has a second reference: the kinks of clipped weights would reveal all histories.
    """
    key = fact("iteration", run, rule)
    last, tasks = json.loads(facts.get(key, json.dumps([reference, []])))
    continues = list(completed[: len(tasks)]) == tasks
    again = len(completed) == len(tasks)
    if not math.isfinite(reference) or (again and not (continues and reference == last)):
        raise Refused(refusals.OTHER_REFERENCE)
    if not continues:
        raise Refused(refusals.PAST)
    facts[key] = json.dumps([reference, list(completed)]).encode()
    histories = (facts.get(_history(run, rule, completed[:place])) for place in range(len(completed), 0, -1))
    return next((float(history) for history in histories if history), None)


def remember(facts: Facts, *, run: str, rule: str, completed: Sequence[str], task: str, history: float) -> None:
    """Store a group's history for the case that the task with this digest is completed after `completed`."""
    facts[_history(run, rule, [*completed, task])] = repr(history).encode()


def _history(run: str, rule: str, completed: Sequence[str]) -> str:
    """Name of a history; it includes the iteration, so that a later iteration cannot bring back an old history."""
    return fact("history", run, rule, str(len(completed)), completed[-1])


def terms(
    rule: str,
    settings: APPASection,
    *,
    reference: float,
    iteration: int,
    history: float | None,
    reward_J: FloatArray,
    training_J: FloatArray,
) -> tuple[dict[str, FloatArray], float]:
    """Compute a group's summands by name, all in [0, 1] like its rewards, and its new history.

    `reference` and `iteration` (from 1 on) come from the server, `history` from `before`.
    """
    mean = float(reward_J.mean())
    # A group that joins late starts with its own mean, since the mean of the other histories is unknown.
    old = 0.0 if iteration == 1 else mean if history is None else history
    new = settings.ema_decay * old + (1 - settings.ema_decay) * mean
    numbers = {"reward": reward_J, "square": reward_J**2, "training": training_J}
    if rule == "alpha":
        size = abs(settings.alpha)
        numbers["term"] = _term(training_J if settings.alpha > 0 else 1 - training_J, size, most=size)
    if rule == "appa":
        log_weight = (1 - old) / settings.temperature - reference
        log_next = (1 - new) / settings.temperature - reference - _largest_rise(settings, iteration)
        weight, following = math.exp(min(log_weight, 0.0)), math.exp(min(log_next, 0.0))
        numbers["term"] = _term(training_J, weight, most=1.0)
        numbers |= {"weight": np.array([weight]), "next": np.array([following])}
    return numbers, new


def _term(training_J: FloatArray, scale: float, *, most: float) -> FloatArray:
    return np.minimum(np.expm1(scale * training_J) / math.expm1(most), 1.0)  # rounding may exceed 1


def _largest_rise(settings: APPASection, iteration: int) -> float:
    """Largest rise of (1 - history) / temperature in iteration t, since every history is at most 1 - decay^(t - 1)."""
    return (1 - settings.ema_decay) * (1 - settings.ema_decay ** (iteration - 1)) / settings.temperature


@dataclass(frozen=True)
class SumState:
    """State of the server between iterations.

    `completed` holds the digest of each iteration's task, in hexadecimal digits. `reference` is the log of the sum over
    groups of exp((1 - history) / temperature); a group's weight is its share of this sum.
    """

    reference: float
    completed: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class FromSums:
    """Result of one iteration; fields as in the plain rules' `Result`."""

    aggregate_J: FloatArray
    state: SumState
    fairness_index: float
    fell_back: bool | None


def first(rule: str, settings: APPASection, groups: int) -> SumState:
    """The state before the first iteration, in which no group has a history (h^0 = 0)."""
    return SumState(1 / settings.temperature + math.log(groups) if rule == "appa" else 0.0, ())


def combine(
    rule: str, settings: APPASection, state: SumState, sums: Mapping[str, FloatArray], *, groups: int, task: str
) -> FromSums:
    """Compute each rollout's reward from the sums of the `terms` of `groups` groups; `task` is the task's digest."""
    fairness = fairness_of_sums(sums["reward"], sums["square"], groups=groups)
    aggregate_J, fell_back, reference = sums["training"] / groups, None, state.reference
    if rule == "alpha":
        size = abs(settings.alpha)
        log_J = np.log1p(math.expm1(size) * sums["term"] / groups) / size
        aggregate_J = log_J if settings.alpha > 0 else 1 - log_J
    if rule == "appa":
        weight, least = float(sums["weight"][0]), math.exp(-LARGEST_MOVE)
        # If groups with nearly all weight have left, the sum of the remaining weights has too few digits to be used.
        fell_back = fairness >= settings.fairness_threshold or weight < least
        if not fell_back:
            aggregate_J = np.log1p(math.expm1(1) * sums["term"] / groups) / weight
        reference += _largest_rise(settings, len(state.completed) + 1) + math.log(max(float(sums["next"][0]), least**2))
    after = SumState(reference, (*state.completed, task))
    return FromSums(aggregate_J, after, fairness, fell_back)


def fairness_of_sums(sum_J: FloatArray, square_J: FloatArray, *, groups: int | FloatArray) -> float:
    """Equation 4 from the sums of rewards and of squared rewards; `groups` is their number, or one per answer (J,).

    Sums cannot tell equal rewards from nearly equal ones, so answers with a mean between 0 and `MIN_MEAN` are left
    out.
    """
    mean_J = sum_J / groups
    used_J = (mean_J == 0.0) | (mean_J >= MIN_MEAN)
    if not used_J.any():
        return 1.0
    variance_J = np.maximum(square_J / groups - mean_J**2, 0.0)
    ratio_J = np.divide(variance_J, mean_J**2, out=np.zeros_like(mean_J), where=mean_J > 0.0)
    return float((1 / (1 + np.minimum(ratio_J, MAX_COV**2)))[used_J].mean())
