"""Reader of microdata with one row per respondent, by a codebook: one weighted distribution per group and question."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import numpy as np
import pandas as pd

from appa_flwr.core.arrays import FloatArray, IntArray
from appa_flwr.core.errors import UserError
from appa_flwr.survey.codebook import UNWEIGHTED, Codebook, Item, Listed
from appa_flwr.survey.frames import Frame, RawAnswer
from appa_flwr.survey.names import some
from appa_flwr.survey.nonanswers import code_text

_UNEQUAL: Final = 0.5
_AMBIGUOUS: Final = re.compile(r"[1-9]\d{0,2}(,\d{3})+")


def raw_answers(frame: Frame, codebook: Codebook) -> list[RawAnswer]:
    """Compute the weighted shares of every group and question; what no list of the codebook has is noted."""
    frame.require(*codebook.groups)
    weight_R = weights(frame, codebook.weight.column)
    frame.notes.add(f"one row a respondent, {len(frame.cells)} of them")
    groups = {column: _placed(frame, column, group, is_group=True) for column, group in codebook.groups.items()}
    if all((group_R < 0).all() for group_R, _ in groups.values()):
        raise UserError(f"{frame.source}: no respondent has a group in {', '.join(groups)}")
    if heavy := [*_unequal(weight_R, groups)]:
        frame.notes.add("groups whose weights make them worth few respondents of equal weight", *heavy)
    raws: list[RawAnswer] = []
    for column, item in codebook.questions.items():
        if column not in frame.cells:
            frame.notes.add("questions of the codebook that the file does not have", column)
            continue
        raws += _counted(frame, column, item, weight_R, groups)
    listed = {*codebook.groups, *codebook.questions, *codebook.left_out, codebook.weight.column}
    if unlisted := [name for name in frame.cells.columns if name not in listed]:
        frame.notes.add("columns in no list of the codebook", *unlisted)
    return raws


def weights(frame: Frame, column: str) -> FloatArray:
    """Read each respondent's weight (R,); drops respondents whose weight is not a number >= 0."""
    if column == UNWEIGHTED:
        return np.ones(len(frame.cells))
    frame.require(column)
    weight_R = numbers(frame, column, frame.layout.decimal)
    if np.isnan(weight_R).all():
        raise UserError(f"{frame.source}: column {column} has no number >= 0, so it is no weight")
    is_usable_R = np.isfinite(weight_R)
    if unusable := int((~is_usable_R).sum()):
        frame.notes.add(f"{unusable} respondents left out: their weight is not a number >= 0")
    frame.keep(is_usable_R)
    return weight_R[is_usable_R]


def _unequal(weight_R: FloatArray, groups: Mapping[str, tuple[IntArray, list[str]]]) -> Iterator[str]:
    """Groups that are worth less than half of their respondents: Kish's effective number, (sum w)^2 / sum w^2."""
    for attribute, (group_R, names) in groups.items():
        for place, name in enumerate(names):
            mine = weight_R[(group_R == place) & (weight_R > 0.0)]
            if len(mine) and (worth := mine.sum() ** 2 / (mine**2).sum()) < _UNEQUAL * len(mine):
                yield f"{full_name(groups, attribute, name)} ({len(mine)} as {worth:.0f})"


def has_decimal_comma(frame: Frame, column: str) -> bool:
    """True if a column of weights has decimal commas; raises `UserError` if these may separate thousands."""
    commas = [cell.strip() for cell in frame.cells.get(column, ()) if isinstance(cell, str) and "," in cell]
    if commas and all(map(_AMBIGUOUS.fullmatch, commas)):
        first = commas[0]
        raise UserError(
            f"{frame.source}: column {column}: {first} may be {first.replace(',', '')} or {first.replace(',', '.')}; "
            "write numbers without separators of thousands, and with a decimal point"
        )
    return bool(commas)


def numbers(frame: Frame, column: str, decimal: str) -> FloatArray:
    """A column's numbers >= 0 (R,), NaN elsewhere, and for codes that the file declares missing."""
    cells = frame.cells[column].astype(str).str.replace(decimal, ".")
    values: FloatArray = pd.to_numeric(cells, errors="coerce").to_numpy(dtype=np.float64)
    if missing := frame.columns[column].missing:
        values = np.where(frame.cells[column].map(code_text).isin([*missing]), np.nan, values)
    return np.where(np.isfinite(values) & (values >= 0.0), values, np.nan)


def _placed(frame: Frame, column: str, listed: Listed, *, is_group: bool = False) -> tuple[IntArray, list[str]]:
    """Return each respondent's index into the distinct labels of options, (R,), -1 for none; and these labels."""
    code_R, size_of = frame.codes(column)
    labels, place = listed.labels, listed.label_places()
    without = {entry.code: entry.label for entry in listed.no_answers}
    unlisted = {code: size for code, size in size_of.items() if code not in place.keys() | without.keys()}
    if unlisted:
        named = f"{sum(unlisted.values())} of {column} ({some(map(repr, unlisted))})"
        frame.notes.add("cells left out that no list of the codebook has", named)
    lost = {without[code]: size for code, size in size_of.items() if code in without}
    empty = int((code_R < 0).sum())
    if is_group and (lost or empty):
        sizes = lost | ({"empty": empty} if empty else {})
        frame.notes.add(f"respondents without a group in {column}", *(f"{n} {label}" for label, n in sizes.items()))
    elif lost:
        frame.notes.add("left out as no answers", *lost)
    return np.array([*(place.get(code, -1) for code in size_of), -1])[code_R], labels


def _counted(
    frame: Frame, column: str, item: Item, weight_R: FloatArray, groups: Mapping[str, tuple[IntArray, list[str]]]
) -> list[RawAnswer]:
    """The answer of each group that was asked a question, or else the question alone.

    An answer has weighted shares, and the number of respondents per option, without those whose weight is 0.
    """
    option_R, options = _placed(frame, column, item)
    if several := [label for label, count in Counter(entry.label for entry in item.options).items() if count > 1]:
        frame.notes.add(
            "options and groups that are one", *(f"several codes of {column} are {label!r}" for label in several)
        )
    question, answers = question_of(item), list[RawAnswer]()
    for attribute, (group_R, names) in groups.items():
        is_counted_R = (group_R >= 0) & (option_R >= 0)
        cell_R, shape = (group_R * len(options) + option_R)[is_counted_R], (len(names), len(options))
        sum_GK, count_GK = (
            np.bincount(cell_R, part_R[is_counted_R], minlength=math.prod(shape)).reshape(shape)
            for part_R in (weight_R, weight_R > 0.0)
        )
        for name, sum_K, count_K in zip(names, sum_GK, count_GK, strict=True):
            if count_K.any():  # else the question was not asked of this group
                group, shares = full_name(groups, attribute, name), (sum_K / sum_K.sum()).tolist()
                answers.append(question._replace(group=group, shares=shares, people=count_K.tolist()))
    return answers or [question]


def full_name(columns: Collection[str], column: str, name: str) -> str:
    """Name of a group, which has its column's before it where there are several columns."""
    return f"{column}/{name}" if len(columns) > 1 else name


def question_of(item: Item) -> RawAnswer:
    """A question without an answer."""
    refusal = {entry.label: entry.refusal for entry in item.options}
    place = dict(zip((entry.label for entry in item.options), item.places(), strict=True))
    return RawAnswer(
        *(1, item.id, item.text, tuple(item.labels)),
        ordinal=[place[label] for label in item.labels],
        kinds=tuple("refusal" if refusal[label] else "answer" for label in item.labels),
    )
