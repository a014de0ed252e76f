"""Tidy tables, as statistics packages and offices write them: one row an option.

Columns `question, group, option` and one of `share`, `percent` or `count`; optionally `question_id` (else a hash of
text and options), `attribute` and `ordinal` (the option's position on the scale). An option's place is that of its
first row in the file, and one that a group has no row of has 0. The rows of a question and a group become one in our
own columns.

Axis letters: K answer options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from appa_flwr.survey.cells import CellError, Reason, as_name, as_text, is_empty, question_hash
from appa_flwr.survey.tables import PRIVATE, PUBLIC_REQUIRED, SurveyRow, SurveyTable

OPTION: Final = "option"
MEASURES: Final = {"share": "shares", "percent": "percentages", "count": "counts"}
_UNIT: Final = {"share": 1.0, "percent": 100.0}
_NUMBER: Final = re.compile(r"[+-]?\d{1,40}([.,]\d{1,40})?([eE][+-]?\d{1,2})?", re.ASCII)
_THOUSANDS: Final = re.compile(r"\d{1,3}([.,]\d{3})+")
_LARGEST: Final = 1e12


@dataclass
class _Answer:
    """What a group's rows on one question say; `reason` where one of them cannot be used."""

    first: SurveyRow
    names: Mapping[str, object]
    text: str
    numbers: dict[str, float] = field(default_factory=dict)
    reason: Reason | None = None


def is_tidy(table: SurveyTable) -> bool:
    """True if a file has a row an option instead of a list."""
    return OPTION in table.columns and table.columns.isdisjoint({"options", PRIVATE})


def by_group(table: SurveyTable) -> SurveyTable:
    """One row per question and group, numbered as the first of its rows.

    Raises:
        UserError: a column is missing.
    """
    measure = next((name for name in MEASURES if name in table.columns), "share")
    table.require("question", "group", OPTION, measure)
    unread: list[SurveyRow] = []
    scales: dict[str, dict[str, float | None]] = {}  # question -> option -> position
    answers: dict[tuple[str, ...], _Answer] = {}
    for row in table.rows:
        try:
            if row.reason is not None:
                raise CellError(row.reason)
            text, names = as_text(row.cells.get("question"), Reason.EMPTY_TEXT), _names(row.cells)
        except CellError as error:
            unread.append(SurveyRow(row.number, {}, error.reason))
            continue
        question = names.get("question_id", text)
        answer = answers.setdefault((question, *names.values()), _Answer(row, names, text))
        try:
            if text != answer.text:
                raise CellError(Reason.OTHER_TEXT)
            _enter(row.cells, measure, answer.numbers, scales.setdefault(question, {}))
        except CellError as error:
            answer.reason = answer.reason or error.reason
    columns = {*PUBLIC_REQUIRED, "group", PRIVATE} | table.columns & {"attribute", "ordinal"}
    columns |= {"n"} if measure == "count" else set()
    rows = [_joined(answer, measure, scales[key[0]]) for key, answer in answers.items()]
    return SurveyTable(
        table.source, frozenset(columns), (*unread, *rows), f"one row an option, with {MEASURES[measure]}"
    )


def _names(cells: Mapping[str, object]) -> dict[str, str]:
    """Question id, attribute and group of a row, as far as it has them."""
    empty = {"question_id": Reason.EMPTY_ID, "attribute": Reason.EMPTY_GROUP, "group": Reason.EMPTY_GROUP}
    return {
        name: as_name(cells.get(name), reason)
        for name, reason in empty.items()
        if name == "group" or not is_empty(cells.get(name))
    }


def _enter(
    cells: Mapping[str, object], measure: str, numbers: dict[str, float], scale: dict[str, float | None]
) -> None:
    """Add a row's option to its question's scale, and its number to its group's; a bad row adds neither."""
    option = as_text(cells.get(OPTION), Reason.EMPTY_TEXT)
    value = number(cells.get(measure), thousands=measure == "count")
    place = None if is_empty(cells.get("ordinal")) else number(cells["ordinal"])
    if value < 0.0:
        raise CellError(Reason.NEGATIVE)
    if option in numbers:
        raise CellError(Reason.OPTION_TWICE)
    known = scale.get(option)
    if known is not None and place is not None and known != place:
        raise CellError(Reason.OTHER_ORDINAL)
    scale[option], numbers[option] = (place if known is None else known), value


def number(cell: object, *, thousands: bool = False) -> float:
    """A finite number as tables write it: 12.5, 12,5 or 12.5 %; with `thousands` 1,200 and 1.200 are none."""
    if isinstance(cell, str):
        text = cell.strip().removesuffix("%").strip()
        if not _NUMBER.fullmatch(text) or (thousands and _THOUSANDS.fullmatch(text)):
            raise CellError(Reason.BAD_NUMBER)
        cell = float(text.replace(",", "."))
    if isinstance(cell, bool) or not isinstance(cell, int | float) or abs(cell) > _LARGEST or cell != cell:
        raise CellError(Reason.BAD_NUMBER)
    return float(cell)


def _joined(answer: _Answer, measure: str, scale: Mapping[str, float | None]) -> SurveyRow:
    options = tuple(scale)
    known: dict[str, object] = {"question_id": question_hash(answer.text, options), **answer.names}
    known |= {"question": answer.text, "options": options}
    if any(place is not None for place in scale.values()):
        known["ordinal"] = list(scale.values())
    if answer.reason is not None:  # in the private cell, for it costs this group alone
        return SurveyRow(answer.first.number, {**known, PRIVATE: answer.reason})
    number_K = [answer.numbers.get(option, 0.0) for option in options]
    total = sum(number_K) if measure == "count" else _UNIT[measure]
    known[PRIVATE] = [value / (total or 1.0) for value in number_K]
    if measure == "count":
        known["n"] = total
    return SurveyRow(answer.first.number, known)
