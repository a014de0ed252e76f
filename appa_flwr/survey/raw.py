"""Answers as a source has them, and one survey made of them: one spelling of each name, every number checked.

A single bad answer is left out with its reason; a code that may be no answer is an error. The first row of a question
decides its text, options and scale.

Axis letters: K answer options.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from appa_flwr.config.sections import DataSection
from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.core.text import clean
from appa_flwr.survey.frames import Frame, Notes
from appa_flwr.survey.nonanswers import Kind, Missing
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS, FloatArray, Question, Survey

SEPARATOR: Final = "/"  # between what a group is defined by and its name
# Pew and the World Values Survey spell these differently, and Pew changed some over the years.
ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {"Britain": "Great Britain", "S. Korea": "South Korea", "Czech Rep.": "Czechia", "Taiwan ROC": "Taiwan"}
)
LEFT_OUT: Final = "left out, "
SUM_TOLERANCE: Final = 0.02
_ID_CHARS: Final = 12  # of a hash
# A sum written as 0.98 or 1.02 is inside the tolerance, though its binary value lies a hair outside.
_ROUNDING: Final = 1e-9
# A vector that sums to one within this is left untouched, so writing and reading again changes no bit.
_ALREADY_ONE: Final = 1e-12
_NOBODY: Final = "nobody gave an answer that counts"


class Unusable(Exception):
    """An answer cannot be used; the text says why."""


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


def group_name(group: str, attribute: str = "") -> str:
    """The name of a group: "attribute/group" where the source says what the group is defined by, or the group alone."""
    name = clean(group)
    name = ALIASES.get(name, name)
    return f"{clean(attribute)}{SEPARATOR}{name}" if attribute else name


def same(name: str) -> str:
    """What two spellings of one name share: case, blanks and a final full stop do not count."""
    return " ".join(clean(name).casefold().split()).removesuffix(".").rstrip()


def settle(
    frame: Frame, raws: Sequence[RawAnswer], data: DataSection, missing: Missing, groups: Sequence[str] | None
) -> Survey:
    """Every usable answer of these groups, or of all; what was decided and left out goes to the frame's notes.

    Raises:
        UserError: codes that may be no answers, an unknown group, or a group or the whole source without a usable
            answer.
    """
    source, notes = frame.source, frame.notes
    rows: dict[str, list[RawAnswer]] = {}
    names: dict[str, str] = {}  # what the spellings of a group's name share -> its first spelling
    for raw in raws:
        key = clean(raw.question_id) or _question_hash(raw)
        rows.setdefault(key, []).append(raw._replace(question_id=key))
        if raw.group:
            _note_spelling(notes, raw.group, names.setdefault(same(raw.group), raw.group))
    read = {key: _ReadQuestion(mine, data, missing, notes) for key, mine in rows.items()}
    asked = {key: question.left for key, question in read.items() if not question.problem}
    missing.check(source, {key: read[key].labels for key in asked})
    # Public questions alone, as the server of a deployment has them, have no group, whatever the run's are called.
    wanted = [group_name(name) for name in groups] if groups is not None and names else [*names.values()]
    for name in wanted:
        if name not in names.values():
            raise UserError(f"{source}: {unknown_name('group', name, valid=names.values())}")
    answers: dict[str, dict[str, FloatArray]] = {name: {} for name in wanted}
    respondents: dict[str, dict[str, float]] = {name: {} for name in wanted}
    for key, mine in rows.items():
        for raw in mine:
            group = names.get(same(raw.group), "")
            if group and group not in answers:
                continue
            try:
                read[key].check(raw)
                if group and key in answers[group]:
                    raise Unusable("question already answered by this group")
                if group:
                    answers[group][key], n = read[key].answer(raw)
                    respondents[group] |= {} if n is None else {key: n}
            except Unusable as reason:
                place = ", ".join(filter(None, (raw.group, raw.question_id)))
                notes.add(f"{LEFT_OUT}{reason}", f"row {raw.row} ({place})")
    causes = "; ".join(notes.lines(LEFT_OUT))
    if groups is not None and (without := [name for name in wanted if not answers[name]]):
        raise UserError(f"{source}: group {without[0]!r} has no usable answer ({causes})")
    answers = {name: mine for name, mine in answers.items() if mine}
    if not asked or (names and not answers):
        raise UserError(f"{source}: no usable {'answer' if names else 'question'} ({causes})")
    answered = {key for mine in answers.values() for key in mine} if names else set(asked)
    questions = tuple(question for key, question in asked.items() if key in answered)
    extra = tuple(question for key, question in asked.items() if key not in answered)
    return Survey(questions, answers, {name: respondents[name] for name in answers}, extra)


def _question_hash(raw: RawAnswer) -> str:
    """An id for a question that has none: the same wherever text, options and their order are."""
    return hashlib.sha256(json.dumps([raw.text, raw.options]).encode()).hexdigest()[:_ID_CHARS]


def _note_spelling(notes: Notes, name: str, first: str) -> None:
    if name != first:
        notes.add("options and groups that are one", f"{name!r} is {first!r}")


class _ReadQuestion:
    """A question as its first row with options has it, and what becomes of these.

    Attributes:
        left: the question with the options that are left.
        labels: code -> label of the answers.
        problem: why none of its rows can be used; empty where they can.
    """

    def __init__(self, rows: Sequence[RawAnswer], data: DataSection, missing: Missing, notes: Notes) -> None:
        first = next((raw for raw in rows if raw.options), rows[0])
        options: dict[str, tuple[str, float | None]] = {}  # what its spellings share -> label and place on the scale
        self._first, self._least, self._notes, self.labels = first, data.min_respondents, notes, dict[str, str]()
        self._kind_K: list[Kind] = []
        self._place_K: list[int | None] = []  # of each of the source's options among those left
        policy = {"keep": "kept as options", "drop": "dropped"}[data.refusals]
        sentences = {"none": "left out as no answers", "refusal": f"refusals, {policy} (data.refusals)"}
        cleaned = [*map(clean, first.options)]
        for label, code, place in zip(cleaned, first.codes or cleaned, first.ordinal or repeat(None), strict=False):
            kind = missing.kind(first.question_id, code, label)
            self._kind_K.append(kind)
            if kind == "answer":
                self.labels[code] = label
            else:
                notes.add(sentences[kind], label)
            if kind == "none" or (kind == "refusal" and data.refusals == "drop"):
                self._place_K.append(None)
                continue
            if (ours := options.setdefault(same(label), (label, place))[0]) != label:
                _note_spelling(notes, label, ours)
            elif [*options].index(same(label)) in self._place_K:
                notes.add("options and groups that are one", f"several codes are {label!r}")
            self._place_K.append([*options].index(same(label)))
        self.problem = ""
        if not clean(first.text) or not all(cleaned):
            self.problem = "empty question or option text"
        elif not MIN_OPTIONS <= len(options) <= MAX_OPTIONS:
            self.problem = f"not {MIN_OPTIONS} to {MAX_OPTIONS} options that are answers"
        # No scale where one of the options left is not on it, or all share one place on it.
        known = tuple(place for _, place in options.values() if place is not None)
        scale = known if len(known) == len(options) and len(set(known)) > 1 else None
        self.left = Question(first.question_id, clean(first.text), tuple(label for label, _ in options.values()), scale)

    def check(self, raw: RawAnswer) -> None:
        """Raise `Unusable` if a row cannot be used, or has other text or options than the first one."""
        if problem := raw.problem or self.problem:
            raise Unusable(problem)
        if same(raw.text) != same(self._first.text):
            raise Unusable("question text differs from the question's first row")
        if raw.options != self._first.options:
            if [*map(same, raw.options)] != [*map(same, self._first.options)]:
                raise Unusable("options differ from the question's first row")
            for label, ours in zip(map(clean, raw.options), map(clean, self._first.options), strict=True):
                _note_spelling(self._notes, label, ours)

    def answer(self, raw: RawAnswer) -> tuple[FloatArray, float | None]:
        """Shares over the options that are left, and respondents; or raise `Unusable`."""
        if len(raw.shares) != len(raw.options) or not all(map(math.isfinite, raw.shares)):
            raise Unusable("distribution is not a list of numbers, one for each option")
        if min(raw.shares) < 0.0:
            raise Unusable("negative share in the distribution")
        if abs(math.fsum(raw.shares) - 1.0) > SUM_TOLERANCE + _ROUNDING:
            raise Unusable(f"distribution is off one by more than {SUM_TOLERANCE}" if any(raw.shares) else _NOBODY)
        n = raw.n
        if raw.people:  # who refused is not counted, whatever becomes of the refusals
            n = float(sum(count for count, kind in zip(raw.people, self._kind_K, strict=True) if kind == "answer"))
        if n is not None and n < self._least:
            raise Unusable("fewer respondents than the minimum")
        shares = np.zeros(len(self.left.options))
        for share, place in zip(raw.shares, self._place_K, strict=True):
            if place is not None:
                shares[place] += share
        total = math.fsum(shares)
        if total <= 0.0:
            raise Unusable(_NOBODY)
        return shares if abs(total - 1.0) <= _ALREADY_ONE else shares / total, n
