"""Scores of a group's predictions against its own survey answers, beside what costs nothing to predict.

`local_sums` is what a group computes of its own answers and may tell.

Axis letters: Q questions, R chosen questions, K options, N answered questions, F features.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from appa_flwr.protocol.asks import HELD_OUT_PART, TRAINING_PART
from appa_flwr.protocol.rewards import js, js_distance, wasserstein
from pluralllm.data import BoolArray, FloatArray, GroupData, IntArray, OptionEmbedding

MEASURES = ("js", "js_distance", "wasserstein")
PREDICTOR, SHARED = "pluralllm", "pluralllm-shared"
MEAN_OF_OTHERS = "mean-of-others"
UNIFORM, NEAREST = "uniform", "nearest-question"
PREDICTORS = (PREDICTOR, UNIFORM, NEAREST, MEAN_OF_OTHERS, SHARED)
PARTS = (TRAINING_PART, HELD_OUT_PART)
COUNT = "answers"
"""Of the answers that are scored, among the measures' sums."""
# with three a group that removes its own share still does not see a single other group's answer
MIN_GROUPS = 3


def summed() -> list[tuple[str, str, str]]:
    """The sums that a group gives: (part, predictor, measure), in their order."""
    return [(part, name, measure) for part in PARTS for name in PREDICTORS for measure in (COUNT, *MEASURES)]


def local_sums(
    prediction_QK: FloatArray,
    *,
    truth: GroupData,
    known: GroupData,
    embedding: OptionEmbedding,
    mean_of_others: FloatArray | None = None,
) -> dict[str, dict[str, float]]:
    """Score one group's predictions, and what costs nothing, against its own answers; only sums come back.

    Questions of a single option are left out: any answer to them is right.

    Args:
        prediction_QK: the group's targets for all Q questions; of a question in `known`, from the others alone.
        truth: the answers to score against.
        known: the answers that a predictor may know, for the nearest question.
        embedding: the public table.
        mean_of_others: (Q, K) mean answer of the other groups, rows of 0 where it is unknown; None if it is nowhere.

    Returns:
        Predictor -> "answers", the number of answers scored, and the sums of `MEASURES` over them, all in [0, answers],
        with the natural Jensen-Shannon distance. "mean-of-others" is scored where it is known, and "pluralllm-shared"
        is the predictor on just these answers.
    """
    option_QK = embedding.option_QK
    scored_N = option_QK[truth.question_N].sum(axis=1) > 1
    rows, answer_NK = truth.question_N[scored_N], truth.answer_NK[scored_N].astype(np.float64)

    def measured(table_QK: FloatArray, kept_N: BoolArray | None = None) -> dict[str, float]:
        kept_N = np.ones(len(rows), dtype=np.bool_) if kept_N is None else kept_N
        return measure_sums(table_QK[rows[kept_N]], answer_NK[kept_N], option_QK[rows[kept_N]])

    uniform_QK = option_QK / option_QK.sum(axis=1, keepdims=True)
    sums = {
        PREDICTOR: measured(prediction_QK),
        UNIFORM: measured(uniform_QK),
        NEAREST: measure_sums(nearest_question(known, embedding, rows), answer_NK, option_QK[rows]),
    }
    if mean_of_others is not None:
        kept_N = mean_of_others[rows].any(axis=1)
        if kept_N.any():
            sums[MEAN_OF_OTHERS] = measured(mean_of_others, kept_N)
            sums[SHARED] = measured(prediction_QK, kept_N)
    return sums


def measure_sums(
    prediction_NK: FloatArray, answer_NK: npt.NDArray[np.floating], option_NK: BoolArray
) -> dict[str, float]:
    """Sums of `MEASURES` over answers (N, K) to questions of at least two options, and their number "answers"."""
    several_N = option_NK.sum(axis=1) > 1
    case = prediction_NK[several_N], answer_NK[several_N].astype(np.float64), option_NK[several_N]
    return {
        COUNT: float(several_N.sum()),
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


def group_sums(groups: Iterable[GroupData], embedding: OptionEmbedding) -> tuple[FloatArray, IntArray]:
    """Add up the groups' answers question by question.

    Held-out answers must not be among them. A node sends these sums for its groups, the server adds the nodes' sums.

    Returns:
        (Q, K) sum of answer distributions, and (Q,) number of groups that answered.
    """
    sum_QK = np.zeros(embedding.option_QK.shape)
    count_Q = np.zeros(len(sum_QK), dtype=np.int64)
    for data in groups:
        sum_QK[data.question_N] += data.answer_NK
        count_Q[data.question_N] += 1
    return sum_QK, count_Q


def mean_from_sums(
    sum_QK: FloatArray, count_Q: IntArray, *, own: GroupData | None = None, min_groups: int = MIN_GROUPS
) -> FloatArray:
    """Mean answer of the others to each question.

    Args:
        sum_QK: (Q, K) from `group_sums`.
        count_Q: (Q,) from `group_sums`.
        own: the answers of a group whose share is within the sums and must not be; None for a group that is not.
        min_groups: groups that must have answered a question for it to have a mean, the own counted; >= 1.

    Returns:
        (Q, K) distributions; a row of zeros where there is no mean.
    """
    others_QK, others_Q = np.array(sum_QK, dtype=np.float64), np.array(count_Q)
    others_QK[count_Q < min_groups] = 0.0
    if own is not None:
        others_QK[own.question_N] -= own.answer_NK
        others_Q[own.question_N] -= 1
    others_QK = np.clip(others_QK, 0.0, None)  # a difference of float32 shares can end just under 0
    others_QK[others_Q < 1] = 0.0  # rounding leaves crumbs of a share that stood alone
    total_Q1 = others_QK.sum(axis=1, keepdims=True)
    mean_QK: FloatArray = np.divide(others_QK, total_Q1, out=np.zeros_like(others_QK), where=total_Q1 > 0.0)
    return mean_QK
