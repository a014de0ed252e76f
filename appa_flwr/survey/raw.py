"""An answer as a source has it, and how the source is read.

Axis letters: K answer options.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from appa_flwr.survey.nonanswers import Missing

Refusals = Literal["keep", "drop", "separate"]

NUM_SHOWN: Final = 4  # names in a note
LEFT_OUT: Final = "left out, "
BAD_DISTRIBUTION: Final = "distribution is not a list of numbers, one for each option"
NEGATIVE: Final = "negative share in the distribution"


class Unusable(Exception):
    """An answer cannot be used; the text says why."""


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
        shares: (K,).
        problem: why there are no shares that can be used.
        codes: of the options, where the source has codes; empty = the labels.
        ordinal: places of the options on a scale, None for one that has none.
        people: (K,) respondents who chose each option, where each is known.
        n: respondents behind the shares, where `people` is not known.
        refusal_rate: where refusals are not among the options.
    """

    row: int
    question_id: str
    text: str
    options: tuple[str, ...] = ()
    group: str = ""
    shares: Sequence[float] = ()
    problem: str = ""
    codes: tuple[str, ...] = ()
    ordinal: tuple[float | None, ...] | None = None
    people: Sequence[float] = ()
    n: float | None = None
    refusal_rate: float | None = None


class Notes:
    """What was decided about a source, and what was left out of it: sentences, and the names that each is about."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, sentence: str, *names: str) -> None:
        """Say a sentence once, whatever the number of names."""
        self._names.setdefault(sentence, []).extend(names)

    def leave_out(self, raw: RawAnswer, reason: Unusable) -> None:
        """Record an answer that cannot be used."""
        what = f" ({raw.group}, {raw.question_id})" if raw.group else ""
        self.add(f"{LEFT_OUT}{reason}", f"row {raw.row}{what}")

    def lines(self, start: str = "") -> tuple[str, ...]:
        """The sentences that start so, each with the first few names."""
        return tuple(
            f"{sentence}: {some(names)}" if names else sentence
            for sentence, names in self._names.items()
            if sentence.startswith(start)
        )


def some(names: Iterable[str], *, between: str = ", ") -> str:
    """The first few of these different names, and how many more there are."""
    listed = list(dict.fromkeys(names))
    rest = f" and {len(listed) - NUM_SHOWN} more" if len(listed) > NUM_SHOWN else ""
    return between.join(listed[:NUM_SHOWN]) + rest
