"""SubPOP's tables, a row a question and group: `qkey, attribute, group, responses, refusal_rate, ordinal, question,
options`. Only names differ from our own columns; a refusal behind the options that has no share goes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Final

from appa_flwr.survey.cells import CellError, Reason, as_list, is_refusal
from appa_flwr.survey.tables import PRIVATE, SurveyRow, SurveyTable

_OURS: Final = {"qkey": "question_id", "responses": PRIVATE}


def is_subpop(table: SurveyTable) -> bool:
    """True if a file has SubPOP's names instead of our own."""
    return _OURS.keys() <= table.columns and table.columns.isdisjoint(_OURS.values())


def renamed(table: SurveyTable) -> SurveyTable:
    """The rows in our own columns."""
    columns = frozenset(_OURS.get(name, name) for name in table.columns)
    return SurveyTable(table.source, columns, tuple(map(_row, table.rows)), "SubPOP's columns, with refusals apart")


def _row(row: SurveyRow) -> SurveyRow:
    cells = {_OURS.get(name, name): cell for name, cell in row.cells.items()}
    with suppress(CellError):  # judged later
        options = as_list(cells.get("options"), Reason.BAD_OPTIONS)
        size = len(as_list(cells[PRIVATE], Reason.BAD_DISTRIBUTION)) if PRIVATE in cells else len(options)
        if all(is_refusal(str(option)) for option in options[size:]):
            cells["options"] = options[:size]
    return replace(row, cells=cells)
