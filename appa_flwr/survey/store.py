"""Writer and strict reader of the own survey format (docs/surveys.md), the only format that nodes read.

The first line describes the survey's origin (`About`), and the noise in its answers if there is some.
"""

import json
import math
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, model_validator

from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.errors import UserError, first_problem
from appa_flwr.core.files import make_folder, replace_file
from appa_flwr.survey.names import numbered
from appa_flwr.survey.types import About, Question, Survey

SUFFIX: Final = ".jsonl"
HEADER, VERSION = "appa-survey", 1
QUESTIONS_FILE: Final = "questions.jsonl"
GROUPS_FOLDER: Final = "groups"
MAX_SLUG_CHARS: Final = 60
_TOLERANCE: Final = 1e-6
_Text = Annotated[str, StringConstraints(pattern=r"\S")]
_Share = Annotated[float, Field(ge=0)]


class Exported(NamedTuple):
    """Paths of an export: the public file, and group name -> private file."""

    questions: Path
    groups: Mapping[str, Path]


def write(survey: Survey, file: Path, *, groups: Collection[str] | None = None, epsilon: float | None = None) -> None:
    """Write a survey, or the answers of some of its groups, to a .jsonl file that only its owner can read.

    Raises:
        RuntimeError: `epsilon` is promised to respondents, and the answers are exact or have less noise.
    """
    check_suffix(file)
    if epsilon and not (survey.about.noise and survey.about.noise.epsilon <= epsilon):
        raise RuntimeError(f"{file}: not written, since the answers do not keep epsilon {epsilon:g}")
    names = [name for name in survey.groups if groups is None or name in groups]
    about = {name: value for name, value in asdict(survey.about).items() if value is not None}
    rows = [{HEADER: VERSION, "groups": names, **about}]
    for question in survey.questions:
        asked = [name for name in names if question.question_id in survey.answers[name]]
        for name in asked:
            n = survey.respondents.get(name, {}).get(question.question_id)
            shares = survey.answers[name][question.question_id].tolist()
            rows += [_public(question) | {"group": name, "distribution": shares} | ({} if n is None else {"n": n})]
        rows += [_public(question)] if groups is None and not asked else []
    rows += [_public(question) | {"extra": True} for question in survey.extra if groups is None]
    replace_file(file, _lines(rows), mode=0o600)


def check_suffix(file: Path) -> None:
    """Raise a `UserError` unless a survey can be written by this name."""
    if file.suffix != SUFFIX:
        raise UserError(f"{file}: a survey is written as {SUFFIX}")


def write_split(survey: Survey, folder: str | os.PathLike[str], *, epsilon: float | None = None) -> Exported:
    """Write the public `questions.jsonl`, and each group's answers to a `groups/SLUG.jsonl` of its own.

    Files of the same name are replaced, each in one step; other files are kept. Raises as `write`.
    """
    root = Path(folder)
    files = {name: root / GROUPS_FOLDER / f"{slug}{SUFFIX}" for name, slug in slugs(survey.groups).items()}
    make_folder(root / GROUPS_FOLDER)
    # The reader's notes are left out, since they count other groups' respondents.
    apart = replace(survey, about=replace(survey.about, notes=()))
    for name, file in files.items():
        write(apart, file, groups=[name], epsilon=epsilon)
    questions = root / QUESTIONS_FILE
    replace_file(questions, _lines([{HEADER: VERSION}, *map(_public, survey.questions)]))
    return Exported(questions, files)


class _Row(BaseModel):
    """A line other than the header."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    question_id: _Text
    question: _Text
    options: Annotated[list[str], Field(min_length=2)]
    ordinal: list[float] | None = None
    group: _Text | None = None
    distribution: list[_Share] = []
    n: _Share | None = None
    extra: bool = False

    @model_validator(mode="after")
    def _fits(self) -> "_Row":
        if self.ordinal is not None and len(self.ordinal) != len(self.options):
            raise ValueError("ordinal has not one number for each option")
        if self.group is not None and not self.extra:
            if len(self.distribution) != len(self.options):
                raise ValueError("distribution has not one share >= 0 for each option")
            if abs(total := math.fsum(self.distribution) - 1.0) > _TOLERANCE:
                raise ValueError(f"distribution sums to {1.0 + total:.7g}, not to 1 within {_TOLERANCE:g}")
        return self

    def public(self) -> Question:
        """The row's question, without the answer."""
        ordinal = None if self.ordinal is None else tuple(self.ordinal)
        return Question(self.question_id, self.question, tuple(self.options), ordinal)


def read(path: str | os.PathLike[str]) -> Survey:
    """Read a survey in the own format, in the order of the file; a `UserError` names a wrong line by its number."""
    file = Path(path)
    advice = f"`appa survey {path} --write FILE{SUFFIX}`"
    if file.suffix != SUFFIX:
        raise UserError(f"{path}: is not in our own format; {advice} makes it so")
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    about, questions, asked = About(), dict[str, Question](), dict[str, Question]()
    answers: dict[str, dict[str, FloatArray]] = {}
    respondents: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            if number == 1 and isinstance(content, dict) and HEADER in content:
                about = about_of(content, path)
                answers = {name: {} for name in content.get("groups", ())}
                continue
            row = _Row.model_validate(content)
            question = questions.setdefault(row.question_id, row.public())
            if question != row.public():
                raise ValueError(f"question {row.question_id!r} differs from an earlier line")
            if row.extra:
                continue
            asked[row.question_id] = question
            if row.group is not None:
                if row.question_id in answers.setdefault(row.group, {}):
                    raise ValueError(f"group {row.group!r} has answered question {row.question_id!r} before")
                answers[row.group][row.question_id] = np.array(row.distribution)
                if row.n is not None:
                    respondents[row.group][row.question_id] = row.n
        except (ValueError, TypeError, RecursionError) as error:  # the last one: brackets in brackets
            cause = first_problem(error) if isinstance(error, ValidationError) else error
            raise UserError(f"{path}, line {number}: {cause}; {advice} says what can be used of it") from None
    if not asked:
        raise UserError(f"{path}: holds no survey rows")
    mine = {name: rows for name, rows in answers.items() if rows}
    extra = tuple(questions[key] for key in questions if key not in asked)
    return Survey(tuple(asked.values()), mine, {name: respondents[name] for name in mine}, extra, about)


def read_about(file: Path) -> About:
    """Read the origin of a survey from a file's first line, if that is there; raises as `about_of`."""
    try:
        with file.open(encoding="utf-8") as lines:
            return about_of(json.loads(next(lines, "{}")), file)
    except (OSError, ValueError, TypeError, RecursionError, AttributeError):  # the last one: the line is no object
        return About()


def about_of(header: Mapping[str, Any], source: str | os.PathLike[str]) -> About:
    """The origin of a survey in the parsed first line of `source`.

    Raises:
        UserError: the line is of another version, or what it says of noise cannot be: nothing may be taken for exact.
    """
    if (version := header.get(HEADER, VERSION)) != VERSION:
        raise UserError(f"{source}, line 1: has version {version} of this format; this program reads {VERSION}")
    try:
        return TypeAdapter(About).validate_python(header)
    except ValidationError as error:
        raise UserError(f"{source}, line 1: {first_problem(error)}") from None


def slugs(names: Sequence[str]) -> dict[str, str]:
    """Give each of the distinct names a file name (no extension) of lower-case ASCII letters, digits and hyphens."""
    slug_of: dict[str, str] = {}
    for name in names:
        ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
        slug = re.sub(r"[^a-z0-9]+", "-", ascii_name.lower())[:MAX_SLUG_CHARS].strip("-") or "group"
        slug_of[name] = numbered(slug, slug_of.values(), "-")
    return slug_of


def _public(question: Question) -> dict[str, object]:
    fields = asdict(question)
    return {"question_id": fields.pop("question_id"), "question": fields.pop("text"), **fields}


def _lines(rows: Iterable[Mapping[str, object]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
