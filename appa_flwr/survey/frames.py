"""Readers of survey files as tables of cells; the raw answer type."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from appa_flwr.core.errors import UserError
from appa_flwr.core.own_code import in_words
from appa_flwr.core.text import clean
from appa_flwr.survey.nonanswers import NUM_SHOWN, code_text, number
from appa_flwr.survey.store import HEADER

if TYPE_CHECKING:
    import pandas as pd

# Pew and the World Values Survey spell these differently, and Pew changed some over the years.
_ALIASES = {"Britain": "Great Britain", "S. Korea": "South Korea", "Czech Rep.": "Czechia", "Taiwan ROC": "Taiwan"}
_IMPORT_ID: Final = '{"ImportId"'
_SURVEYMONKEY: Final = {"response", "open-ended response"}
_QUOTED: Final = re.compile(r'"[^"]*"')


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
    codes: tuple[str, ...] = ()  # codes of the options; empty: the labels are the codes
    ordinal: Sequence[float] = ()  # (K,) scale positions, if known; NaN for an option off the scale
    people: Sequence[float] = ()  # (K,) number of respondents per option, if known
    n: float | None = None  # total number of respondents, used if `people` is empty


def group_name(group: str, attribute: str = "") -> str:
    """Full name of a group, "attribute/group" if the attribute is given."""
    name = clean(group)
    name = _ALIASES.get(name, name)
    return f"{clean(attribute)}/{name}" if attribute else name


def same(name: str) -> str:
    """Normalise a name for comparison, without case, repeated blanks and a final full stop."""
    return " ".join(clean(name).casefold().split()).removesuffix(".").rstrip()


class Notes:
    """Notes on how a source was read and what was left out: sentences, each with the names it concerns."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, sentence: str, *names: str) -> None:
        """Add names to a sentence, which is listed once."""
        self._names.setdefault(sentence, []).extend(names)

    def add_spelling(self, name: str, first: str) -> None:
        """Note that a name counts as its first spelling, unless it has that spelling."""
        if name != first:
            self.add("options and groups that are one", f"{name!r} is {first!r}")

    def lines(self, start: str = "") -> tuple[str, ...]:
        """List the sentences that begin with `start`, each with its first few names."""
        lines = (f"{sentence}: {some(names)}" if names else sentence for sentence, names in self._names.items())
        return tuple(line for line in lines if line.startswith(start))


def some(names: Iterable[str]) -> str:
    """List the first few distinct names, and the number of the others."""
    listed = [*dict.fromkeys(names)]
    return ", ".join(listed[:NUM_SHOWN]) + (f" and {rest} more" if (rest := len(listed) - NUM_SHOWN) > 0 else "")


@dataclass
class Column:
    """What a source says of a column."""

    text: str = ""  # text of its question
    labels: Mapping[str, str] = field(default_factory=dict)  # code -> label
    is_ordered: bool = False
    options: Mapping[str, float] = field(default_factory=dict)  # all options -> scale position or NaN, if listed
    is_question: bool = True

    def label(self, code: str) -> str:
        """Label of a code; the code itself if it has none."""
        return self.labels.get(code, code)


@dataclass
class Frame:
    """A table of cells."""

    source: str  # as the user named it
    cells: pd.DataFrame  # empty cells are None, the index is the row number in the file, column names are texts
    codebook: defaultdict[str, Column] = field(default_factory=lambda: defaultdict(Column))
    notes: Notes = field(default_factory=Notes)
    header: Mapping[str, Any] = field(default_factory=dict)  # first line of a file in the own format (`store`)
    weight: str = ""  # column of the respondents' weights

    def require(self, *names: str) -> None:
        """Raise a `UserError` if any of these columns is missing."""
        if missing := [name for name in names if name not in self.cells.columns]:
            raise UserError(f"{self.source}: has no column {', '.join(missing)}; it has {some(self.cells.columns)}")


def read_frame(path: str) -> Frame:
    """Read the first table of a file.

    Raises:
        UserError: no such file, an unknown or broken format, or no rows; the message names a faulty row.
    """
    file = Path(path)
    readers = {".csv": _csv, ".tsv": _csv, ".txt": _csv, ".jsonl": _jsonl, ".parquet": _parquet, ".xlsx": _excel}
    readers |= dict.fromkeys((".sav", ".zsav", ".dta"), _statistics)
    if (reader := readers.get(file.suffix.lower())) is None:
        raise UserError(f"{path}: unknown survey format {file.suffix!r}; use {', '.join(readers)}")
    if not file.exists():
        raise UserError(f"{path}: no such survey file")
    try:
        frame = reader(file)
    except UserError:
        raise
    except ModuleNotFoundError as missing:
        raise UserError(f"{path}: reading {file.suffix} needs `pip install {missing.name}`") from None
    except Exception as error:  # the libraries raise many types for a broken file
        raise UserError(f"{path}: not a readable {file.suffix} file ({in_words(error)})") from None
    frame.cells.columns = ["" if name is None else str(name).strip() for name in frame.cells.columns]
    if frame.cells.empty:
        raise UserError(f"{path}: holds no survey rows")
    frame.cells = frame.cells.astype(object).where(frame.cells.notna(), None)
    if frame.cells.iloc[0, 0] in (None, "") and _SURVEYMONKEY & {same(str(cell)) for cell in frame.cells.iloc[0]}:
        _surveymonkey(frame)
    is_empty = (frame.cells.columns == "") & frame.cells.isin(["", None]).all().to_numpy()
    frame.cells = frame.cells.loc[:, ~is_empty]
    if (twice := frame.cells.columns.duplicated()).any():
        raise UserError(f"{path}: column {frame.cells.columns[twice][0]!r} occurs twice")
    return frame


def _table(rows: Mapping[int, Any], columns: list[Any] | None = None) -> pd.DataFrame:
    """Make a table from rows by number, which are lists of cells, or dicts whose keys become the columns."""
    import pandas as pd

    return pd.DataFrame([*rows.values()], index=[*rows], columns=columns, dtype=object)


def _csv(file: Path) -> Frame:
    notes = Notes()
    text = _decoded(file, notes)
    first, _, rest = text.partition("\n")
    skipped = 0
    if first.strip().casefold().startswith("sep="):  # Excel's line with the delimiter
        delimiter, text, skipped = first.strip()[len("sep=") :][:1], rest, 1
    else:
        delimiter = max(",;\t|", key=_QUOTED.sub("", first).count)
    # The standard library's reader, since pandas pads or cuts rows whose length differs from the header's.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    header = next(reader, [])
    rows: dict[int, list[str]] = {}
    for row in reader:
        if row:
            rows[line := reader.line_num + skipped] = row
            if len(row) != len(header):
                raise UserError(f"{file}: line {line} has {len(row)} cells, the header {len(header)}")
    frame = Frame(str(file), _table(rows, header), notes=notes)
    return _qualtrics(frame) if len(rows) > 1 and str(frame.cells.iloc[1, 0]).startswith(_IMPORT_ID) else frame


def _decoded(file: Path, notes: Notes) -> str:
    data = file.read_bytes()
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
    try:
        text = data.decode("cp1252")
    except UnicodeDecodeError:
        raise UserError(f"{file}: line {line} is neither UTF-8 nor cp1252; save it as UTF-8") from None
    notes.add("read as cp1252, as it is not UTF-8; where letters look wrong, save it as UTF-8")
    return text


def _qualtrics(frame: Frame) -> Frame:
    """Read a Qualtrics export: the second row holds the question texts, the third the kind of each column."""
    for name, text, import_id in zip(frame.cells.columns, frame.cells.iloc[0], frame.cells.iloc[1], strict=True):
        is_question = str(import_id).replace(" ", "").startswith(_IMPORT_ID + ':"QID')
        frame.codebook[str(name).strip()] = Column(text=str(text), is_question=is_question)
    frame.cells = frame.cells.iloc[2:]
    frame.notes.add("Qualtrics' three header rows")
    return frame


def _surveymonkey(frame: Frame) -> None:
    """Read a SurveyMonkey export: the second row holds the parts of a question, whose text stands above the first."""
    names, text = [], ""
    for name, part in zip(frame.cells.columns, frame.cells.iloc[0], strict=True):
        text = name or text
        names.append(f"{text}: {part}" if part and same(str(part)) not in _SURVEYMONKEY else name)
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
    return Frame(str(file), _table(rows), notes=notes, header=header)


def _parquet(file: Path) -> Frame:
    import pandas as pd

    cells = pd.read_parquet(file).reset_index(drop=True)
    cells.index += 1
    return Frame(str(file), cells)


def _excel(file: Path) -> Frame:
    """Read the first sheet; a cell in percent format becomes a text with "%", since it stores a fraction."""
    import openpyxl

    book = openpyxl.load_workbook(file, read_only=True, data_only=True)
    header = [cell.value for cell in next(book.worksheets[0].iter_rows(max_row=1), ())]
    while header and header[-1] is None:
        header.pop()
    lines = enumerate(book.worksheets[0].iter_rows(min_row=2, max_col=len(header) or 1), start=2)
    frame = Frame(str(file), _table({line: [_shown(cell, file) for cell in row] for line, row in lines}, header))
    frame.cells = frame.cells.dropna(how="all")
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
        return f"{100 * value:.12g} %"
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
        frame.codebook[name.strip()] = Column(
            text=about.column_names_to_labels.get(name) or "",
            labels={code: label for code, label in labels.items() if not _is_declared(code, missing)},
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
