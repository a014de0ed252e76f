"""Tables of shares or counts, as raw answers: our own columns, GlobalOpinionQA's, and one row an option.

Our columns: `question, options, group, distribution`, optionally `question_id`, `attribute` (what a group is defined
by), `ordinal` (scale position of each option), `n` (people behind the distribution), and `refusal_rate` or `refusals`.
One row an option: `question, group, option` and one of `share`, `percent` or `count`, optionally `question_id`,
`attribute` and `ordinal`. Lists in cells are JSON or Python literals; nothing in a cell is executed.

Axis letters: K answer options.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from appa_flwr.survey.frames import Frame
from appa_flwr.survey.nonanswers import code_text
from appa_flwr.survey.raw import Notes, RawAnswer, Unusable, group_name, same

UNITS: Final = {"share": 1.0, "percent": 100.0, "count": 0.0}
"""Column with an option's number -> what the options' numbers sum to; 0 = anything."""
BAD_DISTRIBUTION: Final = "distribution is not a list of numbers, one for each option"
BAD_NUMBER: Final = "not a plain number, such as 1200, 12.5 or 12,5 %"
BAD_OPTIONS: Final = "options are not a list of texts"
BAD_ORDINAL: Final = "ordinal is not one number, or null, for each option"
_TOTALS: Final = {"total", "all", "base", "n", "summe", "gesamt", "insgesamt", "sum", "grand total", "totale"}
_HEAD: Final = re.compile(r"defaultdict\(\s*<class 'list'>\s*,\s*(.*)\)", re.DOTALL)
_NAN: Final = re.compile(r"(?<=[\[,\s(])nan(?=[\s,\])])")
_PLAIN: Final = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE)
_THOUSANDS: Final = re.compile(r"\d{1,3}(?:([,.])\d{3})(?:\1\d{3})*")
_SPACE: Final = re.compile(r"(?<=\d)[ '\u2019\u00a0\u202f\u2009](?=\d{3}(?!\d))")


def is_table(frame: Frame) -> bool:
    """True if a file has one of the layouts of this module, and not one row a respondent."""
    columns = {*frame.cells.columns}
    return bool(columns & {"distribution", "selections", "options"} or {"option", "question"} <= columns)


def raw_answers(frame: Frame) -> list[RawAnswer]:
    """The answers in a table; notes on what was decided go to the frame.

    Raises:
        UserError: a column is missing.
    """
    columns = {*frame.cells.columns}
    if "option" in columns and not columns & {"options", "distribution", "selections"}:
        return [*_one_row_an_option(frame)]
    frame.require("question", "options", *(("group", "distribution") if columns & {"group", "distribution"} else ()))
    if "selections" in columns:
        frame.notes.add("GlobalOpinionQA as published, one row a question")
    raws: list[RawAnswer] = []
    for row, cells in _rows(frame):
        try:
            raws += [_answer(row, mine) for mine in (_by_country(cells) if "selections" in columns else [cells])]
        except Unusable as error:
            raws.append(RawAnswer(row, "", code_text(cells.get("question")), problem=str(error)))
    return raws


def read_list(cell: object, problem: str) -> list[Any]:
    """The list in a cell, itself or as text; `Unusable` with this text where it is none."""
    if isinstance(cell, str):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            cell = _literal(cell)
    values = cell.tolist() if hasattr(cell, "tolist") else cell
    if not isinstance(values, list | tuple):
        raise Unusable(problem)
    return list(values)


def read_numbers(cell: object, problem: str, *, empty: float | None) -> list[Any]:
    """The list of numbers in a cell, with `empty` in place of null."""
    try:
        return [empty if item is None else _float(item) for item in read_list(cell, problem)]
    except (TypeError, ValueError):
        raise Unusable(problem) from None


def _literal(text: str) -> object:
    """JSON or a Python literal."""
    with suppress(ValueError):
        return json.loads(text)
    return ast.literal_eval(_NAN.sub("None", text.strip()))


def _rows(frame: Frame) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows and their cells, without the empty ones."""
    for row, cells in zip(frame.cells.index, frame.cells.to_dict("records"), strict=True):
        yield int(row), {str(name): cell for name, cell in cells.items() if not _is_empty(cell)}


def _is_empty(cell: object) -> bool:
    return cell is None or (isinstance(cell, str) and cell.strip().casefold() in ("", "nan", "null"))


def _float(item: Any) -> float:
    if isinstance(item, bool | str):
        raise TypeError
    return float(item)


def _answer(row: int, cells: Mapping[str, Any]) -> RawAnswer:
    """A row in our own columns; without a group and a distribution it is a question that nobody has answered."""
    raw = RawAnswer(row, code_text(cells.get("question_id")), code_text(cells.get("question")))
    try:
        options = read_list(cells.get("options"), BAD_OPTIONS)
        if not all(isinstance(option, str | int | float) and not isinstance(option, bool) for option in options):
            raise Unusable(BAD_OPTIONS)
        raw = raw._replace(options=tuple(map(code_text, options)))
        if is_answer := "group" in cells or "distribution" in cells:
            raw = raw._replace(group=_group(cells))
        if "ordinal" in cells:
            places = read_numbers(cells["ordinal"], BAD_ORDINAL, empty=None)
            if len(places) < len(options):
                raise Unusable(BAD_ORDINAL)
            raw = raw._replace(ordinal=tuple(places[: len(options)]))
        n, refused, rate = (_count(cells.get(name)) for name in ("n", "refusals", "refusal_rate"))
        if rate is None and refused is not None and n:
            rate = refused / (n + refused)
        shares = read_numbers(cells.get("distribution"), BAD_DISTRIBUTION, empty=math.nan) if is_answer else ()
        return raw._replace(shares=shares, n=n, refusal_rate=rate)
    except Unusable as error:
        return raw._replace(problem=str(error))


def _group(cells: Mapping[str, Any]) -> str:
    attribute, name = code_text(cells.get("attribute")), code_text(cells.get("group"))
    if not group_name(name):
        raise Unusable("empty group")
    if ";" in attribute + name:
        raise Unusable("group's name with a semicolon, which stands between the names of several")
    return group_name(name, attribute)


def _by_country(question: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, in our own columns, of GlobalOpinionQA's row, whose cell `selections` has all countries' shares."""
    selections: Any = question.get("selections")
    try:
        if isinstance(selections, str):
            head = _HEAD.fullmatch(selections.strip())
            selections = _literal(head[1] if head else selections)
        shares = {str(name): shares for name, shares in dict(selections).items()}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise Unusable("selections are not a dict of groups and lists") from None
    return [question | {"group": name, "distribution": mine} for name, mine in shares.items()]


def _one_row_an_option(frame: Frame) -> Iterator[RawAnswer]:
    """The rows of each question and group joined to an answer."""
    measure = next((name for name in UNITS if name in frame.cells.columns), "share")
    frame.require("question", "group", "option", measure)
    frame.notes.add(f"one row an option, with the column {measure}")
    commas = [
        _SPACE.sub("", cell).strip(" %") for cell in frame.cells[measure] if isinstance(cell, str) and "," in cell
    ]
    decimal_comma = any(not _THOUSANDS.fullmatch(cell) for cell in commas)  # one that cannot stand between thousands
    questions: defaultdict[str, list[RawAnswer]] = defaultdict(list)
    for row, cells in _rows(frame):
        raw = RawAnswer(row, code_text(cells.get("question_id")), code_text(cells.get("question")))
        try:
            raw = raw._replace(group=_group(cells))
            number = _number(cells.get(measure), UNITS[measure], decimal_comma=decimal_comma)
            place = _number(cells["ordinal"], 1.0, least=-math.inf) if "ordinal" in cells else None
            raw = raw._replace(options=(code_text(cells.get("option")),), shares=(number,), ordinal=(place,))
        except Unusable as error:
            raw = raw._replace(problem=str(error))
        if raw.group:
            questions[raw.question_id or same(raw.text)].append(raw)
            if same(raw.group) in _TOTALS:
                frame.notes.add("counts as a group, whatever its name", raw.group)
        else:
            yield raw
    for raws in questions.values():
        yield from _joined(raws, measure, frame.notes)


def _joined(rows: Sequence[RawAnswer], measure: str, notes: Notes) -> Iterator[RawAnswer]:
    """A question's answer of each group, of rows with an option each; one that a group has no row of has the share 0.

    Two spellings of an option are added up. The same spelling with two numbers costs the answer. An option named as a
    total, and that is the sum of the others in every group, is left out.
    """
    firsts: dict[str, RawAnswer] = {}  # option -> the first row that has it
    answers: dict[str, RawAnswer] = {}  # group -> its first row
    spellings: defaultdict[str, dict[str, dict[str, float]]] = defaultdict(dict)  # group -> option -> label -> number
    for raw in rows:
        group, problem = same(raw.group), raw.problem
        if not problem:
            (label,), (number,) = raw.options, raw.shares
            firsts.setdefault(same(label), raw)
            if spellings[group].setdefault(same(label), {}).setdefault(label, number) != number:
                problem = "an option twice in a question's rows of one group"
        first = answers.setdefault(group, raw)
        answers[group] = first._replace(problem=problem or first.problem)
    numbers = {group: {option: sum(mine.values()) for option, mine in spellings[group].items()} for group in answers}
    for name in sorted(_TOTALS & firsts.keys()):
        sums = [(mine[name], sum(mine.values()) - mine[name]) for mine in numbers.values() if name in mine]
        if all(_is_sum(total, others) and _is_sum(total, UNITS[measure] or others) for total, others in sums):
            notes.add("options left out as sums of the others", repr(firsts.pop(name).options[0]))
    places = tuple(raw.ordinal[0] if raw.ordinal else None for raw in firsts.values())
    for group, raw in answers.items():
        number_K = [numbers[group].get(option, 0.0) for option in firsts]
        total = UNITS[measure] or sum(number_K) or 1.0
        yield raw._replace(
            options=tuple(first.options[0] for first in firsts.values()),
            shares=[number / total for number in number_K],
            ordinal=places if any(place is not None for place in places) else None,
            people=number_K if measure == "count" else (),
        )


def _is_sum(total: float, others: float) -> bool:
    """True if two numbers are equal but for rounding."""
    return math.isclose(total, others, rel_tol=0.005, abs_tol=0.51 if total > 2 else 0.011)


def _number(cell: object, unit: float, *, decimal_comma: bool = False, least: float = 0.0) -> float:
    """A number as tables write it, in its unit of `UNITS`: 12.5, "12,5", "12.5 %", "1'250", "1,024".

    Of a count "1,024" is 1024, and "1.024" is an error, since it may be either.
    """
    is_percent = False
    if isinstance(cell, str):
        text = _SPACE.sub("", cell.strip())
        is_percent, text = text.endswith("%"), text.removesuffix("%").strip()
        thousands = None if unit or decimal_comma else _THOUSANDS.fullmatch(text)
        if thousands and (thousands[1] == "," or text.count(".") > 1):
            text = text.replace(thousands[1], "")
        elif text.count(",") == 1 and "." not in text:
            text = text.replace(",", ".")
        elif thousands:
            raise Unusable(BAD_NUMBER)
        cell = float(text) if _PLAIN.fullmatch(text) else None
    try:
        value = _float(cell)
    except (TypeError, ValueError):
        raise Unusable(BAD_NUMBER) from None
    if not math.isfinite(value) or (is_percent and not unit):
        raise Unusable(BAD_NUMBER)
    if value < least:
        raise Unusable("negative share in the distribution")
    return value / 100.0 * unit if is_percent else value


def _count(cell: object) -> float | None:
    """A number of people, or a rate, None where the cell is empty."""
    try:
        return None if cell is None else _number(cell, UNITS["count"])
    except Unusable:
        raise Unusable("n is not a number of respondents") from None
