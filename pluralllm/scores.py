"""How close predictions come to real survey answers, beside what costs nothing to predict.

`evaluate` needs the answers of all groups, so it is for experiments and tests, never for a federation's server.
`local_sums` is what a group computes of its own answers and may tell.

Axis letters: G groups, Q questions, R chosen questions, K options, N answered questions, L cells (group, question),
B bins, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appa_flwr.rewards import js, js_distance, wasserstein
from pluralllm.data import BoolArray, FloatArray, GroupData, IntArray, OptionEmbedding
from pluralllm.population import population_sums, prior_from_sums

NUM_BINS = 4
MEASURES = ("js", "js_distance", "wasserstein")
PREDICTOR, SHARED, CALIBRATION = "pluralllm", "pluralllm-shared", "calibration"
MEAN_OF_OTHERS = "mean-of-others"
UNIFORM, NEAREST = "uniform", "nearest-question"
CONTEXT_SIZES = (1, 2, 4, 8, 16, 32, 64)


def by_size(num_context: int) -> str:
    """Name of PluralLLM's score with so many context questions."""
    return f"context-{num_context}"


@dataclass(frozen=True)
class PredictionScore:
    """Mean agreement with survey answers over all cells (group, question) that have one.

    Attributes:
        js: mean of 1 - Jensen-Shannon divergence, base 2, in [0, 1].
        js_distance_natural: mean of 1 - Jensen-Shannon distance with natural logarithms, the figure of the GPO and
            PluralLLM papers, in [0.167, 1].
        wasserstein: mean of 1 - W1 / (K - 1), in [0, 1]; over questions of two options and more.
        min_group_js: lowest `js` of a single group.
        num_cells: cells averaged.
    """

    js: float
    js_distance_natural: float
    wasserstein: float
    min_group_js: float
    num_cells: int


@dataclass(frozen=True)
class Calibration:
    """Whether predictions with a larger spread are further off.

    Attributes:
        rank_correlation: Spearman's, of spread and error over the cells, in [-1, 1]; NaN where either is constant.
        spread_B: mean spread of the cells in each of `NUM_BINS` equally filled bins, ascending.
        error_B: mean error, the natural Jensen-Shannon distance to the survey's answer, in each bin.
    """

    rank_correlation: float
    spread_B: FloatArray
    error_B: FloatArray


def evaluate(
    prediction_GQK: FloatArray,
    truth: Sequence[GroupData],
    embedding: OptionEmbedding,
    *,
    others: Sequence[GroupData] | None = None,
    known: Sequence[GroupData] | None = None,
) -> dict[str, PredictionScore]:
    """Score a predictor and what costs nothing on the same cells.

    The mean of the others reads the very answers that other groups gave to the question. A few-shot predictor on
    held-out questions has nothing of the kind, so this is a hard baseline, and it is always shown.

    Args:
        prediction_GQK: (G, Q, K) distributions, finite on every real option; one table a group, ordered as `truth`.
        truth: each group's answers to score against; pass held-out questions only for an honest figure.
        embedding: the public table the answers point into.
        others: all answers of the groups whose mean is taken, a group's own left out; the groups of `truth` if None.
        known: each group's answers a predictor may know, ordered as `truth`, for the nearest question; none if None.

    Returns:
        Scores under the names "pluralllm", "uniform", "mean-of-others", and "nearest-question" where `known` is given.
        Where no other group answered a question, the mean of the others is the uniform answer.

    Raises:
        ValueError: wrong shape, a prediction that is not finite, or no answer at all.
    """
    option_QK = embedding.option_QK
    if prediction_GQK.shape != (len(truth), *option_QK.shape):
        raise ValueError(f"predictions of shape {prediction_GQK.shape}, expected {(len(truth), *option_QK.shape)}")
    if not np.isfinite(prediction_GQK[:, option_QK]).all():
        raise ValueError("predictions must be finite; a NaN must not pass for a missing answer")
    if not any(map(len, truth)):
        raise ValueError("no group has an answer to score against")
    uniform_QK = option_QK / option_QK.sum(axis=1, keepdims=True)
    means = []
    for data in truth:
        rest = [other for other in (truth if others is None else others) if other.group != data.group]
        mean_QK = prior_from_sums(*population_sums(rest, embedding), min_groups=1)
        means.append(np.where(mean_QK.any(axis=1, keepdims=True), mean_QK, uniform_QK))
    predictors = {PREDICTOR: [*prediction_GQK], UNIFORM: [uniform_QK] * len(truth), MEAN_OF_OTHERS: means}
    if known is not None:
        predictors[NEAREST] = [nearest_question(data, embedding) for data in known]
    found = {}
    for name, table_GQK in predictors.items():
        sums = [
            measure_sums(table_QK[data.question_N], data.answer_NK, option_QK[data.question_N])
            for table_QK, data in zip(table_GQK, truth, strict=True)
        ]
        cells = sum(group["cells"] for group in sums)
        js_mean, distance, transport = (sum(group[measure] for group in sums) / cells for measure in MEASURES)
        lowest = min(group["js"] / group["cells"] for group in sums if group["cells"])
        found[name] = PredictionScore(js_mean, distance, transport, lowest, int(cells))
    return found


def local_sums(
    prediction_QK: FloatArray,
    spread_Q: FloatArray,
    *,
    truth: GroupData,
    known: GroupData,
    embedding: OptionEmbedding,
    mean_of_others: FloatArray | None = None,
) -> dict[str, dict[str, float]]:
    """Score one group's predictions, and what costs nothing, against its own answers; only sums come back.

    Questions of a single option are left out: any answer to them is right.

    Args:
        prediction_QK: (Q, K) the group's predicted distributions; of a question in `known`, from the others alone.
        spread_Q: (Q,) spread of the predictions over context draws.
        truth: the answers to score against.
        known: the answers that a predictor may know, for the nearest question.
        embedding: the public table.
        mean_of_others: (Q, K) mean answer of the other groups, rows of 0 where it is unknown; None if it is nowhere.

    Returns:
        Predictor -> "cells", the number of answers scored, and the sums of `MEASURES` over them, all in [0, cells],
        with the natural Jensen-Shannon distance; "pluralllm" has the sum of "spread" too. "mean-of-others" is scored
        where it is known, and "pluralllm-shared" is the predictor on just these answers. "calibration" holds
        "cells" times the rank correlation of spread and error, and is left out where that is not defined.
    """
    option_QK = embedding.option_QK
    scored_N = option_QK[truth.question_N].sum(axis=1) > 1
    rows, answer_NK = truth.question_N[scored_N], truth.answer_NK[scored_N].astype(np.float64)

    def measured(table_QK: FloatArray, kept_N: BoolArray | None = None) -> dict[str, float]:
        kept_N = np.ones(len(rows), dtype=np.bool_) if kept_N is None else kept_N
        return measure_sums(table_QK[rows[kept_N]], answer_NK[kept_N], option_QK[rows[kept_N]])

    uniform_QK = option_QK / option_QK.sum(axis=1, keepdims=True)
    sums = {
        PREDICTOR: measured(prediction_QK) | {"spread": float(spread_Q[rows].sum())},
        UNIFORM: measured(uniform_QK),
        NEAREST: measure_sums(nearest_question(known, embedding, rows), answer_NK, option_QK[rows]),
    }
    if mean_of_others is not None:
        kept_N = mean_of_others[rows].any(axis=1)
        if kept_N.any():
            sums[MEAN_OF_OTHERS] = measured(mean_of_others, kept_N)
            sums[SHARED] = measured(prediction_QK, kept_N)
    if len(rows) >= NUM_BINS:
        error_N = 1.0 - js_distance(prediction_QK[rows], answer_NK, option_QK[rows], base=np.e)
        correlation = calibration(spread_Q[rows], error_N).rank_correlation
        if not np.isnan(correlation):
            sums[CALIBRATION] = {"cells": float(len(rows)), "rank_correlation": len(rows) * correlation}
    return sums


def measure_sums(
    prediction_NK: FloatArray, answer_NK: npt.NDArray[np.floating], option_NK: BoolArray
) -> dict[str, float]:
    """Sums of `MEASURES` over answers (N, K) to questions of at least two options, and their number "cells"."""
    several_N = option_NK.sum(axis=1) > 1
    case = prediction_NK[several_N], answer_NK[several_N].astype(np.float64), option_NK[several_N]
    return {
        "cells": float(several_N.sum()),
        "js": float(js(*case).sum()),
        "js_distance": float(js_distance(*case, base=np.e).sum()),
        "wasserstein": float(wasserstein(*case).sum()),
    }


def nearest_question(data: GroupData, embedding: OptionEmbedding, rows: IntArray | None = None) -> FloatArray:
    """Answer each question as the group answered the most similar other one with as many options.

    Args:
        data: the group's answers to choose from.
        embedding: similar means near in the features of the options, in their order.
        rows: the questions to answer, R of them; all Q if None.

    Returns:
        (R, K) distributions, uniform where the group has answered no other question with as many options.
    """
    rows = np.arange(len(embedding.option_QK)) if rows is None else rows
    option_RK = embedding.option_QK[rows]
    table_RK: FloatArray = option_RK / option_RK.sum(axis=1, keepdims=True)
    if not len(data) or not len(rows):
        return table_RK
    size_R, size_N = option_RK.sum(axis=1), embedding.option_QK[data.question_N].sum(axis=1)
    flat_RF, flat_NF = (
        embedding.value_QKE[chosen].reshape(len(chosen), -1).astype(np.float64) for chosen in (rows, data.question_N)
    )
    distance_RN = (flat_RF**2).sum(axis=1)[:, None] + (flat_NF**2).sum(axis=1) - 2.0 * flat_RF @ flat_NF.T
    distance_RN[size_R[:, None] != size_N] = np.inf
    distance_RN[rows[:, None] == data.question_N] = np.inf  # never the question itself
    nearest_R = distance_RN.argmin(axis=1)
    found_R = np.isfinite(distance_RN.min(axis=1))
    table_RK[found_R] = data.answer_NK[nearest_R[found_R]]
    return table_RK


def _ranks(value_L: FloatArray) -> FloatArray:
    """Places in ascending order, those of equal values averaged."""
    _, which_L, count_V = np.unique(value_L, return_inverse=True, return_counts=True)
    ranks_L: FloatArray = (np.cumsum(count_V) - (count_V - 1) / 2)[which_L]
    return ranks_L


def calibration(spread_L: FloatArray, error_L: FloatArray) -> Calibration:
    """Compare the predictor's stated uncertainty with its error, cell by cell.

    Args:
        spread_L: (L,) spread over context draws, L >= `NUM_BINS`.
        error_L: (L,) natural Jensen-Shannon distance of the prediction to the survey's answer.
    """
    if spread_L.shape != error_L.shape or len(spread_L) < NUM_BINS:
        raise ValueError(f"expected at least {NUM_BINS} spreads and as many errors, got {spread_L.shape}")
    constant = np.ptp(spread_L) == 0.0 or np.ptp(error_L) == 0.0
    correlation_22 = np.full((2, 2), np.nan) if constant else np.corrcoef([_ranks(spread_L), _ranks(error_L)])
    bins = np.array_split(np.argsort(spread_L, kind="stable"), NUM_BINS)
    return Calibration(
        rank_correlation=float(correlation_22[1, 0]),
        spread_B=np.array([spread_L[cells].mean() for cells in bins]),
        error_B=np.array([error_L[cells].mean() for cells in bins]),
    )
