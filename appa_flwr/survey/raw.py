"""An answer as a source has it, how the source is read, and what is noted about it.

Axis letters: K answer options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from appa_flwr.core.text import clean
from appa_flwr.survey.nonanswers import NUM_SHOWN, Missing

Refusals = Literal["keep", "drop", "separate"]

SEPARATOR: Final = "/"  # between what a group is defined by and its name
# Pew and the World Values Survey spell these differently, and Pew changed some over the years.
ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {"Britain": "Great Britain", "S. Korea": "South Korea", "Czech Rep.": "Czechia", "Taiwan ROC": "Taiwan"}
)
LEFT_OUT: Final = "left out, "


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
    """One group's answer to one question, as a source has it."""

    row: int  # of the source, from 1
    question_id: str  # empty = a hash of text and options
    text: str
    options: tuple[str, ...] = ()  # labels of the K options, non-answers among them
    group: str = ""  # full name; empty for a question without an answer
    shares: Sequence[float] = ()  # (K,)
    problem: str = ""  # why there are no shares that can be used
    codes: tuple[str, ...] = ()  # of the options, where the source has codes; empty = the labels
    ordinal: tuple[float | None, ...] | None = None  # places of the options on a scale, None for one that has none
    people: Sequence[float] = ()  # (K,) respondents who chose each option, where each is known
    n: float | None = None  # respondents behind the shares, where `people` is not known
    refusal_rate: float | None = None  # where refusals are not among the options


class Notes:
    """What was decided about a source, and what was left out of it: sentences, and the names that each is about."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, sentence: str, *names: str) -> None:
        """Say a sentence once, whatever the number of names."""
        self._names.setdefault(sentence, []).extend(names)

    def leave_out(self, raw: RawAnswer, reason: Unusable) -> None:
        """Record an answer that cannot be used."""
        self.add(f"{LEFT_OUT}{reason}", f"row {raw.row} ({', '.join(filter(None, (raw.group, raw.question_id)))})")

    def lines(self, start: str = "") -> tuple[str, ...]:
        """The sentences that start so, each with the first few names."""
        pairs = [(sentence, names) for sentence, names in self._names.items() if sentence.startswith(start)]
        return tuple(f"{sentence}: {some(names)}" if names else sentence for sentence, names in pairs)


def some(names: Iterable[str]) -> str:
    """The first few of these different names, and how many more there are."""
    listed = list(dict.fromkeys(names))
    rest = f" and {len(listed) - NUM_SHOWN} more" if len(listed) > NUM_SHOWN else ""
    return ", ".join(listed[:NUM_SHOWN]) + rest


def group_name(group: str, attribute: str = "") -> str:
    """The name of a group: "attribute/group" where the source says what the group is defined by, or the group alone."""
    name = clean(group)
    name = ALIASES.get(name, name)
    return f"{clean(attribute)}{SEPARATOR}{name}" if attribute else name


def same(name: str) -> str:
    """What two spellings of one name share: case, blanks and a final full stop do not count."""
    return " ".join(clean(name).casefold().split()).removesuffix(".").rstrip()
