"""Differences between groups: how large they are, what predictions capture of them, and whether rules can differ.

A deviation is a group's share of an option less the mean over the groups that answered the question; predictions are
centred over the same groups. What all groups have in common cancels: a predictor that says the same for all scores 0.

Where the best answers for the average serve the worst group as well as the best answers for that group, no rule can
gain anything over the mean; and where the fairness index of good answers is over the threshold, APPA is the mean.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis.alignment import GROUPS_TO_COMPARE, known_targets, shared_rewards
from appa_flwr.analysis.ceilings import OBJECTIVES, shared_answer
from appa_flwr.analysis.fairness import BoolArray, FloatArray, sparse_fairness_index

CLEAR_DIFFERENCE = 0.05
"""Shares of an option that are closer are told apart by chance."""

TINY = 1e-9
"""Shares that only rounding tells apart are alike."""

CLEAR_GAIN = 0.01
"""A smaller gap between the two ceilings is lost among the differences between runs."""

LABELS = {
    "size": "Groups' spread",
    "min_of_average": "Worst group at the best answers for the average",
    "min_of_fairest": "for the worst group",
    "gap": "Most a rule can win",
    "fairness": "FI",
}
"""Field of `GroupDifferences` -> what tables call it."""


@dataclass(frozen=True)
class Deviations:
    """Agreement of predicted and true deviations, pooled over (group, question, option); NaN where there are none.

    Attributes:
        r: their correlation, in [-1, 1]; 0 where all groups are predicted alike.
        r2: 1 - sum of squared errors / sum of squared true deviations, at most 1; 0 where all are predicted alike.
        order: how often, of two groups whose true shares differ by more than `CLEAR_DIFFERENCE`, the right one is
            predicted to give the option more; a tie counts half.
        spread: standard deviation of the predicted deviations over that of the true ones. That of the best guess is r.
        size: standard deviation of the true deviations.
    """

    r: float
    r2: float
    order: float
    spread: float
    size: float


def deviations(prediction_GQK: FloatArray, truth_GQK: FloatArray, option_QK: BoolArray) -> Deviations:
    """Compare predictions with survey answers, both shares (G, Q, K); where a group has not answered is a row of NaN.

    Questions of one option or of fewer than two groups are left out.
    """
    nothing = float("nan")
    known_GQ = known_targets(truth_GQK, option_QK)
    known_GQ &= (known_GQ.sum(axis=0) >= GROUPS_TO_COMPARE) & (option_QK.sum(axis=1) > 1)
    valid_GQK = known_GQ[:, :, None] & option_QK
    if not valid_GQK.any():
        return Deviations(nothing, nothing, nothing, nothing, nothing)
    true_L, predicted_L = (_centred(value_GQK, valid_GQK) for value_GQK in (truth_GQK, prediction_GQK))
    true_size, predicted_size = float(true_L.std()), float(predicted_L.std())
    right = clear = 0.0
    for a, b in itertools.combinations(range(len(known_GQ)), 2):
        valid_QK = valid_GQK[a] & valid_GQK[b]
        true_gap_L, gap_L = ((value[a] - value[b])[valid_QK] for value in (truth_GQK, prediction_GQK))
        clear_L = np.abs(true_gap_L) > CLEAR_DIFFERENCE
        clear += clear_L.sum()
        right += (0.5 + 0.5 * np.sign(true_gap_L) * np.sign(gap_L))[clear_L].sum()
    order = float(right / clear) if clear else nothing
    if true_size < TINY:
        return Deviations(nothing, nothing, order, nothing, 0.0)
    r = float(np.corrcoef(true_L, predicted_L)[0, 1]) if predicted_size > TINY else 0.0
    r2 = 1.0 - float(((true_L - predicted_L) ** 2).sum() / (true_L**2).sum())
    return Deviations(r, r2, order, predicted_size / true_size, true_size)


def _centred(value_GQK: FloatArray, valid_GQK: BoolArray) -> FloatArray:
    """The valid values less their mean over the groups, in a row."""
    kept_GQK = np.where(valid_GQK, value_GQK, 0.0)
    mean_QK = kept_GQK.sum(axis=0) / np.maximum(valid_GQK.any(axis=2).sum(axis=0), 1)[:, None]
    deviation_L: FloatArray = (kept_GQK - mean_QK)[valid_GQK]
    return deviation_L


@dataclass(frozen=True)
class GroupDifferences:
    """Distance between groups, and what it lets a rule win, on some questions by one metric.

    Attributes:
        size: standard deviation of shares around the mean over the groups.
        min_of_average: the worst group's score, in [0, 1], at the shared answers that are best for the average.
        min_of_fairest: the same at the answers that are best for the worst group.
        fairness: fairness index (Equation 4) of the answers that are best for the average.
    """

    size: float
    min_of_average: float
    min_of_fairest: float
    fairness: float

    @property
    def gap(self) -> float:
        """The most that a rule can win for the worst group."""
        return self.min_of_fairest - self.min_of_average

    def row(self) -> dict[str, object]:
        """Label -> number, and whether rules can differ."""
        numbers = {label: getattr(self, name) for name, label in LABELS.items()}
        return {**numbers, "Rules can differ": "yes" if self.gap > CLEAR_GAIN else "no"}


def group_differences(targets_GQK: npt.ArrayLike, options_QK: npt.ArrayLike, *, metric: str) -> GroupDifferences:
    """Of targets (G, Q, K), rows of NaN where a group has none; arguments and errors as of `shared_answer`."""
    targets_GQK, option_QK = np.asarray(targets_GQK, dtype=np.float64), np.asarray(options_QK, dtype=np.bool_)
    best = (shared_answer(targets_GQK, option_QK, metric=metric, objective=objective) for objective in OBJECTIVES)
    average_GQ, fairest_GQ = (shared_rewards(each, targets_GQK, option_QK, metric=metric) for each in best)
    known_GQ = known_targets(targets_GQK, option_QK)
    there_G = known_GQ.any(axis=1)
    return GroupDifferences(
        size=float(_centred(targets_GQK, known_GQ[:, :, None] & option_QK).std()),
        min_of_average=float(np.nanmean(average_GQ[there_G], axis=1).min()),
        min_of_fairest=float(np.nanmean(fairest_GQ[there_G], axis=1).min()),
        fairness=sparse_fairness_index(average_GQ, min_groups=GROUPS_TO_COMPARE),
    )
