"""The in-memory survey: public questions on one side, one group's private answers on the other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from appa_flwr.core.arrays import FloatArray

MIN_OPTIONS, MAX_OPTIONS = 2, 30  # of a question
UNITS = 64  # in a weight of 1, where noise is added


@dataclass(frozen=True)
class Question:
    """A public survey question."""

    question_id: str  # unique within a survey
    text: str
    options: tuple[str, ...]  # the K >= 2 answer options in the survey's order
    ordinal: tuple[float, ...] | None = None  # (K,) positions on a scale, if the answers are ordered

    def matches(self, other: "Question") -> bool:
        """True if both have the same words and options, so that answers are comparable; two files may share an id."""
        return self.text.split() == other.text.split() and self.options == other.options


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Noise:
    """What was added, once, to the counts of a file of respondents, and what that promises each of them."""

    epsilon: _Positive
    delta: Annotated[float, Field(gt=0, lt=1)]
    sd: _Positive  # standard deviation of a count's noise, in people
    questions: Annotated[int, Field(gt=0)]  # of the codebook: the most answers of a respondent
    columns: Annotated[int, Field(gt=0)]  # of groups: the most groups of a respondent
    cap: _Positive = 1.0  # the largest weight of a respondent, in people
    opendp: str = ""  # version of the library
    unit: Literal["respondent"] = "respondent"
    mechanism: Literal["discrete Gaussian"] = "discrete Gaussian"
    total: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # `spent`; 0 in older files

    @property
    def spent(self) -> float:
        """The epsilon of this release and the earlier ones of its codebook together."""
        return max(self.epsilon, self.total)

    @property
    def sensitivity(self) -> float:
        """The most, in people, by which the counts of neighbouring files differ in L2; rounded up."""
        return math.nextafter(self.cap * math.sqrt(self.questions * self.columns), math.inf)

    def sentence(self) -> str:
        """Text for a person, such as "epsilon 4 a respondent (noise of 8 people)"."""
        return noise_sentence(self.spent, self.sd)


def noise_sentence(epsilon: float, sd: float) -> str:
    """See `Noise.sentence`."""
    people = f"{sd:.1f}".removesuffix(".0")
    return f"epsilon {epsilon:.4g} a respondent (noise of {people} people)"


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
    noise: Noise | None = None  # None = exact answers

    @property
    def precision(self) -> str:
        """Say whether the answers are exact, or what noise they have."""
        return "exact answers" if self.noise is None else self.noise.sentence()

    def sentence(self) -> str:
        """Join source, hash, groups, weight, missing codes and the reader's decisions to one text."""
        source = self.source + (f" (sha256 {self.sha256[:12]})" if self.sha256 else "")
        settings = {"with": self.precision} if self.noise else {}
        settings |= {"groups by": self.group_by, "weight": self.weight, "missing codes": self.missing}
        return "; ".join((source, *(f"{name} {value}" for name, value in settings.items() if value), *self.notes))


@dataclass(frozen=True)
class Survey:
    """Questions and each group's answer distributions, of those questions only that the group was asked."""

    questions: tuple[Question, ...]  # in a stable order, ids unique
    # group name -> question id -> distribution over that question's options (K,), >= 0, sums to 1
    answers: Mapping[str, Mapping[str, FloatArray]]
    # group -> question id -> number of respondents, >= 0, if the source states it
    respondents: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    extra: tuple[Question, ...] = ()  # which no group has answered; the policy is trained on them with predictions
    about: About = About()

    @property
    def groups(self) -> tuple[str, ...]:
        """Group names in the requested order, or else in the order of the source."""
        return tuple(self.answers)


def answer_table(questions: Sequence[Question], answers: Mapping[str, FloatArray], num_options: int) -> FloatArray:
    """A group's answers by question id as a table (Q, K): 0 on padding, NaN for a question without an answer."""
    table_QK = np.full((len(questions), num_options), np.nan)
    for row_K, question in zip(table_QK, questions, strict=True):
        if (answer_K := answers.get(question.question_id)) is not None:
            row_K[:] = 0.0
            row_K[: len(answer_K)] = answer_K
    return table_QK


@dataclass(frozen=True)
class Split:
    """Question ids used for training and those held out; the same for every group."""

    train: tuple[str, ...]
    test: tuple[str, ...]
