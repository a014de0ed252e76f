"""Reader of microdata with one row per respondent: one weighted distribution per group and question."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.errors import UserError
from appa_flwr.survey.frames import Column, Frame, RawAnswer, Unusable, group_name, read_frame, same, some
from appa_flwr.survey.nonanswers import Missing, code_text, kind_of, number
from appa_flwr.survey.tables import read_list, read_numbers
from appa_flwr.survey.types import MAX_OPTIONS

if TYPE_CHECKING:
    import pandas as pd

Texts = npt.NDArray[np.object_]

MAX_GROUPS: Final = 200
_WEIGHT: Final = re.compile(
    r"(?:\w+_)?(?:weights?|wgts?|wts?)(?:_?w?\d+)?|weight\w*|wtss\w*|\w{0,4}we?i?ght|combinwt|s017\w?|\w{1,6}wgt|\w{1,6}wt",
    re.IGNORECASE,
)
_UNWEIGHTED: Final = "none"
_CODE: Final = re.compile("[A-Z]{2}")  # of a country or a state, such as DK and NC, which mean no answer elsewhere
_LEADING: Final = re.compile(r"[(\[]?(-?\d+(?:\.\d+)?)(?![\d,])")
_AMBIGUOUS: Final = re.compile(r"[1-9]\d{0,2}(,\d{3})+")
_WAVE: Final = re.compile(r"American_Trends_Panel_W(\d{1,4})")


def raw_answers(frame: Frame, group_by: Sequence[str], weight: str, missing: Missing) -> list[RawAnswer]:
    """Compute the weighted shares of every group and question; decisions are added to `frame.notes`."""
    if not group_by:
        raise UserError(
            f"{frame.source}: has none of our columns, so a row seems to be a respondent; say which columns are "
            f"groups: data.group-by=NAME, out of {some(frame.cells.columns)}"
        )
    frame.require(*group_by, *({weight} - {"", _UNWEIGHTED}))
    weight_R, weights = _weights(frame, group_by, weight)
    groups = {name: _groups(frame, name, missing) for name in group_by}
    if not any(len(group_R.categories) for group_R in groups.values()):
        raise UserError(f"{frame.source}: no respondent has a group in {', '.join(group_by)}")
    raws: list[RawAnswer] = []
    frame.notes.add(f"one row a respondent, {len(frame.cells)} of them")
    for name in frame.cells.columns:
        column = frame.codebook[name]
        if name in (*group_by, *weights) or not column.is_question:
            continue
        text_R = _texts(frame, name)

        def is_answer(code: str, name: str = name, column: Column = column) -> bool:
            return missing.kind(name, code, column.label(code)) == "answer"

        labels = {code: column.label(code) for code in _codes(column, text_R, is_answer)}
        answers = [*filter(is_answer, labels)]
        if column.options and (unlisted := sum(text not in ("", *labels) for text in text_R)):
            frame.notes.add("answers left out that the source does not list", f"{unlisted} of {name}")
        if not column.options and [*labels] == [*labels.values()] and None in map(_leading, answers):
            frame.notes.add("answers without codes stand in the order of the alphabet, which is not that of a scale")
        scale = _scale(column, [*labels], answers)
        question = RawAnswer(1, name, column.text or name, tuple(labels.values()), codes=tuple(labels), ordinal=scale)
        raws += [*_counted(question, text_R, weight_R, groups)] or [question]
    return raws


def _weights(frame: Frame, group_by: Sequence[str], weight: str) -> tuple[FloatArray, list[str]]:
    """Read each respondent's weight (R,) and name the weight columns; drops respondents with an unusable weight."""
    named = (name for name in frame.cells.columns if _WEIGHT.fullmatch(name) and name not in group_by)
    # A label of one code, such as "no weight", leaves the column a weight; labels of all codes make it a question.
    named = (name for name in named if not {*_texts(frame, name)} - {""} <= frame.codebook[name].labels.keys())
    candidates = [name for name in named if np.isfinite(_numbers(frame, name)).mean() > 0.5]
    if not weight and len(candidates) > 1:
        raise UserError(
            f"{frame.source}: {', '.join(candidates)} may each be the respondents' weight; say data.weight=NAME, or "
            "data.weight=none to count every respondent once"
        )
    chosen = weight or "".join(candidates)
    if chosen in ("", _UNWEIGHTED):
        frame.notes.add(f"every respondent counts once, {'as data.weight says' if chosen else 'for want of a weight'}")
        return np.ones(len(frame.cells)), candidates
    commas = [cell.strip() for cell in frame.cells[chosen] if isinstance(cell, str) and "," in cell]
    if commas and all(map(_AMBIGUOUS.fullmatch, commas)):
        first = commas[0]
        raise UserError(
            f"{frame.source}: column {chosen}: {first} may be {first.replace(',', '')} or {first.replace(',', '.')}; "
            "write numbers without separators of thousands, and with a decimal point"
        )
    weight_R, frame.weight = _numbers(frame, chosen), chosen
    frame.notes.add(f"weighted by {chosen}" + ("" if weight else ", the only column that looks like it"))
    if np.isnan(weight_R).all():
        raise UserError(f"{frame.source}: column {chosen} has no number >= 0, so it is no weight")
    if unusable := int(np.isnan(weight_R).sum()):
        frame.notes.add(f"{unusable} respondents left out: their weight is not a number >= 0")
        frame.cells = frame.cells[np.isfinite(weight_R)]
    return weight_R[np.isfinite(weight_R)], [*candidates, chosen]


def _numbers(frame: Frame, column: str) -> FloatArray:
    """A column's numbers >= 0 (R,), NaN elsewhere."""
    import pandas as pd

    cells = frame.cells[column].astype(str).str.replace(",", ".")
    values: FloatArray = pd.to_numeric(cells, errors="coerce").to_numpy(dtype=np.float64)
    return np.where(np.isfinite(values) & (values >= 0.0), values, np.nan)


def _texts(frame: Frame, column: str) -> Texts:
    """Each respondent's code (R,), empty for an empty cell."""
    import pandas as pd

    try:
        cell_R, values = pd.factorize(frame.cells[column])
    except TypeError:
        raise UserError(
            f"{frame.source}: column {column} has lists in its cells; make a column of each option, or drop the column"
        ) from None
    return np.array([*map(code_text, values), ""], dtype=object)[cell_R]  # an empty cell is -1, the last entry


def _groups(frame: Frame, name: str, missing: Missing) -> "pd.Categorical":
    """Read the name of each respondent's group (R,), NaN without an answer."""
    import pandas as pd

    text_R, label = _texts(frame, name), frame.codebook[name].label
    number_of = Counter(text_R)  # in the order of the rows
    is_places = sum(map(bool, number_of)) > 2 and all(_CODE.fullmatch(label(code)) for code in number_of if code)
    labels = {code: label(code) for code in number_of if code and not missing.lists(name, code, label(code))}
    if not is_places:
        labels = {code: text for code, text in labels.items() if kind_of(text) == "answer"}
    if lost := [f"{size} {label(code) or 'empty'}" for code, size in number_of.items() if code not in labels]:
        frame.notes.add(f"respondents without a group in {name}", *lost)
    if doubtful := [code for code in labels if kind_of(label(code)) != "answer"]:
        frame.notes.add(f"groups of {name} whose code can also mean no answer (data.missing)", *doubtful)
    missing.check(frame.source, {name: labels})
    spelling: dict[str, str] = {}
    names = {code: group_name(label).replace(";", ",") for code, label in labels.items()}
    for code, group in names.items():
        names[code] = spelling.setdefault(same(group), group)
        frame.notes.add_spelling(group, names[code])
    if (number_of_groups := len({*names.values()})) > MAX_GROUPS:
        raise UserError(f"{frame.source}: column {name} has {number_of_groups} groups; at most {MAX_GROUPS} can be")
    return pd.Categorical([names.get(code) for code in text_R])


def _codes(column: Column, text_R: Texts, is_answer: Callable[[str], bool]) -> list[str]:
    """List the codes of a question's options; empty if there are too many, as in a column of respondent numbers.

    Unless the source lists the options, codes are in the order of the numbers with which all answers begin, such as
    "18-29", else numbers come before words in alphabetical order; non-answers are last. Labels that nobody has chosen
    are included.
    """
    if column.options:
        return [*column.options]
    used = {*text_R} - {""}
    if len(used) > 2 * MAX_OPTIONS:
        return []
    used |= {*filter(is_answer, column.labels)}
    leading = {code: _leading(code) for code in filter(is_answer, used)}
    numbers = {code: number(code) for code in used} | ({} if None in leading.values() else leading)
    last = math.inf
    return sorted(used, key=lambda code: (code not in leading, last if numbers[code] is None else numbers[code], code))


def _leading(code: str) -> float | None:
    """The number with which a code begins, if any."""
    return float(match[1]) if (match := _LEADING.match(code)) else None


def _scale(column: Column, codes: Sequence[str], answers: Sequence[str]) -> Sequence[float]:
    """Scale positions, if the source lists them, marks the column as ordered, or labels the ends of its numbers."""
    if column.options:
        return [*column.options.values()]
    places = {code: value for code in answers if (value := number(code)) is not None}
    if not column.labels or len(places) < len(answers):
        return ()
    ends = [place for code, place in places.items() if code in column.labels]
    between = [place for code, place in places.items() if code not in column.labels]
    has_ends = bool(ends and between) and min(ends) < min(between) and max(between) < max(ends)
    return [places.get(code, math.nan) for code in codes] if column.is_ordered or has_ends else ()


def _counted(
    question: RawAnswer, text_R: Texts, weight_R: FloatArray, groups: Mapping[str, "pd.Categorical"]
) -> Iterator[RawAnswer]:
    """Yield the answer of each group that was asked the question: weighted shares, and respondents per option."""
    import pandas as pd

    code_R = pd.Categorical(text_R, categories=question.codes)
    for attribute, group_R in groups.items():
        people = pd.DataFrame({"group": group_R, "code": code_R, "weight": weight_R}).dropna()
        weights = people.groupby(["group", "code"], observed=False)["weight"]
        sum_GK, count_GK = weights.sum().unstack(), weights.count().unstack()
        for name, sum_K, count_K in zip(sum_GK.index, sum_GK.to_numpy(), count_GK.to_numpy(), strict=True):
            if count_K.any():  # else the question was not asked of this group
                full_name = group_name(name, attribute if len(groups) > 1 else "")
                shares = (sum_K / (sum_K.sum() or 1.0)).tolist()
                yield question._replace(group=full_name, shares=shares, people=count_K.tolist())


def opinionqa(folder: Path, group_by: Sequence[str], weight: str, missing: Missing) -> tuple[list[RawAnswer], Frame]:
    """Read all waves of OpinionQA in the folder `human_resp` or its parent; returns the answers and the first table.

    In each wave `info.csv` lists questions and options, and `metadata.csv` the columns of groups.
    """
    root = folder / "human_resp" if (folder / "human_resp").is_dir() else folder
    matches = ((_WAVE.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    waves = {int(match[1]): path for match, path in matches if match}
    if not waves:
        raise UserError(f"{folder}: is a folder, and not in OpinionQA's layout; name a survey file in it")
    raws: list[RawAnswer] = []
    frames: list[Frame] = []
    for wave, path in sorted(waves.items()):
        people, meta, info = (read_frame(str(path / f"{name}.csv")) for name in ("responses", "metadata", "info"))
        frames.append(people)
        people.notes = frames[0].notes
        meta.require("key")
        people.codebook |= {name: Column(is_question=False) for name in people.cells.columns} | _codebook(info)
        attributes = tuple(name for name in meta.cells["key"] if name in people.cells)
        raws += raw_answers(people, group_by or attributes, weight or f"WEIGHT_W{wave}", missing)
    frames[0].source = str(folder)
    return raws, frames[0]


def _codebook(info: Frame) -> dict[str, Column]:
    """Read the questions of `info.csv`, whose `references` list answers with an `option_ordinal`, then refusals."""
    info.require("key", "question", "references", "option_ordinal")
    columns: dict[str, Column] = {}
    for row, record in zip(info.cells.index, info.cells.to_dict("records"), strict=True):
        try:
            places, names = read_numbers(record, "option_ordinal"), map(str, read_list(record, "references"))
        except Unusable as error:
            raise UserError(f"{info.source}: row {row}: {error}") from None
        options = dict(zip(names, chain(places, repeat(math.nan)), strict=False))
        columns[record["key"]] = Column(text=record["question"], options=options)
    return columns
