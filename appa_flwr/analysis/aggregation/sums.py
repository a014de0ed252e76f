"""The rules from sums over groups: what `Rule.apply` gives from single rewards, where only totals are known.

`appa_flwr.secure.terms` is a group's half. Weights, histories and leads by group exist nowhere but at the groups.

Legend: G groups, J rollouts, K windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from appa_flwr.analysis.aggregation.beyond import MAX_LEAD
from appa_flwr.analysis.fairness import MAX_COV, MIN_MEAN, FloatArray
from appa_flwr.config.sections import APPASection
from appa_flwr.secure import terms
from appa_flwr.secure.terms import Public

ALL_WEIGHT = 1e-9
"""How far from 1 the sum of appa's weights may be; otherwise they were settled among other groups."""

ROUNDING = 1e-10


class Unsettled(Exception):
    """Weights are not those of the groups that answered: settle them among these and ask again."""


@dataclass(frozen=True, eq=False)
class FromSums:
    """One iteration's outcome; fields as in `Result`, and what the groups are told with the next answers."""

    aggregate_J: FloatArray
    public: Public
    fairness_index: float
    fell_back: bool | None


def shapes(rule: str, settings: APPASection, answers: int) -> dict[str, tuple[int, ...]]:
    """Name of each sum -> its shape."""
    nothing_J = np.zeros(answers)
    found, _ = terms.terms(rule, settings, first(rule, settings, 1), terms.Standing(), nothing_J, nothing_J)
    return {name: array.shape for name, array in found.items()}


def first(rule: str, settings: APPASection, groups: int) -> Public:
    """What the groups are told before the first iteration, in which no group has a history (h^0 = 0)."""
    reference = math.log(groups) + (1 / settings.temperature + ROUNDING if rule == "appa" else 0.0)
    return Public(reference=reference)


def combine(
    rule: str, settings: APPASection, public: Public, sums: Mapping[str, FloatArray], *, groups: int
) -> FromSums:
    """The rewards of an iteration's rollouts from the groups' summed terms.

    Args:
        rule: the run's, one that `terms.check_rule` lets pass.
        settings: its parameters.
        public: what the groups were told.
        sums: of `terms.terms`, by name.
        groups: over how many.

    Raises:
        Unsettled: appa's weights do not sum to 1.
    """
    fairness = fairness_of_sums(sums["reward"], sums["square"], groups=groups)
    mean_J, term_J, weight = sums["training"] / groups, sums["term"], float(sums["weight"][0])
    fell_back = fairness >= settings.fairness_threshold if rule == "appa" else None
    if rule == "average" or fell_back:
        aggregate_J = mean_J
    elif rule == "alpha":
        aggregate_J = _alpha(settings.alpha, term_J / groups)
    elif rule == "appa":
        if abs(weight - 1) > ALL_WEIGHT:
            raise Unsettled
        aggregate_J = np.log1p(math.expm1(1) * term_J / groups)
    else:
        aggregate_J = (1 - settings.worst_share) * mean_J + settings.worst_share * term_J / weight
    return FromSums(aggregate_J, _next(rule, settings, public, sums, groups), fairness, fell_back)


def fairness_of_sums(sum_J: FloatArray, square_J: FloatArray, *, groups: int | FloatArray) -> float:
    """Equation 4 from the sums of rewards and of their squares; see `appa_flwr.analysis.fairness.fairness_index`.

    `groups` are as many for all answers, or for each.

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


def _alpha(alpha: float, mean_J: FloatArray) -> FloatArray:
    """Equation 2 from the means of `terms.alpha_term`."""
    size = abs(alpha)
    if size < np.finfo(float).eps:
        return mean_J
    log_J = np.log1p(np.expm1(size) * mean_J)
    return np.asarray(log_J / size if alpha > 0 else 1 - log_J / size)


def _next(rule: str, settings: APPASection, public: Public, sums: Mapping[str, FloatArray], groups: int) -> Public:
    """What the groups are told with the next answers."""
    history = float(sums["history"][0]) / groups
    lead = terms.LEAD_ROOM * float(sums["lead"][0]) / groups
    added, floor, reference = 0.0, -math.inf, public.reference
    if rule == "mix":
        added = terms.WEIGHT_STEP * float(sums["reward"].mean()) / groups
        reference += terms.LEAD_SLACK + math.log(float(sums["weight"][0])) + added
        # The highest lead is no sum; this is never above the rule's own bound, which goes by it.
        floor = reference - math.log(groups) - MAX_LEAD
    if rule == "appa":
        reference = _log_total(sums["next"], settings, groups)
    moves = {**public.moves, public.iteration: (added, floor)}
    return Public(public.iteration + 1, history, lead + added, reference, moves)


def _log_total(total_K: FloatArray, settings: APPASection, groups: int) -> float:
    """The log of the sum of weights, a trifle more than it, so that none of them comes out above 1."""
    found = log_mean(total_K[:, None] / groups, 1 / settings.temperature)[0]
    return float(found) + math.log(groups) + ROUNDING


def settled(settings: APPASection, public: Public, sums: Mapping[str, FloatArray], groups: int) -> Public:
    """Appa's weights among the groups that are asked, from the sums of `terms.weight_terms`.

    They are asked for where the last iteration did not have one of the groups.
    """
    return replace(public, reference=_log_total(sums["now"], settings, groups))


def log_mean(mean_KJ: FloatArray, span: float) -> FloatArray:
    """The log of a mean of exponentials, (J,), from its `terms.windows`: the highest that holds enough of it."""
    window_J = np.argmax(mean_KJ >= math.exp(-terms.WINDOW), axis=0)
    window_J = np.where((mean_KJ >= math.exp(-terms.WINDOW)).any(axis=0), window_J, len(mean_KJ) - 1)
    return np.asarray(terms.tops(span)[window_J] + np.log(mean_KJ[window_J, np.arange(mean_KJ.shape[1])]))
