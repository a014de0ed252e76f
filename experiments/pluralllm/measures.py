"""The measures of a predictor against survey answers: agreement, what it captures of single groups, its own doubts.

Axis letters: G groups, Q questions, K options, N answers of a group, L answers of all groups,
S scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from appa_flwr.analysis.group_differences import deviations
from appa_flwr.protocol.rewards import js, js_distance
from pluralllm.data import BoolArray, FloatArray, GroupData, IntArray, OptionEmbedding
from pluralllm.prediction import Targets
from pluralllm.scores import coverage, coverage_at, interval_scale


@dataclass(frozen=True)
class PredictorScores:
    """Means over answers to questions of at least two options; NaN where a measure does not apply.

    Attributes:
        js: 1 - Jensen-Shannon divergence, base 2, in [0, 1].
        js_distance: 1 - Jensen-Shannon distance with natural logarithms, as in the papers of GPO and PluralLLM.
        r: correlation of predicted and true deviations, with r2, order and spread as in
            `appa_flwr.analysis.group_differences`.
        spearman: rank correlation of the stated uncertainty and the error, in [-1, 1].
        coverage: share of an answer's options whose survey share lies in the 90 % interval, as the predictor has it.
        scaled: the same with the deviations times the factor that other answers chose (`scores.interval_scale`).
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
    scaled: float
    answers: int


@dataclass(frozen=True)
class Coverage:
    """Shares of answers within their interval, at each of `INTERVAL_SCALES`.

    Attributes:
        share_LS: (L, S) of an answer's options.
        question_L: the answer's question.
    """

    share_LS: FloatArray
    question_L: IntArray

    def mean(self, scale: float) -> float:
        """Share over all answers at this factor of the deviations."""
        return coverage_at(scale, self.share_LS.mean(axis=0))

    def of(self, kept_L: BoolArray) -> Coverage:
        """Some of the answers."""
        return Coverage(self.share_LS[kept_L], self.question_L[kept_L])

    def crossed(self) -> float:
        """Share over all answers, each half of the questions at the factor of the other; NaN for one alone."""
        odd_L = np.random.default_rng(0).permutation(self.question_L.max() + 1)[self.question_L] % 2 == 1
        if odd_L.all() or not odd_L.any():
            return float("nan")
        halves = [(self.of(odd_L), self.of(~odd_L)), (self.of(~odd_L), self.of(odd_L))]
        within = sum(len(one.share_LS) * one.mean(interval_scale(other.share_LS.mean(0))) for one, other in halves)
        return within / len(self.share_LS)


def coverages(predicted: Sequence[Targets], truth: Sequence[GroupData], embedding: OptionEmbedding) -> Coverage | None:
    """Of all groups' answers to questions of at least two options; None where the predictor has no intervals."""
    shares, questions = [], []
    for targets, data in zip(predicted, truth, strict=True):
        several_N = embedding.option_QK[data.question_N].sum(axis=1) > 1
        rows = data.question_N[several_N]
        found = coverage(targets, rows, data.answer_NK[several_N], embedding.option_QK)
        if found is None:
            return None
        shares.append(found.T)
        questions.append(rows)
    return Coverage(np.concatenate(shares), np.concatenate(questions))


def measure(
    predicted: Sequence[Targets], truth: Sequence[GroupData], embedding: OptionEmbedding, *, scale: float | None = None
) -> PredictorScores:
    """Compare (G,) tables of predictions with the groups' answers.

    `scale` is the factor of the deviations that other groups chose; None = half of the questions choose the other's.
    """
    option_QK = embedding.option_QK
    truth_GQK = np.full((len(truth), *option_QK.shape), np.nan)
    agreement, distance, stated = [], [], []
    within = coverages(predicted, truth, embedding)
    for table_QK, targets, data in zip(truth_GQK, predicted, truth, strict=True):
        rows = data.question_N[option_QK[data.question_N].sum(axis=1) > 1]
        table_QK[data.question_N] = data.answer_NK
        case = targets.probability_QK[rows], table_QK[rows], option_QK[rows]
        agreement.append(js(*case))
        distance.append(js_distance(*case, base=np.e))
        stated.append(targets.spread_Q[rows])
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
        coverage=float("nan") if within is None else within.mean(1.0),
        scaled=float("nan") if within is None else within.crossed() if scale is None else within.mean(scale),
        answers=len(agreement_L),
    )
