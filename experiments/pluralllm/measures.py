"""The measures of a predictor against survey answers: agreement, what it captures of single groups, its own doubts.

Axis letters: G groups, Q questions, K options, N answers of a group, L answers of all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from appa_flwr.analysis.group_differences import deviations
from appa_flwr.protocol.rewards import js, js_distance
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.prediction import Targets
from pluralllm.scores import covered


@dataclass(frozen=True)
class PredictorScores:
    """Means over answers to questions of at least two options; NaN where a measure does not apply.

    Attributes:
        js: 1 - Jensen-Shannon divergence, base 2, in [0, 1].
        js_distance: 1 - Jensen-Shannon distance with natural logarithms, as in the papers of GPO and PluralLLM.
        r: correlation of predicted and true deviations, with r2, order and spread as in
            `appa_flwr.analysis.group_differences`.
        spearman: rank correlation of the stated uncertainty and the error, in [-1, 1].
        coverage: share of an answer's options whose survey share lies in the 90 % interval.
        answers: number scored.
    """

    js: float
    js_distance: float
    r: float
    r2: float
    order: float
    spearman: float
    spread: float
    coverage: float
    answers: int


def measure(predicted: Sequence[Targets], truth: Sequence[GroupData], embedding: OptionEmbedding) -> PredictorScores:
    """Compare (G,) tables of predictions with the groups' answers."""
    option_QK = embedding.option_QK
    truth_GQK = np.full((len(truth), *option_QK.shape), np.nan)
    agreement, distance, stated, within = [], [], [], []
    for table_QK, targets, data in zip(truth_GQK, predicted, truth, strict=True):
        rows = data.question_N[option_QK[data.question_N].sum(axis=1) > 1]
        table_QK[data.question_N] = data.answer_NK
        case = targets.probability_QK[rows], table_QK[rows], option_QK[rows]
        agreement.append(js(*case))
        distance.append(js_distance(*case, base=np.e))
        stated.append(targets.spread_Q[rows])
        if (interval := targets.interval()) is not None:
            within.append(covered((interval[0][rows], interval[1][rows]), *case[1:]))
    agreement_L, distance_L, stated_L = map(np.concatenate, (agreement, distance, stated))
    captured = deviations(np.stack([targets.probability_QK for targets in predicted]), truth_GQK, option_QK)
    ranked = np.ptp(stated_L) > 0 and np.ptp(distance_L) > 0
    return PredictorScores(
        js=float(agreement_L.mean()),
        js_distance=float(distance_L.mean()),
        r=captured.r,
        r2=captured.r2,
        order=captured.order,
        spearman=float(stats.spearmanr(stated_L, 1.0 - distance_L).statistic) if ranked else float("nan"),
        spread=captured.spread,
        coverage=float(np.concatenate(within).mean()) if within else float("nan"),
        answers=len(agreement_L),
    )
