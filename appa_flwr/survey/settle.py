"""Answers as a source has them, made one survey: one spelling of each name, no non-answers, every number checked.

A single bad answer is left out with its reason; a code that may be no answer is an error. The first row of a question
decides its text, options and scale.

Axis letters: K answer options.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.core.text import clean
from appa_flwr.survey.names import group_name, same
from appa_flwr.survey.nonanswers import Kind
from appa_flwr.survey.raw import BAD_DISTRIBUTION, NEGATIVE, RawAnswer, Reading, Unusable, some
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS, About, FloatArray, Question, Survey

SUM_TOLERANCE: Final = 0.02
_ID_CHARS: Final = 12  # of a hash
# A sum written as 0.98 or 1.02 is inside the tolerance, though its binary value lies a hair outside.
_ROUNDING: Final = 1e-9
# A vector that sums to one within this is left untouched, so writing and reading again changes no bit.
_ALREADY_ONE: Final = 1e-12
_NOBODY: Final = "nobody gave an answer that counts"


class _Plan(NamedTuple):
    """What becomes of the options of a question's rows.

    Attributes:
        question: with the options that are left.
        place_K: each of the source's options' place among them; None where it is left out.
        kind_K: what each is.
    """

    question: Question
    place_K: tuple[int | None, ...]
    kind_K: tuple[Kind, ...]


class _Answer(NamedTuple):
    """Shares over the options that are left, respondents, and the refusal rate."""

    shares: FloatArray
    n: float | None
    refusal_rate: float | None


def settle(source: str, reading: Reading, raws: Sequence[RawAnswer], groups: Sequence[str] | None) -> Survey:
    """Every usable answer of these groups, or of all.

    Raises:
        UserError: codes that may be no answers, an unknown group, or a group or the whole source without a usable
            answer.
    """
    raws = [raw._replace(question_id=raw.question_id or question_hash(raw.text, raw.options)) for raw in raws]
    settling = _Settling(reading, raws)
    _refuse_doubtful_codes(source, reading, settling.first, raws)
    known = dict.fromkeys(settling.group(raw.group) for raw in raws if raw.group)
    # Public questions alone, as the server of a deployment has them, have no group, whatever the run's are called.
    wanted = [group_name(name) for name in groups] if groups is not None and known else list(known)
    for name in wanted:
        if name not in known:
            raise UserError(f"{source}: {unknown_name('group', name, valid=known)}")
    answers: dict[str, dict[str, _Answer]] = {name: {} for name in wanted}
    asked: dict[str, Question] = {}
    for raw in raws:
        group = settling.group(raw.group) if raw.group else ""
        try:
            if raw.problem and not (raw.options and group):
                raise Unusable(raw.problem)
            plan = settling.plan(raw.question_id, raw.text, raw.options)
            asked.setdefault(raw.question_id, plan.question)
            if group in answers:
                if raw.question_id in answers[group]:
                    raise Unusable("question already answered by this group")
                answers[group][raw.question_id] = _answer(raw, plan, reading)
        except Unusable as error:
            if group in answers or not group:
                settling.left_out[str(error)].append(raw)
    if groups is not None and (without := [name for name in wanted if not answers[name]]):
        raise UserError(f"{source}: group {without[0]!r} has no usable answer ({settling.causes()})")
    answers = {name: mine for name, mine in answers.items() if mine}
    if not asked or (known and not answers):
        raise UserError(f"{source}: no usable {'answer' if known else 'question'} ({settling.causes()})")
    answered = {key for mine in answers.values() for key in mine} if known else set(asked)
    return Survey(
        tuple(question for key, question in asked.items() if key in answered),
        _each(answers, "shares"),
        respondents=_each(answers, "n"),
        refusal_rates=_each(answers, "refusal_rate"),
        extra=tuple(question for key, question in asked.items() if key not in answered),
        about=About(notes=tuple(settling.notes())),
    )


def _each(answers: Mapping[str, Mapping[str, _Answer]], name: str) -> dict[str, dict[str, Any]]:
    """A field of each answer that has it."""
    return {
        group: {key: value for key, answer in mine.items() if (value := getattr(answer, name)) is not None}
        for group, mine in answers.items()
    }


def question_hash(text: str, options: Sequence[str]) -> str:
    """An id for a question that has none: the same wherever text, options and their order are."""
    return hashlib.sha256(json.dumps([text, options]).encode()).hexdigest()[:_ID_CHARS]


class _Settling:
    """One spelling of each group and option, one fate of each option, and the record of what was left out.

    Attributes:
        first: question id -> its first row with options.
        left_out: reason -> rows.
    """

    def __init__(self, reading: Reading, raws: Sequence[RawAnswer]) -> None:
        self.reading = reading
        self.first: dict[str, RawAnswer] = {}
        for raw in raws:
            if raw.options:
                self.first.setdefault(raw.question_id, raw)
        self.left_out: defaultdict[str, list[RawAnswer]] = defaultdict(list)
        self._groups: dict[str, str] = {}
        self._noted: dict[str, list[str]] = {"one": [], "none": [], "refusal": []}
        self.plan = functools.cache(self._plan)  # most rows of a question have the same text and options

    def group(self, name: str) -> str:
        """The first spelling of a group's name."""
        return self._one(name, self._groups.setdefault(same(name), name))

    def _one(self, name: str, first: str) -> str:
        if name != first:
            self._noted["one"].append(f"{name!r} is {first!r}")
        return first

    def _plan(self, question_id: str, text: str, options: tuple[str, ...]) -> _Plan:
        """What becomes of a row's options, which are those of the question's first row.

        Raises:
            Unusable: it lacks a text or has others than the first row, or too few or too many options are left.
        """
        if not clean(question_id):
            raise Unusable("empty question_id")
        if not clean(text) or not all(map(clean, options)):
            raise Unusable("empty question or option text")
        first = self.first.get(question_id, RawAnswer(0, question_id, text))
        if same(text) != same(first.text):
            raise Unusable("question text differs from the question's first row")
        if [*map(same, options)] != [*map(same, first.options)]:
            raise Unusable("options differ from the question's first row")
        for label, ours in zip(map(clean, options), map(clean, first.options), strict=True):
            self._one(label, ours)
        return self._fate(first)

    def _fate(self, first: RawAnswer) -> _Plan:
        index: dict[str, int] = {}
        options: list[str] = []
        scale: list[float | None] = []
        place_K: list[int | None] = []
        kind_K: list[Kind] = []
        for k, (label, code) in enumerate(zip(map(clean, first.options), first.codes or first.options, strict=True)):
            kind = self.reading.missing.kind(first.question_id, code, label)
            kind_K.append(kind)
            if kind != "answer":
                self._noted[kind].append(label)
            if kind == "none" or (kind == "refusal" and self.reading.refusals != "keep"):
                place_K.append(None)
                continue
            place = index.setdefault(same(label), len(options))
            place_K.append(place)
            if place == len(options):
                options.append(label)
                scale.append(first.ordinal[k] if first.ordinal else None)
            elif label == options[place]:
                self._noted["one"].append(f"several codes are {label!r}")
            else:
                self._one(label, options[place])
        if not MIN_OPTIONS <= len(options) <= MAX_OPTIONS:
            raise Unusable(f"not {MIN_OPTIONS} to {MAX_OPTIONS} options that are answers")
        # No scale where one of the options left is not on it, or all share one place on it.
        known = tuple(place for place in scale if place is not None)
        ordinal = known if len(known) == len(options) and len(set(known)) > 1 else None
        question = Question(clean(first.question_id), clean(first.text), tuple(options), ordinal)
        return _Plan(question, tuple(place_K), tuple(kind_K))

    def causes(self) -> str:
        """The reasons of what was left out, each with its first row."""
        return "; ".join(
            f"{len(raws)} x {reason}, first row {raws[0].row}"
            + (f" ({raws[0].group}, {raws[0].question_id})" if raws[0].group else "")
            for reason, raws in self.left_out.items()
        )

    def notes(self) -> list[str]:
        """What was decided about names and options, and what was left out."""
        policy = {"keep": "kept as options", "drop": "dropped", "separate": "counted apart"}[self.reading.refusals]
        begin = {
            "one": "options and groups that are one",
            "none": "left out as no answers",
            "refusal": f"refusals, {policy} (data.refusals)",
        }
        notes = [f"{begin[kind]}: {some(names)}" for kind, names in self._noted.items() if names]
        return [*notes, f"answers left out: {self.causes()}"] if self.left_out else notes


def _answer(raw: RawAnswer, plan: _Plan, reading: Reading) -> _Answer:
    """Shares over the options that are left, respondents, and the refusal rate.

    Raises:
        Unusable: why the answer does not count.
    """
    if raw.problem:
        raise Unusable(raw.problem)
    if len(raw.shares) != len(raw.options) or not all(map(math.isfinite, raw.shares)):
        raise Unusable(BAD_DISTRIBUTION)
    if min(raw.shares) < 0.0:
        raise Unusable(NEGATIVE)
    if abs(math.fsum(raw.shares) - 1.0) > SUM_TOLERANCE + _ROUNDING:
        raise Unusable(f"distribution is off one by more than {SUM_TOLERANCE}" if any(raw.shares) else _NOBODY)
    n = raw.n
    if raw.people:  # who refused is not counted, whatever becomes of the refusals
        n = float(sum(count for count, kind in zip(raw.people, plan.kind_K, strict=True) if kind == "answer"))
    if n is not None and n < reading.min_respondents:
        raise Unusable("fewer respondents than the minimum")
    shares = np.zeros(len(plan.question.options))
    refused = 0.0
    for share, place, kind in zip(raw.shares, plan.place_K, plan.kind_K, strict=True):
        if place is not None:
            shares[place] += share
        elif kind == "refusal":
            refused += share
    total = math.fsum(shares)
    if total <= 0.0:
        raise Unusable(_NOBODY)
    rate = None
    if reading.refusals == "separate":
        rate = refused / (total + refused) if "refusal" in plan.kind_K else raw.refusal_rate
    return _Answer(shares if abs(total - 1.0) <= _ALREADY_ONE else shares / total, n, rate)


def _refuse_doubtful_codes(
    source: str, reading: Reading, first: Mapping[str, RawAnswer], raws: Sequence[RawAnswer]
) -> None:
    """Raise the error about codes that look like missing ones, and that nobody has decided about."""
    doubtful: dict[str, list[str]] = {}
    certain: set[str] = set()  # codes that are answers beyond doubt to some question
    for name, raw in first.items():
        kind = functools.partial(reading.missing.kind, name)
        labels = {code: label for code, label in raw.labels.items() if kind(code, label) == "answer"}
        if codes := reading.missing.doubtful(name, labels):
            doubtful[name] = codes
        certain |= labels.keys() - {*codes}
    if not doubtful:
        return
    shares: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for raw in raws:
        if raw.question_id in doubtful and len(raw.shares) == len(raw.options):
            for code, share in zip(raw.codes or raw.options, raw.shares, strict=True):
                shares[raw.question_id, code].append(share)
    listed = [
        f"{name} " + ", ".join(f"{code} ({np.mean(shares[name, code] or [0.0]):.1%} of answers)" for code in codes)
        for name, codes in doubtful.items()
    ]
    every = sorted({code for codes in doubtful.values() for code in codes}, key=lambda code: (len(code), code))
    proposed = ",".join(every)
    if certain & {*every}:
        proposed = ";".join(f"{name}={','.join(codes)}" for name, codes in doubtful.items())
    raise UserError(
        f"{source}: codes without a label that look like no answers: {some(listed, between='; ', more='columns ')}. "
        f'Say data.missing="{proposed}" to leave them out, or data.missing=none if they are answers'
    )
