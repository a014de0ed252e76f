"""Inputs and sizes of PluralLLM: one group's private answers to the questions of the public catalogue (NumPy only).

A client process that only looks up rewards imports neither torch nor scikit-learn through this module.

Axis letters: Q questions, K answer options (padded to the widest question), E embedding, N answered questions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appa_flwr.core.arrays import BoolArray, FloatArray, IntArray
from appa_flwr.protocol.queries import Catalogue
from appa_flwr.survey.split import position
from appa_flwr.survey.types import answer_table

# Features of an option: 75 of its question's text, 50 of its own, since options repeat a few wordings ("Very good",
# "Agree"), and three of its place: is the answer scale ordered, where on it is this option (-1 to 1), and how far from
# its middle.
EMBEDDING_DIM = 128
QUESTION_PART, OPTION_PART = slice(0, 75), slice(75, 125)

HIDDEN_DIM = 64  # width D of a network
NUM_BLOCKS = 2  # of option mixing, and with "attention" of attention
NUM_HEADS = 4  # H, of "attention"
RANK = 16  # R, learned features by which "residual" compares questions
VALIDATION_FRACTION = 0.125  # share of validation questions among the training questions, on average


@dataclass(frozen=True)
class GroupData:
    """The private survey answers `D_g` of one group (paper, "PluralLLM Preference Probability Modeling")."""

    group: str
    question_N: IntArray  # positions of the questions that the group answered, ascending, no row twice
    answer_NK: npt.NDArray[np.float32]  # distributions, exactly 0 on padding, each row sums to 1

    def __len__(self) -> int:
        """Number of questions N the group answered."""
        return len(self.question_N)

    def first(self, count: int) -> "GroupData":
        """The first `count` answers."""
        return GroupData(self.group, self.question_N[:count], self.answer_NK[:count])

    def only(self, part_Q: BoolArray) -> "GroupData":
        """The answers to a part of the public questions."""
        part_N = part_Q[self.question_N]
        return GroupData(self.group, self.question_N[part_N], self.answer_NK[part_N])


def validation_questions(public: Catalogue) -> BoolArray:
    """Mark the training questions (Q,) whose answers choose the shares of the views of "residual".

    PluralLLM is trained on them too, but only after the choice. A hash of the text alone decides. There are none if
    all training questions would be.
    """
    position_Q = np.array([position(question.text, "validation") for question in public.questions])
    rest_Q = public.train_Q & (position_Q >= VALIDATION_FRACTION)
    return public.train_Q & ~rest_Q if rest_Q.any() else np.zeros_like(rest_Q)


def known_answers(group: str, table_QK: FloatArray) -> GroupData:
    """The rows of a group's table of answers that are not NaN."""
    rows = np.flatnonzero(~np.isnan(table_QK).any(axis=1))
    return GroupData(group, rows, table_QK[rows].astype(np.float32))


def group_data(group: str, answers: Mapping[str, FloatArray], *, public: Catalogue) -> GroupData:
    """Pad one group's answers, question id -> distribution (K,), and match them to the public questions.

    Leave out held-out questions if the result becomes context. N = 0 is possible.
    """
    return known_answers(group, answer_table(public.questions, answers, public.option_QK.shape[1]))
