"""Readers of all sources of surveys: files, OpinionQA's folder, the generated population."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pydantic import ValidationError

from appa_flwr.config import GENERATED_SURVEY, Config
from appa_flwr.config.sections import DataSection, Section
from appa_flwr.core.errors import UserError, first_problem, unknown_name
from appa_flwr.core.files import lock, sha256_of
from appa_flwr.survey import codebook as codebooks
from appa_flwr.survey import draft, generate, labelled, noise, respondents, store, tables
from appa_flwr.survey.codebook import Codebook
from appa_flwr.survey.files import read_frame
from appa_flwr.survey.frames import LEFT_OUT, Column, Frame, RawAnswer, Unusable
from appa_flwr.survey.names import Notes
from appa_flwr.survey.nonanswers import Missing
from appa_flwr.survey.normalize import normalize
from appa_flwr.survey.tables import read_list, read_numbers
from appa_flwr.survey.types import About, Noise, Survey

_WAVE: Final = re.compile(r"American_Trends_Panel_W(\d{1,4})")


class ReadOptions(Section):
    """How `appa survey` reads a source; a file of respondents by `codebook`, or else by the three words before it."""

    group_by: str = ""  # columns of groups, separated by commas
    weight: str = ""  # column of weights; empty = the only column that looks like one; none = all count once
    missing: str = ""  # codes that are no answers, see `Missing`; none = all are answers
    codebook: Path | None = None
    questions: Path | None = None  # public questions to which a file of respondents is restricted
    refusals: Literal["keep", "drop"] = DataSection().refusals
    min_respondents: int = 0
    promise: noise.Promise | None = None  # noise is added, and listed in the file `codebook`


class Conversion(NamedTuple):
    """A survey; of a file of respondents also its codebook, and the guesses in it with their shares of the people."""

    survey: Survey
    codebook: Codebook | None = None
    guesses: Sequence[tuple[float, str]] = ()
    frame: Frame | None = None  # the respondents


def read_survey(source: str | Path, *, groups: Sequence[str] | None = None, **words: Any) -> Survey:
    """Read a survey: its questions and the answers of all groups or of the named ones.

    Args:
        source: a file of shares, counts or respondents (docs/surveys.md), or a folder in OpinionQA's layout.
        groups: full names in the wanted order; None: all with a usable answer, in the order of the source.
        words: `group_by`, `weight` and `missing`, or `codebook`, for a file of respondents (docs/surveys.md);
            `refusals` and `min_respondents` as the keys of a run.

    Returns:
        Survey of the questions with a usable answer, in the order of the source; other questions are `extra`.
        `about.notes` lists decisions and omitted answers, with rows and reasons.

    Raises:
        UserError: a word is unknown or wrong; the source cannot be read, has ambiguous codes or weights, or has no
            usable answer.
    """
    return convert(source, groups=groups, **words).survey


def convert(source: str | Path, *, groups: Sequence[str] | None = None, **words: Any) -> Conversion:
    """Read a survey as `read_survey` does, and the codebook by which a file of respondents was read."""
    try:
        by = ReadOptions.model_validate(words)
    except ValidationError as error:
        raise UserError(first_problem(error)) from None
    if by.promise and not by.codebook:
        raise UserError("--epsilon: name a --codebook that you have read; what is guessed from answers may tell them")
    if by.codebook and (own := [name for name in ("group_by", "weight", "missing", "refusals") if words.get(name)]):
        raise UserError(f"data.{own[0].replace('_', '-')}: {by.codebook} says that; change it there")
    path, missing = Path(source), Missing(by.missing)
    book = codebooks.read(by.codebook) if by.codebook else None
    about = About(missing=by.missing, refusals=by.refusals)
    if path.is_dir():
        frame, raws = _opinionqa(path, by, missing)
        about = replace(about, group_by=by.group_by, weight=by.weight)
        is_table = True
    else:
        frame = read_frame(str(source), book.layout if book else None)
        # What a row of JSON lines holds must not make it another layout than the codebook's.
        is_table = tables.is_table(frame) and not (book and {*book.groups} <= {*frame.cells})
        raws = tables.raw_answers(frame) if is_table else []
    if is_table and (by.codebook or by.questions):
        raise UserError(
            f"{source}: a codebook, public questions and noise are for a file with one row a respondent; of shares and "
            "counts nobody knows who answered"
        )
    if not is_table:
        book = book or draft.draft(frame, by.group_by, by.weight, missing, by.refusals)
        if not book.questions:
            causes = "; ".join(frame.notes.lines(LEFT_OUT)) or f"no column besides {', '.join(book.groups)}"
            raise UserError(f"{source}: no usable question ({causes})")
        book, raws, line = _counted(frame, book, by)
        weight = "" if book.weight.column == codebooks.UNWEIGHTED else book.weight.column
        about = About(group_by=",".join(book.groups), weight=weight, refusals=book.refusals, noise=line)
    survey = normalize(frame, raws, missing, groups, about, min_respondents=by.min_respondents)
    return Conversion(survey, book, draft.weightiest(frame, book) if book else [], frame)


def _counted(frame: Frame, book: Codebook, by: ReadOptions) -> tuple[Codebook, list[RawAnswer], Noise | None]:
    """The answers of a file of respondents, exact or with noise; and the codebook, restricted to public questions."""
    with ExitStack() as stack:
        if by.promise and by.codebook:
            stack.callback(lock(by.codebook).release)
            book = codebooks.read(by.codebook)  # again: each release must know of all earlier ones
        if by.questions:
            public = store.read(by.questions)
            book, problems = codebooks.restrict(book, (*public.questions, *public.extra))
            if problems:
                texts = (f"{key} ({why})" for key, why in problems.items())
                frame.notes.add("questions that do not fit the public ones", *texts)
            if not book.questions:
                causes = "; ".join(frame.notes.lines("questions that"))
                raise UserError(f"{frame.source}: no question fits {by.questions}: {causes}")
        if not (by.promise and by.codebook):
            return book, respondents.raw_answers(frame, book), None
        raws, line = noise.release(frame, book, by.promise)
        codebooks.add_release(by.codebook, line)  # before anything is known of it, or a retry would be a choice
        return book, raws, line


def _opinionqa(folder: Path, by: ReadOptions, missing: Missing) -> tuple[Frame, list[RawAnswer]]:
    """Read the answers of all waves in the folder `human_resp` or its parent; one table has the notes on all.

    In each wave `info.csv` lists questions and options, and `metadata.csv` the columns of groups.
    """
    root = folder / "human_resp" if (folder / "human_resp").is_dir() else folder
    waves = {int(match[1]): path for path in root.iterdir() if path.is_dir() and (match := _WAVE.fullmatch(path.name))}
    if not waves:
        raise UserError(f"{folder}: is a folder, and not in OpinionQA's layout; name a survey file in it")
    frames, raws = list[Frame](), list[RawAnswer]()
    for wave, path in sorted(waves.items()):
        frame, meta, info = (read_frame(str(path / f"{name}.csv")) for name in ("responses", "metadata", "info"))
        meta.require("key")
        frame.columns = defaultdict(lambda: Column(no_question="no question, as the file says"), _listed(info))
        frames.append(frame)
        frame.notes = frames[0].notes
        groups = by.group_by or ";".join(name for name in meta.cells["key"] if name in frame.cells)
        book = draft.draft(frame, groups, by.weight or f"WEIGHT_W{wave}", missing, by.refusals)
        raws += respondents.raw_answers(frame, book)
    return replace(frames[0], source=str(folder)), raws


def _listed(info: Frame) -> dict[str, Column]:
    """Read the questions of `info.csv`, whose `references` list answers with an `option_ordinal`, then refusals."""
    info.require("key", "question", "references", "option_ordinal")
    columns: dict[str, Column] = {}
    for row, record in zip(info.cells.index, info.cells.to_dict("records"), strict=True):
        try:
            places, names = read_numbers(record, "option_ordinal"), [*map(str, read_list(record, "references"))]
        except Unusable as error:
            raise UserError(f"{info.source}: row {row}: {error}") from None
        options = dict(zip(names, chain(places, repeat(math.nan)), strict=False))
        columns[record["key"]] = Column(text=record["question"], order=tuple(names), places=options)
    return columns


def capped(frame: Frame, book: Codebook, cap: float) -> Survey:
    """The exact answers by the weights that a release counts."""
    weight_R, about = noise.weights(frame, book, cap), About(refusals=book.refusals)
    frame = replace(frame, cells=frame.cells.assign(**{book.weight.column: weight_R}), notes=Notes())
    return normalize(frame, respondents.raw_answers(frame, book), Missing(), None, about, min_respondents=0)


def read_run(config: Config) -> Survey:
    """Read or generate the survey of a run: the answers of its groups, and its extra questions without answers.

    Raises:
        UserError: see `read_survey`; or the source has one row a respondent, and has to be converted.
    """
    data = config.data
    if config.survey == GENERATED_SURVEY:
        survey = generate.generate(**generate.population(data, config.seed))
        for name in config.group_names:
            if name not in survey.groups:
                raise unknown_name("group", name, valid=survey.groups)
        answers = {name: survey.answers[name] for name in config.group_names or survey.groups}
        return with_extra(replace(survey, answers=answers, about=About(GENERATED_SURVEY)), config)
    path = Path(config.survey)
    is_other = path.is_dir() or path.suffix.lower() in labelled.SUFFIXES
    if is_other or not tables.is_table(frame := read_frame(config.survey)):
        command = f"appa survey {path} data.group-by=NAME --write {path.stem}.jsonl"
        raise UserError(f"{path}: is no table of shares or counts; convert it first: {command}")
    raws, about, groups = tables.raw_answers(frame), About(refusals=data.refusals), config.group_names or None
    survey = normalize(frame, raws, Missing(), groups, about, min_respondents=data.min_respondents)
    return with_extra(survey, config)


def with_extra(survey: Survey, config: Config) -> Survey:
    """Add the extra questions that `data.extra-questions` names, and drop the survey's own if it does not name them."""
    data = config.data
    extra = survey.extra if data.extra_questions else ()
    if data.extra_file:
        more = read_survey(data.extra_file, refusals=data.refusals)
        known = {question.question_id for question in survey.questions + extra}
        extra += tuple(question for question in more.questions + more.extra if question.question_id not in known)
    return replace(survey, extra=extra)


def kept_survey(config: Config, file: Path) -> Survey | None:
    """Read the survey that a run has saved, if any; raises `UserError` if its source has changed since."""
    if not file.exists():
        return None
    survey = store.read(file)
    before, now = survey.about.sha256, sha256_of(config.survey)
    if before and now and before != now:
        raise UserError(
            f"{config.survey} has changed since the run began: its sha256 is {now[:12]}, and {file} was made of "
            f"{before[:12]}; put the earlier file back, or start a new run"
        )
    return survey
