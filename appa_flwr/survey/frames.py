"""A survey file as a table of cells, with what the file declares of its columns; the raw answer type."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import Field

from appa_flwr.config.sections import Section
from appa_flwr.core.arrays import BoolArray, IntArray
from appa_flwr.core.errors import UserError
from appa_flwr.survey.names import Notes, some
from appa_flwr.survey.nonanswers import Kind, code_text

LAYOUTS: Final = (
    "a table has one row a respondent, or one row an option with the columns question, group, option and share, "
    "percent or count"
)
LEFT_OUT: Final = "left out, "
TWICE: Final = "columns that have the name of an earlier one, numbered"
NOT_UTF8: Final = "read as cp1252, as it is not UTF-8; where letters look wrong, save it as UTF-8"

Encoding = Literal["utf-8", "cp1252"]


class Unusable(Exception):
    """An answer cannot be used; the text says why."""


class RawAnswer(NamedTuple):
    """One group's answer to one question, as stated in the source."""

    row: int  # number of the row in the source, from 1
    question_id: str  # empty: a hash of text and options is used
    text: str
    options: tuple[str, ...] = ()  # labels of the K options, non-answers among them
    group: str = ""  # full name; empty for a question without an answer
    shares: Sequence[float] = ()  # (K,)
    problem: str = ""  # why the answer is unusable; empty if it is usable
    ordinal: Sequence[float] = ()  # (K,) scale positions, if known; NaN for an option off the scale
    people: Sequence[float] = ()  # (K,) number of respondents per option, if known
    n: float | None = None  # total number of respondents, used if `people` is empty
    kinds: tuple[Kind, ...] = ()  # of the options, where a codebook states them


class FileLayout(Section):
    """How the cells of a file are found, as the codebook states it, so that no respondent's row decides it."""

    encoding: Encoding = "utf-8"
    delimiter: str = Field("", max_length=1)  # of CSV; empty: a tab in .tsv, else a comma
    decimal: Literal[".", ","] = "."  # in the weight
    lines_above: int = Field(0, ge=0)  # above the names of the columns
    header_rows: int = Field(1, ge=1)  # the names, and rows below them that are no respondents
    joined: bool = False  # SurveyMonkey: the second header row holds parts of the questions in the first


@dataclass
class Column:
    """What a source says of a column."""

    text: str = ""  # text of its question
    labels: Mapping[str, str] = field(default_factory=dict)  # code -> label
    missing: Mapping[str, str] = field(default_factory=dict)  # code -> label of declared missing codes
    is_ordered: bool = False
    order: tuple[str, ...] = ()  # all codes in the survey's order, if the source lists them
    places: Mapping[str, float] = field(default_factory=dict)  # code -> scale position, if the source states it
    no_question: str = ""  # why it is none, if the source says so
    is_weight: bool = False  # of the respondents, as the source says


@dataclass
class Frame:
    """A table of cells."""

    source: str  # as the user named it
    cells: pd.DataFrame  # empty cells are None, the index is the row number in the file, column names are texts
    columns: defaultdict[str, Column] = field(default_factory=lambda: defaultdict(Column))  # what the source declares
    notes: Notes = field(default_factory=Notes)
    header: Mapping[str, Any] = field(default_factory=dict)  # first line of a file in the own format (`store`)
    layout: FileLayout = field(default_factory=FileLayout)

    _codes: dict[str, tuple[IntArray, dict[str, int]]] = field(init=False, default_factory=dict)  # once asked for

    def require(self, *names: str) -> None:
        """Raise a `UserError` if any of these columns is missing."""
        if missing := [name for name in names if name not in self.cells.columns]:
            advice = "; [layout] of the codebook names the delimiter" if len(self.cells.columns) == 1 else ""
            columns = some(self.cells.columns)
            raise UserError(f"{self.source}: has no column {', '.join(missing)}; it has {columns}{advice}")

    def codes(self, column: str) -> tuple[IntArray, dict[str, int]]:
        """Return each row's index into a column's codes, (R,), -1 for an empty cell; and code -> number of rows.

        Raises:
            UserError: the column has lists in its cells.
        """
        if column not in self._codes:
            try:
                cell_R, values = pd.factorize(self.cells[column])
            except TypeError:
                raise UserError(
                    f"{self.source}: column {column} has lists in its cells; make a column of each option"
                ) from None
            places: dict[str, int] = {}
            place_of = [places.setdefault(code, len(places)) if (code := code_text(value)) else -1 for value in values]
            code_R = np.array([*place_of, -1])[cell_R]
            size_of = np.bincount(code_R + 1, minlength=len(places) + 1)[1:].tolist()
            self._codes[column] = code_R, dict(zip(places, size_of, strict=True))
        return self._codes[column]

    def keep(self, is_kept_R: BoolArray) -> None:
        """Drop all other rows."""
        if not is_kept_R.all():
            self.cells = self.cells[is_kept_R]
            self._codes.clear()
