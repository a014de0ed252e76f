"""Tables of shares or counts, as raw answers: our own columns, SubPOP's, GlobalOpinionQA's, and one row an option.

Our columns: `question_id, question, options, group, distribution`, optionally `attribute` (what a group is defined by),
`ordinal` (scale position of each option), `n` (people behind the distribution), and `refusal_rate` or `refusals`. One
row an option: `question, group, option` and one of `share`, `percent` or `count`, optionally `question_id`,
`attribute` and `ordinal`. Lists in cells are JSON or Python literals; nothing in a cell is executed.

Axis letters: K answer options.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from appa_flwr.core.errors import UserError
from appa_flwr.survey.frames import Frame
from appa_flwr.survey.names import group_name, same
from appa_flwr.survey.nonanswers import code_text, kind_of
from appa_flwr.survey.raw import RawAnswer, Reason, Unusable, some

MEASURES: Final = {"share": 1.0, "percent": 100.0, "count": 0.0}
"""Column with an option's number -> what the options' numbers sum to; 0 = anything."""
_TOTALS: Final = frozenset(
    {"total", "all", "base", "n", "summe", "gesamt", "insgesamt", "sum", "grand total", "totale"}
)
_SUBPOP: Final = {"qkey": "question_id", "responses": "distribution"}
_HEAD: Final = re.compile(r"defaultdict\(\s*<class 'list'>\s*,\s*(.*)\)", re.DOTALL)
_NAN: Final = re.compile(r"(?<=[\[,\s(])nan(?=[\s,\])])")
_PLAIN: Final = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE)
_GROUPED: Final = re.compile(r"\d{1,3}(?:([,.])\d{3})(?:\1\d{3})*")
_SPACED: Final = re.compile(r"(?<=\d)[ '\u2019\u00a0\u202f\u2009](?=\d{3}(?!\d))")


def is_table(frame: Frame) -> bool:
    """True if a file has one of the layouts of this module, and not one row a respondent."""
    columns = {*frame.cells.columns}
    return bool(columns & {"distribution", "selections", "responses", "options"} or {"option", "question"} <= columns)


def raw_answers(frame: Frame) -> list[RawAnswer]:
    """The answers in a table; notes on what was decided go to the frame.

    Raises:
        UserError: a column is missing.
    """
    subpop = {*_SUBPOP} <= {*frame.cells.columns}
    frame.cells = frame.cells.rename(columns=_SUBPOP if subpop else {})
    columns = {*frame.cells.columns}
    if "selections" in columns:
        require(frame, "question", "options")
        frame.notes.append("GlobalOpinionQA as published, one row a question")
        return [raw for row, cells in _rows(frame) for raw in _by_country(row, cells)]
    if "option" in columns and not columns & {"options", "distribution"}:
        return _one_row_an_option(frame)
    require(frame, "question_id", "question", "options", *(["group"] if "distribution" in columns else []))
    return [_own(row, cells, subpop=subpop) for row, cells in _rows(frame)]


def require(frame: Frame, *names: str) -> None:
    """Raise a `UserError` that names the columns a table lacks, and those it has."""
    if missing := [name for name in names if name not in frame.cells.columns]:
        raise UserError(
            f"{frame.source}: missing column {', '.join(missing)} (it has {some(map(str, frame.cells.columns))})"
        )


def read_list(cell: object, reason: Reason) -> list[Any]:
    """The list in a cell, itself or as text; `Unusable` for the reason where it is none."""
    if isinstance(cell, str):
        try:
            cell = _literal(cell)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise Unusable(reason) from None
    values = cell.tolist() if hasattr(cell, "tolist") else cell
    if not isinstance(values, list | tuple):
        raise Unusable(reason)
    return list(values)


def _literal(text: str) -> object:
    """JSON or a Python literal."""
    with suppress(ValueError):
        return json.loads(text)
    return ast.literal_eval(_NAN.sub("None", text.strip()))


def _rows(frame: Frame) -> Iterator[tuple[int, dict[str, Any]]]:
    for row, cells in zip(frame.cells.index, frame.cells.to_dict("records"), strict=True):
        yield int(row), {str(name): cell for name, cell in cells.items()}


def _is_empty(cell: Any) -> bool:
    if isinstance(cell, list | tuple | dict) or hasattr(cell, "tolist"):
        return False
    return cell is None or cell != cell or (isinstance(cell, str) and cell.strip().casefold() in ("", "nan", "null"))


def _text(cell: object) -> str:
    return "" if _is_empty(cell) else code_text(cell)


def _float(item: Any) -> float:
    if isinstance(item, bool | str):
        raise TypeError
    return float(item)


def _shares(cell: object) -> list[float] | Reason:
    try:
        return [math.nan if item is None else _float(item) for item in read_list(cell, Reason.BAD_DISTRIBUTION)]
    except (Unusable, TypeError, ValueError):
        return Reason.BAD_DISTRIBUTION


def _options(cell: object) -> tuple[str, ...]:
    options = read_list(cell, Reason.BAD_OPTIONS)
    if not all(isinstance(option, str | int | float) and not isinstance(option, bool) for option in options):
        raise Unusable(Reason.BAD_OPTIONS)
    return tuple(map(_text, options))


def _own(row: int, cells: Mapping[str, Any], *, subpop: bool) -> RawAnswer:
    """A row in our own columns; without a group and a distribution it is a question that nobody has answered."""
    raw = RawAnswer(row, _text(cells["question_id"]), _text(cells["question"]), (), "", ())
    try:
        if not raw.question_id:
            raise Unusable(Reason.EMPTY_ID)
        raw = raw._replace(options=_options(cells["options"]))
        if not (_is_empty(cells.get("group")) and _is_empty(cells.get("distribution"))):
            raw = raw._replace(group=_group(cells), shares=_shares(cells["distribution"]))
        if subpop and not isinstance(raw.shares, Reason):  # its refusals stand behind the options, and have no share
            spare = raw.options[len(raw.shares) :]
            if all(kind_of(option) != "answer" for option in spare):
                raw = raw._replace(options=raw.options[: len(raw.shares)])
        raw = raw._replace(ordinal=_ordinal(cells.get("ordinal"), len(raw.options)))
        n, refused, rate = (_count(cells.get(name)) for name in ("n", "refusals", "refusal_rate"))
        if rate is None and refused is not None and n:
            rate = refused / (n + refused)
        return raw._replace(n=n, refusal_rate=rate)
    except Unusable as error:
        return raw._replace(shares=error.reason)


def _group(cells: Mapping[str, Any]) -> str:
    attribute, name = _text(cells.get("attribute")), _text(cells.get("group"))
    if not group_name(name):
        raise Unusable(Reason.EMPTY_GROUP)
    if ";" in attribute + name:
        raise Unusable(Reason.BAD_GROUP)
    return group_name(name, attribute)


def _ordinal(cell: object, size: int) -> tuple[float | None, ...] | None:
    if _is_empty(cell):
        return None
    try:
        places = [None if item is None else _float(item) for item in read_list(cell, Reason.BAD_ORDINAL)]
    except (TypeError, ValueError):
        raise Unusable(Reason.BAD_ORDINAL) from None
    if len(places) < size:
        raise Unusable(Reason.BAD_ORDINAL)
    return tuple(places[:size])


def _by_country(row: int, cells: Mapping[str, Any]) -> list[RawAnswer]:
    """GlobalOpinionQA's row, whose cell `selections` has all countries' shares."""
    raw = RawAnswer(row, _text(cells.get("question_id")), _text(cells["question"]), (), "", ())
    try:
        raw = raw._replace(options=_options(cells["options"]))
        selections = cells["selections"]
        if isinstance(selections, str):
            head = _HEAD.fullmatch(selections.strip())
            selections = _literal(head[1] if head else selections)
        by_country = {group_name(str(name)): _shares(shares) for name, shares in dict(selections).items()}
    except (Unusable, ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        return [raw._replace(shares=error.reason if isinstance(error, Unusable) else Reason.BAD_SELECTIONS)]
    return [raw._replace(group=country, shares=shares) for country, shares in by_country.items()]


class _Options:
    """The rows of one question in a table with one row an option.

    Attributes:
        labels: spelling-free name of an option -> its label, in the order of the file.
        places: the same -> its place on the scale.
        numbers: group -> option -> number.
        answers: group -> its first row, with the reason where one of its rows cannot be used.
    """

    def __init__(self) -> None:
        self.labels: dict[str, str] = {}
        self.places: dict[str, float | None] = {}
        self.numbers: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self.answers: dict[str, RawAnswer] = {}


def _one_row_an_option(frame: Frame) -> list[RawAnswer]:
    """Rows of one question and group joined to an answer; an option that a group has no row of has the share 0."""
    measure = next((name for name in MEASURES if name in frame.cells.columns), "share")
    require(frame, "question", "group", "option", measure)
    frame.notes.append(f"one row an option, with the column {measure}")
    decimal_comma = _has_decimal_comma(frame.cells[measure])
    questions: defaultdict[str, _Options] = defaultdict(_Options)
    nobody: list[RawAnswer] = []
    for row, cells in _rows(frame):
        raw = RawAnswer(row, _text(cells.get("question_id")), _text(cells["question"]), (), "", ())
        try:
            raw = raw._replace(group=_group(cells))
        except Unusable as error:
            nobody.append(raw._replace(shares=error.reason))
            continue
        question, group, option = questions[raw.question_id or same(raw.text)], same(raw.group), _text(cells["option"])
        question.answers.setdefault(group, raw)
        try:
            value = _number(cells[measure], measure, decimal_comma=decimal_comma)
            place = None if _is_empty(cells.get("ordinal")) else _number(cells["ordinal"], "", decimal_comma=True)
            mine = question.numbers[group]
            if same(option) in mine and option == question.labels[same(option)]:
                if mine[same(option)] == value:  # the row again, for a group in another spelling
                    continue
                raise Unusable(Reason.OPTION_TWICE)
            question.labels.setdefault(same(option), option)
            question.places.setdefault(same(option), place)
            mine[same(option)] = mine.get(same(option), 0.0) + value
        except Unusable as error:
            question.answers[group] = question.answers[group]._replace(shares=error.reason)
    _drop_totals(frame, questions, MEASURES[measure])
    return [*nobody, *(raw for question in questions.values() for raw in _joined(question, measure))]


def _joined(question: _Options, measure: str) -> Iterator[RawAnswer]:
    places = tuple(question.places[option] for option in question.labels)
    for group, raw in question.answers.items():
        number_K = [question.numbers[group].get(option, 0.0) for option in question.labels]
        total = MEASURES[measure] or sum(number_K) or 1.0
        yield raw._replace(
            options=tuple(question.labels.values()),
            shares=raw.shares if isinstance(raw.shares, Reason) else [number / total for number in number_K],
            ordinal=places if any(place is not None for place in places) else None,
            people=number_K if measure == "count" else (),
        )


def _drop_totals(frame: Frame, questions: Mapping[str, _Options], unit: float) -> None:
    """Take out options and groups that are named as a total and are the sum of the others in every row."""
    dropped: list[str] = []
    for question in questions.values():
        for name in sorted(_TOTALS & question.labels.keys()):
            rows = [mine for mine in question.numbers.values() if name in mine]
            if all(_is_sum(mine[name], unit or sum(mine.values()) - mine[name]) for mine in rows) and all(
                _is_sum(mine[name], sum(mine.values()) - mine[name]) for mine in rows
            ):
                dropped.append(f"option {question.labels.pop(name)!r}")
                for mine in rows:
                    del mine[name]
    for group in sorted({group for question in questions.values() for group in question.numbers} & _TOTALS):
        asked = [question for question in questions.values() if group in question.numbers]
        sums = [
            (number, sum(mine.get(option, 0.0) for name, mine in question.numbers.items() if name != group))
            for question in asked
            for option, number in question.numbers[group].items()
        ]
        if all(_is_sum(number, others) for number, others in sums):
            dropped.append(f"group {asked[0].answers[group].group!r}")
            for question in asked:
                del question.answers[group]
        else:
            frame.notes.append(f"{asked[0].answers[group].group!r} counts as a group, as it is not the others' sum")
    if dropped:
        frame.notes.append(f"left out as sums of the others: {some(dropped)}")


def _is_sum(total: float, others: float) -> bool:
    """True if two numbers are equal but for rounding."""
    return math.isclose(total, others, rel_tol=0.005, abs_tol=0.51 if total > 2 else 0.011)


def _has_decimal_comma(cells: Any) -> bool:
    """True if a column of numbers has a comma that cannot stand between thousands."""
    commas = [_SPACED.sub("", cell).strip(" %") for cell in cells if isinstance(cell, str) and "," in cell]
    return any(not _GROUPED.fullmatch(cell) for cell in commas)


def _number(cell: object, measure: str, *, decimal_comma: bool) -> float:
    """A number as tables write it, in the unit of its column: 12.5, "12,5", "12.5 %", "1'250", "1,024".

    Of a count "1,024" is 1024, and "1.024" is an error, since it may be either.
    """
    percent = False
    if isinstance(cell, str):
        text = _SPACED.sub("", cell.strip())
        percent = text.endswith("%")
        text = text.removesuffix("%").strip()
        if measure == "count" and not decimal_comma and (grouped := _GROUPED.fullmatch(text)):
            if grouped[1] == "." and text.count(".") == 1:
                raise Unusable(Reason.BAD_NUMBER)
            text = text.replace(grouped[1], "")
        elif text.count(",") == 1 and "." not in text:
            text = text.replace(",", ".")
        if not _PLAIN.fullmatch(text):
            raise Unusable(Reason.BAD_NUMBER)
        cell = float(text)
    try:
        value = _float(cell)
    except (TypeError, ValueError):
        raise Unusable(Reason.BAD_NUMBER) from None
    if not math.isfinite(value):
        raise Unusable(Reason.BAD_NUMBER)
    if value < 0.0 and measure:
        raise Unusable(Reason.NEGATIVE)
    return value / 100.0 * MEASURES[measure] if percent and MEASURES.get(measure) else value


def _count(cell: object) -> float | None:
    """A number of people, or a rate, None where the cell is empty."""
    if _is_empty(cell):
        return None
    try:
        return _number(cell, "count", decimal_comma=False)
    except Unusable:
        raise Unusable(Reason.BAD_COUNT) from None
