"""Tidy tables, as statistics packages and offices write them: one row an option.

Columns `question, group, option` and one of `share`, `percent` or `count`; optionally `question_id` (else a hash of
text and options), `attribute` and `ordinal` (the option's position on the scale). An option's place is that of its
first row in the file, and one that a group has no row of has 0. The rows of a question and a group become one in our
own columns.

Axis letters: K answer options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from appa_flwr.survey.cells import CellError, Reason, as_name, as_text, is_empty, question_hash
from appa_flwr.survey.tables import PRIVATE, PUBLIC_REQUIRED, SurveyRow, SurveyTable

OPTION: Final = "option"
MEASURES: Final = {"share": "shares", "percent": "percentages", "count": "counts"}
_UNIT: Final = {"share": 1.0, "percent": 100.0}


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
    return OPTION in table.columns and PRIVATE not in table.columns


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
        if row.reason is not None:
            unread.append(row)
            continue
        try:
            text, names = as_text(row.cells.get("question"), Reason.EMPTY_TEXT), _names(row.cells)
        except CellError as error:
            unread.append(SurveyRow(row.number, {}, error.reason))
            continue
        question = names.get("question_id", text)
        answer = answers.setdefault((question, *names.values()), _Answer(row, names, text))
        try:
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
    """Add a row's option to its question's scale, and its number to its group's."""
    option = as_text(cells.get(OPTION), Reason.EMPTY_TEXT)
    place = cells.get("ordinal")
    if scale.setdefault(option, None) is None and not is_empty(place):
        scale[option] = number(place, Reason.BAD_ORDINAL)
    if option in numbers:
        raise CellError(Reason.OPTION_TWICE)
    numbers[option] = number(cells.get(measure), Reason.BAD_DISTRIBUTION)


def number(cell: object, reason: Reason) -> float:
    """A number as tables write it: 12.5, 12,5 or 12.5 %.

    Raises:
        CellError: it is none.
    """
    if isinstance(cell, str):
        cell = cell.strip().removesuffix("%").strip()
        cell = cell.replace(",", ".") if cell.count(",") == 1 and "." not in cell else cell
    try:
        if isinstance(cell, bool):
            raise TypeError
        return float(cell)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise CellError(reason) from None


def _joined(answer: _Answer, measure: str, scale: Mapping[str, float | None]) -> SurveyRow:
    options = tuple(scale)
    known: dict[str, object] = {"question_id": question_hash(answer.text, options), **answer.names}
    if answer.reason is not None:
        return SurveyRow(answer.first.number, known, answer.reason)
    number_K = [answer.numbers.get(option, 0.0) for option in options]
    total = sum(number_K) if measure == "count" else _UNIT[measure]
    known |= {"question": answer.text, "options": options, PRIVATE: [value / (total or 1.0) for value in number_K]}
    if measure == "count":
        known["n"] = total
    if any(place is not None for place in scale.values()):
        known["ordinal"] = list(scale.values())
    return SurveyRow(answer.first.number, known)
