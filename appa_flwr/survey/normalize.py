"""Settle raw answers to a survey.

Spellings of a name are unified and every number is checked. An unusable answer is left out with its reason; an
undeclared code that looks missing is an error. A question's first row with options sets its text, options and scale.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.core.files import sha256_of
from appa_flwr.core.text import clean
from appa_flwr.survey import store
from appa_flwr.survey.frames import LEFT_OUT, Frame, RawAnswer, Unusable
from appa_flwr.survey.names import Notes, group_name, same, usual_name
from appa_flwr.survey.nonanswers import Kind, Missing
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS, About, Question, Survey

SUM_TOLERANCE: Final = 0.02
_ID_CHARS: Final = 12  # of a question's hash
_ROUNDING: Final = 1e-9  # of 0.98 and 1.02, which are within the tolerance, to binary numbers
_ALREADY_ONE: Final = 1e-12  # sums this near to one are not rescaled, so that writing and reading is exact


def normalize(
    frame: Frame,
    raws: Sequence[RawAnswer],
    missing: Missing,
    groups: Sequence[str] | None,
    about: About,
    *,
    min_respondents: int,
) -> Survey:
    """Collect the usable answers of the named groups, or of all; decisions and omissions are noted in `about`.

    Refusals are kept or dropped as `about` says. Answers of fewer than `min_respondents` people are left out.

    Raises:
        UserError: a named group or the whole source has no usable answer, or a code looks missing and is undeclared.
    """
    source, notes = frame.source, frame.notes
    rows, names = _tidied(raws, notes)
    read = {key: _question(mine, missing, notes, refusals=about.refusals) for key, mine in rows.items()}
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
            if n is not None and n < min_respondents:
                raise Unusable("fewer respondents than the minimum")
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


def _tidied(raws: Iterable[RawAnswer], notes: Notes) -> tuple[dict[str, list[RawAnswer]], dict[str, str]]:
    """Unify ids, names and labels.

    Returns:
        Question id -> its rows; normalised name of a group -> the group's name in these rows.
    """
    rows: dict[str, list[RawAnswer]] = {}
    names: dict[str, str] = {}  # normalised name of a group -> its usual or first spelling
    tidy = cache(clean)  # labels are repeated from row to row
    for raw in raws:
        words = json.dumps([raw.text, raw.options]).encode()
        key = clean(raw.question_id) or hashlib.sha256(words).hexdigest()[:_ID_CHARS]
        usual = usual_name(tidy(raw.group))
        group = names.setdefault(same(usual), usual) if raw.group else ""
        notes.add_spelling(raw.group, group)
        options = tuple(map(tidy, raw.options))
        row = raw._replace(question_id=key, group=group, text=tidy(raw.text), options=options)
        rows.setdefault(key, []).append(row)
    return rows, names


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
    rows: Sequence[RawAnswer], missing: Missing, notes: Notes, *, refusals: str
) -> tuple[Question | None, list[str], Callable[[RawAnswer], tuple[FloatArray, float | None]]]:
    """Read a question from its first row with options.

    Returns:
        The question with its remaining options, None if no row can be used; the labels of answers that no codebook has
        settled; and a function of a row that returns shares over the remaining options, and the number of respondents.
    """
    first = next((raw for raw in rows if raw.options), rows[0])
    kind_K: tuple[Kind, ...] = first.kinds
    if kind_K:  # by a codebook, or in our own format, of which the user may list more
        listed_K = [missing.lists(first.question_id, label, label) for label in first.options]
        kind_K = tuple("none" if listed else kind for listed, kind in zip(listed_K, kind_K, strict=True))
    else:  # a table has no codebook for guesses
        kinds = missing.kinds(first.question_id, {label: label for label in first.options})
        kind_K = tuple("answer" if kinds[label][1] else kinds[label][0] for label in first.options)
        if guesses := [label for label in first.options if kinds[label][1]]:
            notes.add("count as answers, and may be none (data.missing)", *guesses)
    places = _options(first, kind_K, notes, refusals=refusals)
    options = tuple(first.options[mine[0]] for mine in places)
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
        shares = np.array([sum(raw.shares[k] for k in mine) for mine in places])
        if (total := math.fsum(shares)) <= 0.0:
            raise Unusable("nobody gave an answer that counts")
        if abs(math.fsum(raw.shares) - 1.0) > SUM_TOLERANCE + _ROUNDING:
            raise Unusable(f"distribution is off one by more than {SUM_TOLERANCE}")
        n = raw.n
        if raw.people:  # refusals are not counted as respondents, even if they are kept as options
            n = float(sum(count for count, kind in zip(raw.people, kind_K, strict=True) if kind == "answer"))
        return shares if abs(total - 1.0) <= _ALREADY_ONE else shares / total, n

    # There is no scale if a remaining option has no position or all options have the same position.
    positions = tuple(first.ordinal[mine[0]] if first.ordinal else math.nan for mine in places)
    scale = positions if all(map(math.isfinite, positions)) and len(set(positions)) > 1 else None
    question = Question(first.question_id, first.text, options, scale)
    open_labels = [label for label, kind in zip(first.options, kind_K, strict=True) if kind == "answer"]
    return None if problem else question, [] if first.kinds else open_labels, answer


def _options(first: RawAnswer, kind_K: Sequence[Kind], notes: Notes, *, refusals: str) -> list[list[int]]:
    """The indices of the source's options in each remaining option, whose label is the first one's."""
    policy = {"keep": "kept as options", "drop": "dropped"}[refusals]
    sentences = {"none": "left out as no answers", "refusal": f"refusals, {policy} (data.refusals)"}
    places: dict[str, list[int]] = {}
    for k, (label, kind) in enumerate(zip(first.options, kind_K, strict=True)):
        if kind != "answer":
            notes.add(sentences[kind], label)
        if kind == "none" or (kind == "refusal" and refusals == "drop"):
            continue
        mine = places.setdefault(same(label), [])
        mine.append(k)
        notes.add_spelling(label, first.options[mine[0]])
        if label == first.options[mine[0]] and len(mine) > 1:
            notes.add(
                "options and groups that are one", f"several codes of {first.question_id or first.text} are {label!r}"
            )
    return [*places.values()]


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
