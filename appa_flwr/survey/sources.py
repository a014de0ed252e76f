"""Readers of all sources of surveys: files, OpinionQA's folder, the generated population.

Spellings of a name are unified and every number is checked. An unusable answer is left out with its reason; an
undeclared code that looks missing is an error. A question's first row with options sets its text, options and scale.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic import ValidationError

from appa_flwr.config import GENERATED_SURVEY, Config, split_names
from appa_flwr.config.sections import DataSection
from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.errors import UserError, first_problem, unknown_name
from appa_flwr.core.text import clean
from appa_flwr.survey import generate, respondents, store, tables
from appa_flwr.survey.frames import Frame, Notes, RawAnswer, Unusable, group_name, read_frame, same
from appa_flwr.survey.nonanswers import Kind, Missing
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS, About, Question, Survey

LEFT_OUT: Final = "left out, "
SUM_TOLERANCE: Final = 0.02
_ID_CHARS: Final = 12  # of a question's hash
_ROUNDING: Final = 1e-9  # of 0.98 and 1.02, which are within the tolerance, to binary numbers
_ALREADY_ONE: Final = 1e-12  # sums this near to one are not rescaled, so that writing and reading is exact


def read_survey(source: str | Path, *, groups: Sequence[str] | None = None, **keys: Any) -> Survey:
    """Read a survey: its questions and the answers of all groups or of the named ones.

    Args:
        source: a file of shares, counts or respondents (docs/surveys.md), or a folder in OpinionQA's layout.
        groups: full names in the wanted order; None: all with a usable answer, in the order of the source.
        keys: keys of section [data] on reading a source: `group_by`, `weight`, `missing`, `refusals`,
            `min_respondents`.

    Returns:
        Survey of the questions with a usable answer, in the order of the source; other questions are `extra`.
        `about.notes` lists decisions and omitted answers, with rows and reasons.

    Raises:
        UserError: a key is unknown or wrong; the source cannot be read, has ambiguous codes or weights, or has no
            usable answer.
    """
    try:
        data = DataSection(**keys)
    except ValidationError as error:
        raise UserError(first_problem(error)) from None
    path, group_by, missing = Path(source), split_names(data.group_by), Missing(data.missing)
    if path.is_dir():
        raws, frame = respondents.opinionqa(path, group_by, data.weight, missing)
    else:
        frame = read_frame(str(source))
        if tables.is_table(frame):
            raws = tables.raw_answers(frame)
        else:
            raws = respondents.raw_answers(frame, group_by, data.weight, missing)
    survey, earlier = _settle(frame, raws, data, missing, groups), store.about_of(frame.header)
    about = About(
        source=path.name,
        sha256=sha256_of(str(source)),
        group_by=",".join(group_by) or earlier.group_by,
        weight=frame.weight or earlier.weight,
        missing=data.missing or earlier.missing,
        refusals=data.refusals,
        notes=(*earlier.notes, *frame.notes.lines()),
    )
    return replace(survey, about=about)


def read_run(config: Config) -> Survey:
    """Read or generate the survey of a run: the answers of its groups, and its extra questions without answers."""
    data = config.data
    if config.survey != GENERATED_SURVEY:
        survey = read_survey(config.survey, groups=config.group_names or None, **data.model_dump())
    else:
        survey = generate.generate(**generate.population(data, config.seed))
        for name in config.group_names:
            if name not in survey.groups:
                raise unknown_name("group", name, valid=survey.groups)
        answers = {name: survey.answers[name] for name in config.group_names or survey.groups}
        survey = replace(survey, answers=answers, about=About(GENERATED_SURVEY))
    extra = survey.extra if data.extra_questions else ()
    if data.extra_file:
        more = read_survey(data.extra_file, missing=data.missing, refusals=data.refusals)
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


def sha256_of(source: str) -> str:
    """SHA-256 of a file, or of the hashes of all files in a folder; empty if the path does not exist."""
    path = Path(source)
    if path.is_dir():
        files = (str(file) for file in sorted(path.rglob("*")) if file.is_file())
        return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()
    if not path.exists():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _settle(
    frame: Frame, raws: Sequence[RawAnswer], data: DataSection, missing: Missing, groups: Sequence[str] | None
) -> Survey:
    """Collect the usable answers of the named groups, or of all; decisions and omissions go to `frame.notes`."""
    source, notes = frame.source, frame.notes
    rows: dict[str, list[RawAnswer]] = {}
    names: dict[str, str] = {}  # normalised name of a group -> its first spelling
    for raw in raws:
        words = json.dumps([raw.text, raw.options]).encode()
        key = clean(raw.question_id) or hashlib.sha256(words).hexdigest()[:_ID_CHARS]
        rows.setdefault(key, []).append(raw._replace(question_id=key))
        if raw.group:
            notes.add_spelling(raw.group, names.setdefault(same(raw.group), raw.group))
    read = {key: _ReadQuestion(mine, data, missing, notes) for key, mine in rows.items()}
    asked = {key: question.left for key, question in read.items() if not question.problem}
    missing.check(source, {key: read[key].labels for key in asked})
    if unused := missing.unused():
        notes.add("data.missing lists codes that no answer has", *unused)
    # A deployment's public questions have no groups, whatever `groups` names.
    wanted = [group_name(name) for name in groups] if groups is not None and names else [*names.values()]
    for name in wanted:
        if name not in names.values():
            raise UserError(f"{source}: {unknown_name('group', name, valid=names.values())}")
    answers: dict[str, dict[str, FloatArray]] = {name: {} for name in wanted}
    respondents: dict[str, dict[str, float]] = {name: {} for name in wanted}
    for key, mine in rows.items():
        for raw in mine:
            group = names.get(same(raw.group), "")
            if group and group not in answers:
                continue
            try:
                read[key].check(raw)
                if group and key in answers[group]:
                    raise Unusable("question already answered by this group")
                if group:
                    answers[group][key], n = read[key].answer(raw)
                    respondents[group] |= {} if n is None else {key: n}
            except Unusable as reason:
                place = ", ".join(filter(None, (raw.group, raw.question_id)))
                notes.add(f"{LEFT_OUT}{reason}", f"row {raw.row} ({place})")
    causes = "; ".join(notes.lines(LEFT_OUT))
    if groups is not None and (without := [name for name in wanted if not answers[name]]):
        raise UserError(f"{source}: group {without[0]!r} has no usable answer ({causes})")
    answers = {name: mine for name, mine in answers.items() if mine}
    if not asked or (names and not answers):
        raise UserError(f"{source}: no usable {'answer' if names else 'question'} ({causes})")
    answered = {key for mine in answers.values() for key in mine} if names else set(asked)
    questions = tuple(question for key, question in asked.items() if key in answered)
    extra = tuple(question for key, question in asked.items() if key not in answered)
    return Survey(questions, answers, {name: respondents[name] for name in answers}, extra)


class _ReadQuestion:
    """A question, from its first row with options, and the treatment of each of its options."""

    labels: dict[str, str]  # code -> label of the options that are answers
    problem: str = ""  # why no row can be used
    left: Question  # with the remaining options

    def __init__(self, rows: Sequence[RawAnswer], data: DataSection, missing: Missing, notes: Notes) -> None:
        first = next((raw for raw in rows if raw.options), rows[0])
        options: dict[str, tuple[str, float]] = {}  # normalised label -> label and position on the scale
        self._first, self._least, self._notes, self.labels = first, data.min_respondents, notes, {}
        self._kind_K: list[Kind] = []
        self._place_K: list[int | None] = []  # index of each source option among the remaining options
        policy = {"keep": "kept as options", "drop": "dropped"}[data.refusals]
        sentences = {"none": "left out as no answers", "refusal": f"refusals, {policy} (data.refusals)"}
        cleaned = [*map(clean, first.options)]
        for label, code, place in zip(cleaned, first.codes or cleaned, first.ordinal or repeat(math.nan), strict=False):
            kind = missing.kind(first.question_id, code, label)
            self._kind_K.append(kind)
            if kind == "answer":
                self.labels[code] = label
            else:
                notes.add(sentences[kind], label)
            if kind == "none" or (kind == "refusal" and data.refusals == "drop"):
                self._place_K.append(None)
                continue
            if (ours := options.setdefault(same(label), (label, place))[0]) != label:
                notes.add_spelling(label, ours)
            elif [*options].index(same(label)) in self._place_K:
                notes.add("options and groups that are one", f"several codes are {label!r}")
            self._place_K.append([*options].index(same(label)))
        if not clean(first.text) or not all(cleaned):
            self.problem = "empty question or option text"
        elif not MIN_OPTIONS <= len(options) <= MAX_OPTIONS:
            self.problem = f"not {MIN_OPTIONS} to {MAX_OPTIONS} options that are answers"
        # There is no scale if a remaining option has no position or all options have the same position.
        places = tuple(place for _, place in options.values())
        scale = places if all(map(math.isfinite, places)) and len(set(places)) > 1 else None
        self.left = Question(first.question_id, clean(first.text), tuple(label for label, _ in options.values()), scale)

    def check(self, raw: RawAnswer) -> None:
        """Raise `Unusable` if a row has a problem, or if its text or options differ from the first row's."""
        if problem := raw.problem or self.problem:
            raise Unusable(problem)
        if same(raw.text) != same(self._first.text):
            raise Unusable("question text differs from the question's first row")
        if raw.options != self._first.options:
            if [*map(same, raw.options)] != [*map(same, self._first.options)]:
                raise Unusable("options differ from the question's first row")
            for label, ours in zip(map(clean, raw.options), map(clean, self._first.options), strict=True):
                self._notes.add_spelling(label, ours)

    def answer(self, raw: RawAnswer) -> tuple[FloatArray, float | None]:
        """Return the shares over the remaining options, and the number of respondents; raises `Unusable`."""
        if len(raw.shares) != len(raw.options) or not all(map(math.isfinite, raw.shares)):
            raise Unusable("distribution is not a list of numbers, one for each option")
        if min(raw.shares) < 0.0:
            raise Unusable("negative share in the distribution")
        shares = np.zeros(len(self.left.options))
        for share, place in zip(raw.shares, self._place_K, strict=True):
            if place is not None:
                shares[place] += share
        if (total := math.fsum(shares)) <= 0.0:
            raise Unusable("nobody gave an answer that counts")
        if abs(math.fsum(raw.shares) - 1.0) > SUM_TOLERANCE + _ROUNDING:
            raise Unusable(f"distribution is off one by more than {SUM_TOLERANCE}")
        n = raw.n
        if raw.people:  # refusals are not counted as respondents, even if they are kept as options
            n = float(sum(count for count, kind in zip(raw.people, self._kind_K, strict=True) if kind == "answer"))
        if n is not None and n < self._least:
            raise Unusable("fewer respondents than the minimum")
        return shares if abs(total - 1.0) <= _ALREADY_ONE else shares / total, n
