"""OpinionQA's folder: respondents' answers in waves, counted here into one distribution a group and question.

Layout: `human_resp/American_Trends_Panel_W<n>/` with `info.csv` (`key, question, references, option_ordinal`),
`metadata.csv` (`key`: the demographic columns) and `responses.csv` (one row a respondent, the column `WEIGHT_W<n>`).
`references` are the substantive answers, then the refusals; `option_ordinal` covers the first part only.

Axis letters: K answer options, R respondents, G groups of one attribute.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from appa_flwr.core.errors import UserError
from appa_flwr.survey.cells import (
    MIN_OPTIONS,
    CellError,
    Reason,
    as_list,
    as_name,
    as_text,
    is_refusal,
    parse_options,
    parse_ordinal,
    parse_quantity,
)
from appa_flwr.survey.tables import PRIVATE, REFUSED, SurveyRow, SurveyTable
from appa_flwr.survey.types import FloatArray

if TYPE_CHECKING:
    import pandas as pd

IntArray = npt.NDArray[np.intp]

ANSWERS_FOLDER: Final = "human_resp"
INFO_COLUMNS: Final = ("key", "question", "references", "option_ordinal")
COLUMNS: Final = ("question_id", "question", "options", "ordinal", "attribute", "group", PRIVATE, "n")
_WAVE: Final = re.compile(r"American_Trends_Panel_W\d{1,4}")
MAX_GROUPS: Final = 200
_FIRST_ROW: Final = 2  # behind the header
_NONE: Final = -1  # code of a respondent without a usable answer, or in no group


def waves(folder: Path) -> tuple[Path, ...]:
    """The folders of the waves in the order of their numbers, in a folder that holds `human_resp` or in that itself.

    None where this is not OpinionQA's layout.
    """
    inside = folder / ANSWERS_FOLDER
    root = inside if inside.is_dir() else folder
    return tuple(sorted((p for p in root.iterdir() if p.is_dir() and _WAVE.fullmatch(p.name)), key=_wave_number))


def _wave_number(wave: Path) -> int:
    return int(wave.name.rpartition("_W")[2])


def read_folder(folder: Path) -> SurveyTable:
    """One row per question and group of every attribute, refusals still among the options.

    Answers are weighted; `n` counts people who gave a substantive answer, unweighted. Rows are numbered as in the
    `info.csv` of their wave, or in its `responses.csv` where a respondent is at fault. A respondent's empty cell
    means that the question was not asked of them.

    Raises:
        UserError: no wave, or a file of a wave that is missing, unreadable or without a needed column.
    """
    rows = tuple(row for wave in waves(folder) for row in _wave(wave))
    if not rows:
        raise UserError(f"{folder}: holds no survey rows")
    return SurveyTable(str(folder), frozenset(COLUMNS), rows)


def _wave(wave: Path) -> Iterator[SurveyRow]:
    info_file, people_file = wave / "info.csv", wave / "responses.csv"
    info = _read(info_file, *INFO_COLUMNS)
    weight_column = f"WEIGHT_W{_wave_number(wave)}"
    people = _read(people_file, weight_column)
    attributes = [name for name in _read(wave / "metadata.csv", "key")["key"] if name in people.columns]
    if not attributes:
        raise UserError(f"{wave / 'metadata.csv'}: names no column of responses.csv")
    weight_R = np.array([_weight(cell) for cell in people[weight_column]])
    for index in np.flatnonzero(np.isnan(weight_R)):
        yield SurveyRow(int(index) + _FIRST_ROW, {}, Reason.BAD_WEIGHT, str(people_file))
    groups = {attribute: _groups(people[attribute]) for attribute in attributes}
    for attribute, (_, names) in groups.items():
        if len(names) > MAX_GROUPS:  # such as a column of respondents' numbers
            count = f"column {attribute} has {len(names)} groups; at most {MAX_GROUPS} can be"
            raise UserError(f"{wave / 'metadata.csv'}: {count}")
    for number, record in enumerate(info[list(INFO_COLUMNS)].to_dict("records"), start=_FIRST_ROW):
        for row in _question(number, record, people, weight_R, groups):
            yield replace(row, file=str(info_file))


def _read(file: Path, *columns: str) -> pd.DataFrame:
    """A CSV as text, blanks around cells removed."""
    import pandas as pd

    try:
        # Nothing is a missing value but an empty cell: "None" and "NA" can be answers. As objects, because going
        # through the cells of an Arrow column one by one takes several times as long.
        frame: pd.DataFrame = pd.read_csv(file, dtype=object, na_filter=False, encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # pandas' own parser errors and bad UTF-8 are ValueErrors
        cause = str(getattr(error, "strerror", None) or error).partition("\n")[0]
        raise UserError(f"{file}: cannot be read as CSV ({cause})") from None
    frame.columns = frame.columns.str.strip()
    if missing := [name for name in columns if name not in frame.columns]:
        raise UserError(f"{file}: missing column {', '.join(missing)}")
    if not frame.columns.is_unique:
        raise UserError(f"{file}: column {frame.columns[frame.columns.duplicated()][0]} occurs twice")
    return frame.assign(**{name: frame[name].str.strip() for name in frame.columns})


def _weight(cell: str) -> float:
    """A respondent's weight, NaN where it cannot be used."""
    try:
        weight = parse_quantity(cell, Reason.BAD_WEIGHT)
    except CellError:
        weight = None
    return np.nan if weight is None else weight


def _groups(cells: pd.Series[str]) -> tuple[IntArray, list[str]]:
    """Each respondent's group (R,), and the groups' names; one who did not say is in none."""
    names = [name for name in sorted(set(cells)) if name and not is_refusal(name)]
    codes = {name: code for code, name in enumerate(names)}
    return np.array([codes.get(cell, _NONE) for cell in cells], dtype=np.intp), names


def _question(
    number: int,
    record: Mapping[Hashable, str],
    people: pd.DataFrame,
    weight_R: FloatArray,
    groups: dict[str, tuple[IntArray, list[str]]],
) -> Iterator[SurveyRow]:
    """The rows of one question: what is wrong with it, then a row a group that was asked."""
    question_id = ""
    try:
        question_id = as_name(record["key"], Reason.EMPTY_ID)
        text = as_text(record["question"], Reason.EMPTY_TEXT)
        options = parse_options(record["references"])
        scale = _scale(record["option_ordinal"], len(options))
        if question_id not in people.columns:
            raise CellError(Reason.NO_COLUMN)
    except CellError as error:
        yield SurveyRow(number, {"question_id": question_id}, error.reason)
        return
    refused = tuple(k for k, option in enumerate(options) if scale[k] is None or is_refusal(option))
    codes = {option: k for k, option in reversed([*enumerate(options)])}  # the first of two that read the same
    cells = people[question_id]
    answer_R = np.array([codes.get(cell, _NONE) for cell in cells], dtype=np.intp)
    if ((answer_R == _NONE) & (cells != "").to_numpy()).any():
        yield SurveyRow(number, {"question_id": question_id}, Reason.UNKNOWN_ANSWER)
    counted_R = (answer_R != _NONE) & np.isfinite(weight_R)
    size = len(options)
    public = {"question_id": question_id, "question": text, "options": options, "ordinal": scale, REFUSED: refused}
    substantive = [k for k in range(size) if k not in refused]
    for attribute, (group_R, names) in groups.items():
        used_R = counted_R & (group_R != _NONE)
        cell_R = group_R[used_R] * size + answer_R[used_R]
        shape = (len(names), size)
        count_GK = np.bincount(cell_R, minlength=len(names) * size).reshape(shape)
        weight_GK = np.bincount(cell_R, weights=weight_R[used_R], minlength=len(names) * size).reshape(shape)
        for name, count_K, sum_K in zip(names, count_GK, weight_GK, strict=True):
            if not count_K.any():
                continue  # the question was not asked of this group
            total = sum_K.sum()
            shares = (sum_K / total if total > 0 else sum_K).tolist()
            n = int(count_K[substantive].sum())
            yield SurveyRow(number, public | {"attribute": attribute, "group": name, PRIVATE: shares, "n": n})


def _scale(cell: str, num_options: int) -> tuple[float | None, ...]:
    """Position per option; None for those behind the ordinals, which are the refusals."""
    items = as_list(cell, Reason.BAD_ORDINAL)
    if not MIN_OPTIONS <= len(items) <= num_options:
        raise CellError(Reason.BAD_ORDINAL)
    scale = parse_ordinal([*items, *[None] * (num_options - len(items))], num_options)
    if scale is None or None in scale[: len(items)]:
        raise CellError(Reason.BAD_ORDINAL)
    return scale
