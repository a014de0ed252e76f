"""How much of the differences between groups predictions hold, and how large they are.

A deviation is a group's share of an option less the mean over the groups that answered the question; predictions are
centred over the same groups. What all groups have in common cancels: a predictor that says the same for all scores 0.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# closer shares are told apart by chance
CLEAR_GAP = 0.05
# shares that only rounding tells apart are alike
TINY = 1e-9


@dataclass(frozen=True)
class Deviations:
    """Agreement of predicted and true deviations, pooled over (group, question, option); NaN where there are none.

    Attributes:
        r: their correlation, in [-1, 1]; 0 where all groups are predicted alike.
        r2: 1 - sum of squared errors / sum of squared true deviations, at most 1; 0 where all are predicted alike.
        pair: how often, of two groups whose true shares differ by more than `CLEAR_GAP`, the right one is predicted to
            give the option more; a tie counts half.
        spread: standard deviation of the predicted deviations over that of the true ones. That of the best guess is r.
        size: standard deviation of the true deviations.
    """

    r: float
    r2: float
    pair: float
    spread: float
    size: float


def deviations(prediction_GQK: FloatArray, truth_GQK: FloatArray, option_QK: BoolArray) -> Deviations:
    """Compare predictions with survey answers.

    Args:
        prediction_GQK: (G, Q, K) shares, finite on real options.
        truth_GQK: (G, Q, K) shares, rows of NaN where a group has not answered.
        option_QK: True for a real option; questions of one option or of fewer than two groups are left out.
    """
    nothing = float("nan")
    known_GQ = ~np.isnan(np.where(option_QK, truth_GQK, 0.0)).any(axis=2)
    known_GQ &= (known_GQ.sum(axis=0) > 1) & (option_QK.sum(axis=1) > 1)
    cell_GQK = known_GQ[:, :, None] & option_QK
    if not cell_GQK.any():
        return Deviations(nothing, nothing, nothing, nothing, nothing)
    count_Q1 = np.maximum(known_GQ.sum(axis=0), 1)[:, None]

    def centred(value_GQK: FloatArray) -> FloatArray:
        kept_GQK = np.where(cell_GQK, value_GQK, 0.0)
        deviation_L: FloatArray = (kept_GQK - kept_GQK.sum(axis=0) / count_Q1)[cell_GQK]
        return deviation_L

    true_L, predicted_L = centred(truth_GQK), centred(prediction_GQK)
    true_size, predicted_size = float(true_L.std()), float(predicted_L.std())
    right = clear = 0.0
    for a, b in itertools.combinations(range(len(known_GQ)), 2):
        cell_QK = cell_GQK[a] & cell_GQK[b]
        true_gap_L, gap_L = ((value[a] - value[b])[cell_QK] for value in (truth_GQK, prediction_GQK))
        clear_L = np.abs(true_gap_L) > CLEAR_GAP
        clear += clear_L.sum()
        right += (0.5 + 0.5 * np.sign(true_gap_L) * np.sign(gap_L))[clear_L].sum()
    pair = right / clear if clear else nothing
    if true_size < TINY:
        return Deviations(nothing, nothing, pair, nothing, 0.0)
    r = float(np.corrcoef(true_L, predicted_L)[0, 1]) if predicted_size > TINY else 0.0
    r2 = 1.0 - float(((true_L - predicted_L) ** 2).sum() / (true_L**2).sum())
    return Deviations(r, r2, float(pair), predicted_size / true_size, true_size)
