"""The in-memory survey: public questions on one side, one group's private answers on the other.

Axis letters: G groups, Q questions, K answer options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Question:
    """A public survey question.

    Attributes:
        question_id: unique within a survey.
        text: the question as it was asked.
        options: the K >= 2 answer options in the survey's order.
        ordinal: position of each option on its scale (K numbers) where the answers are ordered, else None.
    """

    question_id: str
    text: str
    options: tuple[str, ...]
    ordinal: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Rejection:
    """One group's answer to one question of a source that was not used, and why."""

    source: str
    row: int
    question_id: str
    group: str
    reason: str


@dataclass(frozen=True)
class Survey:
    """Questions and, per group, the answer distributions that group has.

    Attributes:
        questions: in a stable order, ids unique.
        answers: group name -> question id -> distribution over that question's options, shape (K,), >= 0, sums to 1.
            Sparse: a group has only the questions it was asked.
        rejections: answers that were dropped while reading.
        respondents: group -> question id -> people behind a distribution, >= 0, where the source tells it.
        refusal_rates: group -> question id -> share of people who refused, in [0, 1], where refusals are kept
            apart from the distribution and the source tells it.
        layout: what was guessed of a file that is not in our own columns; empty otherwise.
    """

    questions: tuple[Question, ...]
    answers: Mapping[str, Mapping[str, FloatArray]]
    rejections: tuple[Rejection, ...] = field(default=())
    respondents: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    refusal_rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    layout: str = ""

    @property
    def groups(self) -> tuple[str, ...]:
        """Group names in the order they were asked for or first seen."""
        return tuple(self.answers)


@dataclass(frozen=True)
class Split:
    """Question ids used for training and those held out; the same for every group."""

    train: tuple[str, ...]
    test: tuple[str, ...]
