"""Answers as a source has them, made one survey: one spelling of each name, no non-answers, every number checked.

A single bad answer is left out with its reason; a code that may be no answer is an error. The first row of a question
decides its text, options and scale.

Axis letters: K answer options.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.core.text import clean
from appa_flwr.survey.names import group_name, same
from appa_flwr.survey.nonanswers import kind_of, looks_missing
from appa_flwr.survey.raw import NUM_SHOWN, SUM_TOLERANCE, RawAnswer, Reading, Reason, Unusable, some
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS, About, FloatArray, Question, Survey

_ID_CHARS: Final = 12  # of a hash
# A sum written as 0.98 or 1.02 is inside the tolerance, though its binary value lies a hair outside.
_ROUNDING: Final = 1e-9
# A vector that sums to one within this is left untouched, so writing and reading again changes no bit.
_ALREADY_ONE: Final = 1e-12


class _Place(NamedTuple):
    """Options of a source, and what becomes of each.

    Attributes:
        question: with the options that are left.
        position_K: index of each of the source's options among them; `_REFUSED` or `_LEFT_OUT` where it is not there.
        refusal_K: which options are refusals, kept or not.
    """

    question: Question
    position_K: tuple[int, ...]
    refusal_K: tuple[bool, ...]


_REFUSED, _LEFT_OUT = -1, -2


def question_hash(text: str, options: Sequence[str]) -> str:
    """An id for a question that has none: the same wherever text, options and their order are."""
    return hashlib.sha256(json.dumps([text, options]).encode()).hexdigest()[:_ID_CHARS]


class Settling:
    """Settles the answers of one source."""

    def __init__(self, source: str, reading: Reading) -> None:
        self.source, self.reading = source, reading
        self._first: dict[str, RawAnswer] = {}
        self._places: dict[tuple[object, ...], _Place | Reason] = {}
        self._groups: dict[str, str] = {}
        self._counted: dict[str, Counter[str]] = {"one": Counter(), "none": Counter(), "refusal": Counter()}
        self._left_out: dict[Reason, list[RawAnswer]] = {}

    def survey(self, raws: Sequence[RawAnswer], groups: Sequence[str] | None) -> Survey:
        """Every usable answer of these groups, or of all.

        Raises:
            UserError: codes that may be no answers, an unknown group, or a group or the whole source without a usable
                answer.
        """
        raws = [raw._replace(question_id=raw.question_id or question_hash(raw.text, raw.options)) for raw in raws]
        for raw in raws:
            if raw.options:
                self._first.setdefault(raw.question_id, raw)
        self._refuse_doubtful_codes(raws)
        known = dict.fromkeys(self._group(raw.group) for raw in raws if raw.group)
        # Public questions alone, as the server of a deployment has them, have no group, whatever the run's are called.
        wanted = [group_name(name) for name in groups] if groups is not None and known else list(known)
        for name in wanted:
            if name not in known:
                raise UserError(f"{self.source}: {unknown_name('group', name, valid=known)}")
        answers: dict[str, dict[str, FloatArray]] = {name: {} for name in wanted}
        people: dict[str, dict[str, float]] = {name: {} for name in wanted}
        rates: dict[str, dict[str, float]] = {name: {} for name in wanted}
        asked: dict[str, Question] = {}
        for raw in raws:
            group = self._group(raw.group) if raw.group else ""
            try:
                if isinstance(raw.shares, Reason) and not (raw.options and raw.group):
                    raise Unusable(raw.shares)
                place = self._place(raw)
                asked.setdefault(raw.question_id, place.question)
                if group not in answers:
                    continue
                if raw.question_id in answers[group]:
                    raise Unusable(Reason.DUPLICATE)
                shares, n, rate = self._answer(raw, place)
            except Unusable as error:
                if group in answers or not group:
                    self._left_out.setdefault(error.reason, []).append(raw)
                continue
            answers[group][raw.question_id] = shares
            people[group] |= {} if n is None else {raw.question_id: n}
            rates[group] |= {} if rate is None else {raw.question_id: rate}
        if groups is not None and (without := [name for name in wanted if not answers[name]]):
            raise UserError(f"{self.source}: group {without[0]!r} has no usable answer ({self._causes()})")
        answers = {name: mine for name, mine in answers.items() if mine}
        if not asked or (known and not answers):
            raise UserError(f"{self.source}: no usable {'answer' if known else 'question'} ({self._causes()})")
        answered = {key for mine in answers.values() for key in mine} if known else set(asked)
        return Survey(
            tuple(question for key, question in asked.items() if key in answered),
            answers,
            respondents={name: people[name] for name in answers},
            refusal_rates={name: rates[name] for name in answers},
            extra=tuple(question for key, question in asked.items() if key not in answered),
            about=About(notes=tuple(self._decisions())),
        )

    def _group(self, name: str) -> str:
        first = self._groups.setdefault(same(name), name)
        if first != name:
            self._counted["one"][f"{name!r} is {first!r}"] += 1
        return first

    def _place(self, raw: RawAnswer) -> _Place:
        """What becomes of the options of a row, which must be those of its question's first row.

        Raises:
            Unusable: they are not, or too few are left.
        """
        key = (raw.question_id, raw.text, raw.options, raw.codes)
        if key not in self._places:
            try:
                self._places[key] = self._new_place(raw)
            except Unusable as error:
                self._places[key] = error.reason
        place = self._places[key]
        if isinstance(place, Reason):
            raise Unusable(place)
        return place

    def _new_place(self, raw: RawAnswer) -> _Place:
        first = self._first[raw.question_id]
        if not clean(raw.question_id):
            raise Unusable(Reason.EMPTY_ID)
        if not clean(raw.text) or not all(map(clean, raw.options)):
            raise Unusable(Reason.EMPTY_TEXT)
        if same(raw.text) != same(first.text):
            raise Unusable(Reason.OTHER_TEXT)
        if [*map(same, raw.options)] != [*map(same, first.options)]:
            raise Unusable(Reason.OTHER_OPTIONS)
        index: dict[str, int] = {}
        options: list[str] = []
        placed: list[float | None] = []
        position_K: list[int] = []
        refusal_K: list[bool] = []
        for k, (label, code) in enumerate(zip(map(clean, first.options), first.codes or first.options, strict=True)):
            kind = "none" if self.reading.missing.holds(raw.question_id, code, label) else kind_of(label)
            refusal_K.append(kind == "refusal")
            if kind != "answer":
                self._counted[kind][label] += raw is first
            if kind == "none" or (kind == "refusal" and self.reading.refusals != "keep"):
                position_K.append(_REFUSED if kind == "refusal" else _LEFT_OUT)
                continue
            if (again := same(label)) in index:
                same_label = options[index[again]]
                note = f"{label!r} is {same_label!r}" if label != same_label else f"several codes are {label!r}"
                self._counted["one"][note] += raw is first
            else:
                index[again] = len(options)
                options.append(label)
                placed.append(first.ordinal[k] if first.ordinal else None)
            position_K.append(index[again])
        if not MIN_OPTIONS <= len(options) <= MAX_OPTIONS:
            raise Unusable(Reason.NUM_OPTIONS)
        # No scale where one of the options left is not on it, or all share one place on it.
        scale = tuple(place for place in placed if place is not None)
        ordinal = scale if len(scale) == len(options) and len(set(scale)) > 1 else None
        question = Question(clean(raw.question_id), clean(first.text), tuple(options), ordinal)
        for label, ours in zip(map(clean, raw.options), map(clean, first.options), strict=True):
            if label != ours:
                self._counted["one"][f"{label!r} is {ours!r}"] += 1
        return _Place(question, tuple(position_K), tuple(refusal_K))

    def _answer(self, raw: RawAnswer, place: _Place) -> tuple[FloatArray, float | None, float | None]:
        """Shares over the options that are left, respondents, and the refusal rate.

        Raises:
            Unusable: why the answer does not count.
        """
        if isinstance(raw.shares, Reason):
            raise Unusable(raw.shares)
        if len(raw.shares) != len(raw.options) or not all(map(math.isfinite, raw.shares)):
            raise Unusable(Reason.BAD_DISTRIBUTION)
        if min(raw.shares) < 0.0:
            raise Unusable(Reason.NEGATIVE)
        if abs(math.fsum(raw.shares) - 1.0) > SUM_TOLERANCE + _ROUNDING:
            raise Unusable(Reason.SUM if any(raw.shares) else Reason.ZERO)
        n = raw.n
        if raw.people:  # who refused is not counted, whatever becomes of the refusals
            n = float(
                sum(
                    number
                    for number, at, refused in zip(raw.people, place.position_K, place.refusal_K, strict=True)
                    if at >= 0 and not refused
                )
            )
        if n is not None and n < self.reading.min_respondents:
            raise Unusable(Reason.FEW_RESPONDENTS)
        shares = np.zeros(len(place.question.options))
        refused = 0.0
        for share, at in zip(raw.shares, place.position_K, strict=True):
            if at >= 0:
                shares[at] += share
            elif at == _REFUSED:
                refused += share
        total = math.fsum(shares)
        if total <= 0.0:
            raise Unusable(Reason.ZERO)
        rate = None
        if self.reading.refusals == "separate":
            rate = refused / (total + refused) if _REFUSED in place.position_K else raw.refusal_rate
        return shares if abs(total - 1.0) <= _ALREADY_ONE else shares / total, n, rate

    def _refuse_doubtful_codes(self, raws: Iterable[RawAnswer]) -> None:
        """Raise the error about codes that look like missing ones, and that nobody has decided about."""
        missing = self.reading.missing
        doubtful: dict[str, list[str]] = {}
        used: Counter[str] = Counter()  # code -> questions in which it is an answer beyond doubt
        for question_id, first in self._first.items():
            codes = first.codes or first.options
            pairs = [
                (code, label)
                for code, label in zip(codes, first.options, strict=True)
                if not missing.holds(question_id, code, label) and kind_of(label) == "answer"
            ]
            suspects = looks_missing([code for code, _ in pairs], unlabelled=[c for c, label in pairs if c == label])
            if suspects and not missing.settles(question_id):
                doubtful[question_id] = suspects
            used.update(code for code, _ in pairs if code not in suspects)
        if not doubtful:
            return
        share: dict[tuple[str, str], list[float]] = {}
        for raw in raws:
            codes = raw.codes or raw.options
            if raw.question_id in doubtful and not isinstance(raw.shares, Reason) and len(raw.shares) == len(codes):
                for code, value in zip(codes, raw.shares, strict=True):
                    share.setdefault((raw.question_id, code), []).append(value)
        listed = [
            f"{name} "
            + ", ".join(f"{code} ({np.mean(share.get((name, code), [0.0])):.1%} of answers)" for code in codes)
            for name, codes in doubtful.items()
        ]
        every = sorted({code for codes in doubtful.values() for code in codes}, key=lambda code: (len(code), code))
        proposed = ",".join(every)
        if any(used[code] for code in every):
            proposed = ";".join(f"{name}={','.join(codes)}" for name, codes in doubtful.items())
        more = f"; and {len(listed) - NUM_SHOWN} columns more" if len(listed) > NUM_SHOWN else ""
        raise UserError(
            f"{self.source}: codes without a label that look like no answers: {'; '.join(listed[:NUM_SHOWN])}{more}. "
            f'Say data.missing="{proposed}" to leave them out, or data.missing=none if they are answers'
        )

    def _causes(self) -> str:
        """The reasons of what was left out, each with its first row."""
        return "; ".join(
            f"{len(raws)} x {reason}, first row {raws[0].row}"
            + (f" ({raws[0].group}, {raws[0].question_id})" if raws[0].group else "")
            for reason, raws in self._left_out.items()
        )

    def _decisions(self) -> list[str]:
        policy = {"keep": "kept as options", "drop": "dropped", "separate": "counted apart"}[self.reading.refusals]
        begin = {
            "one": "options and groups that are one",
            "none": "left out as no answers",
            "refusal": f"refusals, {policy} (data.refusals)",
        }
        notes = [f"{begin[kind]}: {some(counted)}" for kind, counted in self._counted.items() if +counted]
        return [*notes, f"answers left out: {self._causes()}"] if self._left_out else notes
