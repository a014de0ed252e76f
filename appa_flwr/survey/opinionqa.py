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
)
from appa_flwr.survey.respondents import FIRST_ROW, NONE, IntArray, counted, groups_in, read_csv, weight_of
from appa_flwr.survey.tables import PRIVATE, REFUSED, SurveyRow, SurveyTable
from appa_flwr.survey.types import FloatArray

if TYPE_CHECKING:
    import pandas as pd

ANSWERS_FOLDER: Final = "human_resp"
INFO_COLUMNS: Final = ("key", "question", "references", "option_ordinal")
COLUMNS: Final = ("question_id", "question", "options", "ordinal", "attribute", "group", PRIVATE, "n")
_WAVE: Final = re.compile(r"American_Trends_Panel_W\d{1,4}")


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
    info = read_csv(info_file, *INFO_COLUMNS)
    weight_column = f"WEIGHT_W{_wave_number(wave)}"
    people = read_csv(people_file, weight_column)
    attributes = [name for name in read_csv(wave / "metadata.csv", "key")["key"] if name in people.columns]
    if not attributes:
        raise UserError(f"{wave / 'metadata.csv'}: names no column of responses.csv")
    weight_R = np.array([weight_of(cell) for cell in people[weight_column]])
    for index in np.flatnonzero(np.isnan(weight_R)):
        yield SurveyRow(int(index) + FIRST_ROW, {}, Reason.BAD_WEIGHT, str(people_file))
    groups = {
        attribute: groups_in(people[attribute], f"{wave / 'metadata.csv'}: column {attribute}")
        for attribute in attributes
    }
    for number, record in enumerate(info[list(INFO_COLUMNS)].to_dict("records"), start=FIRST_ROW):
        for row in _question(number, record, people, weight_R, groups):
            yield replace(row, file=str(info_file))


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
    answer_R = np.array([codes.get(cell, NONE) for cell in cells], dtype=np.intp)
    if ((answer_R == NONE) & (cells != "").to_numpy()).any():
        yield SurveyRow(number, {"question_id": question_id}, Reason.UNKNOWN_ANSWER)
    public = {"question_id": question_id, "question": text, "options": options, "ordinal": scale, REFUSED: refused}
    yield from counted(public, number, answer_R, weight_R, groups, refused=refused)


def _scale(cell: str, num_options: int) -> tuple[float | None, ...]:
    """Position per option; None for those behind the ordinals, which are the refusals."""
    items = as_list(cell, Reason.BAD_ORDINAL)
    if not MIN_OPTIONS <= len(items) <= num_options:
        raise CellError(Reason.BAD_ORDINAL)
    scale = parse_ordinal([*items, *[None] * (num_options - len(items))], num_options)
    if scale is None or None in scale[: len(items)]:
        raise CellError(Reason.BAD_ORDINAL)
    return scale
