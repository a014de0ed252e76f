"""One pass over a survey's rows: whose answer each holds, to which question, and, where it is asked for, the answer.

The first row of a question in the file, of whatever group, decides its text, options and scale, so every group and the
server see the same question whoever reads which part of the file.

Axis letters: K answer options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from appa_flwr.survey.cells import (
    MIN_OPTIONS,
    CellError,
    Reason,
    as_name,
    as_text,
    is_empty,
    is_refusal,
    parse_distribution,
    parse_options,
    parse_ordinal,
    parse_quantity,
)
from appa_flwr.survey.names import ALIASES, GroupName
from appa_flwr.survey.tables import PRIVATE, PUBLIC_REQUIRED, REFUSED, SurveyRow, SurveyTable
from appa_flwr.survey.types import FloatArray, Question

Refusals = Literal["keep", "drop", "separate"]


@dataclass(frozen=True)
class AnswerFilter:
    """Conditions under which answers count, as in `read.read_survey`."""

    refusals: Refusals
    min_respondents: int = 0


class Entry(NamedTuple):
    """A question as every row of it must have it.

    Attributes:
        raw: the cells of its first row, to recognise the same question without decoding it again.
        text, options, scale: before refusals are dropped; a position of each option, None where it has none.
        kept: positions of the options that are left, or None for all.
        question: what is left.
    """

    raw: tuple[object, ...]
    text: str
    options: tuple[str, ...]
    scale: tuple[float | None, ...] | None
    kept: tuple[int, ...] | None
    question: Question


class PublicRow(NamedTuple):
    """A row with what its public cells say.

    Attributes:
        row, question_id: as the file has them; the id is empty where it cannot be read.
        group: the group's full name; empty where it cannot be told.
        entry, reason: its question, or why the row cannot be used; one of them is None.
    """

    row: SurveyRow
    question_id: str
    group: str
    entry: Entry | None
    reason: Reason | None


class Answer(NamedTuple):
    """One usable answer, and what the source has next to it."""

    shares: FloatArray
    respondents: float | None
    refusal_rate: float | None


def public_rows(
    table: SurveyTable, entries: dict[str, Entry], *, refusals: Refusals, only: str = ""
) -> Iterator[PublicRow]:
    """Every row of a file in its order; fills `entries`, question id -> question, on the way. No answer is looked at.

    `only` is the group of every row where the file names none.
    """
    for row in table.rows:
        group, question_id, entry, reason = only, "", None, None
        if "group" in table.columns:
            try:
                group = group_of(row.cells).full
            except CellError as error:
                group, reason = "", error.reason
        try:
            question_id = as_name(row.cells.get("question_id"), Reason.EMPTY_ID)
            entry = _entry(row.cells, question_id, entries, refusals=refusals)
        except CellError as error:
            reason = error.reason
        reason = row.reason or reason
        yield PublicRow(row, question_id, group, None if reason else entry, reason)


def group_of(cells: Mapping[str, object]) -> GroupName:
    """The group a row belongs to.

    Raises:
        CellError: its name is empty or cannot be one.
    """
    spelled = as_name(cells.get("group"), Reason.EMPTY_GROUP)
    cell = cells.get("attribute")
    attribute = None if is_empty(cell) else as_name(cell, Reason.EMPTY_GROUP)
    if ";" in f"{attribute}{spelled}":
        raise CellError(Reason.BAD_GROUP)
    return GroupName(attribute, spelled, ALIASES.get(spelled, spelled))


def groups_of(table: SurveyTable) -> tuple[GroupName, ...]:
    """Every group that a file has rows of, in its order."""
    names: dict[GroupName, None] = {}
    for row in table.rows:
        with suppress(CellError):
            names[group_of(row.cells)] = None
    return tuple(names)


def _entry(cells: Mapping[str, object], question_id: str, entries: dict[str, Entry], *, refusals: Refusals) -> Entry:
    """The question of a row, checked against its first row or entered as such."""
    known = entries.get(question_id)
    raw = (cells.get("question"), cells.get("options"), cells.get("ordinal"))
    if known is None or known.raw != raw:
        if any(name not in cells for name in PUBLIC_REQUIRED):
            raise CellError(Reason.MISSING)
        text, options = as_text(cells["question"], Reason.EMPTY_TEXT), parse_options(cells["options"])
        scale = parse_ordinal(cells.get("ordinal"), len(options))
        if known is None:
            kept = tuple(range(len(options)))
            if refusals != "keep":
                told = cells.get(REFUSED)
                kept = tuple(k for k in kept if not (k in told if isinstance(told, tuple) else is_refusal(options[k])))
            # No scale where one of the options left is not on it, or all share one place on it.
            placed = tuple(place for k in kept if scale and (place := scale[k]) is not None)
            ordinal = placed if len(placed) == len(kept) and len(set(placed)) > 1 else None
            question = Question(question_id, text, tuple(options[k] for k in kept), ordinal)
            known = Entry(raw, text, options, scale, None if len(kept) == len(options) else kept, question)
            entries[question_id] = known
        if text != known.text:
            raise CellError(Reason.OTHER_TEXT)
        if options != known.options:
            raise CellError(Reason.OTHER_OPTIONS)
        # A row may leave the scale out, but not contradict it.
        if None not in (scale, known.scale) and scale != known.scale:
            raise CellError(Reason.OTHER_ORDINAL)
    if len(known.question.options) < MIN_OPTIONS:
        raise CellError(Reason.FEW_LEFT)
    return known


def answer_of(row: PublicRow, answer_filter: AnswerFilter) -> Answer:
    """The answer in a row to its question.

    Raises:
        CellError: why it cannot be used.
    """
    cells, entry = row.row.cells, row.entry
    if entry is None or PRIVATE not in cells:
        raise CellError(row.reason or Reason.MISSING)
    try:
        respondents = parse_quantity(cells.get("n"), Reason.BAD_COUNT)
    except CellError:
        if answer_filter.min_respondents:
            raise
        respondents = None  # a column of another meaning, which nobody asks for
    if respondents is not None and respondents < answer_filter.min_respondents:
        raise CellError(Reason.FEW_RESPONDENTS)
    shares = parse_distribution(cells[PRIVATE], len(entry.options), entry.kept)
    if answer_filter.refusals != "separate":
        rate = None
    elif entry.kept is None:
        rate = _reported_rate(cells)
    else:
        rate = float(np.delete(parse_distribution(cells[PRIVATE], len(entry.options)), entry.kept).sum())
    return Answer(shares, respondents, rate)


def _reported_rate(cells: Mapping[str, object]) -> float | None:
    """The refusal rate of a row whose distribution is already without refusals."""
    rate = parse_quantity(cells.get("refusal_rate"), Reason.BAD_RATE, most=1.0)
    refused, answered = (parse_quantity(cells.get(name), Reason.BAD_COUNT) for name in ("refusals", "n"))
    if rate is None and refused is not None and answered:
        return refused / (answered + refused)
    return rate
