"""Readers of all sources of surveys: files, OpinionQA's folder, the generated population.

Spellings of a name are unified and every number is checked. An unusable answer is left out with its reason; an
undeclared code that looks missing is an error. A question's first row with options sets its text, options and scale.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import ValidationError

from appa_flwr.config import GENERATED_SURVEY, Config
from appa_flwr.config.sections import DataSection, Section
from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.errors import UserError, first_problem, unknown_name
from appa_flwr.core.text import clean
from appa_flwr.survey import codebook as codebooks
from appa_flwr.survey import draft, generate, noise, respondents, store, tables
from appa_flwr.survey.codebook import Codebook
from appa_flwr.survey.frames import LEFT_OUT, STATISTICS, Frame, RawAnswer, Unusable, read_frame
from appa_flwr.survey.names import Notes, group_name, same, usual_name
from appa_flwr.survey.nonanswers import Missing
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS, About, Question, Survey

SUM_TOLERANCE: Final = 0.02
_ID_CHARS: Final = 12  # of a question's hash
_ROUNDING: Final = 1e-9  # of 0.98 and 1.02, which are within the tolerance, to binary numbers
_ALREADY_ONE: Final = 1e-12  # sums this near to one are not rescaled, so that writing and reading is exact


class Words(Section):
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
        by = Words.model_validate(words)
    except ValidationError as error:
        raise UserError(first_problem(error)) from None
    if by.promise and not by.codebook:
        raise UserError("--epsilon: name a --codebook that you have read; what is guessed from answers may tell them")
    if by.codebook and (own := [name for name in ("group_by", "weight", "missing", "refusals") if words.get(name)]):
        raise UserError(f"data.{own[0].replace('_', '-')}: {by.codebook} says that; change it there")
    path, missing = Path(source), Missing(by.missing)
    book, about = None, About(missing=by.missing, refusals=by.refusals)
    if path.is_dir():
        frame, raws = _opinionqa(path, by, missing)
        about = replace(about, group_by=by.group_by, weight=by.weight)
    elif tables.is_table(frame := read_frame(str(source))):
        raws = tables.raw_answers(frame)
    else:
        if by.codebook:
            book = codebooks.read(by.codebook)
        else:
            book = draft.draft(frame, by.group_by, by.weight, missing, by.refusals)
        if by.questions:
            book = _restricted(frame, book, by.questions)
        by = by.model_copy(update={"refusals": book.refusals})
        line = None
        if by.promise and by.codebook:
            raws, line = noise.release(frame, book, by.promise)
            codebooks.add_release(by.codebook, line)  # before anything is known of it, or a retry would be a choice
        else:
            raws = respondents.raw_answers(frame, book)
        weight = "" if book.weight.column == codebooks.UNWEIGHTED else book.weight.column
        about = About(group_by=",".join(book.groups), weight=weight, refusals=book.refusals, noise=line)
    if book is None and (by.codebook or by.questions):
        raise UserError(
            f"{source}: a codebook, public questions and noise are for a file with one row a respondent; of shares and "
            "counts nobody knows who answered"
        )
    survey = _survey(frame, raws, by, missing, groups, about)
    return Conversion(survey, book, draft.weightiest(frame, book) if book else [], frame)


def _opinionqa(folder: Path, by: Words, missing: Missing) -> tuple[Frame, list[RawAnswer]]:
    """Read the answers of all waves; the first wave's table has the notes on all."""
    waves, raws = respondents.opinionqa_waves(folder), list[RawAnswer]()
    for frame, attributes, weight in waves:
        frame.notes = waves[0][0].notes
        book = draft.draft(frame, by.group_by or ";".join(attributes), by.weight or weight, missing, by.refusals)
        raws += respondents.raw_answers(frame, book)
    waves[0][0].source = str(folder)
    return waves[0][0], raws


def _restricted(frame: Frame, book: Codebook, questions: Path) -> Codebook:
    public = store.read(questions)
    book, problems = codebooks.restrict(book, (*public.questions, *public.extra))
    frame.notes.add("questions that do not fit the public ones", *(f"{key} ({why})" for key, why in problems.items()))
    if not book.questions:
        raise UserError(
            f"{frame.source}: no question fits {questions}: {'; '.join(frame.notes.lines('questions that'))}"
        )
    return book


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
    is_other = path.is_dir() or path.suffix.lower() in STATISTICS
    if is_other or not tables.is_table(frame := read_frame(config.survey)):
        command = f"appa survey {path} data.group-by=NAME --write {path.stem}.jsonl"
        raise UserError(f"{path}: is no table of shares or counts; convert it first: {command}")
    by = Words(refusals=data.refusals, min_respondents=data.min_respondents)
    raws, about = tables.raw_answers(frame), About(refusals=by.refusals)
    return with_extra(_survey(frame, raws, by, Missing(), config.group_names or None, about), config)


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


def _survey(
    frame: Frame, raws: Sequence[RawAnswer], by: Words, missing: Missing, groups: Sequence[str] | None, about: About
) -> Survey:
    """Collect the usable answers of the named groups, or of all; decisions and omissions are noted in `about`."""
    source, notes = frame.source, frame.notes
    rows: dict[str, list[RawAnswer]] = {}
    names: dict[str, str] = {}  # normalised name of a group -> its usual or first spelling
    tidy = cache(clean)  # labels are repeated from row to row
    for raw in raws:
        words = json.dumps([raw.text, raw.options]).encode()
        key = clean(raw.question_id) or hashlib.sha256(words).hexdigest()[:_ID_CHARS]
        usual = usual_name(raw.group)
        group = names.setdefault(same(usual), usual) if raw.group else ""
        notes.add_spelling(raw.group, group)
        options = tuple(map(tidy, raw.options))
        row = raw._replace(question_id=key, group=group, text=tidy(raw.text), options=options)
        rows.setdefault(key, []).append(row)
    read = {key: _question(mine, by, missing, notes) for key, mine in rows.items()}
    asked = {key: question for key, (question, _, _) in read.items() if question}
    missing.check(source, {key: {label: label for label in read[key][1]} for key in asked})
    # A deployment's public questions have no groups, whatever `groups` names.
    wanted = [usual_name(group_name(name)) for name in groups] if groups is not None and names else [*names.values()]
    for name in wanted:
        if name not in names.values():
            raise UserError(f"{source}: {unknown_name('group', name, valid=names.values())}")
    answers: dict[str, dict[str, FloatArray]] = {name: {} for name in wanted}
    people: dict[str, dict[str, float]] = {name: {} for name in wanted}
    for raw in (raw for mine in rows.values() for raw in mine if not raw.group or raw.group in answers):
        key, group = raw.question_id, raw.group
        try:
            shares, n = read[key][2](raw)
            if key in answers.get(group, ()):
                raise Unusable("question already answered by this group")
        except Unusable as reason:
            notes.add(f"{LEFT_OUT}{reason}", f"row {raw.row} ({', '.join(filter(None, (group, key)))})")
            continue
        if group:
            answers[group][key] = shares
            people[group] |= {} if n is None else {key: n}
    causes = "; ".join(notes.lines(LEFT_OUT))
    if groups is not None and (without := [name for name in wanted if not answers[name]]):
        raise UserError(f"{source}: group {without[0]!r} has no usable answer ({causes})")
    answers = {name: mine for name, mine in answers.items() if mine}
    if not asked or (names and not answers):
        raise UserError(f"{source}: no usable {'answer' if names else 'question'} ({causes})")
    answered = {key for mine in answers.values() for key in mine} if names else {*asked}
    questions = tuple(question for key, question in asked.items() if key in answered)
    extra = tuple(question for key, question in asked.items() if key not in answered)
    if unused := missing.unused():
        notes.add("data.missing lists codes that no answer has", *unused)
    return Survey(questions, answers, {name: people[name] for name in answers}, extra, _complete(about, frame))


def _complete(about: About, frame: Frame) -> About:
    """Add the source and the notes on it, and what our own format says of where it came from.

    Beside a release of noisy answers stand no notes with numbers, and no hash of the file, by which guesses of its
    answers could be checked.
    """
    earlier = store.about_of(frame.header, frame.source)
    names = ("group_by", "weight", "missing", "noise")
    known = {name: getattr(about, name) or getattr(earlier, name) for name in names}
    if not about.noise:
        known |= {"sha256": sha256_of(frame.source), "notes": (*earlier.notes, *frame.notes.lines())}
    return replace(about, source=Path(frame.source).name, **known)


def _question(
    rows: Sequence[RawAnswer], by: Words, missing: Missing, notes: Notes
) -> tuple[Question | None, list[str], Callable[[RawAnswer], tuple[FloatArray, float | None]]]:
    """Read a question from its first row with options.

    Returns:
        The question with its remaining options, None if no row can be used; the labels of answers that no codebook has
        settled; and a function of a row that returns shares over the remaining options, and the number of respondents.
    """
    first = next((raw for raw in rows if raw.options), rows[0])
    kind_K = first.kinds
    if not kind_K:  # a table has no codebook for guesses
        kinds = missing.kinds(first.question_id, {label: label for label in first.options})
        kind_K = tuple("answer" if kinds[label][1] else kinds[label][0] for label in first.options)
        if guesses := [label for label in first.options if kinds[label][1]]:
            notes.add("count as answers, and may be none (data.missing)", *guesses)
    policy = {"keep": "kept as options", "drop": "dropped"}[by.refusals]
    sentences = {"none": "left out as no answers", "refusal": f"refusals, {policy} (data.refusals)"}
    options: dict[str, tuple[str, float]] = {}  # normalised label -> label and position on the scale
    place_K: list[int | None] = []  # index of each source option among the remaining options
    for label, kind, position in zip(first.options, kind_K, first.ordinal or repeat(math.nan), strict=False):
        if kind != "answer":
            notes.add(sentences[kind], label)
        if kind == "none" or (kind == "refusal" and by.refusals == "drop"):
            place_K.append(None)
            continue
        ours, _ = options.setdefault(same(label), (label, position))
        place = [*options].index(same(label))
        notes.add_spelling(label, ours)
        if label == ours and place in place_K:
            notes.add("options and groups that are one", f"several codes are {label!r}")
        place_K.append(place)
    problem = ""
    if not first.text or not all(first.options):
        problem = "empty question or option text"
    elif not MIN_OPTIONS <= len(options) <= MAX_OPTIONS:
        problem = f"not {MIN_OPTIONS} to {MAX_OPTIONS} options that are answers"

    def answer(raw: RawAnswer) -> tuple[FloatArray, float | None]:
        if cause := raw.problem or problem:
            raise Unusable(cause)
        _check(raw, first, notes)
        if not raw.group:
            return np.zeros(0), None
        shares = np.zeros(len(options))
        for share, place in zip(raw.shares, place_K, strict=True):
            if place is not None:
                shares[place] += share
        if (total := math.fsum(shares)) <= 0.0:
            raise Unusable("nobody gave an answer that counts")
        if abs(math.fsum(raw.shares) - 1.0) > SUM_TOLERANCE + _ROUNDING:
            raise Unusable(f"distribution is off one by more than {SUM_TOLERANCE}")
        n = raw.n
        if raw.people:  # refusals are not counted as respondents, even if they are kept as options
            n = float(sum(count for count, kind in zip(raw.people, kind_K, strict=True) if kind == "answer"))
        if n is not None and n < by.min_respondents:
            raise Unusable("fewer respondents than the minimum")
        return shares if abs(total - 1.0) <= _ALREADY_ONE else shares / total, n

    # There is no scale if a remaining option has no position or all options have the same position.
    positions = tuple(position for _, position in options.values())
    scale = positions if all(map(math.isfinite, positions)) and len(set(positions)) > 1 else None
    question = Question(first.question_id, first.text, tuple(label for label, _ in options.values()), scale)
    open_labels = [label for label, kind in zip(first.options, kind_K, strict=True) if kind == "answer"]
    return None if problem else question, [] if first.kinds else open_labels, answer


def _check(raw: RawAnswer, first: RawAnswer, notes: Notes) -> None:
    """Raise `Unusable` if a row has other words than its question's first row, or no shares."""
    if same(raw.text) != same(first.text):
        raise Unusable("question text differs from the question's first row")
    if raw.options != first.options:
        if [*map(same, raw.options)] != [*map(same, first.options)]:
            raise Unusable("options differ from the question's first row")
        for label, ours in zip(raw.options, first.options, strict=True):
            notes.add_spelling(label, ours)
    if raw.group and (len(raw.shares) != len(raw.options) or not all(map(math.isfinite, raw.shares))):
        raise Unusable("distribution is not a list of numbers, one for each option")
    if raw.group and min(raw.shares) < 0.0:
        raise Unusable("negative share in the distribution")
