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
from dataclasses import dataclass, field
from typing import Any, Final

from appa_flwr.survey.frames import Frame
from appa_flwr.survey.names import group_name, same
from appa_flwr.survey.nonanswers import code_text, kind_of
from appa_flwr.survey.raw import BAD_DISTRIBUTION, NEGATIVE, RawAnswer, Unusable, some

MEASURES: Final = {"share": 1.0, "percent": 100.0, "count": 0.0}
"""Column with an option's number -> what the options' numbers sum to; 0 = anything."""
BAD_NUMBER: Final = "not a plain number, such as 1200, 12.5 or 12,5 %"
BAD_OPTIONS: Final = "options are not a list of texts"
BAD_ORDINAL: Final = "ordinal is not one number, or null, for each option"
_TOTALS: Final = {"total", "all", "base", "n", "summe", "gesamt", "insgesamt", "sum", "grand total", "totale"}
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
        frame.require("question", "options")
        frame.notes.append("GlobalOpinionQA as published, one row a question")
        return [raw for row, cells in _rows(frame) for raw in _by_country(row, cells)]
    if "option" in columns and not columns & {"options", "distribution"}:
        return _one_row_an_option(frame)
    frame.require("question_id", "question", "options", *(["group"] if "distribution" in columns else []))
    return [_own(row, cells, subpop=subpop) for row, cells in _rows(frame)]


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


def _shares(cell: object) -> dict[str, Any]:
    """The shares in a cell, or what is wrong with them, as an answer's fields."""
    try:
        return {"shares": read_numbers(cell, BAD_DISTRIBUTION, empty=math.nan)}
    except Unusable as error:
        return {"problem": str(error)}


def _options(cell: object) -> tuple[str, ...]:
    options = read_list(cell, BAD_OPTIONS)
    if not all(isinstance(option, str | int | float) and not isinstance(option, bool) for option in options):
        raise Unusable(BAD_OPTIONS)
    return tuple(map(_text, options))


def _own(row: int, cells: Mapping[str, Any], *, subpop: bool) -> RawAnswer:
    """A row in our own columns; without a group and a distribution it is a question that nobody has answered."""
    raw = RawAnswer(row, _text(cells["question_id"]), _text(cells["question"]))
    try:
        if not raw.question_id:
            raise Unusable("empty question_id")
        raw = raw._replace(options=_options(cells["options"]))
        if not (_is_empty(cells.get("group")) and _is_empty(cells.get("distribution"))):
            raw = raw._replace(group=_group(cells), **_shares(cells["distribution"]))
        if subpop and not raw.problem:  # its refusals stand behind the options, and have no share
            spare = raw.options[len(raw.shares) :]
            if all(kind_of(option) != "answer" for option in spare):
                raw = raw._replace(options=raw.options[: len(raw.shares)])
        raw = raw._replace(ordinal=_ordinal(cells.get("ordinal"), len(raw.options)))
        n, refused, rate = (_count(cells.get(name)) for name in ("n", "refusals", "refusal_rate"))
        if rate is None and refused is not None and n:
            rate = refused / (n + refused)
        return raw._replace(n=n, refusal_rate=rate)
    except Unusable as error:
        return raw._replace(problem=str(error))


def _group(cells: Mapping[str, Any]) -> str:
    attribute, name = _text(cells.get("attribute")), _text(cells.get("group"))
    if not group_name(name):
        raise Unusable("empty group")
    if ";" in attribute + name:
        raise Unusable("group's name with a semicolon, which stands between the names of several")
    return group_name(name, attribute)


def _ordinal(cell: object, size: int) -> tuple[float | None, ...] | None:
    if _is_empty(cell):
        return None
    places = read_numbers(cell, BAD_ORDINAL, empty=None)
    if len(places) < size:
        raise Unusable(BAD_ORDINAL)
    return tuple(places[:size])


def _by_country(row: int, cells: Mapping[str, Any]) -> list[RawAnswer]:
    """GlobalOpinionQA's row, whose cell `selections` has all countries' shares."""
    raw = RawAnswer(row, _text(cells.get("question_id")), _text(cells["question"]))
    try:
        raw = raw._replace(options=_options(cells["options"]))
        selections = cells["selections"]
        if isinstance(selections, str):
            head = _HEAD.fullmatch(selections.strip())
            selections = _literal(head[1] if head else selections)
        by_country = {group_name(str(name)): _shares(shares) for name, shares in dict(selections).items()}
    except Unusable as error:
        return [raw._replace(problem=str(error))]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return [raw._replace(problem="selections are not a dict of groups and lists")]
    return [raw._replace(group=country, **shares) for country, shares in by_country.items()]


@dataclass
class _Options:
    """The rows of one question in a table with one row an option.

    Attributes:
        labels: spelling-free name of an option -> its label, in the order of the file.
        places: the same -> its place on the scale.
        numbers: group -> option -> number.
        answers: group -> its first row, with the problem where one of its rows cannot be used.
    """

    labels: dict[str, str] = field(default_factory=dict)
    places: dict[str, float | None] = field(default_factory=dict)
    numbers: defaultdict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    answers: dict[str, RawAnswer] = field(default_factory=dict)

    def add(self, group: str, label: str, number: float, place: float | None) -> None:
        """Add a row; two spellings of an option are added up.

        Raises:
            Unusable: the group has another number under the same spelling.
        """
        option, mine = same(label), self.numbers[group]
        if option in mine and label == self.labels[option]:
            if mine[option] == number:  # the row again, for a group in another spelling
                return
            raise Unusable("an option twice in a question's rows of one group")
        self.labels.setdefault(option, label)
        self.places.setdefault(option, place)
        mine[option] = mine.get(option, 0.0) + number

    def joined(self, measure: str) -> Iterator[RawAnswer]:
        """An answer a group; an option that it has no row of has the share 0."""
        places = tuple(self.places[option] for option in self.labels)
        for group, raw in self.answers.items():
            number_K = [self.numbers[group].get(option, 0.0) for option in self.labels]
            total = MEASURES[measure] or sum(number_K) or 1.0
            yield raw._replace(
                options=tuple(self.labels.values()),
                shares=() if raw.problem else [number / total for number in number_K],
                ordinal=places if any(place is not None for place in places) else None,
                people=number_K if measure == "count" else (),
            )


def _one_row_an_option(frame: Frame) -> list[RawAnswer]:
    """Rows of one question and group joined to an answer."""
    measure = next((name for name in MEASURES if name in frame.cells.columns), "share")
    frame.require("question", "group", "option", measure)
    frame.notes.append(f"one row an option, with the column {measure}")
    decimal_comma = _has_decimal_comma(frame.cells[measure])
    questions: defaultdict[str, _Options] = defaultdict(_Options)
    nobody: list[RawAnswer] = []
    for row, cells in _rows(frame):
        raw = RawAnswer(row, _text(cells.get("question_id")), _text(cells["question"]))
        try:
            raw = raw._replace(group=_group(cells))
        except Unusable as error:
            nobody.append(raw._replace(problem=str(error)))
            continue
        question, group = questions[raw.question_id or same(raw.text)], same(raw.group)
        question.answers.setdefault(group, raw)
        try:
            number = _number(cells[measure], measure, decimal_comma=decimal_comma)
            place = None if _is_empty(cells.get("ordinal")) else _number(cells["ordinal"], "", decimal_comma=True)
            question.add(group, _text(cells["option"]), number, place)
        except Unusable as error:
            question.answers[group] = question.answers[group]._replace(problem=str(error))
    _drop_totals(frame, questions, MEASURES[measure])
    return [*nobody, *(raw for question in questions.values() for raw in question.joined(measure))]


def _drop_totals(frame: Frame, questions: Mapping[str, _Options], unit: float) -> None:
    """Take out options and groups that are named as a total and are the sum of the others in every row."""
    dropped: list[str] = []
    for question in questions.values():
        for name in sorted(_TOTALS & question.labels.keys()):
            rows = [mine for mine in question.numbers.values() if name in mine]
            sums = [(mine[name], sum(mine.values()) - mine[name]) for mine in rows]
            if all(_is_sum(total, others) and _is_sum(total, unit or others) for total, others in sums):
                dropped.append(f"option {question.labels.pop(name)!r}")
                for mine in rows:
                    del mine[name]
    for group in sorted({group for question in questions.values() for group in question.numbers} & _TOTALS):
        asked = [question for question in questions.values() if group in question.numbers]
        if all(
            _is_sum(number, sum(mine.get(option, 0.0) for name, mine in question.numbers.items() if name != group))
            for question in asked
            for option, number in question.numbers[group].items()
        ):
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
                raise Unusable(BAD_NUMBER)
            text = text.replace(grouped[1], "")
        elif text.count(",") == 1 and "." not in text:
            text = text.replace(",", ".")
        if not _PLAIN.fullmatch(text):
            raise Unusable(BAD_NUMBER)
        cell = float(text)
    try:
        if not math.isfinite(value := _float(cell)):
            raise ValueError
    except (TypeError, ValueError):
        raise Unusable(BAD_NUMBER) from None
    if value < 0.0 and measure:
        raise Unusable(NEGATIVE)
    return value / 100.0 * MEASURES[measure] if percent and MEASURES.get(measure) else value


def _count(cell: object) -> float | None:
    """A number of people, or a rate, None where the cell is empty."""
    if _is_empty(cell):
        return None
    try:
        return _number(cell, "count", decimal_comma=False)
    except Unusable:
        raise Unusable("n is not a number of respondents") from None
