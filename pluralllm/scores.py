"""Scores of a group's predictions against its own survey answers, beside what costs nothing to predict.

`local_sums` is what a group computes of its own answers and may tell.

Axis letters: Q questions, R chosen questions, K options, N answered questions, L answers, F features,
S scales.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from appa_flwr.protocol.rewards import js, js_distance, wasserstein
from pluralllm.data import BoolArray, FloatArray, GroupData, IntArray, OptionEmbedding
from pluralllm.prediction import COVERAGE as WANTED
from pluralllm.prediction import Targets

# of fewer answers a rank correlation says nothing
MIN_RANKED = 4
MEASURES = ("js", "js_distance", "wasserstein")
PREDICTOR, SHARED = "pluralllm", "pluralllm-shared"
CALIBRATION, COVERAGE = "calibration", "coverage"
INTERVAL_SCALES = (0.7, 1.0, 1.4, 2.0, 2.8)
AT_SCALES = tuple(f"coverage-{scale:g}" for scale in INTERVAL_SCALES)
MEAN_OF_OTHERS = "mean-of-others"
UNIFORM, NEAREST = "uniform", "nearest-question"
CONTEXT_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def summed() -> list[tuple[str, str, str]]:
    """What is summed over groups that give none by itself: (part, predictor, measure), in the order of the sums."""
    plain = (PREDICTOR, UNIFORM, NEAREST, *map(by_size, CONTEXT_SIZES))
    measures: dict[str, tuple[str, ...]] = {name: ("answers", *MEASURES) for name in plain}
    measures[PREDICTOR] += ("spread",)
    measures |= {CALIBRATION: ("answers", "rank_correlation"), COVERAGE: ("answers", *AT_SCALES)}
    return [(part, name, one) for part in ("training", "held-out") for name, of in measures.items() for one in of]


def by_size(num_context: int) -> str:
    """Name of PluralLLM's score with so many context questions."""
    return f"context-{num_context}"


def local_sums(
    predicted: Targets,
    *,
    truth: GroupData,
    known: GroupData,
    embedding: OptionEmbedding,
    mean_of_others: FloatArray | None = None,
) -> dict[str, dict[str, float]]:
    """Score one group's predictions, and what costs nothing, against its own answers; only sums come back.

    Questions of a single option are left out: any answer to them is right.

    Args:
        predicted: the group's targets for all Q questions; of a question in `known`, from the others alone.
        truth: the answers to score against.
        known: the answers that a predictor may know, for the nearest question.
        embedding: the public table.
        mean_of_others: (Q, K) mean answer of the other groups, rows of 0 where it is unknown; None if it is nowhere.

    Returns:
        Predictor -> "answers", the number of answers scored, and the sums of `MEASURES` over them, all in [0, answers],
        with the natural Jensen-Shannon distance; "pluralllm" has the sum of "spread" too. "mean-of-others" is scored
        where it is known, and "pluralllm-shared" is the predictor on just these answers. "calibration" holds
        "answers" times the rank correlation of spread and error, and is left out where that is not defined; "coverage"
        at each of `INTERVAL_SCALES` the sum over answers of the share of their options that lie in their interval.
    """
    option_QK, prediction_QK, spread_Q = embedding.option_QK, predicted.probability_QK, predicted.spread_Q
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
    if (shares := coverage(predicted, rows, answer_NK, option_QK)) is not None:
        sums[COVERAGE] = {"answers": float(len(rows))} | dict(zip(AT_SCALES, shares.sum(axis=1).tolist(), strict=True))
    if len(rows) >= MIN_RANKED:
        error_N = 1.0 - js_distance(prediction_QK[rows], answer_NK, option_QK[rows], base=np.e)
        correlation = rank_correlation(spread_Q[rows], error_N)
        if not np.isnan(correlation):
            sums[CALIBRATION] = {"answers": float(len(rows)), "rank_correlation": len(rows) * correlation}
    return sums


def coverage(
    predicted: Targets, rows: IntArray, answer_NK: npt.NDArray[np.floating], option_QK: BoolArray
) -> FloatArray | None:
    """Share of each answer's options that lie in their interval, at each of `INTERVAL_SCALES`; (scales, N).

    `rows` (N,) are the questions of the answers (N, K). None where the predictor has no intervals.
    """
    option_NK, found = option_QK[rows], []
    for scale in INTERVAL_SCALES:
        if (interval := predicted.interval(scale)) is None:
            return None
        low_NK, high_NK = interval[0][rows], interval[1][rows]
        within_NK = (low_NK <= answer_NK) & (answer_NK <= high_NK) & option_NK
        found.append(within_NK.sum(axis=1) / option_NK.sum(axis=1))
    return np.stack(found)


def interval_scale(share_S: npt.ArrayLike) -> float:
    """Factor of the deviations at which `prediction.COVERAGE` of the shares lie in their interval.

    `share_S` is the share that does at each of `INTERVAL_SCALES`; between these it is taken to be linear in the
    logarithm of the factor, and the answer is never beyond them.
    """
    # A wider interval holds no less; what was rounded, or lied about, need not know it.
    rising_S = np.maximum.accumulate(np.asarray(share_S, dtype=np.float64))
    return float(np.exp(np.interp(WANTED, rising_S, np.log(INTERVAL_SCALES))))


def coverage_at(scale: float, share_S: npt.ArrayLike) -> float:
    """Share that lies in its interval at another factor than the measured ones; see `interval_scale`."""
    return float(np.interp(np.log(scale), np.log(INTERVAL_SCALES), np.asarray(share_S, dtype=np.float64)))


def measure_sums(
    prediction_NK: FloatArray, answer_NK: npt.NDArray[np.floating], option_NK: BoolArray
) -> dict[str, float]:
    """Sums of `MEASURES` over answers (N, K) to questions of at least two options, and their number "answers"."""
    several_N = option_NK.sum(axis=1) > 1
    case = prediction_NK[several_N], answer_NK[several_N].astype(np.float64), option_NK[several_N]
    return {
        "answers": float(several_N.sum()),
        "js": float(js(*case).sum()),
        "js_distance": float(js_distance(*case, base=np.e).sum()),
        "wasserstein": float(wasserstein(*case).sum()),
    }


def nearest_question(
    data: GroupData, embedding: OptionEmbedding, rows: IntArray | None = None, *, count: int = 1
) -> FloatArray:
    """Answer questions `rows` (all Q if None) as the group answered the most similar other one with as many options.

    Similar means near in the features of the options, in their order. The answer is the mean over `count` such
    questions, or as many as there are: (R, K) distributions, uniform where the group has answered none.
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
    nearest_RC = distance_RN.argsort(axis=1, kind="stable")[:, :count]
    there_RC = np.isfinite(np.take_along_axis(distance_RN, nearest_RC, axis=1))
    found_R = there_RC[:, 0]
    sum_RK = (data.answer_NK[nearest_RC] * there_RC[..., None]).sum(axis=1)
    table_RK[found_R] = sum_RK[found_R] / there_RC[found_R].sum(axis=1, keepdims=True)
    return table_RK


def _ranks(value_L: FloatArray) -> FloatArray:
    """Places in ascending order, those of equal values averaged."""
    _, which_L, count_V = np.unique(value_L, return_inverse=True, return_counts=True)
    ranks_L: FloatArray = (np.cumsum(count_V) - (count_V - 1) / 2)[which_L]
    return ranks_L


def rank_correlation(spread_L: FloatArray, error_L: FloatArray) -> float:
    """Spearman's, of the stated uncertainty and the error (L,), in [-1, 1]; NaN where either is constant."""
    if np.ptp(spread_L) == 0.0 or np.ptp(error_L) == 0.0:
        return float("nan")
    return float(np.corrcoef(_ranks(spread_L), _ranks(error_L))[1, 0])
