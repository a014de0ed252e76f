"""The measures of a predictor against survey answers: agreement, and what it captures of single groups.

Axis letters: G groups, Q questions, K options, N answers of a group, L answers of all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from appa_flwr.analysis.group_differences import deviations
from appa_flwr.protocol.rewards import js, js_distance
from pluralllm.data import FloatArray, GroupData, OptionEmbedding


@dataclass(frozen=True)
class PredictorScores:
    """Means over answers to questions of at least two options; NaN where a measure does not apply.

    Attributes:
        js: 1 - Jensen-Shannon divergence, base 2, in [0, 1].
        js_distance: 1 - Jensen-Shannon distance with natural logarithms, as in the papers of GPO and PluralLLM.
        r: correlation of predicted and true deviations, with r2, order and spread as in
            `appa_flwr.analysis.group_differences`.
        answers: number scored.
    """

    js: float
    js_distance: float
    r: float
    r2: float
    order: float
    spread: float
    answers: int


def measure(predicted: Sequence[FloatArray], truth: Sequence[GroupData], embedding: OptionEmbedding) -> PredictorScores:
    """Compare (G,) tables of predictions (Q, K) with the groups' answers."""
    option_QK = embedding.option_QK
    truth_GQK = np.full((len(truth), *option_QK.shape), np.nan)
    agreement, distance = [], []
    for table_QK, prediction_QK, data in zip(truth_GQK, predicted, truth, strict=True):
        rows = data.question_N[option_QK[data.question_N].sum(axis=1) > 1]
        table_QK[data.question_N] = data.answer_NK
        case = prediction_QK[rows], table_QK[rows], option_QK[rows]
        agreement.append(js(*case))
        distance.append(js_distance(*case, base=np.e))
    agreement_L, distance_L = map(np.concatenate, (agreement, distance))
    captured = deviations(np.stack(predicted), truth_GQK, option_QK)
    return PredictorScores(
        js=float(agreement_L.mean()),
        js_distance=float(distance_L.mean()),
        r=captured.r,
        r2=captured.r2,
        order=captured.order,
        spread=captured.spread,
        answers=len(agreement_L),
    )
