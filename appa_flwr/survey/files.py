"""Readers of files as tables of cells: CSV, JSON lines, Parquet, Excel, SPSS and Stata."""

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import pandas as pd

from appa_flwr.core.errors import UserError, in_words
from appa_flwr.core.files import stand_in
from appa_flwr.core.text import clean, decode
from appa_flwr.survey import labelled
from appa_flwr.survey.frames import LAYOUTS, NOT_UTF8, TWICE, Column, Encoding, FileLayout, Frame
from appa_flwr.survey.names import Notes, numbered, same
from appa_flwr.survey.nonanswers import code_text
from appa_flwr.survey.store import HEADER
from appa_flwr.survey.types import MAX_OPTIONS

_IMPORT_ID: Final = re.compile(r"""\{\s*["']ImportId["']\s*:\s*["'](QID)?""")  # of Qualtrics; QID of questions
_SURVEYMONKEY: Final = {"response", "open-ended response"}
_QUOTED: Final = re.compile(r'"[^"]*"')
_UNCLOSED: Final = 'a quotation mark that is not closed, or not doubled within a quoted cell; write it as ""'
_HEADER_CHARS: Final = 100_000
_FEWEST_ROWS, _MOST_ROWS = 10, 1_000  # of a table whose first row is compared with the others
_LITERAL: Final = re.compile(r'"[^"]*"|\\.')  # of a number format
_PLACES: Final = "selections"  # GlobalOpinionQA's column of objects, which is read whole


def read_frame(path: str, layout: FileLayout | None = None) -> Frame:
    """Read the first table of a file, by a stated layout or by the one that its first rows look like.

    Raises:
        UserError: no such file, an unknown or broken format, or no rows; the message names a faulty row.
    """
    file = Path(path)
    readers = {".csv": _csv, ".tsv": _csv, ".txt": _csv, ".jsonl": _jsonl, ".parquet": _parquet, ".xlsx": _excel}
    readers |= dict.fromkeys(labelled.SUFFIXES, labelled.read)
    if (reader := readers.get(file.suffix.lower())) is None:
        raise UserError(f"{path}: unknown survey format {file.suffix!r}; use {', '.join(readers)}")
    if not file.exists():
        raise UserError(f"{path}: no such survey file")
    try:
        if (what := stand_in(file)) is not None:
            raise UserError(f"{path}: is {what}")
        frame = reader(file, layout)
    except UserError:
        raise
    except ModuleNotFoundError as missing:
        raise UserError(f"{path}: reading {file.suffix} needs `pip install {missing.name}`") from None
    except Exception as error:  # the libraries raise many types for a broken file
        raise UserError(f"{path}: not a readable {file.suffix} file ({in_words(error)})") from None
    frame.cells.columns = [clean(code_text(name)) for name in frame.cells.columns]
    if reader is not _csv:  # whose cells are texts
        frame.cells = frame.cells.astype(object).where(frame.cells.notna(), None)
    is_used = [bool(name) or not frame.cells.iloc[:, k].isin(["", None]).all() for k, name in enumerate(frame.cells)]
    frame.cells = frame.cells.loc[:, is_used]
    if frame.cells.empty:
        raise UserError(f"{path}: holds no survey rows")
    _header(frame, layout)
    nameless = int((frame.cells.columns == "").sum())
    if layout is None and (nameless > 1 or nameless == frame.cells.shape[1] - 1 > 0):
        raise UserError(f"{path}: columns without a name: a crosstab, or a title above the table; {LAYOUTS}")
    return frame


def _distinct(columns: Iterable[str], notes: Notes) -> list[str]:
    """Number the columns of one name by their positions: Other, Other.2."""
    names = list[str]()
    for name in columns:
        names.append(numbered(name, names, ".") if name else name)
        if names[-1] != name:
            notes.add(TWICE, names[-1])
    return names


def _table(rows: Mapping[int, Any], *, has_header: bool = True) -> pd.DataFrame:
    """Make a table from rows by number: lists, of which the first has the columns' names, or else dicts."""
    cells = pd.DataFrame([*rows.values()], index=[*rows], dtype=object)
    return cells.iloc[1:].set_axis(cells.iloc[0], axis=1) if has_header else cells


# --- header rows -----------------------------------------------------------------------------------------------------


def _header(frame: Frame, layout: FileLayout | None) -> None:
    """Take the rows below the names of the columns from the respondents, by the layout or by what these rows hold.

    Such rows have the questions' texts, Qualtrics' kinds of columns, or SurveyMonkey's parts of questions.
    """
    rows, kinds, names = (
        [[*map(code_text, row)] for row in frame.cells.iloc[:_MOST_ROWS].to_numpy()],
        None,
        frame.cells.columns,
    )
    is_open = layout is None
    if layout is None:
        kinds = next((number for number, row in enumerate(rows[:2]) if _IMPORT_ID.match(row[0])), None)
        is_joined = same(rows[0][0]) in {"", *_SURVEYMONKEY} and bool(_SURVEYMONKEY & {*map(same, rows[0])})
        has_texts = is_joined or (kinds is None and _is_header(rows))
        num_rows = kinds + 2 if kinds is not None else 1 + has_texts
        layout = frame.layout.model_copy(update={"header_rows": num_rows, "joined": is_joined})
    frame.cells.columns = _distinct(_joined(names, rows[0]) if layout.joined else names, frame.notes)
    if layout.joined:
        frame.notes.add("SurveyMonkey's two header rows")
    elif layout.header_rows > 1:
        frame.notes.add("header rows below the first, with the questions' texts")
        for k, name in enumerate(frame.cells.columns if is_open else ()):
            frame.columns[name].text = name if kinds == 0 else rows[0][k]
            if kinds is not None and not ((kind := _IMPORT_ID.match(rows[kinds][k])) and kind[1]):
                frame.columns[name].no_question = "no question, as the file says"
    frame.cells = frame.cells.iloc[layout.header_rows - 1 :]
    frame.layout = layout


def _joined(names: Iterable[str], parts: Sequence[str]) -> list[str]:
    """Names of columns from SurveyMonkey's questions, which stand above their first part alone, and their parts."""
    joined, text = [], ""
    for name, part in zip(names, parts, strict=True):
        text = name or text
        joined.append(f"{text}: {part}" if part and same(part) not in _SURVEYMONKEY else name)
    return joined


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


# --- text files ------------------------------------------------------------------------------------------------------


def _csv(file: Path, layout: FileLayout | None) -> Frame:
    notes, known = Notes(), layout
    text, encoding = _decoded(file, layout, notes)
    layout = layout or _csv_layout(text, encoding)
    lines = text.split("\n", layout.lines_above)
    delimiter = layout.delimiter or ("\t" if file.suffix.lower() == ".tsv" else ",")
    # The standard library's reader, since pandas pads or cuts rows whose length differs from the header's.
    reader = csv.reader(io.StringIO(lines[-1], newline=""), delimiter=delimiter, strict=True)
    rows, last, width = dict[int, list[str]](), layout.lines_above, 0
    try:
        for row in reader:
            begun, last = last + 1, reader.line_num + layout.lines_above
            if not row:
                continue
            width = width or len(row)
            if len(row) != width:
                advice = f"; {LAYOUTS}, and no title above" if width == 1 else ""
                advice = advice or ("; [layout] of the codebook names the delimiter" if known else "")
                raise UserError(f"{file}: line {last} has {len(row)} cells, the header {width}{advice}")
            inner = [line for cell in row for line in cell.split("\n")[1:]] if last > begun else []
            if width > 2 and any(line.count(delimiter) == width - 1 for line in inner):  # as many cells as a row
                raise UserError(f"{file}: line {begun}: {_UNCLOSED}")
            rows[last] = row
    except csv.Error as error:
        raise UserError(f"{file}: line {last + 1}: {_UNCLOSED} ({error})") from None
    return Frame(str(file), _table(rows), notes=notes, layout=layout)


def _csv_layout(text: str, encoding: Encoding) -> FileLayout:
    """Layout of a CSV file by its first lines."""
    first = text.partition("\n")[0]
    if first.strip().casefold().startswith("sep="):  # Excel's line with the delimiter
        return FileLayout(encoding=encoding, delimiter=first.strip(" \r")[len("sep=") :][:1] or ",", lines_above=1)
    # A name can hold other delimiters, and in quotes line breaks: rows have the same number of the right one.
    lines = _QUOTED.sub("", text[:_HEADER_CHARS]).split("\n")[:2]
    counts = {mark: [line.count(mark) for line in lines] for mark in ",;\t|"}
    delimiter = max(counts, key=lambda mark: (counts[mark][0] > 0 and len({*counts[mark]}) == 1, counts[mark][0]))
    return FileLayout(encoding=encoding, delimiter=delimiter)


def _decoded(file: Path, layout: FileLayout | None, notes: Notes) -> tuple[str, Encoding]:
    """Text of a file, and its encoding: the layout's, or else UTF-8 or cp1252."""
    data, lines = file.read_bytes(), list[int]()
    encodings: tuple[Encoding, ...] = (layout.encoding,) if layout else ("utf-8", "cp1252")
    for encoding in encodings:
        try:
            text = decode(data) if encoding == "utf-8" else data.decode(encoding)
        except UnicodeDecodeError as error:
            lines.append(data.count(b"\n", 0, error.start) + 1)
            continue
        if encoding == "cp1252":
            notes.add(NOT_UTF8)
        return text, encoding
    wrong = "neither UTF-8 nor cp1252; save it as UTF-8"
    if encodings == ("utf-8",):
        wrong = 'not UTF-8; say encoding = "cp1252" in [layout] of the codebook'
    raise UserError(f"{file}: line {lines[0]} is {wrong}")


def _jsonl(file: Path, layout: FileLayout | None) -> Frame:
    """Read objects, one a line; the fields of an object in an object become columns of their own."""
    notes, rows = Notes(), dict[int, dict[str, object]]()
    text, encoding = _decoded(file, layout, notes)
    for line, part in enumerate(text.split("\n"), start=1):
        if not part.strip():
            continue
        try:
            row = json.loads(part)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}: line {line} is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise UserError(f"{file}: line {line} is not a JSON object")
        rows[line] = row if line == 1 and HEADER in row else _flat(row)
    header = rows.pop(1) if layout is None and HEADER in rows.get(1, ()) else {}
    layout = layout or FileLayout(encoding=encoding)
    return Frame(str(file), _table(rows, has_header=False), notes=notes, header=header, layout=layout)


def _flat(row: Mapping[str, object]) -> dict[str, object]:
    """Replace each object by its fields: location.country."""
    flat = dict[str, object]()
    for name, cell in row.items():
        if isinstance(cell, dict) and name.casefold() != _PLACES:
            flat |= {f"{name}.{part}": value for part, value in _flat(cell).items()}
        else:
            flat[name] = cell
    return flat


# --- files of other programs -----------------------------------------------------------------------------------------


def _parquet(file: Path, layout: FileLayout | None) -> Frame:
    """Read a table; categories keep their order."""
    cells = pd.read_parquet(file).reset_index(drop=True)
    cells.index += 1
    frame = Frame(str(file), cells, layout=layout or FileLayout())
    for name, kind in cells.dtypes.items():
        if isinstance(kind, pd.CategoricalDtype):
            frame.columns[clean(str(name))] = Column(
                order=tuple(filter(None, map(code_text, kind.categories))), is_ordered=bool(kind.ordered)
            )
    return frame


def _excel(file: Path, layout: FileLayout | None) -> Frame:
    """Read the first sheet; a cell in percent format becomes a text with "%", since it stores a fraction."""
    import openpyxl

    book = openpyxl.load_workbook(file, read_only=True, data_only=True)
    sheet = book.worksheets[0]
    sheet.reset_dimensions()  # some programs store the size A1 of a full sheet
    rows = {line: [*row] for line, row in enumerate(sheet.iter_rows(), start=1)}
    # The first row has names, not answers.
    cells = {line: [_shown(cell) if line > 1 else cell.value for cell in row] for line, row in rows.items()}
    for column in zip_longest(*(row for line, row in rows.items() if line > 1)) if layout is None else ():
        filled = [cell for cell in column if cell is not None and cell.value]
        if (dates := [*filter(_is_date, filled)]) and len(dates) < len(filled):
            raise UserError(
                f"{file}: cell {dates[0].coordinate} holds a date ({dates[0].value}), others of its column do not; "
                'Excel makes one of "2-1": make the column text'
            )
    frame = Frame(str(file), _table({1: [], **cells}).dropna(how="all"), layout=layout or FileLayout())
    if len(book.sheetnames) > 1:
        frame.notes.add(f"the first of {len(book.sheetnames)} sheets")
    return frame


def _is_date(cell: Any) -> bool:
    """True for a date, or a time, not for both: the time at which a form was sent, which Excel makes of no answer."""
    value = cell.value
    return isinstance(value, date | time) and not (isinstance(value, datetime) and value.time() != time())


def _shown(cell: Any) -> object:
    value = cell.value
    if isinstance(value, date | time):
        return str(value).removesuffix(" 00:00:00")
    if isinstance(value, float | int) and not isinstance(value, bool) and "%" in str(cell.number_format):
        # A literal "%" is shown as it stands; the format's own shows hundred times the number.
        return f"{value * (100 if '%' in _LITERAL.sub('', cell.number_format) else 1):.12g} %"
    return value
