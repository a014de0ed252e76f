"""Reads surveys: our own columns, tidy tables, GlobalOpinionQA's CSV or hub id, OpinionQA's folder (see `sources`).

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
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar, get_args

from appa_flwr.core.errors import UserError
from appa_flwr.survey.answer_filter import Answer, AnswerFilter, answer_of
from appa_flwr.survey.cells import CellError, Reason
from appa_flwr.survey.loaders import open_source
from appa_flwr.survey.names import resolve
from appa_flwr.survey.question_rows import PublicRow, QuestionEntries, Refusals, groups_of, public_rows
from appa_flwr.survey.tables import PRIVATE, PUBLIC_REQUIRED, SurveyTable
from appa_flwr.survey.types import FloatArray, Question, Rejection, Survey

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
PathLike = str | os.PathLike[str]
UNREADABLE: Final = "(unreadable)"
__all__ = [
    "UNREADABLE",
    "AnswerFilter",
    "PathLike",
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
    strict: bool = False,
    min_respondents: int = 0,
    min_questions: int = 1,
) -> Survey:
    """A survey as questions and answers of all groups, or of some.

    Args:
        path: a file, folder or hub id, as in `loaders.open_source`.
        groups: names in the wanted order; a bare name will do where only one attribute has it. None: all groups with
            a usable answer, in the order of the file. Other groups' answers are not looked at.
        refusals: "keep" leaves options such as "Don't know" in; "drop" takes them out of every question and
            renormalises the rest; "separate" does the same and gives the share they had in `refusal_rates`.
        strict: the first bad row is an error.
        min_respondents: answers of fewer people are rejected; those without a number stay.
        min_questions: groups with fewer usable questions are left out, each of their answers a rejection.

    Returns:
        Questions with at least one usable answer, in the order of the file; distributions (K,), >= 0, sum 1; the
        rejected rows (numbered as in `tables.SurveyRow`).

    Raises:
        UserError: a file that is missing, unreadable, of another format or without a needed column; an unknown or
            ambiguous group; a wanted group, or the whole file, without a usable answer; a wanted group with fewer than
            `min_questions`; with `strict` any rejection.
    """
    return _survey(_open(path, refusals), groups, AnswerFilter(refusals, min_respondents, min_questions), strict=strict)


def _survey(
    table: SurveyTable, groups: Sequence[str] | None, answer_filter: AnswerFilter, *, strict: bool = False
) -> Survey:
    table.require(*PUBLIC_REQUIRED, "group", PRIVATE)
    wanted = _wanted(table, groups)
    catalogue: QuestionEntries = {}
    rows = public_rows(table, catalogue, refusals=answer_filter.refusals)
    answers, rejections = _collect(table.source, rows, wanted, answer_filter=answer_filter, strict=strict)
    if not answers:
        raise _unusable(table.source, "no usable answer", rejections)
    answered = {question_id for mine in answers.values() for question_id in mine}
    return Survey(
        tuple(entry.question for question_id, entry in catalogue.items() if question_id in answered),
        {name: _known(mine, lambda answer: answer.shares) for name, mine in answers.items()},
        tuple(rejections),
        respondents={name: _known(mine, lambda answer: answer.respondents) for name, mine in answers.items()},
        refusal_rates={name: _known(mine, lambda answer: answer.refusal_rate) for name, mine in answers.items()},
        layout=table.layout,
    )


def read_questions(
    path: PathLike, *, groups: Sequence[str] | None = None, refusals: Refusals = "keep", strict: bool = False
) -> tuple[Question, ...]:
    """The public side of a survey file, the only one a server needs; no answer is looked at.

    Args:
        path: as in `read_survey`, or a public question file without the columns `group` and `distribution`.
        groups: only questions that the file has a row of for one of these groups, be its distribution usable or not;
            None for all. Ignored for a file without a `group` column, which holds what everybody may see.
        refusals: as in `read_survey`; the same options are left in `read_groups`.
        strict: the first bad public cell of a row that counts is an error.

    Returns:
        Q >= 1 questions in the order of the file.

    Raises:
        UserError: as in `read_survey`, or no usable question.
    """
    table = _open(path, refusals)
    table.require(*PUBLIC_REQUIRED)
    wanted = _wanted(table, groups) if "group" in table.columns else None
    catalogue: QuestionEntries = {}
    asked: set[str] = set()
    rejections: list[Rejection] = []
    for row in public_rows(table, catalogue, refusals=refusals):
        if wanted is not None and row.group and row.group not in wanted:
            continue
        if row.reason is None:
            asked.add(row.question_id)
        else:
            rejections.append(_rejection(table.source, row, row.reason, strict=strict))
    if not asked:
        raise _unusable(table.source, "no usable question", rejections)
    return tuple(entry.question for question_id, entry in catalogue.items() if question_id in asked)


def read_groups(
    path: PathLike, groups: Sequence[str], *, answer_filter: AnswerFilter, strict: bool = False
) -> tuple[dict[str, Mapping[str, FloatArray] | UserError], dict[str, tuple[str, ...]]]:
    """Several groups' answers, each alone, and the options they are about; other groups' answers are not looked at.

    Args:
        path: as in `read_survey`; a file of a single group may leave the column `group` out.
        groups: names, as in `read_survey`.
        answer_filter: which answers count; a group with fewer usable questions than its minimum has none.
        strict: a group with a bad row has none.

    Returns:
        Group -> question id -> distribution of shape (K,) over the options that `read_questions` gives with the same
        refusals, in the order of the file, at least one; or the error for a group that has none or is unknown. And
        question id -> these options.

    Raises:
        UserError: the file is missing, unreadable, of another format or without a needed column.
    """
    table = _open(path, answer_filter.refusals)
    table.require(*PUBLIC_REQUIRED, PRIVATE)
    entries: QuestionEntries = {}
    rows = tuple(public_rows(table, entries, refusals=answer_filter.refusals))
    names = groups_of(table)
    found: dict[str, Mapping[str, FloatArray] | UserError] = {}
    for group in groups:
        try:
            if "group" in table.columns:
                (name,) = resolve((group,), names, source=table.source)
                concerned = [row for row in rows if row.group in ("", name)]
            else:
                name, concerned = group, [replace(row, group=group) for row in rows]
            answers, _ = _collect(table.source, concerned, (name,), answer_filter=answer_filter, strict=strict)
            found[group] = _known(answers[name], lambda answer: answer.shares)
        except UserError as error:
            found[group] = error
    return found, {question_id: entry.question.options for question_id, entry in entries.items()}


def group_names(
    path: PathLike, *, refusals: Refusals = "keep", min_respondents: int = 0, min_questions: int = 1
) -> tuple[str, ...]:
    """The groups a survey has rows of, in its order; none in a public question file.

    No answer is decoded, unless `min_questions` asks for more than one: then only groups with so many usable ones are
    named, and the other arguments are as in `read_survey`.

    Raises:
        UserError: the file is missing, unreadable or of another format.
    """
    table = _open(path, refusals)
    if min_questions > 1 and PRIVATE in table.columns:
        return _survey(table, None, AnswerFilter(refusals, min_respondents, min_questions)).groups
    return tuple(dict.fromkeys(name.full for name in groups_of(table)))


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


def _open(path: PathLike, refusals: str) -> SurveyTable:
    if refusals not in get_args(Refusals):
        raise UserError(f"refusals: {refusals!r} is not one of {', '.join(map(repr, get_args(Refusals)))}")
    return open_source(path)


def _wanted(table: SurveyTable, groups: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if groups is None else resolve(groups, groups_of(table), source=table.source)


def _collect(
    source: str, rows: Iterable[PublicRow], wanted: Sequence[str] | None, *, answer_filter: AnswerFilter, strict: bool
) -> tuple[dict[str, dict[str, Answer]], list[Rejection]]:
    """The answers of the wanted groups, or of all that have enough, and the rows that gave none.

    Raises:
        UserError: a wanted group has too few; with `strict` any row gave none.
    """
    answers: dict[str, dict[str, Answer]] = {name: {} for name in wanted or ()}
    rejections: list[Rejection] = []
    for row in rows:
        if wanted is not None and row.group and row.group not in answers:
            continue
        mine = answers.setdefault(row.group, {}) if row.group else {}
        try:
            if row.entry is None:
                raise CellError(row.reason or Reason.MISSING)
            if row.question_id in mine:
                raise CellError(Reason.DUPLICATE)
            mine[row.question_id] = answer_of(row, row.entry, answer_filter)
        except CellError as error:
            rejections.append(_rejection(source, row, error.reason, strict=strict))
    for name, mine in answers.items():
        if wanted is not None and not mine:
            raise _unusable(source, f"group {name!r} has no usable answer", rejections, name)
        if len(mine) < answer_filter.min_questions:
            if wanted is not None:
                count = f"{len(mine)} usable questions, fewer than min-questions = {answer_filter.min_questions}"
                raise UserError(f"{source}: group {name!r} has {count}")
            rejections += [
                _rejection(source, answer.row, Reason.FEW_QUESTIONS, strict=strict) for answer in mine.values()
            ]
    least = max(1, answer_filter.min_questions)
    return {name: mine for name, mine in answers.items() if len(mine) >= least}, rejections


def _known(mine: Mapping[str, Answer], of: Callable[[Answer], T | None]) -> dict[str, T]:
    return {question_id: value for question_id, answer in mine.items() if (value := of(answer)) is not None}


def _rejection(source: str, row: PublicRow, reason: Reason, *, strict: bool) -> Rejection:
    file = row.row.file or source
    if strict:
        known = row.question_id or row.group
        where = f"question {row.question_id!r}, group {row.group!r}: " if known else ""
        raise UserError(f"{file}, row {row.row.number}: {where}{reason.value}")
    return Rejection(file, row.row.number, row.question_id, row.group, reason.value)


def _unusable(source: str, what: str, rejections: Iterable[Rejection], group: str = "") -> UserError:
    """The error for a group, or a file, whose rows were all rejected; it says why, rows of nobody included."""
    counts = Counter(rejection.reason for rejection in rejections if not group or rejection.group in ("", group))
    causes = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common())
    return UserError(f"{source}: {what} ({causes or 'it has no rows'})")
