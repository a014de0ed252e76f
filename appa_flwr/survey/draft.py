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
from appa_flwr.survey.nonanswers import WORDS, Kinds, Missing, number
from appa_flwr.survey.respondents import numbers, weights
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS

MAX_GROUPS: Final = 200
_MOST_UNWEIGHTED: Final = 0.2  # share of people without a weight up to which a column can be guessed to be the weight
_FEWEST_PEOPLE: Final = 10  # of a column that may number respondents
_NAMES: Final = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in WORDS["columns"].items()}
_PLACE: Final = re.compile("[A-Z]{2}(?:-[A-Z]{1,3})?|[a-z]{2}")  # such as DK and NC, which mean no answer elsewhere
_LEADING: Final = re.compile(r"[(\[]?(-?\d+(?:\.\d+)?)(?![\d,])")


def draft(frame: Frame, group_by: str, weight: str, missing: Missing, refusals: Refusals) -> Codebook:
    """Draft the codebook of a file; decisions are added to `frame.notes`.

    Raises:
        UserError: the columns of groups or the weight have to be named, rows are no respondents, or codes look missing.
    """
    columns = _group_columns(frame, group_by)
    if why := _several_rows(frame, columns):
        raise UserError(
            f"{frame.source}: seems to have several rows a respondent: {why}; make it wide (a pivot): one row a "
            "respondent, one column a question; of events keep one. If rows are respondents, delete the first column"
        )
    weight_line, unused = _weight(frame, columns, clean(weight))
    weights(frame, weight_line.column)
    groups = {name: _group(frame, name, missing) for name in columns}
    questions, left_out = dict[str, Item](), dict[str, str]()
    for name in frame.cells.columns.difference([*columns, weight_line.column], sort=False):
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
        for entry in column.entries if name in frame.cells else ():
            if entry.guessed:
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


def _several_rows(frame: Frame, columns: Sequence[str]) -> str:
    """Why a respondent seems to have several rows, such as one for each question or event; empty if it does not."""
    import pandas as pd

    named = {kind: [*filter(_NAMES[kind].search, frame.cells.columns)] for kind in ("event", "question", "answer")}
    if events := [name for name in named["event"] if len(frame.codes(name)[1]) > 1]:
        return f"{events[0]!r} has several events"
    if (items := [name for name in named["question"] if name not in columns]) and named["answer"]:
        return f"{items[0]!r} names the question of the answer in {named['answer'][0]!r}"
    groups = pd.DataFrame({name: frame.codes(name)[0] for name in columns}).replace(-1, math.nan)
    code_of: dict[str, IntArray] = {}
    for name in frame.cells.columns.difference([*columns], sort=False):
        with suppress(UserError):  # lists
            code_of[name] = frame.codes(name)[0]
    cells = pd.DataFrame(code_of)
    for person, person_R in code_of.items():
        size_of = frame.codes(person)[1]
        if not _FEWEST_PEOPLE <= len(size_of) <= len(cells) / 1.2 or person_R.min() < 0:
            continue
        if (groups.groupby(person_R).nunique() > 1).any(axis=None):
            continue  # groups differ between the rows of one value
        for part in code_of:
            is_few = part != person and 1 < len(frame.codes(part)[1]) <= 2 * max(size_of.values())
            if is_few and not cells.duplicated([person, part]).any():
                return f"values of {person!r} are repeated, and {part!r} tells their rows apart"
    return ""


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
    is_called = _NAMES["weight"].search(name) or _NAMES["weight-label"].search(column.text)
    is_body = _NAMES["body"].search(name) or _NAMES["body"].search(column.text)
    if is_body or not (is_called or _NAMES["weight-if-fractions"].search(name)):
        return False
    number_R = numbers(frame, name)
    number_R = number_R[np.isfinite(number_R)]
    if 2 * len(number_R) <= sum(cell not in (None, "") for cell in frame.cells[name]):
        return False
    # A label of one code, such as "no weight", leaves the column a weight; labels of all codes make it a question.
    is_labelled = column.labels.keys() >= frame.codes(name)[1].keys()
    return not is_labelled and bool(is_called or (number_R % 1.0 > 0).any())


def _group(frame: Frame, name: str, missing: Missing) -> Listed:
    """Read the names of a column's groups, and the codes of respondents without a group."""
    column = frame.columns[name]
    labels = {code: column.labels.get(code, code) for code in frame.codes(name)[1]}
    kinds = missing.kinds(name, labels)
    others = [labels[code] for code, (kind, _) in kinds.items() if kind == "answer"]
    if others and all(map(_PLACE.fullmatch, others)):
        for code, label in labels.items():
            if kinds[code][0] != "answer" and _PLACE.fullmatch(label) and not missing.lists(name, code, label):
                kinds[code] = "answer", "a place, or no answer"
                frame.notes.add(f"groups of {name} whose code can also mean no answer (data.missing)", label)
    codes = [code for code in labels if kinds[code][0] == "answer"]
    missing.check(frame.source, {name: {code: labels[code] for code in codes}})
    for code in codes:
        group = group_name(labels[code]).replace(";", ",")
        labels[code] = usual_name(group)
        if labels[code] != group:
            kinds[code] = "answer", f"another name of {group}"
            frame.notes.add_spelling(group, labels[code])
    if not codes:
        raise UserError(f"{frame.source}: no respondent has a group in {name}")
    codes.sort(key=lambda code: labels[code])
    listed = Listed(**_lists(frame, column, codes, labels, kinds))
    if (size := len({entry.label for entry in listed.options})) > MAX_GROUPS:
        raise UserError(f"{frame.source}: column {name} has {size} groups; at most {MAX_GROUPS} can be")
    return listed


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
    labels = {
        code: clean(column.labels.get(code, code)) or code
        for code in column.order or dict.fromkeys([*used, *column.labels])
    }
    kinds = missing.kinds(name, labels)
    answers = [code for code, (kind, _) in kinds.items() if kind == "answer"]
    refused = [code for code, (kind, _) in kinds.items() if kind == "refusal" and (code in used or column.order)]
    size = len({same(labels[code]) for code in (answers + refused if refusals == "keep" else answers)})
    if not MIN_OPTIONS <= size <= MAX_OPTIONS:
        return f"not {MIN_OPTIONS} to {MAX_OPTIONS} options that are answers"
    is_numbered = None not in map(_leading, answers)
    if column.order:
        codes = [code for code in labels if code in {*answers, *refused}]
    else:  # refusals last, numbers before words in the order of the alphabet
        answers.sort(key=lambda code: _place(_leading(code) if is_numbered else number(code), code))
        codes = answers + sorted(refused, key=lambda code: _place(number(code), code))
    why, ordinal = "", _scale(column, answers)
    if not column.labels and not column.order and not is_numbered:
        frame.notes.add("answers without codes stand in the order of the alphabet, which is not that of a scale")
        why = "options in the order of the alphabet" if len(answers) > MIN_OPTIONS else ""
    elif ordinal and not column.is_ordered and not column.places:
        why = "a scale, since its ends alone have labels"
    lists = _lists(frame, column, codes, labels, kinds)
    return Item(id=name, text=clean(column.text) or name, ordinal=ordinal, guessed=why, **lists)


def _lists(
    frame: Frame, column: Column, codes: Sequence[str], labels: Mapping[str, str], kinds: Kinds
) -> dict[str, Entries]:
    """Make the lines of the codes that are options, and of the others.

    A label that was spelled otherwise before in its list takes its first spelling.
    """
    declared = {*column.labels, *column.missing, *column.order}
    labels = {**labels, **column.missing}

    def entries(codes: Iterable[str]) -> Entries:
        lines, first = list[Entry](), dict[str, str]()
        for code in codes:
            kind, why = kinds.get(code, ("none", ""))
            label = first.setdefault(same(labels[code]), labels[code])
            frame.notes.add_spelling(labels[code], label)
            why = why or ("another spelling" if label != labels[code] else "")
            seen, refusal = code not in declared, kind == "refusal"
            lines.append(Entry(code=code, label=label or code, refusal=refusal, seen=seen, guessed=why))
        return tuple(lines)

    return {"options": entries(codes), "no_answers": entries(code for code in labels if code not in codes)}


def _has_several(codes: Sequence[str]) -> bool:
    """True if cells list several answers, such as "Radio;TV;": their parts also stand alone or in other cells."""
    return any(_are_lists(codes, mark) for mark in (";", "|", "\n", ","))


def _are_lists(codes: Sequence[str], mark: str) -> bool:
    cells = {code: [part for part in map(str.strip, code.split(mark)) if part] for code in codes if mark in code}
    lists = [parts for parts in cells.values() if len(parts) > 1]
    alone = {parts[0] for parts in cells.values() if len(parts) == 1} | ({*codes} - cells.keys())
    number_of = Counter(part for parts in lists for part in {*parts})
    known = [part for part, times in number_of.items() if part in alone or (mark != "," and times > 1)]
    is_repeated = len(lists) > 1 or (len(lists) == 1 and alone.issuperset(lists[0]))
    return is_repeated and len(known) > 1 and 2 * len(known) > len(number_of)


def _place(value: float | None, code: str) -> tuple[float, str]:
    return math.inf if value is None else value, code


def _leading(code: str) -> float | None:
    """The number with which a code begins, if any, such as "18-29"."""
    return float(match[1]) if (match := _LEADING.match(code)) else None


def _scale(column: Column, answers: Sequence[str]) -> bool | tuple[float, ...]:
    """Positions of the answers, if the source states them; or whether it marks an order, or labels the ends."""
    if column.places:
        places = tuple(column.places.get(code, math.nan) for code in answers)
        return places if all(map(math.isfinite, places)) else False
    if column.order:
        return column.is_ordered
    value_of = {code: value for code in answers if (value := number(code)) is not None}
    if not column.labels or len(value_of) < len(answers):
        return False
    ends = [value for code, value in value_of.items() if code in column.labels]
    between = [value for code, value in value_of.items() if code not in column.labels]
    return column.is_ordered or bool(ends and between and min(ends) < min(between) and max(between) < max(ends))
