"""The aggregation rules by sums over groups: what a group adds, and what the server makes of the totals. J rollouts.

Equal to the plain rules while the cohort stands. In the iteration in which a group comes or goes, rule appa's weights
are those among the groups of the last one, made to sum to 1 to first order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from appa_flwr.config import Config
from appa_flwr.config.ranges import MAX_COV, MIN_MEAN
from appa_flwr.config.sections import APPASection
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import refusals
from appa_flwr.protocol.refusals import Refused
from appa_flwr.secure.masks import Facts, FloatArray, fact
from appa_flwr.secure.roster import LEAST_GROUPS, MOST_GROUPS

LARGEST_MOVE = 14.0  # of an exponent: sums end at the digit 2^-52, so exp(-14) is right to 1e-10 of itself


def check_rule(rule: str, settings: APPASection) -> None:
    """Raise a UserError where a rule cannot be computed from sums."""
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
    """Raise a UserError where a run with run.sums = "secure" asks for what no sum holds; `groups` is their number."""
    if config.run.sums == "plain":
        return
    for rule in config.rules:
        check_rule(rule, config.appa)
    trains = config.pluralllm.rounds > 0 and not config.pluralllm.checkpoint
    unseen, number = len(config.unseen_group_names), MOST_GROUPS if groups is None else groups
    if config.sft.target == "mean":
        what = "sft.target=mean: it is made of training answers themselves; predicted-mean is of predictions"
    elif config.task == "opa" and config.sft.target == "majority":
        what = "sft.target=majority and task=opa: the most frequent ranking is no sum; votes is the mean rank"
    elif config.run.phases == "serve":
        what = "run.phases=serve: the service gives other trainers single groups' rewards"
    elif not LEAST_GROUPS <= number <= MOST_GROUPS:
        what = f"{number} groups: sums are over {LEAST_GROUPS} to {MOST_GROUPS}"
    elif trains and unseen > 0 and number - unseen < LEAST_GROUPS:
        what = f"{unseen} pluralllm.unseen-groups of {number}: fewer than {LEAST_GROUPS} would be left that train"
    else:
        return
    raise UserError(f"run.sums=secure cannot be with {what}; change it, or choose run.sums=plain")


def before(facts: Facts, *, run: str, rule: str, reference: float, completed: Sequence[str]) -> float | None:
    """A group's history, that of the last completed task that it knows; None before its first.

    `completed` holds the digest of each earlier iteration's task, in hexadecimal digits. Refused where an iteration
    does not continue the last one, or has a second reference: bends of clipped weights would tell all histories.
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
    """Write down which history a group has once the task of this digest is completed too."""
    facts[_history(run, rule, [*completed, task])] = repr(history).encode()


def _history(run: str, rule: str, completed: Sequence[str]) -> str:
    """The name of a history, in the iteration of its task alone: in a later one it would bring the past back."""
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
    """A group's numbers by name, all in [0, 1] as its rewards are, and its history after them.

    `reference` and `iteration` (from 1 on) are the server's, `history` is from `before`.
    """
    mean = float(reward_J.mean())
    # A latecomer begins with its own mean: that of the others' histories is known nowhere.
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
    return np.minimum(np.expm1(scale * training_J) / math.expm1(most), 1.0)  # above it by rounding


def _largest_rise(settings: APPASection, iteration: int) -> float:
    """How much (1 - history) / temperature rises at most in an iteration: no history is above 1 - decay^(t - 1)."""
    return (1 - settings.ema_decay) * (1 - settings.ema_decay ** (iteration - 1)) / settings.temperature


@dataclass(frozen=True)
class SumState:
    """What the server keeps between iterations.

    `completed` is the digest of each one's task, in hexadecimal digits. `reference` is the log of the sum over groups
    of exp((1 - history) / temperature), of which each one's part is its weight.
    """

    reference: float
    completed: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class FromSums:
    """One iteration's outcome; fields as in the plain rules' `Result`."""

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
    """The reward of each rollout from the sums of so many groups' `terms`; `task` is the sum's digest."""
    fairness = fairness_of_sums(sums["reward"], sums["square"], groups=groups)
    aggregate_J, fell_back, reference = sums["training"] / groups, None, state.reference
    if rule == "alpha":
        size = abs(settings.alpha)
        log_J = np.log1p(math.expm1(size) * sums["term"] / groups) / size
        aggregate_J = log_J if settings.alpha > 0 else 1 - log_J
    if rule == "appa":
        weight, least = float(sums["weight"][0]), math.exp(-LARGEST_MOVE)
        # Where groups that had nearly all weight are gone, the others' has no digits left for an iteration.
        fell_back = fairness >= settings.fairness_threshold or weight < least
        if not fell_back:
            aggregate_J = np.log1p(math.expm1(1) * sums["term"] / groups) / weight
        reference += _largest_rise(settings, len(state.completed) + 1) + math.log(max(float(sums["next"][0]), least**2))
    after = SumState(reference, (*state.completed, task))
    return FromSums(aggregate_J, after, fairness, fell_back)


def fairness_of_sums(sum_J: FloatArray, square_J: FloatArray, *, groups: int | FloatArray) -> float:
    """Equation 4 from the sums of rewards and of their squares, over as many groups for all answers or for each (J,).

    Equal rewards are not told from nearly equal ones: where their mean is under `MIN_MEAN` and not 0 the question is
    left out.
    """
    mean_J = sum_J / groups
    used_J = (mean_J == 0.0) | (mean_J >= MIN_MEAN)
    if not used_J.any():
        return 1.0
    variance_J = np.maximum(square_J / groups - mean_J**2, 0.0)
    ratio_J = np.divide(variance_J, mean_J**2, out=np.zeros_like(mean_J), where=mean_J > 0.0)
    return float((1 / (1 + np.minimum(ratio_J, MAX_COV**2)))[used_J].mean())
