"""GlobalOpinionQA as its authors publish it: one row a question, all countries' answers in one cell.

Columns `question, selections, options` (`source` is not used). `selections` is the text of a Python
defaultdict, country -> list of shares. It is cut into one row a country, and nothing in it is ever executed; the
questions have no ids, so a hash of text and options stands for one.

Axis letters: K answer options.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, Final

from appa_flwr.config import HUB_SURVEY
from appa_flwr.core.errors import UserError
from appa_flwr.survey.cells import CellError, Reason, as_text, literal_list, parse_options, question_hash, syntax_tree
from appa_flwr.survey.tables import PRIVATE, PUBLIC_REQUIRED, SurveyRow, SurveyTable

COLUMNS: Final = ("question", "selections", "options")
SPLIT: Final = "train"
_HEAD: Final = re.compile(r"defaultdict\(\s*+<class 'list'>\s*+,\s*+")


def is_globalqa(table: SurveyTable) -> bool:
    """True if a file has the columns of GlobalOpinionQA instead of our own."""
    return "selections" in table.columns and PRIVATE not in table.columns


def by_country(table: SurveyTable) -> SurveyTable:
    """One row per question and country, numbered as the question's row.

    A question whose text, options or selections cannot be read is one row with the reason.

    Raises:
        UserError: a column is missing.
    """
    table.require(*COLUMNS)
    columns = frozenset({*PUBLIC_REQUIRED, "group", PRIVATE})
    rows = tuple(part for row in table.rows for part in _countries(row))
    return SurveyTable(table.source, columns, rows, "GlobalOpinionQA as published, one row a question")


def from_hub() -> SurveyTable:
    """The public data set from the Hugging Face hub, or from its cache on this machine.

    Raises:
        UserError: it is neither there nor can it be downloaded.
    """
    # Imported here: the library takes seconds to load, and only this source needs it.
    import datasets

    try:
        loaded: Any = datasets.load_dataset(HUB_SURVEY, split=SPLIT)
        cells: list[dict[str, object]] = loaded.select_columns(list(COLUMNS)).to_list()
    # Whatever fails here, in any of the libraries below, means to the user that the hub gave no data.
    except Exception as error:
        cause = str(error).partition("\n")[0]
        raise UserError(
            f"{HUB_SURVEY}: cannot be had from the hub ({cause}); download its CSV and give survey = its path"
        ) from None
    return by_country(
        SurveyTable(HUB_SURVEY, frozenset(COLUMNS), tuple(SurveyRow(k, row) for k, row in enumerate(cells, start=1)))
    )


def selections(cell: object) -> list[tuple[str, list[object] | None]]:
    """Countries and their lists, None where a value is no list of literals.

    Raises:
        CellError: not the text of a dict or defaultdict literal with string keys, or too long.
    """
    if not isinstance(cell, str):
        raise CellError(Reason.BAD_SELECTIONS)
    body = cell.strip()
    if (head := _HEAD.match(body)) and body.endswith(")"):
        body = body[head.end() : -1]
    tree = syntax_tree(body)
    if not isinstance(tree, ast.Dict):
        raise CellError(Reason.BAD_SELECTIONS)
    found: list[tuple[str, list[object] | None]] = []
    for key, value in zip(tree.keys, tree.values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            raise CellError(Reason.BAD_SELECTIONS)
        found.append((key.value, literal_list(value)))
    return found


def _countries(row: SurveyRow) -> Iterator[SurveyRow]:
    question_id = ""
    try:
        if row.reason is not None:
            raise CellError(row.reason)
        # Once a question rather than once a country: a hostile cell must not be parsed as often as it has keys.
        text = as_text(row.cells.get("question"), Reason.EMPTY_TEXT)
        options = parse_options(row.cells.get("options"))
        question_id = question_hash(text, options)
        pairs = selections(row.cells.get("selections"))
    except CellError as error:
        yield SurveyRow(row.number, {"question_id": question_id}, error.reason)
        return
    for country, shares in pairs:
        cells = {"question_id": question_id, "question": text, "options": options, "group": country, PRIVATE: shares}
        yield SurveyRow(row.number, cells)
