"""Reader of SPSS's and Stata's files, which declare labels, missing codes, dates and the weight."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from appa_flwr.core.errors import UserError, in_words
from appa_flwr.core.text import clean
from appa_flwr.survey.frames import NOT_UTF8, Column, FileLayout, Frame
from appa_flwr.survey.names import Notes
from appa_flwr.survey.nonanswers import code_text, number

SUFFIXES: Final = (".sav", ".zsav", ".dta")
_LARGEST: Final = 1e12  # seconds of a date

# Formats of dates -> pandas' unit of the number, the number of 1970, and the unit that is shown; "" = a time of day.
_DATES: Final = {
    **dict.fromkeys(("DATE", "ADATE", "EDATE", "SDATE", "JDATE", "WKYR"), ("s", 12_219_379_200, "D")),
    **dict.fromkeys(("DATETIME", "YMDHMS"), ("s", 12_219_379_200, "s")),
    **{"MOYR": ("s", 12_219_379_200, "M"), "QYR": ("s", 12_219_379_200, "Q")},
    **dict.fromkeys(("TIME", "DTIME", "MTIME"), ("s", 0, "")),
    **dict.fromkeys(("%D", "%TD"), ("D", 3_653, "D")),
    **{"%TC": ("ms", 315_619_200_000, "s"), "%TM": ("M", 120, "M"), "%TQ": ("Q", 40, "Q"), "%TY": ("Y", 1_970, "Y")},
}
_FORMAT: Final = re.compile("%T?[A-Z]|[A-Z]+")  # such as MOYR8, or %tdD_m_Y


def read(file: Path, layout: FileLayout | None) -> Frame:
    """Read codes, labels and what else a file of SPSS or Stata declares: missing codes, dates, the weight."""
    import pyreadstat

    with file.open("rb") as content:
        is_stata = file.suffix.lower() == ".dta" or content.read(11) == b"<stata_dta>"
    read = partial(
        pyreadstat.read_dta if is_stata else pyreadstat.read_sav, str(file), disable_datetime_conversion=True
    )
    notes, encoding = Notes(), None if layout is None or layout.encoding == "utf-8" else layout.encoding
    try:
        cells, about = read(user_missing=True, encoding=encoding)
    except (UnicodeDecodeError, pyreadstat.ReadstatError) as error:
        if layout is not None:
            advice = 'if letters are the cause, say encoding = "cp1252" in [layout] of the codebook'
            raise UserError(f"{file}: cannot be read ({in_words(error)}); {advice}") from None
        encoding = "cp1252"
        cells, about = read(user_missing=True, encoding=encoding)
        notes.add(NOT_UTF8)
    if is_stata and (lettered := [*about.missing_user_values]):
        # Beside letters, a whole number's "." comes as a random number; without them, both come as empty.
        plain, _ = read(usecols=lettered, encoding=encoding)
        for name in lettered:
            letters = cells[name].map(lambda cell: cell if isinstance(cell, str) else None)
            cells[name] = plain[name].astype(object).where(plain[name].notna(), letters)
    cells.index += 1
    frame = Frame(str(file), cells, notes=notes, layout=layout or FileLayout(encoding=encoding or "utf-8"))
    for name in cells.columns:
        labels = {code_text(code): str(label) for code, label in about.variable_value_labels.get(name, {}).items()}
        labels = {code: label if label.strip() else code for code, label in labels.items() if code}
        missing = [*about.missing_ranges.get(name, ()), *about.missing_user_values.get(name, ())]
        codes = {*labels, *map(code_text, cells[name].unique())} if missing else {}
        kind = _FORMAT.match(str(about.original_variable_types.get(name)).upper().replace("%-", "%"))
        date = _DATES.get(kind[0]) if kind else None
        if date and not labels:
            cells[name] = _dates(cells[name], *date)
        frame.columns[clean(name)] = Column(
            text=about.column_names_to_labels.get(name) or "",
            labels={code: label for code, label in labels.items() if not _is_declared(code, missing)},
            missing={code: labels.get(code, code) for code in codes if _is_declared(code, missing)},
            is_ordered=about.variable_measure.get(name) == "ordinal",
            no_question="a date or time, as the file says" if date else "",
        )
    weight = None if is_stata else _weight(file, about.variable_storage_width)
    if weight and about.readstat_variable_types[weight] != "string":
        frame.columns[clean(weight)].is_weight = True
    return frame


def _is_declared(code: str, missing: Sequence[Any]) -> bool:
    """True if a code is one of Stata's missing letters or lies in a missing range of SPSS, also of texts."""
    ends = ((part["lo"], part["hi"]) if isinstance(part, dict) else (part, part) for part in missing)
    value = math.nan if number(code) is None else float(code)
    return any(low <= (code if isinstance(low, str) else value) <= high for low, high in ends)


def _weight(file: Path, width_of: Mapping[str, int]) -> str | None:
    """The variable that weights cases, if a file of SPSS names one in its header, by the widths of all variables.

    The header has the weight's place among parts of 8 bytes, of which a text has several; one of more than 255 bytes
    has 32 for each 252 (PSPP's description of the format, "File header record" and "Very long string record").
    """
    with file.open("rb") as content:
        head = content.read(80)
    (weight,) = struct.unpack("<i" if head[64:65] in (b"\2", b"\3") else ">i", head[76:])
    place = 1
    for name, width in width_of.items():
        if place == weight:
            return name
        whole, rest = divmod(width, 252) if width > 255 else (0, width)
        place += 32 * whole + math.ceil(rest / 8)
    return None


def _dates(numbers: pd.Series[Any], unit: str, number_of_1970: int, shown: str) -> pd.Series[Any]:
    """Dates from numbers, as texts such as 2025-09-01, 2025-09, 2025Q3, or 10:30:00; weeks by their first day."""
    number_R = pd.to_numeric(numbers, errors="coerce").to_numpy(dtype=np.float64)
    is_date_R = np.abs(number_R) < _LARGEST * (1000 if unit == "ms" else 1)  # False for NaN
    whole_R = np.rint(np.where(is_date_R, number_R, 0.0)).astype(np.int64) - number_of_1970
    if shown:
        periods = pd.PeriodIndex.from_ordinals(whole_R, freq=unit)  # type: ignore[attr-defined]  # stubs lack it
        texts = periods.asfreq(shown).astype(str).tolist()
    else:
        texts = [str(timedelta(seconds=seconds)) for seconds in whole_R.tolist()]
    return pd.Series(texts, numbers.index, dtype=object).where(is_date_R)
