"""Inputs and sizes of PluralLLM: the public option embedding and one group's private answers (NumPy only).

A client process that only looks rewards up imports neither torch nor scikit-learn through this module.

Axis letters: Q questions, K answer options (padded to the widest question), E embedding, N answered questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appa_flwr.protocol.asks import Catalogue

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

# Features of an option: 75 of its question's text, 50 of its own, since options repeat a few wordings ("Very good",
# "Agree"), and three of its place: is the answer scale ordered, where on it is this option (-1 to 1), and how far from
# its middle.
EMBEDDING_DIM = 128
QUESTION_PART, OPTION_PART = slice(0, 75), slice(75, 125)

HIDDEN_DIM = 64  # width D of a network
NUM_BLOCKS = 2  # of option mixing, and with "attention" of attention
NUM_HEADS = 4  # H, of "attention"
RANK = 16  # R, learned features by which "residual" compares questions


@dataclass(frozen=True)
class OptionEmbedding:
    """Public features of every answer option; computed once by the server and shipped to the groups.

    Attributes:
        question_ids: the Q ids, unique, in the order of the rows below.
        value_QKE: (Q, K, E) float32, exactly 0 on padding.
        option_QK: (Q, K), True where a question has that option; every row has at least one.
    """

    question_ids: tuple[str, ...]
    value_QKE: npt.NDArray[np.float32]
    option_QK: BoolArray


def option_embedding(public: Catalogue) -> OptionEmbedding:
    """The server's catalogue as PluralLLM takes it."""
    ids = tuple(question.question_id for question in public.questions)
    return OptionEmbedding(ids, public.embedding_QKE, public.option_QK)


@dataclass(frozen=True)
class GroupData:
    """The private survey answers `D_g` of one group (paper, "PluralLLM Preference Probability Modeling").

    Attributes:
        group: its name.
        question_N: (N,) rows of the embedding table that the group answered, ascending, no row twice.
        answer_NK: (N, K) float32 answer distributions, exactly 0 on padding, each row sums to 1.
    """

    group: str
    question_N: IntArray
    answer_NK: npt.NDArray[np.float32]

    def __len__(self) -> int:
        """Number of questions N the group answered."""
        return len(self.question_N)

    def first(self, count: int) -> GroupData:
        """The first so many answers."""
        return GroupData(self.group, self.question_N[:count], self.answer_NK[:count])


def group_data(group: str, answers: Mapping[str, FloatArray], *, embedding: OptionEmbedding) -> GroupData:
    """Pad one group's answers and tie them to the embedding table.

    Args:
        group: the group's name, for messages and seeds.
        answers: question id -> distribution (K,) over that question's own options. Leave held-out questions out:
            whatever is kept may become context.
        embedding: the public table; fixes the order of questions and the padding.

    Returns:
        The answers to the table's questions in its order; N = 0 is possible.
    """
    rows = np.array([row for row, name in enumerate(embedding.question_ids) if name in answers], dtype=np.int64)
    answer_NK = np.zeros((len(rows), embedding.option_QK.shape[1]), dtype=np.float32)
    for padded_K, row in zip(answer_NK, rows, strict=True):
        answer_K = answers[embedding.question_ids[row]]
        padded_K[: len(answer_K)] = answer_K
    return GroupData(group, rows, answer_NK)
