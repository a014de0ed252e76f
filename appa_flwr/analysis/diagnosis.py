"""Diagnosis of a survey before anything is trained on it: do its groups tell aggregation rules apart?

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from appa_flwr.analysis.aggregation import Rule
from appa_flwr.analysis.alignment import GROUPS_TO_COMPARE, as_arrays, known_targets
from appa_flwr.analysis.destinations import destination, drawn_questions, ends
from appa_flwr.analysis.fairness import BoolArray, FloatArray
from appa_flwr.analysis.group_differences import LABELS, group_differences
from appa_flwr.core.errors import UserError
from appa_flwr.survey.types import Survey

MOST_LEFT_OUT = 24
"""Groups up to which each is left out in turn."""


def diagnose(survey: Survey, *, metric: str, rules: Mapping[str, Rule], seed: int = 0) -> tuple[pd.DataFrame, ...]:
    """Four tables on the groups' own answers, by one metric.

    - a row: how many questions compare groups.
    - a row: how much the groups differ, and whether rules can.
    - a row a rule: Avg AS and Min AS of the free answers that follow it, and "Plain mean taken", see `Destination`.
    - a row a group that is left out: its answers, and what the others leave a rule to win; where that is much smaller
      than what all groups leave, this group makes the gap. Empty for two groups, and above `MOST_LEFT_OUT`.

    `rules` are named, `average` among them, as `appa_flwr.analysis.destinations.rules` does; `seed` is of the questions
    and noise that they are tried with.

    Raises:
        UserError: no question was answered by two groups, or the metric has no ceilings.
    """
    target_GQK, option_QK = as_arrays(survey.questions, survey.answers)
    count_Q = known_targets(target_GQK, option_QK).sum(axis=0)
    compared_Q = count_Q >= GROUPS_TO_COMPARE
    target_GQK, option_QK = target_GQK[:, compared_Q], option_QK[compared_Q]
    if not len(option_QK):
        raise UserError("no question was answered by two groups, so there is nothing to compare")
    differences = group_differences(target_GQK, option_QK, metric=metric).row()
    drawn = drawn_questions(*target_GQK.shape[:2], seed=seed)
    tried = (target_GQK[:, drawn], option_QK[drawn])
    reached = {name: destination(rule, *tried, metric=metric, seed=seed) for name, rule in rules.items()}
    counts = {
        "Questions": len(count_Q),
        "answered by two groups or more": len(option_QK),
        "answered by all": int((count_Q == len(survey.groups)).sum()),
        "that rules were tried on": len(drawn),
    }
    of_rules, without = ends(reached, *tried, metric=metric), _without(survey.groups, target_GQK, option_QK, metric)
    return pd.DataFrame([counts]), pd.DataFrame([differences]), of_rules, without


def _without(groups: tuple[str, ...], target_GQK: FloatArray, option_QK: BoolArray, metric: str) -> pd.DataFrame:
    """The differences among all groups but one, for each; the smallest gap first."""
    rows = []
    for g, name in enumerate(groups if GROUPS_TO_COMPARE < len(groups) <= MOST_LEFT_OUT else ()):
        others_GQK = np.delete(target_GQK, g, axis=0)
        others_Q = known_targets(others_GQK, option_QK).sum(axis=0) >= GROUPS_TO_COMPARE
        gap = np.nan
        if others_Q.any():
            gap = group_differences(others_GQK[:, others_Q], option_QK[others_Q], metric=metric).gap
        rows.append((name, int(known_targets(target_GQK, option_QK)[g].sum()), gap))
    columns = ["Without group", "Its answers", LABELS["gap"]]
    return pd.DataFrame(rows, columns=columns).sort_values(LABELS["gap"], kind="stable")
