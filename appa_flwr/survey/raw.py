"""An answer as a source has it, how the source is read, and why an answer can be left out.

Axis letters: K answer options.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from appa_flwr.survey.nonanswers import Missing
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS

Refusals = Literal["keep", "drop", "separate"]

SUM_TOLERANCE: Final = 0.02
NUM_SHOWN: Final = 4  # names in a note


class Reason(StrEnum):
    """Why an answer was left out; the text is what summaries and errors show."""

    EMPTY_ID = "empty question_id"
    EMPTY_TEXT = "empty question or option text"
    EMPTY_GROUP = "empty group"
    BAD_GROUP = "group's name with a semicolon, which stands between the names of several"
    BAD_OPTIONS = "options are not a list of texts"
    BAD_ORDINAL = "ordinal is not one number, or null, for each option"
    NUM_OPTIONS = f"not {MIN_OPTIONS} to {MAX_OPTIONS} options that are answers"
    OTHER_TEXT = "question text differs from the question's first row"
    OTHER_OPTIONS = "options differ from the question's first row"
    DUPLICATE = "question already answered by this group"
    BAD_DISTRIBUTION = "distribution is not a list of numbers, one for each option"
    NEGATIVE = "negative share in the distribution"
    ZERO = "nobody gave an answer that counts"
    SUM = f"distribution is off one by more than {SUM_TOLERANCE}"
    BAD_COUNT = "n is not a number of respondents"
    FEW_RESPONDENTS = "fewer respondents than the minimum"
    BAD_NUMBER = "not a plain number, such as 1200, 12.5 or 12,5 %"
    BAD_SELECTIONS = "selections are not a dict of groups and lists"
    OPTION_TWICE = "an option twice in a question's rows of one group"


class Unusable(Exception):
    """An answer cannot be used, for the `reason` it carries."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True)
class Reading:
    """How a source is read: the keys of [data] that concern it."""

    group_by: tuple[str, ...] = ()
    weight: str = ""
    missing: Missing = field(default_factory=Missing)
    refusals: Refusals = "keep"
    min_respondents: int = 0


class RawAnswer(NamedTuple):
    """One group's answer to one question, as a source has it.

    Attributes:
        row: of the source, from 1.
        question_id: empty = a hash of text and options.
        options: labels of the K options, non-answers among them.
        group: full name; empty for a question without an answer.
        shares: (K,), or why there are none.
        codes: of the options, where the source has codes; empty = the labels.
        ordinal: places of the options on a scale, None for one that has none.
        people: (K,) respondents who chose each option, where each is known.
        n: respondents behind the shares, where `people` is not known.
        refusal_rate: where refusals are not among the options.
    """

    row: int
    question_id: str
    text: str
    options: tuple[str, ...]
    group: str
    shares: Sequence[float] | Reason
    codes: tuple[str, ...] = ()
    ordinal: tuple[float | None, ...] | None = None
    people: Sequence[float] = ()
    n: float | None = None
    refusal_rate: float | None = None


def some(names: Iterable[str]) -> str:
    """The first few of these names, and how many more there are."""
    listed = list(dict.fromkeys(names))
    more = f" and {len(listed) - NUM_SHOWN} more" if len(listed) > NUM_SHOWN else ""
    return ", ".join(listed[:NUM_SHOWN]) + more
