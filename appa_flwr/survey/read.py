"""Reads surveys: our own columns, tidy tables, rows of respondents, the layouts of published data sets.

Our columns: `question_id, question, options, group, distribution`, optionally `attribute` (what a group is defined by),
`ordinal` (scale position of each option, null for one that has none), `n` (people behind the distribution), and
`refusal_rate` or `refusals` (people who refused, next to `n`) where refusals are already apart. Others are ignored. In
CSV the list cells hold JSON or Python-literal text.

Bad answers are rejected one by one with a counted reason, everything else is renormalised.
Names of groups are "attribute/group" where the file has an attribute, and one name stands for every spelling of a
country (`names.ALIASES`); where two spellings answer the same question the first in the file counts.

Axis letters: G groups, Q questions, K answer options.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, get_args

from appa_flwr.config import HUB_SURVEY, split_names
from appa_flwr.config.sections import DataSection
from appa_flwr.core.errors import UserError
from appa_flwr.core.own_code import reader_of
from appa_flwr.survey import globalqa, opinionqa, own_reader, respondents, subpop, tidy
from appa_flwr.survey.cells import CellError, Reason
from appa_flwr.survey.names import resolve
from appa_flwr.survey.rows import (
    Answer,
    AnswerFilter,
    Entry,
    PublicRow,
    Refusals,
    answer_of,
    groups_of,
    public_rows,
)
from appa_flwr.survey.tables import PRIVATE, PUBLIC_REQUIRED, SurveyTable, read_table
from appa_flwr.survey.types import FloatArray, Question, Rejection, Survey

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """A survey, and which columns are groups and weights (empty: by its name) where a row is a respondent."""

    path: str | os.PathLike[str]
    group_by: tuple[str, ...] = ()
    weight: str = ""

    @classmethod
    def of(cls, path: str, data: DataSection) -> Source:
        """A survey with the columns that a config names."""
        return cls(path, split_names(data.group_by), data.weight)


PathLike = str | os.PathLike[str] | Source
UNREADABLE: Final = "(unreadable)"
__all__ = [
    "UNREADABLE",
    "AnswerFilter",
    "Source",
    "group_names",
    "read_groups",
    "read_questions",
    "read_survey",
    "summary",
]


def read_survey(
    path: PathLike,
    *,
    groups: Sequence[str] | None = None,
    refusals: Refusals = "keep",
    min_respondents: int = 0,
) -> Survey:
    """A survey as questions and answers of all groups, or of some.

    Args:
        path: a .csv, .tsv, .jsonl, .parquet, .xlsx or .dta file in our own columns, tidy, in GlobalOpinionQA's or
            SubPOP's, or with one row a respondent; a folder in OpinionQA's layout; the hub id `HUB_SURVEY`; or a reader
            of one's own (`own_code.reader_of`).
        groups: names in the wanted order; a bare name will do where only one attribute has it. None: all groups with
            a usable answer, in the order of the file. Other groups' answers are not looked at.
        refusals: "keep" leaves options such as "Don't know" in; "drop" takes them out of every question and
            renormalises the rest; "separate" does the same and gives the share they had in `refusal_rates`.
        min_respondents: answers of fewer people are rejected; those without a number stay.

    Returns:
        Questions with at least one usable answer, in the order of the file; distributions (K,), >= 0, sum 1; the
        rejected rows (numbered as in `tables.SurveyRow`).

    Raises:
        UserError: a file that is missing, unreadable, of another format or without a needed column; an unknown or
            ambiguous group; a wanted group, or the whole file, without a usable answer.
    """
    table = _open(path, refusals)
    table.require(*PUBLIC_REQUIRED, "group", PRIVATE)
    wanted = _wanted(table, groups)
    entries, answers, rejections = _collect(table, wanted, AnswerFilter(refusals, min_respondents))
    for name in wanted or ():
        _check_group(table, name, answers[name], rejections)
    answers = {name: mine for name, mine in answers.items() if mine}
    if not answers:
        raise _unusable(table, "no usable answer", rejections)
    answered = {question_id for mine in answers.values() for question_id in mine}
    return Survey(
        tuple(entry.question for question_id, entry in entries.items() if question_id in answered),
        {name: _known(mine, lambda answer: answer.shares) for name, mine in answers.items()},
        tuple(rejections),
        respondents={name: _known(mine, lambda answer: answer.respondents) for name, mine in answers.items()},
        refusal_rates={name: _known(mine, lambda answer: answer.refusal_rate) for name, mine in answers.items()},
        layout=table.layout,
    )


def read_questions(
    path: PathLike, *, groups: Sequence[str] | None = None, refusals: Refusals = "keep"
) -> tuple[Question, ...]:
    """The public side of a survey file, the only one a server needs; no answer is looked at.

    Args:
        path: as in `read_survey`, or a public question file without the columns `group` and `distribution`.
        groups: only questions that the file has a row of for one of these groups, be its distribution usable or not;
            None for all. Ignored for a file without a `group` column, which holds what everybody may see.
        refusals: as in `read_survey`; the same options are left in `read_groups`.

    Returns:
        Q >= 1 questions in the order of the file.

    Raises:
        UserError: as in `read_survey`, or no usable question.
    """
    table = _open(path, refusals)
    table.require(*PUBLIC_REQUIRED)
    wanted = _wanted(table, groups) if "group" in table.columns else None
    entries: dict[str, Entry] = {}
    rows = [
        row
        for row in public_rows(table, entries, refusals=refusals)
        if wanted is None or not row.group or row.group in wanted
    ]
    asked = {row.question_id for row in rows if row.reason is None}
    if not asked:
        rejections = [_rejection(table, row, row.reason) for row in rows if row.reason is not None]
        raise _unusable(table, "no usable question", rejections)
    return tuple(entry.question for question_id, entry in entries.items() if question_id in asked)


def read_groups(
    path: PathLike, groups: Sequence[str], *, answer_filter: AnswerFilter
) -> tuple[dict[str, Mapping[str, FloatArray] | UserError], dict[str, tuple[str, ...]]]:
    """Several groups' answers, each alone, and the options they are about; other groups' answers are not looked at.

    Args:
        path: as in `read_survey`; a file of a single group may leave the column `group` out.
        groups: names, as in `read_survey`.
        answer_filter: which answers count.

    Returns:
        Group -> question id -> distribution of shape (K,) over the options that `read_questions` gives with the same
        refusals, in the order of the file, at least one; or the error for a group that has none or is unknown. And
        question id -> these options.

    Raises:
        UserError: the file is missing, unreadable, of another format or without a needed column.
    """
    table = _open(path, answer_filter.refusals)
    table.require(*PUBLIC_REQUIRED, PRIVATE)
    names = groups_of(table)

    def full(group: str) -> str:
        return resolve((group,), names, source=table.source)[0] if "group" in table.columns else groups[0]

    wanted: list[str] = []
    for group in groups:
        with suppress(UserError):  # raised again below
            wanted.append(full(group))
    entries, answers, rejections = _collect(table, wanted, answer_filter, only=next(iter(groups), ""))
    found: dict[str, Mapping[str, FloatArray] | UserError] = {}
    for group in groups:
        try:
            name = full(group)
            _check_group(table, name, answers[name], rejections)
            found[group] = _known(answers[name], lambda answer: answer.shares)
        except UserError as error:
            found[group] = error
    return found, {question_id: entry.question.options for question_id, entry in entries.items()}


def group_names(path: PathLike) -> tuple[str, ...]:
    """The groups a survey has rows of, in its order; none in a public question file. No answer is decoded.

    Raises:
        UserError: the file is missing, unreadable or of another format.
    """
    return tuple(dict.fromkeys(name.full for name in groups_of(_open(path))))


def summary(survey: Survey) -> pd.DataFrame:
    """Counts of what was kept and what was not, and why.

    Returns:
        One row a group (index `group`; rows of none come last under `UNREADABLE`), integer columns: `kept`
        questions, then one column per reason that occurred, in the order of the file.
    """
    # Imported here: reading a file on a client needs no data frames.
    import pandas as pd

    counts = Counter((rejection.group or UNREADABLE, rejection.reason) for rejection in survey.rejections)
    groups = sorted(dict.fromkeys((*survey.groups, *(group for group, _ in counts))), key=UNREADABLE.__eq__)
    data = {"kept": [len(survey.answers.get(group, {})) for group in groups]}
    data |= {reason: [counts[group, reason] for group in groups] for _, reason in counts}
    return pd.DataFrame(data, index=pd.Index(groups, name="group"))


def _open(path: PathLike, refusals: str = "keep") -> SurveyTable:
    """The rows of a source, one per question and group."""
    source = path if isinstance(path, Source) else Source(path)
    path = source.path
    if refusals not in get_args(Refusals):
        raise UserError(f"refusals: {refusals!r} is not one of {', '.join(map(repr, get_args(Refusals)))}")
    if str(path) == HUB_SURVEY:
        return globalqa.from_hub()
    try:
        if Path(path).is_dir() and opinionqa.waves(Path(path)):
            return opinionqa.read_folder(Path(path))
    except OSError as error:  # such as a folder of somebody else's
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    table = own_reader.rows(*reader) if (reader := reader_of(str(path))).name else read_table(path)
    if not reader.name and respondents.are_rows(table, source.group_by):
        return respondents.by_group(table, source.group_by, source.weight)
    if subpop.is_subpop(table):
        return subpop.renamed(table)
    if tidy.is_tidy(table):
        return tidy.by_group(table)
    return globalqa.by_country(table) if globalqa.is_globalqa(table) else table


def _wanted(table: SurveyTable, groups: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if groups is None else resolve(groups, groups_of(table), source=table.source)


def _collect(
    table: SurveyTable, wanted: Sequence[str] | None, answer_filter: AnswerFilter, *, only: str = ""
) -> tuple[dict[str, Entry], dict[str, dict[str, Answer]], list[Rejection]]:
    """The questions, the answers of the wanted groups, or of all, and the rows that gave none, those of nobody too."""
    entries: dict[str, Entry] = {}
    answers: dict[str, dict[str, Answer]] = {name: {} for name in wanted or ()}
    rejections: list[Rejection] = []
    for row in public_rows(table, entries, refusals=answer_filter.refusals, only=only):
        if wanted is not None and row.group and row.group not in answers:
            continue
        mine = answers.setdefault(row.group, {}) if row.group else {}
        try:
            if row.entry is not None and row.question_id in mine:
                raise CellError(Reason.DUPLICATE)
            mine[row.question_id] = answer_of(row, answer_filter)
        except CellError as error:
            rejections.append(_rejection(table, row, error.reason))
    return entries, answers, rejections


def _check_group(table: SurveyTable, name: str, mine: Mapping[str, Answer], rejections: Iterable[Rejection]) -> None:
    """A UserError where a group that was asked for has no answer."""
    if not mine:
        concerned = [rejection for rejection in rejections if rejection.group in ("", name)]
        raise _unusable(table, f"group {name!r} has no usable answer", concerned)


def _known(mine: Mapping[str, Answer], of: Callable[[Answer], T | None]) -> dict[str, T]:
    return {question_id: value for question_id, answer in mine.items() if (value := of(answer)) is not None}


def _rejection(table: SurveyTable, row: PublicRow, reason: Reason) -> Rejection:
    return Rejection(row.row.file or table.source, row.row.number, row.question_id, row.group, reason.value)


def _unusable(table: SurveyTable, what: str, rejections: Iterable[Rejection]) -> UserError:
    """The error for a group, or a file, whose rows were all rejected; it says why, rows of nobody included."""
    counts = Counter(rejection.reason for rejection in rejections)
    causes = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common())
    return UserError(f"{table.source}: {what} ({causes or 'it has no rows'})")
