"""The in-memory survey: public questions on one side, one group's private answers on the other.

Axis letters: G groups, Q questions, K answer options.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

MIN_OPTIONS, MAX_OPTIONS = 2, 30  # of a question


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

    def matches(self, other: "Question") -> bool:
        """True if both have the same words and the same options in order, so that answers to both are comparable.

        Ids are not compared, since two files may use the id Q1 for different questions.
        """
        return self.text.split() == other.text.split() and self.options == other.options


@dataclass(frozen=True)
class About:
    """Where a survey comes from, and how its source was read."""

    source: str = ""  # the name of the file or folder, or of a published set
    sha256: str = ""  # hash of the source; empty if the source has no files
    group_by: str = ""  # columns of groups, empty for a table of shares
    weight: str = ""  # column of weights; empty = none
    missing: str = ""  # `data.missing`
    refusals: str = ""  # `data.refusals`
    notes: tuple[str, ...] = ()  # decisions of the reader, one sentence each

    def sentence(self) -> str:
        """Join source, hash, groups, weight, missing codes and the reader's decisions to one text."""
        parts = [self.source + (f" (sha256 {self.sha256[:12]})" if self.sha256 else "")]
        parts += [f"groups by {self.group_by}"] if self.group_by else []
        parts += [f"weight {self.weight}"] if self.weight else []
        parts += [f"missing codes {self.missing}"] if self.missing else []
        return "; ".join((*parts, *self.notes))


@dataclass(frozen=True)
class Survey:
    """Questions and each group's answer distributions.

    Attributes:
        questions: in a stable order, ids unique.
        answers: group name -> question id -> distribution over that question's options, shape (K,), >= 0, sums to 1.
            Sparse: a group has only the questions it was asked.
        respondents: group -> question id -> number of respondents, >= 0, if the source states it.
        extra: questions that none of the groups has answered; the policy is trained on them with predictions.
        about: the source, and how it was read.
    """

    questions: tuple[Question, ...]
    answers: Mapping[str, Mapping[str, FloatArray]]
    respondents: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    extra: tuple[Question, ...] = ()
    about: About = About()

    @property
    def groups(self) -> tuple[str, ...]:
        """Group names in the requested order, or else in the order of the source."""
        return tuple(self.answers)


@dataclass(frozen=True)
class Split:
    """Question ids used for training and those held out; the same for every group."""

    train: tuple[str, ...]
    test: tuple[str, ...]
