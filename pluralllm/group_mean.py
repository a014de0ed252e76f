"""The mean of the other groups, from sums over groups: a score to compare a predictor with.

A question that fewer than `min_groups` groups answered has no mean.

Axis letters: Q questions, K options.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pluralllm.data import FloatArray, GroupData, IntArray, OptionEmbedding

# with three a group that removes its own share still does not see a single other group's answer
MIN_GROUPS = 3


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
