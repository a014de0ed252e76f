"""What predictions capture of the differences between groups.

A deviation is a group's share of an option less the mean over the groups that answered the question; predictions are
centred over the same groups. What all groups have in common cancels: a predictor that says the same for all scores 0.

Axis letters: G groups, Q questions, K options, L valid values in a row.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from appa_flwr.analysis.alignment import GROUPS_TO_COMPARE, known_targets
from appa_flwr.analysis.fairness import BoolArray, FloatArray

CLEAR_DIFFERENCE = 0.05
"""Shares of an option that are closer are told apart by chance."""

TINY = 1e-9
"""Shares that only rounding tells apart are alike."""


@dataclass(frozen=True)
class Deviations:
    """Agreement of predicted and true deviations, pooled over (group, question, option); NaN where there are none.

    Attributes:
        r: their correlation, in [-1, 1]; 0 where all groups are predicted alike.
        r2: 1 - sum of squared errors / sum of squared true deviations, at most 1; 0 where all are predicted alike.
        order: how often, of two groups whose true shares differ by more than `CLEAR_DIFFERENCE`, the right one is
            predicted to give the option more; a tie counts half.
    """

    r: float
    r2: float
    order: float


def deviations(prediction_GQK: FloatArray, truth_GQK: FloatArray, option_QK: BoolArray) -> Deviations:
    """Compare predictions with survey answers, both shares (G, Q, K); where a group has not answered is a row of NaN.

    Questions of one option or of fewer than two groups are left out.
    """
    nothing = float("nan")
    known_GQ = known_targets(truth_GQK, option_QK)
    known_GQ &= (known_GQ.sum(axis=0) >= GROUPS_TO_COMPARE) & (option_QK.sum(axis=1) > 1)
    valid_GQK = known_GQ[:, :, None] & option_QK
    if not valid_GQK.any():
        return Deviations(nothing, nothing, nothing)
    true_L, predicted_L = (_centred(value_GQK, valid_GQK) for value_GQK in (truth_GQK, prediction_GQK))
    right = clear = 0.0
    for a, b in itertools.combinations(range(len(known_GQ)), 2):
        valid_QK = valid_GQK[a] & valid_GQK[b]
        true_gap_L, gap_L = ((value[a] - value[b])[valid_QK] for value in (truth_GQK, prediction_GQK))
        clear_L = np.abs(true_gap_L) > CLEAR_DIFFERENCE
        clear += clear_L.sum()
        right += (0.5 + 0.5 * np.sign(true_gap_L) * np.sign(gap_L))[clear_L].sum()
    order = float(right / clear) if clear else nothing
    if true_L.std() < TINY:
        return Deviations(nothing, nothing, order)
    r = float(np.corrcoef(true_L, predicted_L)[0, 1]) if predicted_L.std() > TINY else 0.0
    return Deviations(r, 1.0 - float(((true_L - predicted_L) ** 2).sum() / (true_L**2).sum()), order)


def _centred(value_GQK: FloatArray, valid_GQK: BoolArray) -> FloatArray:
    """The valid values less their mean over the groups, in a row."""
    kept_GQK = np.where(valid_GQK, value_GQK, 0.0)
    mean_QK = kept_GQK.sum(axis=0) / np.maximum(valid_GQK.any(axis=2).sum(axis=0), 1)[:, None]
    deviation_L: FloatArray = (kept_GQK - mean_QK)[valid_GQK]
    return deviation_L
