"""One row a respondent: survey data as institutes give it, made one weighted distribution a group and question.

`data.group-by` says which columns are groups; all others with 2 to `MAX_OPTIONS` different answers are questions.

Axis letters: K answer options, R respondents, G groups of one attribute.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from appa_flwr.core.errors import UserError
from appa_flwr.survey.frames import Frame, read_frame
from appa_flwr.survey.names import group_name
from appa_flwr.survey.nonanswers import code_text, kind_of, looks_missing, number
from appa_flwr.survey.raw import RawAnswer, Reading, Unusable, some
from appa_flwr.survey.tables import read_list, read_numbers
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS, FloatArray

IntArray = npt.NDArray[np.intp]
Groups = Mapping[str, tuple[IntArray, Sequence[str]]]
"""Column -> each respondent's group (R,), and the groups' names (G,)."""

MAX_GROUPS: Final = 200
_NONE: Final = -1  # code of a respondent without an answer that counts, or in no group
_WEIGHT: Final = re.compile(
    r"(?:\w+_)?(?:weights?|wgts?|wts?)(?:_?w?\d+)?|weight\w*|wtss\w*|\w{0,4}we?i?ght|combinwt|s017\w?|\w{1,6}wgt|\w{1,6}wt",
    re.IGNORECASE,
)
_UNWEIGHTED: Final = "none"
_WAVE: Final = re.compile(r"American_Trends_Panel_W(\d{1,4})")


def raw_answers(frame: Frame, reading: Reading) -> list[RawAnswer]:
    """The weighted shares of every group and question; notes on what was decided go to the frame.

    Raises:
        UserError: no column of groups is named, a named column does not exist, several columns may be the weight, or no
            column is a question.
    """
    columns = list(frame.cells.columns)
    if not reading.group_by:
        raise UserError(
            f"{frame.source}: has none of our columns, so a row seems to be a respondent; say which columns are "
            f"groups: data.group-by=NAME, out of {some(columns)}"
        )
    for name in (*reading.group_by, reading.weight):
        if name not in ("", _UNWEIGHTED, *columns):
            raise UserError(f"{frame.source}: has no column {name}; it has {some(columns)}")
    weight_R, weights = _weights(frame, reading)
    groups = {name: _groups(frame, name, reading) for name in reading.group_by}
    raws: list[RawAnswer] = []
    left_out, declared = list[str](), Counter[str]()
    for name in columns:
        if name in (*reading.group_by, *weights) or name in frame.skipped:
            continue
        code_R, codes, labels = _codes(frame, name, declared)
        kinds = [reading.missing.kind(name, code, label) for code, label in zip(codes, labels, strict=True)]
        if MIN_OPTIONS <= kinds.count("answer") <= MAX_OPTIONS:
            question = RawAnswer(1, name, frame.texts.get(name) or name, labels, codes=codes)
            raws += _counted(question._replace(ordinal=_scale(frame, name, codes)), code_R, weight_R, groups)
        else:
            left_out.append(name)
    if not raws:
        raise UserError(
            f"{frame.source}: no other column than {', '.join(reading.group_by)} has {MIN_OPTIONS} to {MAX_OPTIONS} "
            "different answers"
        )
    frame.notes.append(f"one row a respondent, {len(frame.cells)} of them")
    words = (raw for raw in raws if raw.codes == raw.options and {*map(number, raw.codes)} == {None})
    if not frame.options and any(words):
        frame.notes.append("answers without codes stand in the order of the alphabet, which is not that of a scale")
    if left_out:
        frame.notes.append(f"no questions: {some(left_out)}")
    if declared:
        counts = (f"{label!r} {count}" for label, count in declared.most_common())
        frame.notes.append(f"left out as missing, as the file declares: {some(counts)}")
    return raws


def _weights(frame: Frame, reading: Reading) -> tuple[FloatArray, list[str]]:
    """Each respondent's weight, NaN where it cannot be used, and the columns that may be weights."""
    candidates = [
        name
        for name in frame.cells.columns
        if name not in reading.group_by and _WEIGHT.fullmatch(name) and np.isfinite(_numbers(frame, name)).mean() > 0.5
    ]
    if not reading.weight and len(candidates) > 1:
        raise UserError(
            f"{frame.source}: {', '.join(candidates)} may each be the respondents' weight; say data.weight=NAME, or "
            "data.weight=none to count every respondent once"
        )
    chosen = reading.weight or "".join(candidates)
    if chosen in ("", _UNWEIGHTED):
        frame.notes.append(
            f"every respondent counts once, {'as data.weight says' if chosen else 'for want of a weight'}"
        )
        return np.ones(len(frame.cells)), candidates
    weight_R = _numbers(frame, chosen)
    frame.weight = chosen
    frame.notes.append(f"weighted by {chosen}" + ("" if reading.weight else ", the only column that looks like it"))
    if unusable := int(np.isnan(weight_R).sum()):
        frame.notes.append(f"{unusable} respondents left out: their weight is not a number >= 0")
    return weight_R, [*candidates, chosen]


def _numbers(frame: Frame, column: str) -> FloatArray:
    """A column's numbers >= 0 (R,), NaN elsewhere."""
    import pandas as pd

    cells = frame.cells[column]
    if cells.dtype == object or cells.dtype == "str":
        cells = cells.astype(str).str.replace(",", ".")
    values: FloatArray = pd.to_numeric(cells, errors="coerce").to_numpy(dtype=np.float64)
    return np.where(np.isfinite(values) & (values >= 0.0), values, np.nan)


def _is_declared(frame: Frame, column: str, code: str) -> bool:
    """True if the file itself calls a code of a column missing."""
    value = number(code)
    return any(
        code == part if isinstance(part, str) else value is not None and part[0] <= value <= part[1]
        for part in frame.missing.get(column, ())
    )


def _groups(frame: Frame, column: str, reading: Reading) -> tuple[IntArray, list[str]]:
    """Each respondent's group (R,), and the groups' names; one who did not say is in none.

    Raises:
        UserError: there are more than `MAX_GROUPS`, as in a column of respondents' numbers, or codes that look like
            missing ones, and that nobody has decided about.
    """
    labels = frame.labels.get(column, {})
    cell_R, texts = _coded(frame, column)
    names = {  # code -> group
        code: group_name(labels.get(code, code)).replace(";", ",")
        for code in texts
        if not _is_declared(frame, column, code)
        and reading.missing.kind(column, code, labels.get(code, code)) == "answer"
    }
    doubtful = looks_missing([*names], unlabelled=[code for code in names if code not in labels])
    if doubtful and not reading.missing.settles(column):
        raise UserError(
            f"{frame.source}: groups of {column} that look like no answers: {', '.join(doubtful)}. Say "
            f'data.missing="{column}={",".join(doubtful)}" to leave them out, or data.missing="{column}=none"'
        )
    places = {name: g for g, name in enumerate(sorted({*names.values()}))}
    if len(places) > MAX_GROUPS:
        raise UserError(f"{frame.source}: column {column} has {len(places)} groups; at most {MAX_GROUPS} can be")
    return _placed(cell_R, [places.get(names.get(code, ""), _NONE) for code in texts]), list(places)


def _coded(frame: Frame, column: str) -> tuple[IntArray, list[str]]:
    """Each respondent's place (R,) among the different cells of a column, -1 for an empty one, and their texts."""
    import pandas as pd

    cell_R, values = pd.factorize(frame.cells[column])
    return cell_R.astype(np.intp), [*map(code_text, values)]


def _placed(cell_R: IntArray, places: Sequence[int]) -> IntArray:
    """The place (R,) that each respondent's cell has; `_NONE` for an empty one."""
    return np.array([*places, _NONE], dtype=np.intp)[cell_R]  # an empty cell is -1: the last


def _codes(frame: Frame, column: str, declared: Counter[str]) -> tuple[IntArray, tuple[str, ...], tuple[str, ...]]:
    """Each respondent's answer (R,), and the codes and labels of the options; none where they are too many.

    Unless the source lists them, codes that are numbers stand in their order, words in that of the alphabet, and
    refusals last. An option that has a label is one, though nobody has chosen it.
    """
    labels = frame.labels.get(column, {})
    cell_R, texts = _coded(frame, column)
    used = {text for text in texts if text}
    gone = sorted(code for code in used if _is_declared(frame, column, code))
    codes = list(frame.options.get(column, ()))
    if not codes and not 0 < len(used) - len(gone) <= 2 * MAX_OPTIONS:  # such as a column of respondents' numbers
        return cell_R, (), ()
    for code in gone:
        places = [place for place, text in enumerate(texts) if text == code]
        declared[labels.get(code, code)] += int(np.isin(cell_R, places).sum())
    if not codes:
        used |= {code for code, label in labels.items() if kind_of(label) == "answer"}
        codes = sorted(
            (code for code in used if not _is_declared(frame, column, code)),
            key=lambda code: (
                kind_of(labels.get(code, code)) != "answer",
                np.inf if (value := number(code)) is None else value,
                code,
            ),
        )
    index = {code: k for k, code in enumerate(codes)}
    code_R = _placed(cell_R, [index.get(text, _NONE) for text in texts])
    return code_R, tuple(codes), tuple(labels.get(code, code) for code in codes)


def _scale(frame: Frame, column: str, codes: Sequence[str]) -> tuple[float | None, ...] | None:
    """Places on a scale, where the source lists them, calls the column ordered, or labels some numbers of a scale."""
    if column in frame.options:
        return tuple(frame.options[column].values())
    labels = frame.labels.get(column, {})
    places = {code: number(code) for code in codes if kind_of(labels.get(code, code)) == "answer"}
    if not labels or None in places.values() or (column not in frame.scales and places.keys() <= labels.keys()):
        return None
    return tuple(map(places.get, codes))


def _counted(question: RawAnswer, code_R: IntArray, weight_R: FloatArray, groups: Groups) -> Iterator[RawAnswer]:
    """An answer of each group that was asked a question: weighted shares, and people by option."""
    size = len(question.options)
    counted_R = (code_R != _NONE) & np.isfinite(weight_R)
    for attribute, (group_R, names) in groups.items():
        used_R = counted_R & (group_R != _NONE)
        cell_R = group_R[used_R] * size + code_R[used_R]
        shape = (len(names), size)
        count_GK = np.bincount(cell_R, minlength=len(names) * size).reshape(shape)
        weight_GK = np.bincount(cell_R, weights=weight_R[used_R], minlength=len(names) * size).reshape(shape)
        for name, count_K, sum_K in zip(names, count_GK, weight_GK, strict=True):
            if count_K.any():  # else the question was not asked of this group
                group = group_name(name, attribute if len(groups) > 1 else "")
                shares = (sum_K / (sum_K.sum() or 1.0)).tolist()
                yield question._replace(group=group, shares=shares, people=count_K.tolist())


def waves(folder: Path) -> list[Path]:
    """The folders of OpinionQA's waves in a folder that holds `human_resp` or is that itself, in their order."""
    root = folder / "human_resp" if (folder / "human_resp").is_dir() else folder
    inside = [path for path in root.iterdir() if path.is_dir() and _WAVE.fullmatch(path.name)]
    return sorted(inside, key=lambda path: int(path.name.rpartition("_W")[2]))


def opinionqa(wave: Path, reading: Reading) -> tuple[list[RawAnswer], Frame]:
    """One wave of OpinionQA: `info.csv` names questions and options, `metadata.csv` the columns of groups.

    `references` are the substantive answers, then the refusals; `option_ordinal` covers the first part alone.

    Raises:
        UserError: a file that is missing, unreadable or without a needed column; else as `raw_answers`.
    """
    people, info, meta = (read_frame(str(wave / f"{name}.csv")) for name in ("responses", "info", "metadata"))
    info.require("key", "question", "references", "option_ordinal")
    meta.require("key")
    columns = {*people.cells.columns}
    options: dict[str, dict[str, float | None]] = {}
    for row, record in zip(info.cells.index, info.cells.to_dict("records"), strict=True):
        try:
            places = read_numbers(record["option_ordinal"], "option_ordinal is not a list of numbers", empty=None)
            names = map(str, read_list(record["references"], "references are not a list of texts"))
            options[record["key"]] = dict(zip(names, chain(places, repeat(None)), strict=False))
        except Unusable as error:
            raise UserError(f"{info.source}: row {row}: {error}") from None
    people.options = options
    people.texts = dict(zip(info.cells["key"], info.cells["question"], strict=True))
    people.skipped = frozenset(columns - options.keys())
    attributes = tuple(name for name in meta.cells["key"] if name in columns)
    weight = reading.weight or f"WEIGHT_{wave.name.rpartition('_')[2]}"
    lists = ((people.cells[key].map(code_text), places) for key, places in options.items() if key in columns)
    if unknown := sum(int((~cells.isin(["", *places])).sum()) for cells, places in lists):
        people.notes.append(f"{unknown} answers left out: they are not among their question's references")
    raws = raw_answers(people, replace(reading, group_by=reading.group_by or attributes, weight=weight))
    people.notes[:] = [f"{wave.name}: {note}" for note in people.notes]
    return raws, people
