"""Readers of tables of shares or counts: own columns, GlobalOpinionQA's columns, and one row per option.

docs/surveys.md lists the columns. Lists in cells are JSON or Python literals; nothing in a cell is executed.
"""

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Final

import numpy as np
import pandas as pd

from appa_flwr.core.arrays import BoolArray, FloatArray
from appa_flwr.core.errors import UserError
from appa_flwr.core.text import plain
from appa_flwr.survey.frames import TWICE, Frame, RawAnswer, Unusable
from appa_flwr.survey.names import Notes, group_name, same
from appa_flwr.survey.nonanswers import WORDS, Kind, classify, code_text
from appa_flwr.survey.nonanswers import number as number_of

# Column of an option's number -> sum over a question's options; 0 = any sum.
UNITS: Final = {"share": 1.0, "percent": 100.0, "count": 0.0}
_TOTALS: Final = set[str](WORDS["totals"])
_NET: Final = re.compile(r"^(?:sub)?nett?\b|\bnett?$|\(nett?\)|\b(?:top|bottom)[ -]?(?:\d|two|three|box)|^[tb]\d ?b\b")
_PEOPLE_TOLERANCE: Final = 0.1  # of shares, and between numbers of one group
_NO_ACCIDENT: Final = 4.0  # sum over groups of the logarithms of numbers that are equal to sums by accident
_EMPTY: Final = ("", "nan", "null")
_HEAD: Final = re.compile(r"defaultdict\(\s*<class 'list'>\s*,\s*(.*)\)", re.DOTALL)
_NAN: Final = re.compile(r"(?<=[\[,\s(])nan(?=[\s,\])])")
_PLAIN: Final = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE)
_THOUSANDS: Final = re.compile(r"\d{1,3}(?:([,.])\d{3})(?:\1\d{3})*")
_SPACE: Final = re.compile(r"(?<=\d)[ '\u2019\u00a0\u202f\u2009](?=\d{3}(?!\d))")


def is_table(frame: Frame) -> bool:
    """True if a file has one of this module's layouts, not one row per respondent."""
    columns = {*frame.cells.columns.str.lower()}
    return bool(columns & {"distribution", "selections", "options"} or {"option", "question"} <= columns)


def raw_answers(frame: Frame) -> list[RawAnswer]:
    """Read the answers of a table; decisions are added to `frame.notes`."""
    if (lower := frame.cells.columns.str.lower()).is_unique:
        frame.cells.columns = lower
    columns = {*frame.cells.columns}
    if twice := frame.notes.lines(TWICE):
        raise UserError(f"{frame.source}: {twice[0]}; a table has each once")
    if "option" in columns and not columns & {"options", "distribution", "selections"}:
        return [*_one_row_an_option(frame)]
    frame.require("question", "options", *(("group", "distribution") if columns & {"group", "distribution"} else ()))
    if "selections" in columns:
        frame.notes.add("GlobalOpinionQA as published, one row a question")
    return [raw for begun, cells in _rows(frame) for raw in _answers(begun, cells, is_own=bool(frame.header))]


def read_list(cells: Mapping[Any, Any], name: str) -> list[Any]:
    """Read a cell that holds a list or a list's text; raises `Unusable` otherwise."""
    cell: Any = cells.get(name)
    if isinstance(cell, str):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            cell = _literal(cell)
    values = cell.tolist() if hasattr(cell, "tolist") else cell
    if not isinstance(values, list | tuple):
        raise Unusable(f"{name}: not a list")
    return list(values)


def read_numbers(cells: Mapping[Any, Any], name: str) -> list[float]:
    """Read a cell that holds a list of numbers, NaN in place of null; raises `Unusable` otherwise."""
    try:
        return [math.nan if item is None else _float(item) for item in read_list(cells, name)]
    except (TypeError, ValueError):
        raise Unusable(f"{name}: not a list of numbers") from None


def _literal(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return ast.literal_eval(_NAN.sub("None", text.strip()))


def _float(item: Any) -> float:
    if isinstance(item, bool | str):
        raise TypeError
    return float(item)


def _rows(frame: Frame) -> Iterator[tuple[RawAnswer, dict[str, Any]]]:
    """Yield each row's number, question id and text as a raw answer, and its non-empty cells.

    Texts in our own format stand as they are, and a group's name, too: nodes read them so.
    """
    for row, record in zip(frame.cells.index, frame.cells.to_dict("records"), strict=True):
        if frame.header:
            cells = {str(name): cell for name, cell in record.items() if cell is not None}
            key, text, group = (str(cells.get(name, "")) for name in ("question_id", "question", "group"))
            yield RawAnswer(int(row), key, text, group=group_name(group)), cells
            continue
        cells = {str(name): cell for name, cell in record.items() if code_text(cell).casefold() not in _EMPTY}
        yield RawAnswer(int(row), code_text(cells.get("question_id")), plain(code_text(cells.get("question")))), cells


def _answers(raw: RawAnswer, cells: dict[str, Any], *, is_own: bool) -> list[RawAnswer]:
    """Read a row's answers: one per country in GlobalOpinionQA, else one, without a group if the row has none."""
    try:
        options = read_list(cells, "options")
        if not all(isinstance(option, str | int | float) and not isinstance(option, bool) for option in options):
            raise Unusable("options: not a list of texts")
        labels = tuple(str(option) if is_own else plain(code_text(option)) for option in options)
        raw = raw._replace(options=labels, kinds=tuple(map(_kind, labels)) if is_own else ())
        if "selections" in cells:
            return [_answer(raw, cells | {"group": name, "distribution": mine}) for name, mine in _selections(cells)]
    except Unusable as error:
        return [raw._replace(options=(), problem=str(error))]
    return [_answer(raw, cells)]


@cache  # labels are repeated from row to row
def _kind(label: str) -> Kind:
    """Kind of an option in our own format, from which what is no answer was left out when it was written."""
    return "refusal" if classify(label) == ("refusal", False) else "answer"


def _answer(raw: RawAnswer, cells: Mapping[str, Any]) -> RawAnswer:
    """Read an answer in own columns; a row without group and distribution is a question without answers."""
    try:
        if is_answer := "group" in cells or "distribution" in cells:
            raw = raw._replace(group=raw.group or _group(cells))
        if "ordinal" in cells:
            if len(places := read_numbers(cells, "ordinal")) != len(raw.options):
                raise Unusable("ordinal: not one number, or null, for each option")
            raw = raw._replace(ordinal=places)
        shares = read_numbers(cells, "distribution") if is_answer else ()
        return raw._replace(shares=shares, n=_number(cells, "n"))
    except Unusable as error:
        return raw._replace(problem=str(error))


def _group(cells: Mapping[str, Any]) -> str:
    attribute, name = code_text(cells.get("attribute")), code_text(cells.get("group"))
    if not group_name(name):
        raise Unusable("empty group")
    if ";" in attribute + name:
        raise Unusable("group's name with a semicolon, which stands between the names of several")
    return group_name(name, attribute)


def _selections(cells: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Read the countries and their shares; raises `Unusable` if the cell is malformed."""
    selections = cells["selections"]
    try:
        if isinstance(selections, str):
            head = _HEAD.fullmatch(selections.strip())
            selections = _literal(head[1] if head else selections)
        return [(str(name), shares) for name, shares in dict(selections).items()]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise Unusable("selections: not a dict of groups and lists") from None


def _one_row_an_option(frame: Frame) -> Iterator[RawAnswer]:
    """Join the rows of each question and group into one answer."""
    measure = next((name for name in UNITS if name in frame.cells.columns), "share")
    frame.require("question", "group", "option", measure)
    frame.notes.add(f"one row an option, with the column {measure}")
    beside = next((name for name in ("count", "n") if name in frame.cells.columns), "")
    commas = {name for name in (measure, beside) if name and _has_decimal_comma(frame, name)}
    rows = []
    for raw, cells in _rows(frame):
        option = plain(code_text(cells.get("option")))
        place = number = people = None
        try:
            raw = raw._replace(group=_group(cells))
            place = _number(cells, "ordinal", unit=1.0, least=-math.inf)
            number = _number(cells, measure, UNITS[measure], decimal_comma=measure in commas)
            if number is None:
                raise Unusable(f"{measure}: empty")
            with suppress(Unusable):  # then the number of people is unknown
                people = _number(cells, beside, decimal_comma=beside in commas)
        except Unusable as error:
            raw = raw._replace(problem=str(error))
        if not raw.group:
            yield raw
            continue
        rows.append(
            (raw.question_id or same(raw.text), raw, same(raw.group), same(option), option, place, number, people)
        )
        if same(raw.group) in _TOTALS:
            frame.notes.add("counts as a group, whatever its name", raw.group)
    table = pd.DataFrame(rows, columns=["question", "raw", "group", "option", "label", "place", "number", "people"])
    table = table.astype({"place": float, "number": float, "people": float})
    for _, question in table.groupby("question", sort=False):
        yield from _joined(question, measure, frame.notes, is_total=beside == "n")


def _has_decimal_comma(frame: Frame, column: str) -> bool:
    commas = [_SPACE.sub("", cell) for cell in frame.cells[column] if isinstance(cell, str) and "," in cell]
    return not all(_THOUSANDS.fullmatch(cell.strip(" %")) for cell in commas)


def _joined(rows: pd.DataFrame, measure: str, notes: Notes, *, is_total: bool) -> Iterator[RawAnswer]:
    """Join one question's rows, one per option, into each group's answer.

    Two spellings of an option are added up. Three checks: one spelling with two different numbers makes the group's
    answer unusable, totals and nets are no options (`_sums`), and options without a row have share 0, which is noted.
    """
    answers: dict[str, RawAnswer] = {  # group -> its first row, or its first row with a problem
        str(group): next((raw for raw in raws if raw.problem), raws.iloc[0])
        for group, raws in rows.groupby("group", sort=False)["raw"]
    }
    has_number = rows["number"].notna()
    # A wrong number costs a group's answer, not the question's option.
    firsts = rows[has_number | (rows["label"] != "")].drop_duplicates("option").set_index("option")
    table = rows[has_number].drop_duplicates(["group", "label", "number"])
    for group in table["group"][table.duplicated(["group", "label"])]:
        answers[group] = answers[group]._replace(problem="an option twice in a question's rows of one group")
    added = table.groupby(["group", "option"])[["number", "people"]].sum(min_count=1).reset_index()
    number = added.pivot(index="group", columns="option", values="number").reindex(columns=firsts.index)
    people = added.pivot(index="group", columns="option", values="people").reindex(columns=firsts.index)
    sums = _sums(number, measure)
    for name, is_sum in sums.items():
        sentence = "options left out as sums of others" if is_sum else "counts as an option, whatever its name"
        notes.add(sentence, repr(firsts["label"][name]))
    names = [name for name in firsts.index if not sums.get(name)]
    if all(number_of(name) is not None for name in names):
        names.sort(key=float)
    options, places = firsts["label"][names], firsts["place"][names].tolist()
    has_row = number[names].notna()
    number, people = number[names].fillna(0.0), people[names].where(has_row, 0.0)
    for group, raw in answers.items():
        raw = raw._replace(options=tuple(options), ordinal=places)
        if not raw.problem:
            number_K, people_K, row_K = (part.loc[group].to_numpy() for part in (number, people, has_row))
            if not row_K.all():
                notes.add("options without a row count as 0", f"{', '.join(map(repr, options[~row_K]))} of {raw.group}")
            share_K = number_K / (UNITS[measure] or math.fsum(number_K) or 1.0)
            raw = raw._replace(shares=share_K.tolist())
            if not np.isnan(people_K).any():  # else the number of people is unknown
                raw = _with_people(raw, people_K, share_K, row_K, notes, is_total=is_total)
        yield raw


def _with_people(
    raw: RawAnswer, people_K: FloatArray, share_K: FloatArray, row_K: BoolArray, notes: Notes, *, is_total: bool
) -> RawAnswer:
    """Add the number of respondents: of each option if the numbers fit the shares, else of the group.

    With `is_total`, a number that is nearly the same in all rows of a group is the group's; the least of them counts.
    """
    fits = bool(np.abs(people_K / (people_K.sum() or 1.0) - share_K).max() <= _PEOPLE_TOLERANCE)
    is_same = bool(people_K[row_K].max() <= (1.0 + _PEOPLE_TOLERANCE) * people_K[row_K].min())
    if is_same and (is_total or not fits):
        return raw._replace(n=float(people_K[row_K].min()))
    if fits:
        return raw._replace(people=people_K.tolist())
    notes.add("numbers of people that fit neither the options nor the group", raw.group)
    return raw


def _sums(number: pd.DataFrame, measure: str) -> dict[str, bool]:
    """Whether an option that is called a total or a net, or could be one, is the sum of others in every group.

    A total is the sum of all others, a net of some others side by side. A count without such a name is a net only if
    equal numbers in all groups are no accident; shares have nets only if they sum to more than one.
    """
    called = [name for name in number.columns if name in _TOTALS or _NET.search(name)]
    result = dict.fromkeys(called, False)
    for name in number.columns:
        others = [other for other in number.columns if other not in (name, *called) and not result.get(other)]
        mine_G = number[name].dropna()
        other_GK = number.loc[mine_G.index, others].fillna(0.0).to_numpy()
        if not all(_is_sum(total, UNITS[measure] or total) for total in other_GK.sum(axis=1)):
            continue
        runs = [(i, j) for i in range(len(others)) for j in range(i + 2, len(others) + 1)]
        runs = [(0, len(others))] if name in _TOTALS else runs
        sums = [other_GK[:, i:j].sum(axis=1) for i, j in runs]
        if name in called:
            # Beside shares that sum to one, a net is one too many, however it is rounded.
            is_over = bool(UNITS[measure]) and name not in _TOTALS
            result[name] = is_over or (len(mine_G) > 0 and any(all(map(_is_sum, mine_G, sum_G)) for sum_G in sums))
        elif not UNITS[measure] and np.log10(mine_G + 1.0).sum() >= _NO_ACCIDENT and len(mine_G) > 1:
            result |= {name: True} if any((sum_G == mine_G).all() for sum_G in sums) else {}
    return result


def _is_sum(total: float, others: float) -> bool:
    """True if two numbers are equal up to rounding."""
    return math.isclose(total, others, rel_tol=0.005, abs_tol=0.51 if total > 2 else 0.011)


def _number(
    cells: Mapping[str, Any], name: str, unit: float = 0.0, *, decimal_comma: bool = False, least: float = 0.0
) -> float | None:
    """Parse a number such as 12.5, "12,5", "12.5 %", "1'250" or "1,024", in a unit of `UNITS`; None if empty.

    Raises `Unusable` for a negative number, any other text, and a count of "1.024", which may mean 1024.
    """
    if (cell := cells.get(name)) is None:
        return None
    scale, is_wrong = 1.0, False
    if isinstance(cell, str):
        text = _SPACE.sub("", cell.strip())
        if text.endswith("%"):
            text, scale, is_wrong = text[:-1].strip(), unit / 100.0, not unit
        thousands = None if unit or decimal_comma else _THOUSANDS.fullmatch(text)
        if thousands:
            is_wrong |= thousands[1] == "." and text.count(".") == 1
            text = text.replace(thousands[1], "")
        elif text.count(",") == 1 and "." not in text:
            text = text.replace(",", ".")
        cell = float(text) if _PLAIN.fullmatch(text) else math.nan
    try:
        value = _float(cell)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or is_wrong:
        raise Unusable(f"{name}: not a plain number, such as 1200, 12.5 or 12,5 %")
    if value < least:
        raise Unusable(f"{name}: negative")
    return value * scale
