"""Diagnosis of a survey before anything is trained on it: do its groups tell aggregation rules apart?

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from appa_flwr.analysis.aggregation import Rule
from appa_flwr.analysis.alignment import as_arrays, known_targets
from appa_flwr.analysis.ceilings import SOLVED_METRICS, unsolved
from appa_flwr.analysis.destinations import Destination, End, destination, drawn_questions, ends
from appa_flwr.analysis.fairness import BoolArray, FloatArray
from appa_flwr.analysis.group_differences import CLEAR_GAIN, GroupDifferences, group_differences
from appa_flwr.core.errors import UserError
from appa_flwr.survey.types import Survey

COMPARED = 2
HALF = 0.5
MOST_LEFT_OUT = 24
"""Groups up to which each is left out in turn."""


@dataclass(frozen=True)
class Diagnosis:
    """Findings on a survey.

    Attributes:
        differences: between the groups, on all questions that two groups or more have.
        destinations: rule -> where free answers end that follow it, on `tried` of these questions.
        ends: rule -> the scores there.
        without: group -> its answers among the compared questions, and the gap between the two ceilings of the others:
            where that is much smaller than all groups', this group makes the gap. Empty for two groups, and for more
            than `MOST_LEFT_OUT`.
        compared: questions that two groups or more have answered.
        common: questions that all have answered.
    """

    metric: str
    differences: GroupDifferences
    destinations: Mapping[str, Destination]
    ends: Mapping[str, End]
    tried: int
    without: Mapping[str, tuple[int, float]]
    compared: int
    common: int
    questions: int

    def sentences(self, *, threshold: float) -> Iterator[str]:
        """In plain words, the warnings last."""
        yield f"By {self.metric}: {self.differences.sentence(threshold=threshold)}."
        yield (
            f"Of {self.questions} questions, {self.compared} were answered by two groups or more and {self.common} by "
            f"all. Rules were tried on {self.tried}."
        )
        if self.differences.gap <= CLEAR_GAIN:
            yield f"WARNING: no rule can gain more than {CLEAR_GAIN:g} for the worst group over the plain mean."
        if (taken := self.destinations["appa"].fell_back) is not None and taken > HALF:
            yield (
                f"WARNING: as configured, appa takes the plain mean in {taken:.0%} of the iterations once its answers "
                "are good; with appa.fairness-threshold above 1 it never does."
            )
        if self.compared < HALF * self.questions:
            yield (
                "WARNING: most questions were answered by one group alone, so scores against the survey compare groups "
                "on different questions."
            )


def diagnose(survey: Survey, *, metric: str, rules: Mapping[str, Rule], seed: int = 0) -> Diagnosis:
    """Diagnosis of a survey from the groups' own answers, by one metric.

    `rules` are named, `average` and `appa` among them, as `appa_flwr.analysis.destinations.rules` does; `seed` is of
    the questions and noise that they are tried with.

    Raises:
        UserError: no question was answered by two groups, or the metric has no ceilings.
    """
    if metric not in SOLVED_METRICS:
        raise unsolved(metric)
    target_GQK, option_QK = as_arrays(survey.questions, survey.answers)
    known_GQ = known_targets(target_GQK, option_QK)
    count_Q = known_GQ.sum(axis=0)
    compared_Q = count_Q >= COMPARED
    target_GQK, option_QK, known_GQ = target_GQK[:, compared_Q], option_QK[compared_Q], known_GQ[:, compared_Q]
    if not len(option_QK):
        raise UserError("no question was answered by two groups, so there is nothing to compare")
    drawn = drawn_questions(*target_GQK.shape[:2], seed=seed)
    tried = (target_GQK[:, drawn], option_QK[drawn])
    reached = {name: destination(rule, *tried, metric=metric, seed=seed) for name, rule in rules.items()}
    return Diagnosis(
        metric=metric,
        differences=group_differences(target_GQK, option_QK, metric=metric),
        destinations=reached,
        ends=ends(reached, *tried, metric=metric),
        tried=len(drawn),
        without=_without(survey.groups, target_GQK, option_QK, known_GQ, metric=metric),
        compared=int(compared_Q.sum()),
        common=int((count_Q == len(survey.groups)).sum()),
        questions=len(count_Q),
    )


def _without(
    groups: tuple[str, ...], target_GQK: FloatArray, option_QK: BoolArray, known_GQ: BoolArray, *, metric: str
) -> dict[str, tuple[int, float]]:
    """Group -> its answers, and the others' gap; nothing for two groups, which leave one, and for very many."""
    if not COMPARED < len(groups) <= MOST_LEFT_OUT:
        return {}
    gaps = {}
    for g, name in enumerate(groups):
        others_Q = np.delete(known_GQ, g, axis=0).sum(axis=0) >= COMPARED
        left_GQK = np.delete(target_GQK, g, axis=0)[:, others_Q]
        gap = group_differences(left_GQK, option_QK[others_Q], metric=metric).gap if others_Q.any() else float("nan")
        gaps[name] = int(known_GQ[g].sum()), gap
    return gaps
