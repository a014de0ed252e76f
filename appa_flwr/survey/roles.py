"""What a column of a file of respondents is: groups, weight, key, or no question; `columns.toml` has names and labels.

Each function states its evidence in this order: what the file declares, name and label, values.
"""

import math
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from importlib import resources
from typing import Final

import numpy as np
import pandas as pd

from appa_flwr.config import split_names
from appa_flwr.core.arrays import IntArray
from appa_flwr.core.errors import UserError
from appa_flwr.core.text import clean
from appa_flwr.survey.codebook import UNWEIGHTED, Weight
from appa_flwr.survey.frames import LAYOUTS, Frame
from appa_flwr.survey.names import some
from appa_flwr.survey.nonanswers import number
from appa_flwr.survey.respondents import has_decimal_comma, numbers
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS

_MOST_UNWEIGHTED: Final = 0.2  # share of people without a weight up to which a column can be guessed to be the weight
_NEAR_ONE: Final = 0.5, 2.0  # the mean of weights that are known by their name alone
_FEWEST_PEOPLE: Final = 10  # of a column that may number respondents, or hold a text of each
_WORDS: Final = tomllib.loads(resources.files(__package__).joinpath("columns.toml").read_text(encoding="utf-8"))
_NAMES: Final = {name: re.compile("|".join(f"(?:{one})" for one in parts), re.I) for name, parts in _WORDS.items()}
_DATE: Final = re.compile(
    r"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d{2}))(?:[ T]+\d{1,2}:\d{2}.*)?"
)


def group_columns(frame: Frame, group_by: str) -> tuple[str, ...]:
    """The columns of groups, as the user names them; a name that holds commas is one column.

    Raises:
        UserError: no name, or one that no column has.
    """
    name = clean(group_by)
    names = (name,) if name and name in frame.cells.columns else split_names(group_by)
    columns = some(map(repr, filter(None, frame.cells.columns)))
    if not names:
        raise UserError(
            f"{frame.source}: has none of our columns, so a row seems to be a respondent; say to `appa survey` which "
            f"columns are groups: data.group-by=NAME, out of {columns}. For a crosstab: {LAYOUTS}"
        )
    if unknown := [name for name in names if name not in frame.cells.columns]:
        if fields := [column for column in frame.cells.columns if column.startswith(f"{unknown[0]}.")]:
            raise UserError(f"{frame.source}: {unknown[0]} holds objects; name one of their fields: {some(fields)}")
        raise UserError(
            f"{frame.source}: has no column {', '.join(map(repr, unknown))} for data.group-by; it has {columns} (names "
            f"that hold commas: semicolons between several); {LAYOUTS}"
        )
    return names


def several_rows(frame: Frame, columns: Sequence[str]) -> str:
    """Why rows are no respondents, with what would be right; empty if they are.

    Names: one row an event; a question beside an answer or its share. Values: two columns whose pairs are distinct, of
    which one is named like an occasion or a question, or like a person and none like a cluster.
    """
    wide = "make it wide (a pivot): one row a respondent, one column a question; of events keep one"
    named = {kind: [*filter(_NAMES[kind].search, frame.cells.columns)] for kind in _NAMES}
    if events := [name for name in named["event"] if len(frame.codes(name)[1]) > 1]:
        return f"has several rows a respondent: {events[0]!r} has several events; {wide}"
    answers = [name for name in named["answer"] if name not in columns]
    if answers and named["share"]:
        return (
            f"is a table of shares, one row an option: rename {answers[0]!r} to 'option' and {named['share'][0]!r} to "
            "'percent', beside the columns question and group"
        )
    if answers and (items := [name for name in named["question"] if name not in columns]):
        return f"has several rows a respondent: {items[0]!r} names the question of the answer in {answers[0]!r}; {wide}"
    for person, part in _distinct_pairs(frame, columns):
        kinds = {kind for kind in _NAMES if _NAMES[kind].search(person) or _NAMES[kind].search(part)}
        if kinds & {"occasion", "question"} or ("person" in kinds and "cluster" not in kinds):
            return (
                f"has several rows a respondent: values of {person!r} are repeated, and {part!r} tells their rows "
                f"apart; {wide}. If rows are respondents, delete the first column"
            )
    return ""


def repeated_ids(frame: Frame, columns: Sequence[str]) -> list[str]:
    """Columns named like respondents' ids, most of which stand in one row, with the number of further rows."""
    repeated = []
    for name in frame.cells.columns.difference([*columns], sort=False):
        if _NAMES["person"].search(name) and not _NAMES["cluster"].search(name):
            with suppress(UserError):  # lists
                size_of = frame.codes(name)[1]
                if 0 < (further := sum(size_of.values()) - len(size_of)) < len(size_of):
                    repeated.append(f"{further} by {name}")
    return repeated


def _distinct_pairs(frame: Frame, columns: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Columns whose values are repeated, within a group, with a column that tells the rows of each value apart."""
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
                yield person, part


def weight(frame: Frame, columns: Sequence[str], asked: str) -> tuple[Weight, list[str]]:
    """The line of the weight, and the columns that may be weights and are not used.

    The user's word, else the weight that the file declares, else the only column that looks like one: by a label that
    says what it is, or by name or label and a mean near 1, since a person's weight can be kilograms.

    Raises:
        UserError: several columns look like weights, or the only one is in doubt.
    """
    declared = [name for name in frame.cells.columns if frame.columns[name].is_weight and name not in columns]
    others = frame.cells.columns.difference([*columns, *declared], sort=False)
    candidates = [*declared, *(name for name in others if _may_be_weight(frame, name))]
    either = "say data.weight=NAME, or data.weight=none to count every respondent once"
    if not asked and not declared and len(candidates) > 1:
        raise UserError(f"{frame.source}: {', '.join(candidates)} may each be the respondents' weight; {either}")
    chosen = asked or "".join(declared or candidates) or UNWEIGHTED
    unused = [name for name in candidates if name != chosen]
    if chosen == UNWEIGHTED:
        frame.notes.add(f"every respondent counts once, {'as data.weight says' if asked else 'for want of a weight'}")
        return Weight(guessed="" if asked else "no column looks like a weight"), unused
    frame.require(chosen)
    if has_decimal_comma(frame, chosen):
        frame.layout = frame.layout.model_copy(update={"decimal": ","})
    if asked or declared:
        frame.notes.add(f"weighted by {chosen}" + ("" if asked else ", as the file declares"))
        return Weight(column=chosen), unused
    number_R = numbers(frame, chosen, frame.layout.decimal)
    mean, without = float(np.nanmean(number_R)), int(np.isnan(number_R).sum())
    if without > _MOST_UNWEIGHTED * len(frame.cells):
        raise UserError(
            f"{frame.source}: {chosen} looks like the weight, and {without} of {len(frame.cells)} respondents have "
            f"none; say data.weight={chosen} to leave them out, or data.weight=none to count every respondent once"
        )
    if not _NAMES["weight-by-label"].search(frame.columns[chosen].text) and not _NEAR_ONE[0] <= mean <= _NEAR_ONE[1]:
        raise UserError(
            f"{frame.source}: {chosen} may be the respondents' weight, or another number, of a mean of {mean:.4g}; "
            + either.replace("NAME", chosen)
        )
    frame.notes.add(f"weighted by {chosen}, the only column that looks like it")
    return Weight(column=chosen, guessed="the only column that looks like a weight"), unused


def _may_be_weight(frame: Frame, name: str) -> bool:
    """True if a column's name or label is a weight's, not of a body's, and its cells are numbers without labels."""
    column = frame.columns[name]
    is_called = _NAMES["weight"].search(name) or _NAMES["weight-label"].search(column.text)
    may_be_called = not _has_label(name, column.text) and _NAMES["weight-if-fractions"].search(name)
    is_body = _NAMES["body"].search(name) or _NAMES["body"].search(column.text)
    if column.no_question or is_body or not (is_called or may_be_called):
        return False
    number_R = numbers(frame, name, ",")
    number_R = number_R[np.isfinite(number_R)]
    if 2 * len(number_R) <= sum(cell not in (None, "") for cell in frame.cells[name]):
        return False
    # A label of one code, such as "no weight", leaves the column a weight; labels of all codes make it a question.
    is_labelled = column.labels.keys() >= frame.codes(name)[1].keys()
    is_varied = bool((number_R % 1.0 > 0).any()) or len({*number_R}) > MAX_OPTIONS
    return not is_labelled and bool(is_called or is_varied)


def no_question(frame: Frame, name: str) -> str:
    """Why a column is no question; empty if it may be one.

    What the file says. Then name and label: about the interview, or typed texts. Then values: several answers in a
    cell, dates, or texts of which most occur once.
    """
    column = frame.columns[name]
    if column.no_question or not name:
        return column.no_question if name else "the column has no name"
    texts, is_coded = (name, column.text), bool(column.labels or column.order)
    try:
        size_of = frame.codes(name)[1]
    except UserError:  # lists
        size_of = {";": 1}
    is_mode = not _has_label(name, column.text) and _NAMES["interview-unless-labelled"].search(name)
    if any(map(_NAMES["interview"].search, texts)) or (is_mode and any(map(_NAMES["mode"].search, size_of))):
        return "about the interview, by its name"
    if not is_coded and any(map(_NAMES["typed"].search, texts)):
        return "typed answers (free text), by its name"
    if [*size_of] == [";"] or (not is_coded and _has_several([*size_of])):
        return "several answers in a cell; make a column of each option"
    if is_coded or not size_of:
        return ""
    if all(map(_DATE.fullmatch, size_of)):
        return "dates"
    words = {code: size for code, size in size_of.items() if number(code) is None}
    is_other = any(map(_NAMES["typed-if-varied"].search, texts))
    num_once, total = sum(size == 1 for size in words.values()), sum(size_of.values())
    is_varied = (is_other and len(words) > MIN_OPTIONS) or 2 * num_once >= max(total, _FEWEST_PEOPLE)
    if 2 * len(words) > len(size_of) and (is_varied or all("@" in word for word in words)):
        return "typed answers (free text)"
    return ""


def _has_label(name: str, text: str) -> bool:
    return bool(text) and text.casefold() != name.casefold()


def _has_several(codes: Collection[str]) -> bool:
    """True if cells list several answers, such as "Radio;TV;": their parts also stand alone or in other cells."""
    for mark in (";", "|", "\n", ","):
        cells = {code: [part for part in map(str.strip, code.split(mark)) if part] for code in codes if mark in code}
        lists = [parts for parts in cells.values() if len(parts) > 1]
        alone = {parts[0] for parts in cells.values() if len(parts) == 1} | ({*codes} - cells.keys())
        number_of = Counter(part for parts in lists for part in {*parts})
        known = [part for part, times in number_of.items() if part in alone or (mark != "," and times > 1)]
        is_repeated = len(lists) > 1 or (len(lists) == 1 and alone.issuperset(lists[0]))
        if is_repeated and len(known) > 1 and 2 * len(known) > len(number_of):
            return True
    return False
