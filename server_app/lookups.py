"""Look-ups of answers to training questions: baselines that a policy is to beat.

Axis letters: Q public questions, J asked ones, K options.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from appa_flwr.protocol.asks import Catalogue
from appa_flwr.run.records import NEAREST_QUESTIONS, OPTION_LIST
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.scores import nearest_question

FloatArray = npt.NDArray[np.float64]

NUM_NEAREST = 3


def look_ups(mean_QK: FloatArray, catalogue: Catalogue, question_J: npt.NDArray[np.int64]) -> dict[str, FloatArray]:
    """Answers (J, K) by look-up, one for all groups.

    Args:
        mean_QK: the groups' mean answers, of any sums; only those to training questions are used.
        catalogue: the public questions.
        question_J: the held-out questions to answer.

    Returns:
        "option-list": the mean answer to training questions with the same options, or else with as many; uniform where
        there are none. "nearest-questions": the mean over the `NUM_NEAREST` training questions with as many options
        whose options, each embedded with its question, are nearest.
    """
    total_Q1 = mean_QK.sum(axis=1, keepdims=True)
    known_Q = np.flatnonzero(catalogue.train_Q & (total_Q1[:, 0] > 0))
    share_QK = mean_QK / np.where(total_Q1 > 0, total_Q1, 1.0)
    ids = tuple(question.question_id for question in catalogue.questions)
    table = OptionEmbedding(ids, catalogue.embedding_QKE, catalogue.option_QK)
    mean = GroupData("mean", known_Q, share_QK[known_Q].astype(np.float32))
    same_JK = np.stack([_by_options(share_QK, catalogue, known_Q, catalogue.questions[j].options) for j in question_J])
    return {OPTION_LIST: same_JK, NEAREST_QUESTIONS: nearest_question(mean, table, question_J, count=NUM_NEAREST)}


def _by_options(
    share_QK: FloatArray, catalogue: Catalogue, known_Q: npt.NDArray[np.int64], options: tuple[str, ...]
) -> FloatArray:
    alike = [q for q in known_Q if catalogue.questions[q].options == options]
    alike = alike or [q for q in known_Q if len(catalogue.questions[q].options) == len(options)]
    if alike:
        mean_K: FloatArray = share_QK[alike].mean(axis=0)
        return mean_K
    uniform_K: FloatArray = (np.arange(share_QK.shape[1]) < len(options)) / len(options)
    return uniform_K
