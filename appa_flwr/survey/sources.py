"""A survey from anywhere: files, OpinionQA's folder, the generated population.

Only `appa survey`, the launcher and a simulation's server come here; nodes read what `store` has written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from appa_flwr.config import GENERATED_SURVEY, Config, split_names
from appa_flwr.config.sections import DataSection
from appa_flwr.core.errors import UserError, first_problem, unknown_name
from appa_flwr.survey import generate, respondents, store, tables
from appa_flwr.survey.frames import read_frame
from appa_flwr.survey.nonanswers import Missing
from appa_flwr.survey.raw import settle
from appa_flwr.survey.types import About, Survey


def read_survey(source: str | Path, *, groups: Sequence[str] | None = None, **keys: Any) -> Survey:
    """A survey as questions and answers of all groups, or of some.

    Args:
        source: a file of shares, counts or respondents (docs/surveys.md), or a folder in OpinionQA's layout.
        groups: full names in the wanted order; None: all with a usable answer, in the order of the source.
        keys: those of section [data] that say how a source is read: `group_by`, `weight`, `missing`, `refusals`,
            `min_respondents`.

    Returns:
        Questions with at least one usable answer, in the order of the source; the others as `extra`; what was decided
        and left out, with rows and reasons, in `about.notes`.

    Raises:
        UserError: a key is unknown or wrong; the source cannot be read, has codes or weights that a person must decide
            about, or has no usable answer.
    """
    try:
        return _read(str(source), DataSection(**keys), groups)
    except ValidationError as error:
        raise UserError(first_problem(error)) from None


def _read(source: str, data: DataSection, groups: Sequence[str] | None) -> Survey:
    path, group_by, missing = Path(source), split_names(data.group_by), Missing(data.missing)
    if path.is_dir():
        raws, frame = respondents.opinionqa(path, group_by, data.weight, missing)
    else:
        frame = read_frame(source)
        if tables.is_table(frame):
            raws = tables.raw_answers(frame)
        else:
            raws = respondents.raw_answers(frame, group_by, data.weight, missing)
    survey, earlier = settle(frame, raws, data, missing, groups), store.about_of(frame.header)
    about = About(
        source=path.name,
        sha256=sha256_of(source),
        group_by=",".join(group_by) or earlier.group_by,
        weight=frame.weight or earlier.weight,
        missing=data.missing or earlier.missing,
        refusals=data.refusals,
        notes=(*earlier.notes, *frame.notes.lines()),
    )
    return replace(survey, about=about)


def read_run(config: Config) -> Survey:
    """The survey of a run, read or drawn: the answers of its groups, and the questions without answers that it uses.

    Raises:
        UserError: as `read_survey`, or a group that the generated survey does not have.
    """
    data = config.data
    if config.survey == GENERATED_SURVEY:
        survey = _generated(config)
    else:
        survey = _read(config.survey, data, config.group_names or None)
    extra = survey.extra if data.extra_questions else ()
    if data.extra_file:
        more = read_survey(data.extra_file, missing=data.missing, refusals=data.refusals)
        known = {question.question_id for question in survey.questions + extra}
        extra += tuple(question for question in more.questions + more.extra if question.question_id not in known)
    return replace(survey, extra=extra)


def kept_survey(config: Config, file: Path) -> Survey | None:
    """The survey that a run has kept in its folder; None where it has kept none yet.

    Raises:
        UserError: the source has changed since.
    """
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


def _generated(config: Config) -> Survey:
    drawn = generate.generate(**generate.population(config.data, config.seed))
    for name in config.group_names:
        if name not in drawn.groups:
            raise unknown_name("group", name, valid=drawn.groups)
    answers = {name: drawn.answers[name] for name in config.group_names or drawn.groups}
    return replace(drawn, answers=answers, about=About(GENERATED_SURVEY))


def sha256_of(source: str) -> str:
    """The hash of a source's bytes: of a file, of all files of a folder; empty where there are none."""
    path = Path(source)
    if path.is_dir():
        files = (str(file) for file in sorted(path.rglob("*")) if file.is_file())
        return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()
    if not path.exists():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
