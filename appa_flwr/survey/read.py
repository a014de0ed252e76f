"""Reads surveys: our own columns, GlobalOpinionQA's CSV or hub id, OpinionQA's folder (see `sources`).

Our columns: `question_id, question, options, group, distribution`, optionally `attribute` (what a group is
defined by), `ordinal` (scale position of each option, null for one that has none), `n` (people behind the
distribution), and `refusal_rate` or `refusals` (people who refused, beside `n`) where refusals are already apart.
Others are ignored. In CSV the list cells hold JSON or Python-literal text.

Bad cells (question x group) are rejected one by one with a counted reason, everything else is renormalised.
The first row of a question in the file, of whatever group, decides its text, options and scale, so every
group and the server see the same question whoever reads which part of the file. Names of groups are
"attribute/group" where the file has an attribute, and one name stands for every spelling of a country
(`names.ALIASES`).

Axis letters: G groups, Q questions, K answer options.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, get_args

from appa_flwr.errors import UserError
from appa_flwr.survey.cells import (
    MIN_OPTIONS,
    CellError,
    Reason,
    as_name,
    as_text,
    is_empty,
    parse_distribution,
    parse_options,
    parse_ordinal,
    parse_quantity,
)
from appa_flwr.survey.names import ALIASES, GroupName, resolve
from appa_flwr.survey.refusals import is_refusal
from appa_flwr.survey.sources import open_source
from appa_flwr.survey.tables import PRIVATE, PUBLIC_REQUIRED, REFUSED, Row, Table, decode
from appa_flwr.survey.types import FloatArray, Question, Rejection, Survey

if TYPE_CHECKING:
    import pandas as pd

PathLike = str | os.PathLike[str]
Refusals = Literal["keep", "drop", "separate"]
UNREADABLE: Final = "(unreadable)"


@dataclass(frozen=True)
class _Asked:
    """A question as a row has it, before the refusal policy.

    Attributes:
        text: the question.
        options: its K options.
        scale: position of each option, None where it has none; None as a whole where there is no scale.
        refused: positions of the options that are refusals.
    """

    text: str
    options: tuple[str, ...]
    scale: tuple[float | None, ...] | None
    refused: tuple[int, ...]


@dataclass(frozen=True)
class _Entry:
    """A question as every row of it must have it.

    Attributes:
        raw: the cells of its first row, to recognise the same question without decoding it again.
        asked: the question before the refusal policy.
        question: the question after it.
        kept: positions of `asked.options` that are left, or None for all.
    """

    raw: tuple[object, ...]
    asked: _Asked
    question: Question
    kept: tuple[int, ...] | None


@dataclass(frozen=True)
class Policy:
    """Which answers count; as in `read_survey`."""

    refusals: Refusals
    min_respondents: int = 0
    min_questions: int = 1


@dataclass(frozen=True)
class _Answer:
    """One usable cell, the row it came from, and what the source tells beside it."""

    row: _Judged
    shares: FloatArray
    respondents: float | None
    refusal_rate: float | None


@dataclass
class _Reading:
    """One group's answers as they are read, under its full name, and what ends it early."""

    name: str
    answers: dict[str, _Answer] = field(default_factory=dict)
    rejections: list[Rejection] = field(default_factory=list)
    error: UserError | None = None

    def take(self, table: Table, judged: _Judged, fault: Reason | None, policy: Policy, *, strict: bool) -> None:
        """Add a row's answer, or why it is none: `fault` where it cannot be told whose it is."""
        if self.error is not None:
            return
        reason = fault or _answer(judged, self.answers, policy)
        if reason is not None:
            try:
                self.rejections.append(_reject(table, judged, reason, strict=strict))
            except UserError as error:
                self.error = error

    def result(self, table: Table, min_questions: int) -> Mapping[str, FloatArray] | UserError:
        if self.error is not None:
            return self.error
        if not self.answers:
            return _unusable(table, f"group {self.name!r} has no usable answer", self.rejections)
        if len(self.answers) < min_questions:
            return _too_few(table, self.name, len(self.answers), min_questions)
        return _shares(self.answers)


@dataclass(frozen=True)
class _Judged:
    """One row with what its public side says.

    Attributes:
        row: as the file has it.
        question_id: empty where it cannot be read.
        group: whose answer it is, or why that cannot be told.
        entry: its question; set exactly where `reason` is not.
        reason: why it has none.
    """

    row: Row
    question_id: str
    group: GroupName | Reason
    entry: _Entry | None
    reason: Reason | None


def read_survey(
    path: PathLike,
    *,
    groups: Sequence[str] | None = None,
    refusals: Refusals = "keep",
    strict: bool = False,
    aliases: Mapping[str, str] | None = None,
    min_respondents: int = 0,
    min_questions: int = 1,
) -> Survey:
    """A survey as questions and answers of all groups, or of some.

    Args:
        path: a file, folder or hub id, as in `sources.open_source`.
        groups: names in the wanted order; a bare name will do where only one attribute has it. None: all
            groups with a usable answer, in the order of the file. Other groups' answers are not decoded and
            not judged.
        refusals: "keep" leaves options such as "Don't know" in; "drop" takes them out of every question and
            renormalises the rest; "separate" does the same and gives the share they had in `refusal_rates`.
        strict: the first bad row is an error.
        aliases: other spelling -> name of a group; None takes `names.ALIASES`, an empty mapping none. Where
            two spellings answer the same question the first in the file wins.
        min_respondents: cells of fewer people are rejected; those that do not tell how many stay.
        min_questions: groups with fewer usable questions are left out, each of their cells a rejection.

    Returns:
        Questions with at least one usable answer, in the order of the file; distributions of shape (K,),
        >= 0, sum 1; the rejected rows (numbered as in `tables.Row`).

    Raises:
        UserError: a file that is missing, unreadable, of another format or without a needed column; an
            unknown or ambiguous group; a wanted group, or the whole file, without a usable answer; a wanted
            group with fewer than `min_questions`; with `strict` any rejection.
    """
    return _survey(
        _open(path, refusals),
        groups=groups,
        policy=Policy(refusals, min_respondents, min_questions),
        strict=strict,
        aliases=ALIASES if aliases is None else aliases,
    )


def _survey(
    table: Table, *, groups: Sequence[str] | None, policy: Policy, strict: bool, aliases: Mapping[str, str]
) -> Survey:
    table.require(*PUBLIC_REQUIRED, "group", PRIVATE)
    wanted: tuple[str, ...] | None = None
    if groups is not None:
        wanted = resolve(groups, _groups(table, aliases), aliases=aliases, source=table.source)
    answers: dict[str, dict[str, _Answer]] = {name: {} for name in wanted or ()}
    rejections: list[Rejection] = []
    catalog: dict[str, _Entry] = {}
    for judged in _judge(table, catalog, refusals=policy.refusals, aliases=aliases):
        if isinstance(judged.group, Reason):
            reason: Reason | None = judged.reason or judged.group
        else:
            if wanted is not None and judged.group.full not in answers:
                continue
            mine = answers.setdefault(judged.group.full, {})
            reason = _answer(judged, mine, policy)
        if reason is not None:
            rejections.append(_reject(table, judged, reason, strict=strict))
    for name, mine in answers.items():
        if not mine and wanted is not None:
            raise _unusable(table, f"group {name!r} has no usable answer", rejections, name)
        if 0 < len(mine) < policy.min_questions:
            if wanted is not None:
                raise _too_few(table, name, len(mine), policy.min_questions)
            rejections += [_reject(table, cell.row, Reason.FEW_QUESTIONS, strict=strict) for cell in mine.values()]
    kept = {name: mine for name, mine in answers.items() if len(mine) >= max(1, policy.min_questions)}
    if not kept:
        raise _unusable(table, "no usable answer", rejections)
    answered = {question_id for mine in kept.values() for question_id in mine}
    questions = tuple(entry.question for question_id, entry in catalog.items() if question_id in answered)
    return Survey(
        questions,
        {name: _shares(mine) for name, mine in kept.items()},
        tuple(rejections),
        respondents={
            name: {key: cell.respondents for key, cell in mine.items() if cell.respondents is not None}
            for name, mine in kept.items()
        },
        refusal_rates={
            name: {key: cell.refusal_rate for key, cell in mine.items() if cell.refusal_rate is not None}
            for name, mine in kept.items()
        },
    )


def read_questions(
    path: PathLike,
    *,
    groups: Sequence[str] | None = None,
    refusals: Refusals = "keep",
    strict: bool = False,
    aliases: Mapping[str, str] | None = None,
) -> tuple[Question, ...]:
    """The public side of a survey file, the only one a server needs; no distribution is decoded.

    Args:
        path: as in `read_survey`, or a public question file without the columns `group` and `distribution`.
        groups: only questions that the file has a row of for one of these groups, be its distribution usable
            or not; None for all. Ignored for a file without a `group` column, which holds what everybody may
            see.
        refusals: as in `read_survey`; the same options are left in `read_group`.
        strict: the first bad public cell of a row that counts is an error.
        aliases: as in `read_survey`.

    Returns:
        Q >= 1 questions in the order of the file.

    Raises:
        UserError: as in `read_survey`, or no usable question.
    """
    table = _open(path, refusals)
    table.require(*PUBLIC_REQUIRED)
    aliases = ALIASES if aliases is None else aliases
    has_groups = "group" in table.columns
    wanted: frozenset[str] | None = None
    if groups is not None and has_groups:
        wanted = frozenset(resolve(groups, _groups(table, aliases), aliases=aliases, source=table.source))
    catalog: dict[str, _Entry] = {}
    asked: set[str] = set()
    rejections: list[Rejection] = []
    for judged in _judge(table, catalog, refusals=refusals, aliases=aliases):
        reason = judged.reason
        if has_groups:
            if isinstance(judged.group, Reason):
                reason = reason or judged.group
            elif wanted is not None and judged.group.full not in wanted:
                continue
        if reason is None:
            asked.add(judged.question_id)
        else:
            rejections.append(_reject(table, judged, reason, strict=strict))
    if not asked:
        raise _unusable(table, "no usable question", rejections)
    return tuple(entry.question for question_id, entry in catalog.items() if question_id in asked)


def read_group(
    path: PathLike,
    group: str,
    *,
    refusals: Refusals = "keep",
    strict: bool = False,
    aliases: Mapping[str, str] | None = None,
    min_respondents: int = 0,
    min_questions: int = 1,
) -> Mapping[str, FloatArray]:
    """One group's answers; of other groups' rows only the public cells are decoded.

    Args:
        path: as in `read_survey`; a file of a single group may leave the column `group` out.
        group: the group's name, as in `read_survey`.
        refusals: as in `read_survey`.
        strict: the first bad row of this group is an error.
        aliases: as in `read_survey`.
        min_respondents: as in `read_survey`.
        min_questions: fewer usable questions than these are an error.

    Returns:
        Question id -> distribution of shape (K,) over the options that `read_questions` gives with the same
        `refusals`, in the order of the file, at least one.

    Raises:
        UserError: as in `read_survey`.
    """
    policy = Policy(refusals, min_respondents, min_questions)
    found = read_groups(path, (group,), policy=policy, strict=strict, aliases=aliases)[group]
    if isinstance(found, UserError):
        raise found
    return found


def read_groups(
    path: PathLike,
    groups: Sequence[str],
    *,
    policy: Policy,
    strict: bool = False,
    aliases: Mapping[str, str] | None = None,
) -> dict[str, Mapping[str, FloatArray] | UserError]:
    """Several groups' answers, each as `read_group` gives them or with the error it would raise, in one pass.

    Raises:
        UserError: the file is missing, unreadable, of another format or without a needed column.
    """
    table = _open(path, policy.refusals)
    table.require(*PUBLIC_REQUIRED, PRIVATE)
    aliases = ALIASES if aliases is None else aliases
    has_groups = "group" in table.columns
    names = _groups(table, aliases) if has_groups else ()
    readings: dict[str, _Reading] = {}
    for group in groups:
        readings[group] = _Reading(group)
        if has_groups:
            try:
                (readings[group].name,) = resolve((group,), names, aliases=aliases, source=table.source)
            except UserError as error:
                readings[group].error = error
    everyone = list(readings.values())
    by_name: dict[str, list[_Reading]] = {}
    for reading in everyone:
        by_name.setdefault(reading.name, []).append(reading)
    for judged in _judge(table, {}, refusals=policy.refusals, aliases=aliases):
        concerned, fault = everyone, None
        if has_groups and isinstance(judged.group, Reason):
            fault = judged.reason or judged.group
        elif has_groups and isinstance(judged.group, GroupName):
            concerned = by_name.get(judged.group.full, [])
        for reading in concerned:
            reading.take(table, judged, fault, policy, strict=strict)
    return {group: reading.result(table, policy.min_questions) for group, reading in readings.items()}


def group_names(
    path: PathLike,
    *,
    refusals: Refusals = "keep",
    aliases: Mapping[str, str] | None = None,
    min_respondents: int = 0,
    min_questions: int = 1,
) -> tuple[str, ...]:
    """The groups a survey has rows of, in its order.

    There are none in a public question file. No answer is decoded, unless `min_questions` asks for more than one:
    then only groups with so many usable ones are named, and the other arguments are as in `read_survey`.

    Raises:
        UserError: the file is missing, unreadable or of another format.
    """
    table = _open(path, refusals)
    aliases = ALIASES if aliases is None else aliases
    if min_questions > 1 and PRIVATE in table.columns:
        policy = Policy(refusals, min_respondents, min_questions)
        return _survey(table, groups=None, policy=policy, strict=False, aliases=aliases).groups
    names = _groups(table, aliases)
    return tuple(dict.fromkeys(name.full for name in names))


def summary(survey: Survey) -> pd.DataFrame:
    """What was kept and what was not, and why.

    Returns:
        One row a group (index `group`; rows that could not be attributed to one come last under
        `UNREADABLE`), integer columns: `kept` questions, then one column per reason that occurred, in the
        order of the file.
    """
    # Imported here: reading a file on a client needs no data frames.
    import pandas as pd

    counts = Counter((rejection.group or UNREADABLE, rejection.reason) for rejection in survey.rejections)
    groups = dict.fromkeys((*survey.groups, *(group for group, _ in counts if group != UNREADABLE)))
    if any(group == UNREADABLE for group, _ in counts):
        groups[UNREADABLE] = None
    data = {"kept": [len(survey.answers.get(group, {})) for group in groups]}
    for reason in dict.fromkeys(rejection.reason for rejection in survey.rejections):
        data[reason] = [counts[group, reason] for group in groups]
    return pd.DataFrame(data, index=pd.Index(list(groups), name="group"))


def _open(path: PathLike, refusals: str) -> Table:
    if refusals not in get_args(Refusals):
        raise UserError(f"refusals: {refusals!r} is not one of {', '.join(map(repr, get_args(Refusals)))}")
    return open_source(path)


def _group(row: Row, aliases: Mapping[str, str]) -> GroupName | Reason:
    """The group a row belongs to, or why there is none: an empty cell too where the file has no such column."""
    try:
        spelled = as_name(row.cells.get("group"), Reason.EMPTY_GROUP)
        cell = row.cells.get("attribute")
        attribute = None if is_empty(cell) else as_name(cell, Reason.EMPTY_GROUP)
    except CellError as error:
        return error.reason
    return GroupName(attribute, spelled, aliases.get(spelled, spelled))


def _groups(table: Table, aliases: Mapping[str, str]) -> tuple[GroupName, ...]:
    names = (_group(row, aliases) for row in table.rows)
    return tuple(dict.fromkeys(name for name in names if isinstance(name, GroupName)))


def _judge(
    table: Table, catalog: dict[str, _Entry], *, refusals: Refusals, aliases: Mapping[str, str]
) -> Iterator[_Judged]:
    """Every row with its question or the reason it has none; fills `catalog` on the way, first row first."""
    for row in table.rows:
        if row.reason is not None:
            yield _Judged(row, str(row.cells.get("question_id", "")), Reason.EMPTY_GROUP, None, row.reason)
            continue
        group = _group(row, aliases)
        question_id = ""
        try:
            question_id = as_name(row.cells.get("question_id"), Reason.EMPTY_ID)
            entry = _entry(row, question_id, catalog, refusals=refusals)
        except CellError as error:
            yield _Judged(row, question_id, group, None, error.reason)
        else:
            yield _Judged(row, question_id, group, entry, None)


def _entry(row: Row, question_id: str, catalog: dict[str, _Entry], *, refusals: Refusals) -> _Entry:
    """The question of a row, checked against its first row or entered as such."""
    cells = row.cells
    known = catalog.get(question_id)
    raw = (cells.get("question"), cells.get("options"), cells.get("ordinal"))
    if known is None or known.raw != raw:
        asked = _asked(cells)
        if known is None:
            known = catalog[question_id] = _entered(raw, question_id, asked, refusals=refusals)
        _same(asked, known.asked)
    if len(known.question.options) < MIN_OPTIONS:
        raise CellError(Reason.FEW_LEFT)
    return known


def _asked(cells: Mapping[str, object]) -> _Asked:
    if any(name not in cells for name in PUBLIC_REQUIRED):
        raise CellError(Reason.MISSING)
    text = as_text(cells["question"], Reason.EMPTY_TEXT)
    options = parse_options(cells["options"])
    told = cells.get(REFUSED)
    refused = told if isinstance(told, tuple) else tuple(k for k, option in enumerate(options) if is_refusal(option))
    return _Asked(text, options, parse_ordinal(cells.get("ordinal"), len(options)), refused)


def _same(asked: _Asked, first: _Asked) -> None:
    if asked.text != first.text:
        raise CellError(Reason.OTHER_TEXT)
    if asked.options != first.options:
        raise CellError(Reason.OTHER_OPTIONS)
    # A row may leave the scale out, but not contradict it.
    if asked.scale is not None and first.scale is not None and asked.scale != first.scale:
        raise CellError(Reason.OTHER_ORDINAL)


def _entered(raw: tuple[object, ...], question_id: str, asked: _Asked, *, refusals: Refusals) -> _Entry:
    kept = tuple(k for k in range(len(asked.options)) if refusals == "keep" or k not in asked.refused)
    options = tuple(asked.options[k] for k in kept)
    question = Question(question_id, asked.text, options, _ordinal(asked.scale, kept))
    return _Entry(raw, asked, question, None if len(kept) == len(asked.options) else kept)


def _ordinal(scale: Sequence[float | None] | None, kept: Sequence[int]) -> tuple[float, ...] | None:
    """The scale of the options left; None where one of them is not on it or all share one place on it."""
    if scale is None:
        return None
    placed = tuple(place for k in kept if (place := scale[k]) is not None)
    return placed if len(placed) == len(kept) and len(set(placed)) > 1 else None


def _answer(judged: _Judged, mine: dict[str, _Answer], policy: Policy) -> Reason | None:
    """Adds the row's distribution to the group's answers, or says why not."""
    if judged.entry is None:
        return judged.reason
    if judged.question_id in mine:
        return Reason.DUPLICATE
    if PRIVATE not in judged.row.cells:
        return Reason.MISSING
    entry, cells = judged.entry, judged.row.cells
    try:
        respondents = _respondents(cells, policy.min_respondents)
        cell = decode(cells[PRIVATE])
        shares = parse_distribution(cell, len(entry.asked.options), entry.kept)
        rate: float | None = None
        if policy.refusals == "separate":
            if entry.kept is None:
                rate = _told_rate(cells)
            else:
                rate = float(parse_distribution(cell, len(entry.asked.options))[list(entry.asked.refused)].sum())
    except CellError as error:
        return error.reason
    mine[judged.question_id] = _Answer(judged, shares, respondents, rate)
    return None


def _shares(mine: Mapping[str, _Answer]) -> dict[str, FloatArray]:
    return {question_id: cell.shares for question_id, cell in mine.items()}


def _respondents(cells: Mapping[str, object], minimum: int) -> float | None:
    """How many people answered, where the row tells it; what is no number counts only if there is a minimum."""
    try:
        respondents = parse_quantity(cells.get("n"), Reason.BAD_COUNT)
    except CellError:
        if minimum:
            raise
        return None
    if respondents is not None and respondents < minimum:
        raise CellError(Reason.FEW_RESPONDENTS)
    return respondents


def _told_rate(cells: Mapping[str, object]) -> float | None:
    """The refusal rate of a row whose distribution is already without refusals."""
    rate = parse_quantity(cells.get("refusal_rate"), Reason.BAD_RATE, most=1.0)
    refused, answered = (parse_quantity(cells.get(name), Reason.BAD_COUNT) for name in ("refusals", "n"))
    if rate is None and refused is not None and answered:
        return refused / (answered + refused)
    return rate


def _reject(table: Table, judged: _Judged, reason: Reason, *, strict: bool) -> Rejection:
    group = "" if isinstance(judged.group, Reason) else judged.group.full
    file = judged.row.file or table.source
    if strict:
        where = f"question {judged.question_id!r}, group {group!r}: " if judged.question_id or group else ""
        raise UserError(f"{file}, row {judged.row.number}: {where}{reason.value}")
    return Rejection(file, judged.row.number, judged.question_id, group, reason.value)


def _too_few(table: Table, group: str, count: int, minimum: int) -> UserError:
    return UserError(
        f"{table.source}: group {group!r} has {count} usable questions, fewer than min-questions = {minimum}"
    )


def _unusable(table: Table, what: str, rejections: Sequence[Rejection], group: str | None = None) -> UserError:
    """The error for a group, or a file, whose rows were all rejected; it says why."""
    counts = Counter(rejection.reason for rejection in rejections if group in (None, rejection.group))
    causes = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common())
    return UserError(f"{table.source}: {what} ({causes or 'it has no rows'})")
