"""Scores of a group's predictions against its own survey answers, beside scores of trivial predictions.

A group computes `local_sums` from its own answers, and only these sums may leave.

Axis letters: Q questions, R chosen questions, K options, N answered questions, F features, P predictors, M measures.
"""

from itertools import product

import numpy as np

from appa_flwr.core.arrays import FloatArray, IntArray
from appa_flwr.protocol.queries import Catalogue
from appa_flwr.protocol.rewards import js, js_distance, wasserstein
from pluralllm.data import GroupData

MEASURES = ("answers", "js", "js_distance", "wasserstein")
"""The number of scored answers, and the measures that are summed over them."""
PREDICTORS = PREDICTOR, UNIFORM, NEAREST = "pluralllm", "uniform", "nearest-question"
SUMS = tuple(product(PREDICTORS, MEASURES))
"""The sums over held-out answers that a group gives: (predictor, measure), in their order."""


def local_sums(prediction_QK: FloatArray, *, truth: GroupData, known: GroupData, public: Catalogue) -> FloatArray:
    """Score one group's predictions, and trivial predictions, against its own answers; returns sums over them.

    Questions with a single option are left out, since any answer to them is right. `truth` are the answers to score
    against, `known` the answers that a predictor may know, for the nearest question.

    Returns:
        For each of `PREDICTORS` the sums of `MEASURES`, (P, M), each in [0, answers]. The Jensen-Shannon distance is
        the natural one.
    """
    rows = truth.question_N
    option_NK = public.option_QK[rows]
    several_N = option_NK.sum(axis=1) > 1
    uniform_NK = option_NK / option_NK.sum(axis=1, keepdims=True)
    sums = []
    for table_NK in (prediction_QK[rows], uniform_NK, nearest_question(known, public, rows)):
        case = table_NK[several_N], truth.answer_NK[several_N], option_NK[several_N]
        measures = js(*case), js_distance(*case, base=np.e), wasserstein(*case)
        sums.append([several_N.sum(), *(score_N.sum() for score_N in measures)])
    return np.array(sums, dtype=np.float64)


def nearest_question(data: GroupData, public: Catalogue, rows: IntArray | None = None, *, count: int = 1) -> FloatArray:
    """Answer questions `rows` (all Q if None) like the group's nearest other question with equally many options.

    The distance is that of the features of the options, in their order. The answer is the mean over the `count` nearest
    questions, or fewer if there are fewer: (R, K) distributions, uniform if there is no such question.
    """
    rows = np.arange(len(public.option_QK)) if rows is None else rows
    option_RK = public.option_QK[rows]
    table_RK: FloatArray = option_RK / option_RK.sum(axis=1, keepdims=True)
    if not len(data) or not len(rows):
        return table_RK
    size_R, size_N = option_RK.sum(axis=1), public.option_QK[data.question_N].sum(axis=1)
    flat_RF, flat_NF = (
        public.embedding_QKE[chosen].reshape(len(chosen), -1).astype(np.float64) for chosen in (rows, data.question_N)
    )
    distance_RN = (flat_RF**2).sum(axis=1)[:, None] + (flat_NF**2).sum(axis=1) - 2.0 * flat_RF @ flat_NF.T
    distance_RN[size_R[:, None] != size_N] = np.inf
    distance_RN[rows[:, None] == data.question_N] = np.inf  # never the question itself
    nearest_RC = distance_RN.argsort(axis=1, kind="stable")[:, :count]
    valid_RC = np.isfinite(np.take_along_axis(distance_RN, nearest_RC, axis=1))
    any_R = valid_RC[:, 0]
    sum_RK = (data.answer_NK[nearest_RC] * valid_RC[..., None]).sum(axis=1)
    table_RK[any_R] = sum_RK[any_R] / valid_RC[any_R].sum(axis=1, keepdims=True)
    return table_RK
