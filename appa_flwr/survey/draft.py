"""The draft of a codebook: what a file of respondents declares, and guesses of the rest, each of which is marked."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from appa_flwr.config import split_names
from appa_flwr.core.arrays import IntArray
from appa_flwr.core.errors import UserError
from appa_flwr.core.text import clean
from appa_flwr.survey.codebook import UNWEIGHTED, Codebook, Entries, Entry, Item, Listed, Refusals, Weight
from appa_flwr.survey.frames import LAYOUTS, LEFT_OUT, Column, Frame
from appa_flwr.survey.names import group_name, same, some, usual_name
from appa_flwr.survey.nonanswers import Kind, Missing, in_context, looks_missing, number
from appa_flwr.survey.respondents import numbers, weights
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS

MAX_GROUPS: Final = 200
_MOST_UNWEIGHTED: Final = 0.2  # share of people without a weight up to which a column can be guessed to be the weight
_WEIGHT: Final = re.compile(
    r"we?i?ght|wgt|gewicht|pond[eé]ra|poids|wtss|(?:^|[^a-z])(?:wts?|peso)(?:[^a-z]|$)|^\w{1,6}wt$|combinwt|^s017",
    re.IGNORECASE,
)
_WEIGHT_LABEL: Final = re.compile(r"\bweight|gewicht|pond[eé]ra|poids", re.IGNORECASE)
_NUMBERED: Final = re.compile(r"w\d{0,2}", re.IGNORECASE)  # a weight, if its cells have fractions
_BODY: Final = re.compile(
    r"(?:^|[^a-z])(?:kg|kilos?|kilograms?|lbs?|pounds?|stones?|body|bmi|birth|baby|your?|height)(?:[^a-z]|$)|"
    r"(?:over|under)weight|weight[_ ]?(?:loss|gain|kg|lbs?|pounds|change)|bodyw|birthw|körperg",
    re.IGNORECASE,
)
_PLACE: Final = re.compile("[A-Z]{2}(?:-[A-Z]{1,3})?|[a-z]{2}")  # such as DK and NC, which mean no answer elsewhere
_LEADING: Final = re.compile(r"[(\[]?(-?\d+(?:\.\d+)?)(?![\d,])")
_QUESTION: Final = re.compile(
    r"(?:question|item|variable|indicator|statement|frage|pregunta)s?(?:[ _]?(?:id|text|name|code|label|no))?|qid"
)
_ANSWER: Final = re.compile(
    r"(?:answer|response|value|val|choice|rating|score|antwort|wert|respuesta|r[ée]ponse)s?"
    r"(?:[ _]?(?:text|value|label|code))?"
)
_EVENT: Final = re.compile(r"redcap_(?:event_name|repeat_\w+)")
_FEWEST_PEOPLE: Final = 10  # of a column that may number respondents


Kinds = Mapping[str, tuple[Kind, str]]
"""Code -> its kind, and why that is a guess; empty if it is none."""


def draft(frame: Frame, group_by: str, weight: str, missing: Missing, refusals: Refusals) -> Codebook:
    """Draft the codebook of a file; decisions are added to `frame.notes`.

    Raises:
        UserError: the columns of groups or the weight have to be named, rows are no respondents, or codes look missing.
    """
    columns = _group_columns(frame, group_by)
    _check_layout(frame, columns)
    weight_line, unused = _weight(frame, columns, clean(weight))
    weights(frame, weight_line.column)
    groups = {name: _group(frame, name, missing) for name in columns}
    questions, left_out = dict[str, Item](), dict[str, str]()
    for name in frame.cells.columns:
        if name in columns or name == weight_line.column:
            continue
        item = "named like a weight, and not used" if name in unused else _item(frame, name, missing, refusals)
        if isinstance(item, Item):
            questions[name] = item
            continue
        left_out[name] = item
        if frame.columns[name].is_question:
            frame.notes.add(f"{LEFT_OUT}{item}", name)
    answers = {
        name: {entry.code: entry.label for entry in item.options if not entry.refusal}
        for name, item in questions.items()
    }
    missing.check(frame.source, answers)
    return Codebook(refusals=refusals, weight=weight_line, groups=groups, questions=questions, left_out=left_out)


def weightiest(frame: Frame, codebook: Codebook) -> list[tuple[float, str]]:
    """The guesses of a codebook with the share of the respondents whom each concerns, the weightiest first."""
    guesses = [(1.0, f"weight {codebook.weight.column!r}: {why}")] if (why := codebook.weight.guessed) else []
    guesses += [(0.0, f"{name}: {item.guessed}") for name, item in codebook.questions.items() if item.guessed]
    for name, column in (codebook.groups | codebook.questions).items():
        if name in frame.cells and (marked := [entry for entry in column.entries if entry.guessed]):
            for entry in marked:
                share = frame.codes(name)[1].get(entry.code, 0) / len(frame.cells)
                guesses.append((share, f"{name}: {entry.code} {entry.label!r}: {entry.guessed}"))
    return sorted(guesses, key=lambda guess: -guess[0])


def _group_columns(frame: Frame, group_by: str) -> tuple[str, ...]:
    """The columns of groups; a name that holds commas is one column."""
    names = (clean(group_by),) if clean(group_by) in frame.cells.columns else split_names(group_by)
    columns = some(map(repr, frame.cells.columns))
    if not names:
        raise UserError(
            f"{frame.source}: has none of our columns, so a row seems to be a respondent; say to `appa survey` which "
            f"columns are groups: data.group-by=NAME, out of {columns}. For a crosstab: {LAYOUTS}"
        )
    if unknown := [name for name in names if name not in frame.cells.columns]:
        raise UserError(
            f"{frame.source}: has no column {', '.join(map(repr, unknown))} for data.group-by; it has {columns} (names "
            f"that hold commas: semicolons between several); {LAYOUTS}"
        )
    return names


def _check_layout(frame: Frame, columns: Sequence[str]) -> None:
    """Raise a `UserError` if a respondent seems to have several rows, such as one for each question or event."""
    import pandas as pd

    items = [name for name in frame.cells.columns if _QUESTION.fullmatch(name.casefold()) and name not in columns]
    answers = [name for name in frame.cells.columns if _ANSWER.fullmatch(name.casefold())]
    events = [name for name in frame.cells.columns if _EVENT.fullmatch(name) and frame.cells[name].nunique() > 1]
    why = f"{items[0]!r} names the question of the answer in {answers[0]!r}" if items and answers else ""
    why = f"{events[0]!r} has several events" if events else why
    code_of: dict[str, IntArray] = {}
    for name in frame.cells.columns:
        with suppress(UserError):  # lists
            code_of[name] = frame.codes(name)[0]
    cells = pd.DataFrame(code_of)
    groups = pd.DataFrame({name: frame.codes(name)[0] for name in columns}).replace(-1, math.nan)
    for person in cells.columns.difference([*columns], sort=False):
        size_of = frame.codes(person)[1]
        if not _FEWEST_PEOPLE <= len(size_of) <= len(cells) / 1.2 or cells[person].min() < 0:
            continue
        if (groups.groupby(cells[person]).nunique() > 1).any(axis=None):
            continue  # groups differ between the rows of one value
        most = 2 * max(size_of.values())
        for part in cells.columns.difference([person, *columns], sort=False):
            if 1 < len(frame.codes(part)[1]) <= most and not cells.duplicated([person, part]).any():
                why = why or f"values of {person!r} are repeated, and {part!r} tells their rows apart"
    if why:
        raise UserError(
            f"{frame.source}: seems to have several rows a respondent: {why}; make it wide (a pivot): one row a "
            "respondent, one column a question; of events keep one. If rows are respondents, delete the first column"
        )


def _weight(frame: Frame, columns: Sequence[str], weight: str) -> tuple[Weight, list[str]]:
    """The line of the weight, and the columns that may be weights and are not used."""
    candidates = [name for name in frame.cells.columns if name not in columns and _may_be_weight(frame, name)]
    if not weight and len(candidates) > 1:
        raise UserError(
            f"{frame.source}: {', '.join(candidates)} may each be the respondents' weight; say data.weight=NAME, or "
            "data.weight=none to count every respondent once"
        )
    chosen = weight or "".join(candidates) or UNWEIGHTED
    unused = [name for name in candidates if name != chosen]
    if chosen == UNWEIGHTED:
        frame.notes.add(f"every respondent counts once, {'as data.weight says' if weight else 'for want of a weight'}")
        return Weight(guessed="" if weight else "no column looks like a weight"), unused
    frame.require(chosen)
    frame.notes.add(f"weighted by {chosen}" + ("" if weight else ", the only column that looks like it"))
    without = int(np.isnan(numbers(frame, chosen)).sum())
    if not weight and without > _MOST_UNWEIGHTED * len(frame.cells):
        raise UserError(
            f"{frame.source}: {chosen} looks like the weight, and {without} of {len(frame.cells)} respondents have "
            f"none; say data.weight={chosen} to leave them out, or data.weight=none to count every respondent once"
        )
    return Weight(column=chosen, guessed="" if weight else "the only column that looks like a weight"), unused


def _may_be_weight(frame: Frame, name: str) -> bool:
    """True if a column's name or label is a weight's, not of a body's, and its cells are numbers without labels."""
    column = frame.columns[name]
    is_called = _WEIGHT.search(name) or _WEIGHT_LABEL.search(column.text)
    if not (is_called or _NUMBERED.fullmatch(name)) or _BODY.search(name) or _BODY.search(column.text):
        return False
    number_R = numbers(frame, name)
    number_R = number_R[np.isfinite(number_R)]
    if 2 * len(number_R) <= sum(cell not in (None, "") for cell in frame.cells[name]):
        return False
    # A label of one code, such as "no weight", leaves the column a weight; labels of all codes make it a question.
    is_labelled = all(code in column.labels for code in frame.codes(name)[1])
    return not is_labelled and bool(is_called or (number_R % 1.0 > 0).any())


def _group(frame: Frame, name: str, missing: Missing) -> Listed:
    """Read the names of a column's groups, and the codes of respondents without a group."""
    column = frame.columns[name]
    labels = {code: column.label(code) for code in frame.codes(name)[1]}
    kinds = _kinds(name, labels, missing)
    others = [labels[code] for code, (kind, _) in kinds.items() if kind == "answer"]
    if others and all(map(_PLACE.fullmatch, others)):
        for code, label in labels.items():
            if kinds[code][0] != "answer" and _PLACE.fullmatch(label) and not missing.lists(name, code, label):
                kinds[code] = "answer", "a place, or no answer"
                frame.notes.add(f"groups of {name} whose code can also mean no answer (data.missing)", label)
    names = {code: group_name(label).replace(";", ",") for code, label in labels.items() if kinds[code][0] == "answer"}
    missing.check(frame.source, {name: {code: labels[code] for code in names}})
    for code, group in names.items():
        if (usual := usual_name(group)) != group:
            kinds[code], names[code] = ("answer", f"another name of {group}"), usual
            frame.notes.add_spelling(group, usual)
    entries = _entries(frame, column, sorted(names, key=lambda code: names[code]), names, kinds)
    if not entries:
        raise UserError(f"{frame.source}: no respondent has a group in {name}")
    if (size := len({entry.label for entry in entries})) > MAX_GROUPS:
        raise UserError(f"{frame.source}: column {name} has {size} groups; at most {MAX_GROUPS} can be")
    rest = {code: label for code, label in labels.items() if code not in names} | {**column.missing}
    return Listed(options=entries, no_answers=_entries(frame, column, rest, rest, kinds))


def _item(frame: Frame, name: str, missing: Missing, refusals: str) -> Item | str:
    """Read a question, or the reason why a column is none."""
    column = frame.columns[name]
    if not column.is_question or not name:
        return "no question, as the file says" if name else "the column has no name"
    try:
        used = [*frame.codes(name)[1]]
    except UserError:  # lists
        used = [";"]
    if used == [";"] or (not column.labels and _has_several(used)):
        return "several answers in a cell; make a column of each option"
    if len(used) > 2 * MAX_OPTIONS and not column.order:
        return f"more than {MAX_OPTIONS} different answers"
    # A label that nobody has chosen is an option, unless it is a refusal.
    listed = column.order or (*used, *(code for code in column.labels if code not in used))
    labels = {code: clean(column.label(code)) or code for code in listed}
    kinds = _kinds(name, labels, missing)
    is_option = {
        code: kind == "answer" or (kind == "refusal" and (code in used or bool(column.order)))
        for code, (kind, _) in kinds.items()
    }
    codes = _in_order([code for code in labels if is_option[code]], kinds, column)
    answers = [code for code in codes if kinds[code][0] == "answer"]
    size = len({same(labels[code]) for code in (codes if refusals == "keep" else answers)})
    if not MIN_OPTIONS <= size <= MAX_OPTIONS:
        return f"not {MIN_OPTIONS} to {MAX_OPTIONS} options that are answers"
    why, ordinal = "", _scale(column, answers)
    if not column.labels and not column.order and None in map(_leading, answers):
        frame.notes.add("answers without codes stand in the order of the alphabet, which is not that of a scale")
        why = "options in the order of the alphabet" if len(answers) > MIN_OPTIONS else ""
    elif ordinal and not column.is_ordered and not column.places:
        why = "a scale, since its ends alone have labels"
    options = _entries(frame, column, codes, labels, kinds)
    rest = {code: label for code, label in labels.items() if not is_option[code]} | {**column.missing}
    no_answers = _entries(frame, column, rest, rest, kinds)
    text = clean(column.text) or name
    return Item(id=name, text=text, ordinal=ordinal, guessed=why, options=options, no_answers=no_answers)


def _kinds(name: str, labels: Mapping[str, str], missing: Missing) -> dict[str, tuple[Kind, str]]:
    """Classify each code by the user's list, by its label, or since it is negative."""
    kinds: dict[str, tuple[Kind, str]] = {}
    for code, (kind, is_doubtful) in in_context(labels).items():
        kinds[code] = kind, ("reads as no answer" if is_doubtful else "")
        if missing.lists(name, code, labels[code]):
            kinds[code] = "none", ""
    answers = {code: labels[code] for code, (kind, _) in kinds.items() if kind == "answer"}
    if not missing.decides(name) and any((number(code) or 0.0) > 0.0 for code in answers):
        negative = (code for code in looks_missing(answers) if labels[code] != code and (number(code) or 0.0) < 0.0)
        kinds |= dict.fromkeys(negative, ("none", "a negative code beside positive ones"))
    return kinds


def _entries(frame: Frame, column: Column, codes: Iterable[str], labels: Mapping[str, str], kinds: Kinds) -> Entries:
    """Make the lines of codes; a label that was spelled otherwise before takes its first spelling."""
    entries, first = list[Entry](), dict[str, str]()
    for code in codes:
        kind, why = kinds.get(code, ("none", ""))
        label = first.setdefault(same(labels[code]), labels[code])
        frame.notes.add_spelling(labels[code], label)
        why = why or ("another spelling" if label != labels[code] else "")
        seen = code not in {*column.labels, *column.missing, *column.order}
        entries.append(Entry(code=code, label=label or code, refusal=kind == "refusal", seen=seen, guessed=why))
    return tuple(entries)


def _has_several(codes: Sequence[str]) -> bool:
    """True if cells list several answers, such as "Radio;TV;": their parts also stand alone or in other cells."""
    return any(_lists(codes, mark) for mark in (";", "|", "\n", ","))


def _lists(codes: Sequence[str], mark: str) -> bool:
    cells = {code: [part for part in map(str.strip, code.split(mark)) if part] for code in codes if mark in code}
    lists = [parts for parts in cells.values() if len(parts) > 1]
    alone = {parts[0] for parts in cells.values() if len(parts) == 1} | ({*codes} - cells.keys())
    number_of = Counter(part for parts in lists for part in {*parts})
    known = [part for part, times in number_of.items() if part in alone or (mark != "," and times > 1)]
    is_repeated = len(lists) > 1 or (len(lists) == 1 and alone.issuperset(lists[0]))
    return is_repeated and len(known) > 1 and 2 * len(known) > len(number_of)


def _in_order(codes: Sequence[str], kinds: Kinds, column: Column) -> list[str]:
    """Put codes in the order that the source lists, else of the numbers with which all answers begin, such as "18-29".

    Otherwise numbers come before words in alphabetical order. Refusals are last.
    """
    if column.order:
        return [*codes]
    leading = {code: _leading(code) for code in codes if kinds[code][0] == "answer"}
    by_number = {code: number(code) for code in codes} | ({} if None in leading.values() else leading)
    last = math.inf
    return sorted(
        codes, key=lambda code: (code not in leading, last if by_number[code] is None else by_number[code], code)
    )


def _leading(code: str) -> float | None:
    """The number with which a code begins, if any."""
    return float(match[1]) if (match := _LEADING.match(code)) else None


def _scale(column: Column, answers: Sequence[str]) -> bool | tuple[float, ...]:
    """Positions of the answers, if the source states them; or whether it marks an order, or labels the ends."""
    if column.places:
        places = tuple(column.places.get(code, math.nan) for code in answers)
        return places if all(map(math.isfinite, places)) else False
    if column.order:
        return column.is_ordered
    numeric = {code: value for code in answers if (value := number(code)) is not None}
    if not column.labels or len(numeric) < len(answers):
        return False
    ends = [place for code, place in numeric.items() if code in column.labels]
    between = [place for code, place in numeric.items() if code not in column.labels]
    return column.is_ordered or bool(ends and between and min(ends) < min(between) and max(between) < max(ends))
