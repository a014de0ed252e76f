"""Survey readers of the user's own: a function whose rows, in our own columns or tidy, are judged as a file's are."""

from __future__ import annotations

from typing import Any

from appa_flwr.core import own_code
from appa_flwr.core.errors import UserError
from appa_flwr.survey.tables import COLUMNS, SurveyRow, SurveyTable


def rows(name: str, file: str) -> SurveyTable:
    """What the function "module:name" gives for a file, or without one where `file` is empty; rows count from 1.

    Raises:
        UserError: it cannot be imported, is no function, fails, or gives something else than rows.
    """
    function: Any = own_code.load("survey", name)
    if not callable(function):
        raise UserError(f'survey "{name}": {name.replace(":", " has no function ")}')
    try:
        given = function(*filter(None, [file]))
        given = given.to_dict("records") if hasattr(given, "to_dict") else given
        kept = [{column: _plain(row[column]) for column in COLUMNS if column in row} for row in map(dict, given)]
    except (Exception, SystemExit) as error:  # whatever its code does
        raise UserError(f'survey "{name}": gives no dicts of our columns ({own_code.in_words(error)})') from error
    if not kept:
        raise UserError(f'survey "{name}": gives no rows')
    numbered = tuple(SurveyRow(k, row) for k, row in enumerate(kept, start=1))
    return SurveyTable(name, frozenset(column for row in kept for column in row), numbered, f"{name} says")


def _plain(cell: Any) -> object:
    return cell.tolist() if hasattr(cell, "tolist") else cell  # NumPy's
