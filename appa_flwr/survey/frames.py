"""Readers of survey files as tables of cells; the raw answer type."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from appa_flwr.core.arrays import BoolArray, IntArray
from appa_flwr.core.errors import UserError
from appa_flwr.core.own_code import in_words
from appa_flwr.core.text import clean, decode
from appa_flwr.survey.names import Notes, same, some
from appa_flwr.survey.nonanswers import Kind, code_text, number
from appa_flwr.survey.store import HEADER
from appa_flwr.survey.types import MAX_OPTIONS

if TYPE_CHECKING:
    import pandas as pd

_NO_TABLES: Final = {
    b"version https://git-lfs": "a Git LFS pointer, which stands for the file; fetch the file by `git lfs pull`",
    b"<!doctype": "a web page; download the file itself",
    b"<html": "a web page; download the file itself",
}
LAYOUTS: Final = (
    "a table has one row a respondent, or one row an option with the columns question, group, option and share, "
    "percent or count"
)
STATISTICS: Final = (".sav", ".zsav", ".dta")
LEFT_OUT: Final = "left out, "
NOT_UTF8: Final = "read as cp1252, as it is not UTF-8"
_IMPORT_ID: Final = '{"ImportId"'
_SURVEYMONKEY: Final = {"response", "open-ended response"}
_QUOTED: Final = re.compile(r'"[^"]*"')
_HEADER_CHARS: Final = 100_000
_FEWEST_ROWS, _MOST_ROWS = 10, 1_000  # of a table whose first row is compared with the others
_LITERAL: Final = re.compile(r'"[^"]*"|\\.')  # of a number format


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


@dataclass
class Column:
    """What a source says of a column."""

    text: str = ""  # text of its question
    labels: Mapping[str, str] = field(default_factory=dict)  # code -> label
    missing: Mapping[str, str] = field(default_factory=dict)  # code -> label of declared missing codes
    is_ordered: bool = False
    order: tuple[str, ...] = ()  # all codes in the survey's order, if the source lists them
    places: Mapping[str, float] = field(default_factory=dict)  # code -> scale position, if the source states it
    is_question: bool = True


@dataclass
class Frame:
    """A table of cells."""

    source: str  # as the user named it
    cells: pd.DataFrame  # empty cells are None, the index is the row number in the file, column names are texts
    columns: defaultdict[str, Column] = field(default_factory=lambda: defaultdict(Column))  # what the source declares
    notes: Notes = field(default_factory=Notes)
    header: Mapping[str, Any] = field(default_factory=dict)  # first line of a file in the own format (`store`)

    _codes: dict[str, tuple[IntArray, dict[str, int]]] = field(init=False, default_factory=dict)  # once asked for

    def require(self, *names: str) -> None:
        """Raise a `UserError` if any of these columns is missing."""
        if missing := [name for name in names if name not in self.cells.columns]:
            raise UserError(f"{self.source}: has no column {', '.join(missing)}; it has {some(self.cells.columns)}")

    def codes(self, column: str) -> tuple[IntArray, dict[str, int]]:
        """Return each row's index into a column's codes, (R,), -1 for an empty cell; and code -> number of rows.

        Raises:
            UserError: the column has lists in its cells.
        """
        import pandas as pd

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


def read_frame(path: str, *, guess_header: bool = True) -> Frame:
    """Read the first table of a file; `guess_header` lets all rows decide whether the first one holds texts.

    Raises:
        UserError: no such file, an unknown or broken format, or no rows; the message names a faulty row.
    """
    file = Path(path)
    readers = {".csv": _csv, ".tsv": _csv, ".txt": _csv, ".jsonl": _jsonl, ".parquet": _parquet, ".xlsx": _excel}
    readers |= dict.fromkeys(STATISTICS, _statistics)
    if (reader := readers.get(file.suffix.lower())) is None:
        raise UserError(f"{path}: unknown survey format {file.suffix!r}; use {', '.join(readers)}")
    if not file.exists():
        raise UserError(f"{path}: no such survey file")
    try:
        with file.open("rb") as content:
            start = content.read(512).lstrip(b"\xef\xbb\xbf \r\n\t").lower()
        for mark, what in _NO_TABLES.items():
            if start.startswith(mark):
                raise UserError(f"{path}: is {what}")
        frame = reader(file)
    except UserError:
        raise
    except ModuleNotFoundError as missing:
        raise UserError(f"{path}: reading {file.suffix} needs `pip install {missing.name}`") from None
    except Exception as error:  # the libraries raise many types for a broken file
        raise UserError(f"{path}: not a readable {file.suffix} file ({in_words(error)})") from None
    frame.cells.columns = [clean(code_text(name)) for name in frame.cells.columns]
    frame.cells = frame.cells.astype(object).where(frame.cells.notna(), None)
    is_used = [bool(name) or not frame.cells.iloc[:, k].isin(["", None]).all() for k, name in enumerate(frame.cells)]
    frame.cells = frame.cells.loc[:, is_used]
    if frame.cells.empty:
        raise UserError(f"{path}: holds no survey rows")
    _surveymonkey(frame)
    _second_header(frame, guess_header)
    if (nameless := (frame.cells.columns == "").sum()) > 1 or nameless == frame.cells.shape[1] - 1 > 0:
        raise UserError(f"{path}: columns without a name: a crosstab, or a title above the table; {LAYOUTS}")
    if (twice := frame.cells.columns.duplicated()).any():
        raise UserError(f"{path}: column {frame.cells.columns[twice][0]!r} occurs twice")
    return frame


def _table(rows: Mapping[int, Any], *, has_header: bool = True) -> pd.DataFrame:
    """Make a table from rows by number: lists, of which the first has the columns' names, or else dicts."""
    import pandas as pd

    cells = pd.DataFrame([*rows.values()], index=[*rows], dtype=object)
    return cells.iloc[1:].set_axis(cells.iloc[0], axis=1) if has_header else cells


def _csv(file: Path) -> Frame:
    notes = Notes()
    text = _decoded(file, notes)
    first, _, rest = text.partition("\n")
    skipped = 0
    if first.strip().casefold().startswith("sep="):  # Excel's line with the delimiter
        delimiter, text, skipped = first.strip(" \r")[len("sep=") :][:1] or ",", rest, 1
    else:
        # A name can hold other delimiters, and in quotes line breaks: rows have the same number of the right one.
        lines = _QUOTED.sub("", text[:_HEADER_CHARS]).split("\n")[:2]
        counts = {mark: [line.count(mark) for line in lines] for mark in ",;\t|"}
        delimiter = max(counts, key=lambda mark: (counts[mark][0] > 0 and len({*counts[mark]}) == 1, counts[mark][0]))
    # The standard library's reader, since pandas pads or cuts rows whose length differs from the header's.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    width = len(header := next(reader, []))
    rows = {0: header}
    for row in filter(None, reader):
        rows[line := reader.line_num + skipped] = row
        if len(row) != width:
            layouts = f"; {LAYOUTS}, and no title above" if width == 1 else ""
            raise UserError(f"{file}: line {line} has {len(row)} cells, the header {width}{layouts}")
    return Frame(str(file), _table(rows), notes=notes)


def _decoded(file: Path, notes: Notes) -> str:
    data = file.read_bytes()
    try:
        return decode(data)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
    try:
        text = data.decode("cp1252")
    except UnicodeDecodeError:
        raise UserError(f"{file}: line {line} is neither UTF-8 nor cp1252; save it as UTF-8") from None
    notes.add(f"{NOT_UTF8}; where letters look wrong, save it as UTF-8")
    return text


def _second_header(frame: Frame, guess: bool) -> None:
    """Read the rows of question texts, and of Qualtrics' kinds of columns, below the names of the columns."""
    rows = [[*map(code_text, row)] for row in frame.cells.iloc[:_MOST_ROWS].to_numpy()]
    kinds = next((number for number, row in enumerate(rows[:2]) if row[0].startswith(_IMPORT_ID)), None)
    if kinds is None and not (guess and _is_header(rows)):
        return
    for k, name in enumerate(frame.cells.columns):
        frame.columns[name].text = name if kinds == 0 else rows[0][k]
        if kinds is not None:
            frame.columns[name].is_question = rows[kinds][k].replace(" ", "").startswith(_IMPORT_ID + ':"QID')
    frame.cells = frame.cells.iloc[1 if kinds is None else kinds + 1 :]
    frame.notes.add("header rows below the first, with the questions' texts")


def _is_header(rows: Sequence[Sequence[str]]) -> bool:
    """True if a table's first row is unlike the others: none of its cells is an answer, and most are longer.

    Columns of answers are those in which the same few cells are repeated; there must be two.
    """
    if len(rows) <= _FEWEST_ROWS:
        return False
    columns = [(column[0], column[1:]) for column in zip(*rows, strict=True)]
    answers = [(first, rest) for first, rest in columns if len({*rest}) <= min(MAX_OPTIONS, len(rest) / 2)]
    is_new = all(first and first not in rest for first, rest in answers)
    num_longer = sum(len(first) > max(map(len, rest)) for first, rest in answers)
    return len(answers) > 1 and is_new and 2 * num_longer > len(answers)


def _surveymonkey(frame: Frame) -> None:
    """Read the row of SurveyMonkey that holds the parts of a question, whose text stands above the first, if any."""
    parts = frame.cells.iloc[0].map(code_text)
    if parts.iloc[0] or not _SURVEYMONKEY & {*map(same, parts)}:
        return
    names, text = [], ""
    for name, part in zip(frame.cells.columns, parts, strict=True):
        text = name or text
        names.append(f"{text}: {part}" if part and same(part) not in _SURVEYMONKEY else name)
    frame.cells.columns = names
    frame.cells = frame.cells.iloc[1:]
    frame.notes.add("SurveyMonkey's two header rows")


def _jsonl(file: Path) -> Frame:
    notes, rows = Notes(), dict[int, dict[str, object]]()
    for line, text in enumerate(_decoded(file, notes).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise UserError(f"{file}: line {line} is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise UserError(f"{file}: line {line} is not a JSON object")
        rows[line] = row
    header = rows.pop(1) if HEADER in rows.get(1, ()) else {}
    return Frame(str(file), _table(rows, has_header=False), notes=notes, header=header)


def _parquet(file: Path) -> Frame:
    """Read a table; categories keep their order."""
    import pandas as pd

    cells = pd.read_parquet(file).reset_index(drop=True)
    cells.index += 1
    frame = Frame(str(file), cells)
    for name, kind in cells.dtypes.items():
        if isinstance(kind, pd.CategoricalDtype):
            frame.columns[clean(str(name))] = Column(
                order=tuple(filter(None, map(code_text, kind.categories))), is_ordered=bool(kind.ordered)
            )
    return frame


def _excel(file: Path) -> Frame:
    """Read the first sheet; a cell in percent format becomes a text with "%", since it stores a fraction."""
    import openpyxl

    book = openpyxl.load_workbook(file, read_only=True, data_only=True)
    rows = {line: [*row] for line, row in enumerate(book.worksheets[0].iter_rows(), start=1)}
    # The first row has names, not answers.
    cells = {line: [_shown(cell, file) if line > 1 else cell.value for cell in row] for line, row in rows.items()}
    frame = Frame(str(file), _table({1: [], **cells}).dropna(how="all"))
    if len(book.sheetnames) > 1:
        frame.notes.add(f"the first of {len(book.sheetnames)} sheets")
    return frame


def _shown(cell: Any, file: Path) -> object:
    value = cell.value
    if isinstance(value, datetime) and value.time() != time():
        return str(value)  # the time at which a form was sent, which Excel makes of no answer
    if isinstance(value, date | time):
        raise UserError(
            f'{file}: cell {cell.coordinate} holds a date ({value}); Excel makes one of "2-1": make the column text, '
            "or delete a column of dates"
        )
    if isinstance(value, float | int) and not isinstance(value, bool) and "%" in str(cell.number_format):
        # A literal "%" is shown as it stands; the format's own shows hundred times the number.
        return f"{value * (100 if '%' in _LITERAL.sub('', cell.number_format) else 1):.12g} %"
    return value


def _statistics(file: Path) -> Frame:
    """Read codes and their labels from a file of SPSS or Stata, without the codes that it declares missing."""
    import pyreadstat

    read = pyreadstat.read_dta if file.suffix.lower() == ".dta" else pyreadstat.read_sav
    cells, about = read(str(file), disable_datetime_conversion=True, user_missing=True)
    cells.index += 1
    frame = Frame(str(file), cells)
    for name in cells.columns:
        labels = {code_text(code): str(label) for code, label in about.variable_value_labels.get(name, {}).items()}
        missing = [*about.missing_ranges.get(name, ()), *about.missing_user_values.get(name, ())]
        declared = [value for value in cells[name].unique() if _is_declared(code_text(value), missing)]
        for code in map(code_text, declared):
            frame.notes.add("left out as missing, as the file declares", repr(labels.get(code, code)))
        cells[name] = cells[name].mask(cells[name].isin(declared))
        frame.columns[clean(name)] = Column(
            text=about.column_names_to_labels.get(name) or "",
            labels={code: label for code, label in labels.items() if not _is_declared(code, missing)},
            missing={code: label for code, label in labels.items() if _is_declared(code, missing)},
            is_ordered=about.variable_measure.get(name) == "ordinal",
        )
    return frame


def _is_declared(code: str, missing: Sequence[Any]) -> bool:
    """True if a code is one of Stata's missing letters or lies in a missing range of SPSS, also of texts."""
    for part in missing:
        low, high = (part["lo"], part["hi"]) if isinstance(part, dict) else (part, part)
        value = code if isinstance(low, str) else number(code)
        if value is not None and low <= value <= high:
            return True
    return False
