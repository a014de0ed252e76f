"""How close predictions come to real survey answers, beside what costs nothing to predict.

Needs the answers of all groups, so it is for experiments and tests, never for a federation's server.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from appa_flwr.rewards import js, js_distance
from pluralllm.data import BoolArray, FloatArray, GroupData, OptionEmbedding


@dataclass(frozen=True)
class PredictionScore:
    """Mean agreement with survey answers over all cells (group, question) that have one.

    Attributes:
        js: mean of 1 - Jensen-Shannon divergence, base 2, in [0, 1].
        js_distance_natural: mean of 1 - Jensen-Shannon distance with natural logarithms, the figure of the GPO and
            PluralLLM papers, in [0.167, 1].
        min_group_js: lowest `js` of a single group.
        num_cells: cells averaged.
    """

    js: float
    js_distance_natural: float
    min_group_js: float
    num_cells: int


def evaluate(
    prediction_GQK: FloatArray, truth: Sequence[GroupData], embedding: OptionEmbedding
) -> dict[str, PredictionScore]:
    """Score a predictor, the uniform answer and the mean of the other groups on the same cells.

    The mean of the others reads the very answers that other groups gave to the question. A few-shot predictor on
    held-out questions has nothing of the kind, so this is a hard baseline, and it is always shown.

    Args:
        prediction_GQK: (G, Q, K) distributions, finite on every real option; one table a group, ordered as `truth`.
        truth: each group's answers to score against; pass held-out questions only for an honest figure.
        embedding: the public table the answers point into.

    Returns:
        Scores under the names "pluralllm", "uniform", "mean-of-others". Where no other group answered a question, the
        mean of the others is the uniform answer.

    Raises:
        ValueError: wrong shape, a prediction that is not finite, or no answer at all.
    """
    option_QK = embedding.option_QK
    answer_GQK = np.full((len(truth), *option_QK.shape), np.nan)
    for group, data in enumerate(truth):
        answer_GQK[group, data.question_N] = data.answer_NK
    if prediction_GQK.shape != answer_GQK.shape:
        raise ValueError(f"predictions of shape {prediction_GQK.shape}, expected {answer_GQK.shape}")
    if not np.isfinite(prediction_GQK[:, option_QK]).all():
        raise ValueError("predictions must be finite; a NaN must not pass for a missing answer")
    known_GQ = ~np.isnan(answer_GQK[:, :, 0])
    if not known_GQ.any():
        raise ValueError("no group has an answer to score against")
    uniform_QK = option_QK / option_QK.sum(axis=1, keepdims=True)
    sum_GQK = np.nan_to_num(answer_GQK)
    others_GQ = known_GQ.sum(axis=0) - known_GQ
    others_GQK = (sum_GQK.sum(axis=0) - sum_GQK) / np.maximum(others_GQ, 1)[:, :, None]
    predictors = {
        "pluralllm": prediction_GQK,
        "uniform": np.broadcast_to(uniform_QK, answer_GQK.shape),
        "mean-of-others": np.where(others_GQ[:, :, None] > 0, others_GQK, uniform_QK),
    }
    return {name: _score(table, answer_GQK, option_QK) for name, table in predictors.items()}


def _score(prediction_GQK: FloatArray, answer_GQK: FloatArray, option_QK: BoolArray) -> PredictionScore:
    reward_GQ = js(prediction_GQK, answer_GQK, option_QK)
    known_GQ = ~np.isnan(reward_GQ)
    distance_GQ = js_distance(prediction_GQK, answer_GQK, option_QK, base=np.e)
    return PredictionScore(
        js=float(reward_GQ[known_GQ].mean()),
        js_distance_natural=float(distance_GQ[known_GQ].mean()),
        min_group_js=min(float(row[~np.isnan(row)].mean()) for row in reward_GQ if not np.isnan(row).all()),
        num_cells=int(known_GQ.sum()),
    )
