"""The public side of a survey: whose answer each row holds and to which question. No answer is looked at.

The first row of a question in the file, of whatever group, decides its text, options and scale, so every group and the
server see the same question whoever reads which part of the file.

Axis letters: K answer options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from appa_flwr.survey.cells import (
    MIN_OPTIONS,
    CellError,
    Reason,
    as_name,
    as_text,
    is_empty,
    parse_options,
    parse_ordinal,
)
from appa_flwr.survey.names import ALIASES, GroupName
from appa_flwr.survey.refusals import is_refusal
from appa_flwr.survey.tables import PUBLIC_REQUIRED, REFUSED, SurveyRow, SurveyTable
from appa_flwr.survey.types import Question

Refusals = Literal["keep", "drop", "separate"]


class Wording(NamedTuple):
    """A question as a row has it, before refusals are dropped.

    Attributes:
        scale: position of each of the K options, None where it has none; None where there is no scale.
        refused: positions of the options that are refusals.
    """

    text: str
    options: tuple[str, ...]
    scale: tuple[float | None, ...] | None
    refused: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A question as every row of it must have it.

    Attributes:
        raw: the cells of its first row, to recognise the same question without decoding it again.
        wording, question: before and after refusals are dropped.
        kept: positions of the options that are left, or None for all.
    """

    raw: tuple[object, ...]
    wording: Wording
    question: Question
    kept: tuple[int, ...] | None


QuestionEntries = dict[str, Entry]


@dataclass(frozen=True)
class PublicRow:
    """A row with what its public cells say.

    Attributes:
        row, question_id: as the file has them; the id is empty where it cannot be read.
        group: the group's full name; empty where it cannot be told, or the file has no groups.
        entry, reason: its question, or why the row cannot be used; one of them is None.
    """

    row: SurveyRow
    question_id: str
    group: str
    entry: Entry | None
    reason: Reason | None = None


def public_rows(table: SurveyTable, catalogue: QuestionEntries, *, refusals: Refusals) -> Iterator[PublicRow]:
    """Every row of a file in its order; fills `catalogue`, question id -> question, on the way."""
    has_groups = "group" in table.columns
    for row in table.rows:
        if row.reason is not None:
            yield PublicRow(row, str(row.cells.get("question_id", "")), "", None, row.reason)
            continue
        group, question_id, entry, reason = "", "", None, None
        try:
            group = group_of(row.cells).full
        except CellError as error:
            reason = error.reason if has_groups else None
        try:
            question_id = as_name(row.cells.get("question_id"), Reason.EMPTY_ID)
            entry = _entry(row.cells, question_id, catalogue, refusals=refusals)
        except CellError as error:
            reason = error.reason
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


def _entry(cells: Mapping[str, object], question_id: str, catalogue: QuestionEntries, *, refusals: Refusals) -> Entry:
    """The question of a row, checked against its first row or entered as such."""
    known = catalogue.get(question_id)
    raw = (cells.get("question"), cells.get("options"), cells.get("ordinal"))
    if known is None or known.raw != raw:
        wording = _wording(cells)
        if known is None:
            known = catalogue[question_id] = _new_entry(raw, question_id, wording, refusals=refusals)
        _check_same(wording, known.wording)
    if len(known.question.options) < MIN_OPTIONS:
        raise CellError(Reason.FEW_LEFT)
    return known


def _wording(cells: Mapping[str, object]) -> Wording:
    if any(name not in cells for name in PUBLIC_REQUIRED):
        raise CellError(Reason.MISSING)
    text = as_text(cells["question"], Reason.EMPTY_TEXT)
    options = parse_options(cells["options"])
    known = cells.get(REFUSED)
    refused = known if isinstance(known, tuple) else tuple(k for k, option in enumerate(options) if is_refusal(option))
    return Wording(text, options, parse_ordinal(cells.get("ordinal"), len(options)), refused)


def _check_same(wording: Wording, first: Wording) -> None:
    if wording.text != first.text:
        raise CellError(Reason.OTHER_TEXT)
    if wording.options != first.options:
        raise CellError(Reason.OTHER_OPTIONS)
    # A row may leave the scale out, but not contradict it.
    if wording.scale is not None and first.scale is not None and wording.scale != first.scale:
        raise CellError(Reason.OTHER_ORDINAL)


def _new_entry(raw: tuple[object, ...], question_id: str, wording: Wording, *, refusals: Refusals) -> Entry:
    kept = tuple(k for k in range(len(wording.options)) if refusals == "keep" or k not in wording.refused)
    places = [wording.scale[k] for k in kept] if wording.scale else []
    # No scale where one of the options left is not on it, or all share one place on it.
    placed = tuple(place for place in places if place is not None)
    ordinal = placed if len(placed) == len(kept) and len(set(placed)) > 1 else None
    question = Question(question_id, wording.text, tuple(wording.options[k] for k in kept), ordinal)
    return Entry(raw, wording, question, None if len(kept) == len(wording.options) else kept)
