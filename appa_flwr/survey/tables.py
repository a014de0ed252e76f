"""Survey files as rows of raw cells: CSV, JSON lines and Parquet behind one shape.

Rows come with the number a user finds them by. Nothing is checked here: what a row's private cell (`distribution`)
holds matters only to whoever asks for that group.
"""

from __future__ import annotations

import csv
import itertools
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TextIO

from appa_flwr.core import own_code
from appa_flwr.core.errors import UserError
from appa_flwr.survey import wvs
from appa_flwr.survey.cells import JSON, Reason

PRIVATE: Final = "distribution"
REFUSED: Final = "refused"
"""Cell that only a loader can fill: positions of the options that are refusals, where the source tells it."""
OF_TIDY: Final = ("option", "share", "percent", "count", "qkey", "responses")
"""Columns of `tidy` or `subpop` alone: in other files they are somebody's own."""
COLUMNS: Final = (
    "question_id", "question", "options", "ordinal", "attribute", "group", PRIVATE, "n", "refusals", "refusal_rate",
    "selections", *OF_TIDY,
)  # fmt: skip
PUBLIC_REQUIRED: Final = ("question_id", "question", "options")
MAX_LINE_CHARS: Final = 1_000_000
MAX_PARQUET_BYTES: Final = 1 << 30
"""Of a Parquet file's columns, unpacked: some hundred bytes can stand for terabytes."""
MAX_PARQUET_CELLS: Final = 20_000_000
"""Of one of its columns, numbers in lists counted one by one; of an Excel or a Stata file in all."""
MAX_EXCEL_BYTES: Final = 1 << 28
"""Of an Excel file, unpacked: it is text, which takes longer to read."""
_PART_BYTES: Final = 1 << 28  # unpacked at once
_PART_ROWS: Final = 1 << 16


@dataclass(frozen=True)
class SurveyRow:
    """One row of a file.

    Attributes:
        number: JSON lines and CSV: the line on which the row starts, from 1 (a CSV header is line 1). Parquet: the
            row, from 1.
        cells: column -> raw cell. Where `reason` is set at most what names the row.
        reason: why the row cannot be read at all, else None.
        file: the one that `number` counts in, where the table comes from several.
    """

    number: int
    cells: Mapping[str, object]
    reason: Reason | None = None
    file: str = ""


@dataclass(frozen=True)
class SurveyTable:
    """A survey file's rows.

    Attributes:
        columns: those of `COLUMNS` that it has anywhere.
        layout: what was guessed of a file that is not in our own columns; empty otherwise.
        header: all columns of a CSV, an Excel or a Stata file; the rows of the last two have all their cells.
        asks: what each column of a Stata file asks, by its label; empty where it has none.
    """

    source: str
    columns: frozenset[str]
    rows: tuple[SurveyRow, ...]
    layout: str = ""
    header: tuple[str, ...] = ()
    asks: Mapping[str, str] = field(default_factory=dict)

    def require(self, *columns: str) -> None:
        """Raises a `UserError` that names the missing columns and those the file has."""
        missing = [name for name in columns if name not in self.columns]
        if missing:
            none = "none of ours; if a row is a respondent, data.group-by names the columns of groups"
            has = ", ".join(name for name in COLUMNS if name in self.columns) or none
            raise UserError(f"{self.source}: missing column {', '.join(missing)} (columns found: {has})")


def read_table(path: str | os.PathLike[str]) -> SurveyTable:
    """The rows of a .csv, .tsv, .jsonl, .parquet, .xlsx or .dta file; columns we do not use are left out.

    Rows that cannot be read (broken JSON, wrong number of CSV cells, overlong line) stay in, with their reason.

    Raises:
        UserError: no such file, a folder, not readable, another extension, not UTF-8, broken Parquet, Excel or
            Stata, or no row.
    """
    file = Path(path)
    source = str(path)
    if file.is_dir():
        raise UserError(f"{source}: is a folder, and not in OpinionQA's layout; name a survey file in it")
    readers = {".csv": _read_csv, ".tsv": _read_csv, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    readers |= {".xlsx": _read_excel, ".dta": _read_stata}
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise UserError(f"{source}: unknown survey format {file.suffix!r}; use {', '.join(readers)}")
    try:
        table = reader(file, source)
    except FileNotFoundError:
        raise UserError(f"{source}: no such survey file") from None
    except OSError as error:
        cause = error.strerror or str(error).partition("\n")[0]
        raise UserError(f"{source}: cannot be read ({cause})") from None
    if not table.rows:
        raise UserError(f"{source}: holds no survey rows")
    return table


def _used(header: Sequence[str], source: str) -> list[str]:
    """The columns of a header that we use; two of one name are an error, since either could be meant."""
    if twice := [name for name in COLUMNS if header.count(name) > 1 and name not in OF_TIDY]:
        raise UserError(f"{source}: column {twice[0]} occurs twice")
    return [name for name in COLUMNS if name in header]


# A flat list, its strings skipped. Nothing is matched twice, however the text goes on.
_ANSWERS: Final = re.compile(r'"distribution"[ \t]*+:[ \t]*+\[(?:[^"\[\]]|"(?:[^"\\]|\\.)*+")*+\]', re.DOTALL)


def _object(text: str) -> dict[str, object]:
    """One line as an object; a list of answers that is no JSON costs that cell, not the row that says whose it is."""
    try:
        row: object = JSON.decode(text)
    except ValueError:
        start = max(text.find(f'"{PRIVATE}"'), 0)
        answers = _ANSWERS.match(text, start)
        if answers is None:
            raise
        row = JSON.decode(f'{text[:start]}"{PRIVATE}": null{text[answers.end() :]}')
    if not isinstance(row, dict):
        raise ValueError("not an object")
    return row


def _lines(stream: TextIO) -> Iterator[str | None]:
    """The lines of a text; None for an overlong one, which is skipped without being held in memory."""
    while line := stream.readline(MAX_LINE_CHARS):
        overlong = False
        while len(line) == MAX_LINE_CHARS and not line.endswith("\n"):
            overlong, line = True, stream.readline(MAX_LINE_CHARS)
        yield None if overlong else line


def _read_jsonl(file: Path, source: str) -> SurveyTable:
    rows: list[SurveyRow] = []
    columns: set[str] = set()
    # What is not UTF-8 costs the row whose text or name it is in.
    with file.open(encoding="utf-8-sig", errors="surrogateescape") as stream:
        for number, line in enumerate(_lines(stream), start=1):
            if line is not None and not line.strip():
                continue
            try:
                cells = {} if line is None else _object(line)
                reason = Reason.TOO_LONG if line is None else None
            except (ValueError, RecursionError):
                cells, reason = {}, Reason.BAD_LINE
            rows.append(SurveyRow(number, {name: cells[name] for name in COLUMNS if name in cells}, reason))
            columns.update(rows[-1].cells)
    if rows and all(row.reason is not None for row in rows):
        raise UserError(f"{source}: no line is a JSON object (line {rows[0].number}: {rows[0].reason})")
    return SurveyTable(source, frozenset(columns), tuple(rows))


def delimiter_of(file: Path) -> str:
    """What separates a CSV's cells: comma, semicolon or tab, by which it has most of our columns, or most."""
    with file.open(encoding="utf-8-sig", errors="replace") as stream:
        header = next((line for line in _lines(stream) if line and line.strip()), "")
    names = {sign: [name.strip(' "\r\n') for name in header.split(sign)] for sign in ",;\t"}
    return max(names, key=lambda sign: (len({*COLUMNS}.intersection(names[sign])), len(names[sign])))


def _read_csv(file: Path, source: str) -> SurveyTable:
    # The standard reader rather than a data frame: a row with a cell too many costs that row, not the file,
    # and the line on which a row starts stays known when cells hold line breaks.
    rows: list[SurveyRow] = []
    header: list[str] | None = None
    wanted: list[tuple[int, str]] = []
    delimiter = delimiter_of(file)
    with file.open(encoding="utf-8-sig", newline="") as stream:
        # In place of an overlong line stands a cell that no CSV reader takes.
        lines = ("x" * (csv.field_size_limit() + 1) + "\n" if line is None else line for line in _lines(stream))
        reader = csv.reader(lines, delimiter=delimiter)
        while True:
            number = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                break
            except csv.Error:  # a cell beyond the csv module's limit; the reader goes on with the next line
                rows.append(SurveyRow(number, {}, Reason.TOO_LONG))
                continue
            except UnicodeDecodeError:
                raise UserError(f"{source}: not UTF-8 text near line {number}; save it as UTF-8") from None
            if not cells:
                continue
            if header is None:
                header = [name.strip() for name in cells]
                wanted = [(header.index(name), name) for name in _used(header, source)]
            elif len(cells) != len(header):
                rows.append(SurveyRow(number, {}, Reason.WRONG_CELLS))
            else:
                rows.append(SurveyRow(number, {name: cells[position] for position, name in wanted}))
    return SurveyTable(source, frozenset(name for _, name in wanted), tuple(rows), header=tuple(header or ()))


def _read_excel(file: Path, source: str) -> SurveyTable:
    """The first sheet, whose cells are all kept; rows are numbered as there."""
    try:
        import openpyxl
    except ModuleNotFoundError:
        raise UserError(f"{source}: needs the package openpyxl (pip install openpyxl); or save it as .csv") from None
    rows: list[SurveyRow] = []
    header: list[str] = []
    too_large = UserError(f"{source}: unpacks to too much; save it as .csv")
    try:
        with zipfile.ZipFile(file) as parts:
            if sum(part.file_size for part in parts.infolist()) > MAX_EXCEL_BYTES:
                raise too_large
        # Not by pandas, which first fills all rows up to the widest that a file claims to have.
        with closing(openpyxl.load_workbook(file, read_only=True, data_only=True)) as book:
            total, names = 0, book.sheetnames
            book.worksheets[0].reset_dimensions()  # what the file says of them need not be so
            for number, cells in enumerate(book.worksheets[0].iter_rows(values_only=True), start=1):
                if (total := total + len(cells) + 1) > MAX_PARQUET_CELLS:
                    raise too_large
                if not header:
                    header = ["" if cell is None else str(cell).strip() for cell in cells]
                elif any(cell is not None for cell in cells):
                    rows.append(SurveyRow(number, dict(zip(header, cells, strict=False))))
    except (OSError, UserError):
        raise
    except Exception as error:  # of the packing, of XML, or of what openpyxl makes of it
        raise UserError(f"{source}: not a readable Excel file ({own_code.in_words(error)})") from None
    layout = f"the sheet {names[0]!r} of {len(names)}" if len(names) > 1 else ""
    return SurveyTable(source, frozenset(_used(header, source)), tuple(rows), layout, tuple(filter(None, header)))


def _read_stata(file: Path, source: str) -> SurveyTable:
    """All cells, values by their labels and missing ones None."""
    import pandas as pd

    try:
        with pd.read_stata(file, iterator=True, convert_dates=False) as content:
            asks = content.variable_labels()  # of the World Values Survey the codes, whose words are known
            frame = content.read(convert_categoricals=not wvs.is_wvs(asks))  # type: ignore[attr-defined]  # not in stubs
    except OSError:
        raise
    except Exception as error:  # whatever pandas makes of it, such as two values of one label
        raise UserError(f"{source}: not a readable Stata file ({own_code.in_words(error)})") from None
    if frame.size > MAX_PARQUET_CELLS:
        raise UserError(f"{source}: has more than {MAX_PARQUET_CELLS} cells; save it as .csv")
    cells = frame.astype(object).where(frame.notna(), None).to_dict("records")
    rows = tuple(itertools.starmap(SurveyRow, enumerate(cells, start=1)))
    return SurveyTable(source, frozenset(_used([*frame], source)), rows, header=tuple(frame), asks=asks)


def _plain(cell: Any) -> object:
    """An Arrow scalar as a value; None where Python has none for it, such as text that is not UTF-8."""
    try:
        return cell.as_py()
    except (ValueError, OverflowError):
        return None


def _read_parquet(file: Path, source: str) -> SurveyTable:
    # Imported here: a client that reads JSON lines starts without the cost of loading Arrow.
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with file.open("rb") as stream:
            content = pq.ParquetFile(stream)
            names = _used(content.schema_arrow.names, source)
            parts = _parts(content, names, source)
            rows = [cells for part in parts for cells in zip(*map(_cells, names, part), strict=True)]
    # Python's own errors come from names and texts that are not UTF-8, and from dates beyond its calendar.
    except (pa.ArrowException, ValueError, OverflowError) as error:
        first_line = str(error).partition("\n")[0]
        raise UserError(f"{source}: not a readable Parquet file ({first_line})") from None
    lines = (dict(zip(names, cells, strict=True)) for cells in rows)
    return SurveyTable(source, frozenset(names), tuple(itertools.starmap(SurveyRow, enumerate(lines, start=1))))


def _cells(name: str, column: Any) -> Iterable[object]:
    # One by one in the private column: a bad cell costs its group, not the file.
    return map(_plain, column) if name == PRIVATE else column.to_pylist()


def _parts(content: Any, names: list[str], source: str) -> Iterator[list[Any]]:
    """The columns of a Parquet file, a part of the rows at a time, each small enough to be unpacked."""
    about = content.metadata
    groups = [about.row_group(place) for place in range(about.num_row_groups)]
    columns = [[group.column(place) for group in groups] for place in range(about.num_columns)]
    largest = max((chunk.total_uncompressed_size for column in columns for chunk in column), default=0)
    cells = max((sum(chunk.num_values for chunk in column) for column in columns), default=0)
    too_large = UserError(
        f"{source}: unpacks to more than {MAX_PARQUET_BYTES >> 20} MB, or {MAX_PARQUET_CELLS} cells in a column; "
        "split it, or give it as .jsonl"
    )
    if largest > MAX_PARQUET_BYTES or cells > MAX_PARQUET_CELLS:
        raise too_large
    unpacked = 0
    # No cell is larger than what its column is stored in, however often a file says that it comes again.
    for part in content.iter_batches(min(_PART_BYTES // max(largest, 1) + 1, _PART_ROWS), columns=names):
        plain = [column.dictionary_decode() if hasattr(column, "dictionary") else column for column in part.columns]
        unpacked += sum(column.nbytes for column in plain)
        if unpacked > MAX_PARQUET_BYTES:
            raise too_large
        yield plain
