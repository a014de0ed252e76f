"""The draft of a codebook: what a file of respondents declares, and guesses of the rest, each of which is marked."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from appa_flwr.core.errors import UserError
from appa_flwr.core.text import clean, plain
from appa_flwr.survey import roles
from appa_flwr.survey.codebook import Codebook, Entries, Entry, Item, Listed, Refusals
from appa_flwr.survey.frames import LEFT_OUT, Column, Frame
from appa_flwr.survey.names import group_name, same, some, usual_name
from appa_flwr.survey.nonanswers import PLACE_OR_NONE, Kinds, Missing, number
from appa_flwr.survey.respondents import weights
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS

MAX_GROUPS: Final = 200
_LEADING: Final = re.compile(r"[(\[]?(-?\d+(?:\.\d+)?)(?![\d,])")
_DIGITS: Final = re.compile(r"(\d+)")
_DIGITS_SHOWN: Final = 20  # more than a code has
_BRACKETS: Final = "()[]{} "


def draft(frame: Frame, group_by: str, weight: str, missing: Missing, refusals: Refusals) -> Codebook:
    """Draft the codebook of a file; decisions are added to `frame.notes`.

    Raises:
        UserError: the columns of groups or the weight have to be named, rows are no respondents, or codes look missing.
    """
    columns = roles.group_columns(frame, group_by)
    if why := roles.several_rows(frame, columns):
        raise UserError(f"{frame.source}: {why}")
    if repeated := roles.repeated_ids(frame, columns):
        frame.notes.add("rows with the id of an earlier row, each of which counts", *repeated)
    weight_line, unused = roles.weight(frame, columns, clean(weight))
    weights(frame, weight_line.column)
    groups = {name: _group(frame, name, missing) for name in columns}
    questions, left_out = dict[str, Item](), dict[str, str]()
    for name in frame.cells.columns.difference([*columns, weight_line.column], sort=False):
        item = "named like a weight, and not used" if name in unused else _item(frame, name, missing, refusals)
        if isinstance(item, Item):
            questions[name] = item
            continue
        left_out[name] = item
        frame.notes.add(f"{LEFT_OUT}{item}", name)
    answers = {
        name: {entry.code: entry.label for entry in item.options if not entry.refusal}
        for name, item in questions.items()
    }
    missing.check(frame.source, answers)
    return Codebook(
        refusals=refusals,
        layout=frame.layout,
        weight=weight_line,
        groups=groups,
        questions=questions,
        left_out=left_out,
    )


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


def _group(frame: Frame, name: str, missing: Missing) -> Listed:
    """Read the names of a column's groups, and the codes of respondents without a group."""
    column = frame.columns[name]
    labels = {code: plain(column.labels.get(code, code)) for code in frame.codes(name)[1] if code not in column.missing}
    kinds = missing.kinds(name, labels, fewest_places=1)
    if places := [labels[code] for code, (kind, why) in kinds.items() if kind == "answer" and why == PLACE_OR_NONE]:
        frame.notes.add(f"groups of {name} whose code can also mean no answer (data.missing)", *places)
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
    if why := roles.no_question(frame, name):
        return why
    used = [code for code in frame.codes(name)[1] if code not in column.missing]
    if len(used) > 2 * MAX_OPTIONS and not column.order:
        return f"more than {MAX_OPTIONS} different answers"
    # A label that nobody has chosen is an option, unless it is a refusal.
    labels = {
        code: clean(plain(column.labels.get(code, code))) or code
        for code in column.order or dict.fromkeys([*used, *column.labels])
    }
    kinds = missing.kinds(name, labels)
    answers = [code for code, (kind, _) in kinds.items() if kind == "answer"]
    refused = [code for code, (kind, _) in kinds.items() if kind == "refusal" and (code in used or column.order)]
    size = len({same(labels[code]) for code in (answers + refused if refusals == "keep" else answers)})
    if size == 1 and frame.codes(name)[0].min() < 0:
        return "one answer or an empty cell; if empty means 'not mentioned', write a code for that there"
    if not MIN_OPTIONS <= size <= MAX_OPTIONS:
        return f"not {MIN_OPTIONS} to {MAX_OPTIONS} options that are answers"
    is_numbered = None not in map(_leading, answers)
    codes = [code for code in labels if code in {*answers, *refused}]

    def place(code: str) -> tuple[bool, float, tuple[str, ...]]:
        """Refusals last, numbers before words, in these words numbers in their order: A2 before A10."""
        value, text = _leading(code) if is_numbered else number(code), code if column.labels else labels[code]
        parts = (part.zfill(_DIGITS_SHOWN) if part.isdecimal() else part for part in _DIGITS.split(text))
        return code in refused, math.inf if value is None else value, tuple(parts)

    if not column.order:
        codes.sort(key=place)
    answers = [code for code in codes if code not in refused]
    why, ordinal = "", _scale(column, answers, labels)
    if not column.labels and not column.order and not is_numbered:
        frame.notes.add("answers without codes stand in the order of the alphabet, which is not that of a scale")
        why = "options in the order of the alphabet" if len(answers) > MIN_OPTIONS else ""
    elif ordinal and not column.is_ordered and not column.places:
        why = "a scale, since its labels are numbers, or its ends alone have words"
    elif bare := [code for code in answers if column.labels and code not in column.labels]:
        why = f"options without a label: {some(bare)}"
    elif not column.labels and any((_leading(code) or 0.0) < 0.0 for code in answers):
        why = "negative codes as points of a scale"
    lists = _lists(frame, column, codes, labels, kinds)
    return Item(id=name, text=clean(plain(column.text)) or plain(name), ordinal=ordinal, guessed=why, **lists)


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


def _leading(code: str) -> float | None:
    """The number with which a code begins, if any, such as "18-29"."""
    return float(match[1]) if (match := _LEADING.match(code)) else None


def _scale(column: Column, answers: Sequence[str], labels: Mapping[str, str]) -> bool | tuple[float, ...]:
    """Positions of the answers, if the source states them; or whether it marks an order, or has words at the ends.

    A label can be the number of its point, also in brackets.
    """
    if column.places:
        places = tuple(column.places.get(code, math.nan) for code in answers)
        return places if all(map(math.isfinite, places)) else False
    if column.order:
        return column.is_ordered
    code_K = np.array([number(code) for code in answers], np.float64)  # NaN for a text
    point_K = np.array([number(labels[code].strip(_BRACKETS)) for code in answers], np.float64)
    is_word_K, are_many = np.isnan(point_K), len(answers) > MIN_OPTIONS
    are_points = are_many and not is_word_K.any() and len({*point_K}) == len(answers)
    if column.labels and are_points and (point_K != code_K).any():
        return tuple(point_K.tolist())
    if not column.labels or np.isnan(code_K).any():
        return False
    word_K, between_K = code_K[is_word_K], code_K[~is_word_K]
    # A stray code between labels, which are then more, makes no scale of them.
    if 1 < len(word_K) <= len(between_K) + 1 and word_K.min() < between_K.min() and between_K.max() < word_K.max():
        return True
    return column.is_ordered or (are_many and not is_word_K.any())
