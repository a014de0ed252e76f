"""Tables with one row a respondent, counted into one weighted distribution a group and question; OpinionQA's waves too.

`data.group-by` says which columns are groups; all others with 2 to `MAX_OPTIONS` different answers are questions.

Axis letters: K answer options, R respondents, G groups of one attribute.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from appa_flwr.core.errors import UserError
from appa_flwr.survey.frames import Frame, read_frame
from appa_flwr.survey.names import group_name
from appa_flwr.survey.nonanswers import code_text, kind_of, looks_missing
from appa_flwr.survey.raw import RawAnswer, Reading, Reason, Unusable, some
from appa_flwr.survey.tables import read_list, require
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
    columns = [str(name) for name in frame.cells.columns]
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
    _note_constant_weights(frame, weight_R, groups)
    raws: list[RawAnswer] = []
    left_out, declared = [], Counter[str]()
    for name in columns:
        if name in (*reading.group_by, *weights) or name in frame.skipped:
            continue
        code_R, codes, labels = _codes(frame, name, declared)
        answers = [
            label
            for code, label in zip(codes, labels, strict=True)
            if kind_of(label) == "answer" and not reading.missing.holds(name, code, label)
        ]
        if not MIN_OPTIONS <= len(answers) <= MAX_OPTIONS:
            left_out.append(name)
            continue
        scale = _scale(frame, name, codes)
        question = RawAnswer(1, name, frame.texts.get(name) or name, labels, "", (), codes, scale)
        raws += _counted(question, code_R, weight_R, groups)
    if not raws:
        raise UserError(
            f"{frame.source}: no other column than {', '.join(reading.group_by)} has {MIN_OPTIONS} to {MAX_OPTIONS} "
            "different answers"
        )
    frame.notes.append(f"one row a respondent, {len(frame.cells)} of them")
    if any(raw.codes == raw.options and not any(map(_is_number, raw.codes)) for raw in raws):
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
        for name in map(str, frame.cells.columns)
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


def _note_constant_weights(frame: Frame, weight_R: FloatArray, groups: Groups) -> None:
    """Say where a weight is the same for all respondents of a group, so that it changes no share."""
    if len(np.unique(weight_R[np.isfinite(weight_R)])) < 2:
        return
    for name, (group_R, names) in groups.items():
        spread = [len(np.unique(weight_R[(group_R == g) & np.isfinite(weight_R)])) for g in range(len(names))]
        if max(spread, default=0) == 1:
            frame.notes.append(f"the weight is the same within each group of {name}, so it changes nothing")


def _is_declared(frame: Frame, column: str, code: str) -> bool:
    """True if the file itself calls a code of a column missing."""
    for part in frame.missing.get(column, ()):
        if isinstance(part, str):
            if code == part:
                return True
        elif _is_number(code) and part[0] <= float(code) <= part[1]:
            return True
    return False


def _groups(frame: Frame, column: str, reading: Reading) -> tuple[IntArray, list[str]]:
    """Each respondent's group (R,), and the groups' names; one who did not say is in none.

    Raises:
        UserError: there are more than `MAX_GROUPS`, as in a column of respondents' numbers, or codes that look like
            missing ones, and that nobody has decided about.
    """
    labels = frame.labels.get(column, {})
    code_R, codes = _coded(frame, column)
    names: dict[str, str] = {}  # code -> group
    for code in codes:
        label = labels.get(code, code)
        gone = _is_declared(frame, column, code) or reading.missing.holds(column, code, label)
        if not gone and kind_of(label) == "answer":
            names[code] = group_name(label).replace(";", ",")
    doubtful = looks_missing([*names], unlabelled=[code for code in names if code not in labels])
    if doubtful and not reading.missing.settles(column):
        raise UserError(
            f"{frame.source}: groups of {column} that look like no answers: {', '.join(doubtful)}. Say "
            f'data.missing="{column}={",".join(doubtful)}" to leave them out, or data.missing="{column}=none"'
        )
    places = {name: g for g, name in enumerate(sorted({*names.values()}))}
    if len(places) > MAX_GROUPS:
        raise UserError(f"{frame.source}: column {column} has {len(places)} groups; at most {MAX_GROUPS} can be")
    # The last place is for respondents without a code, whose number is -1.
    place_K = np.array([*(places.get(names.get(code, ""), _NONE) for code in codes), _NONE], dtype=np.intp)
    return place_K[code_R], list(places)


def _coded(frame: Frame, column: str) -> tuple[IntArray, list[str]]:
    """Each respondent's place (R,) among the different cells of a column, -1 for an empty one, and their texts."""
    import pandas as pd

    code_R, values = pd.factorize(frame.cells[column])
    return code_R.astype(np.intp), [*map(code_text, values)]


def _codes(frame: Frame, column: str, declared: Counter[str]) -> tuple[IntArray, tuple[str, ...], tuple[str, ...]]:
    """Each respondent's answer (R,), and the codes and labels of the options; none where they are too many.

    Codes that are numbers stand in their order, words in that of the alphabet, and refusals last. An option that has a
    label is one, though nobody has chosen it.
    """
    labels = frame.labels.get(column, {})
    cell_R, texts = _coded(frame, column)
    used = {text for text in texts if text}
    gone = sorted(code for code in used if _is_declared(frame, column, code))
    if not used - {*gone} or len(used) - len(gone) > 2 * MAX_OPTIONS:  # such as a column of respondents' numbers
        return np.zeros(0, dtype=np.intp), (), ()
    for code in gone:
        declared[labels.get(code, code)] += int(
            np.isin(cell_R, [k for k, text in enumerate(texts) if text == code]).sum()
        )
    used |= {code for code, label in labels.items() if kind_of(label) == "answer"}
    codes = sorted(
        (code for code in used if not _is_declared(frame, column, code)),
        key=lambda code: (
            kind_of(labels.get(code, code)) != "answer",
            float(code) if _is_number(code) else np.inf,
            code,
        ),
    )
    index = {code: k for k, code in enumerate(codes)}
    place_K = np.array([*(index.get(text, _NONE) for text in texts), _NONE], dtype=np.intp)
    return place_K[cell_R], tuple(codes), tuple(labels.get(code, code) for code in codes)


def _is_number(code: str) -> bool:
    with suppress(ValueError):
        return bool(np.isfinite(float(code)))
    return False


def _scale(frame: Frame, column: str, codes: Sequence[str]) -> tuple[float | None, ...] | None:
    """Places on a scale, where the file calls the column ordered, or labels only some of a scale's numbers."""
    labels = frame.labels.get(column, {})
    answers = [code for code in codes if kind_of(labels.get(code, code)) == "answer"]
    if not labels or not all(map(_is_number, answers)):
        return None
    if column not in frame.scales and all(code in labels for code in answers):
        return None
    return tuple(float(code) if code in answers else None for code in codes)


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
        UserError: a file that is missing, unreadable or without a needed column.
    """
    people, info = read_frame(str(wave / "responses.csv")), read_frame(str(wave / "info.csv"))
    meta = read_frame(str(wave / "metadata.csv"))
    require(info, "key", "question", "references", "option_ordinal")
    require(meta, "key")
    weight = f"WEIGHT_{wave.name.rpartition('_')[2]}"
    attributes = tuple(str(name) for name in meta.cells["key"] if name in people.cells.columns)
    reading = Reading(reading.group_by or attributes, reading.weight or weight, reading.missing)
    require(people, *reading.group_by, *{reading.weight} - {_UNWEIGHTED})
    weight_R, _ = _weights(people, reading)
    groups = {name: _groups(people, name, reading) for name in reading.group_by}
    raws: list[RawAnswer] = []
    unknown = 0
    for row, record in zip(info.cells.index, info.cells.to_dict("records"), strict=True):
        if (key := record["key"]) not in people.cells.columns:
            continue
        try:
            options = tuple(map(str, read_list(record["references"], Reason.BAD_OPTIONS)))
            places = [float(place) for place in read_list(record["option_ordinal"], Reason.BAD_ORDINAL)]
        except (Unusable, ValueError, TypeError) as error:
            raise UserError(f"{info.source}: row {row}: {error}") from None
        ordinal = (*places, *[None] * (len(options) - len(places)))[: len(options)]
        index = {option: k for k, option in enumerate(options)}
        cell_R, texts = _coded(people, key)
        place_K = np.array([*(index.get(text, _NONE) for text in texts), _NONE], dtype=np.intp)
        asked_K = np.array([*(text != "" for text in texts), False])
        code_R = place_K[cell_R]
        unknown += int(((code_R == _NONE) & asked_K[cell_R]).sum())
        question = RawAnswer(int(row), key, record["question"], options, "", (), (), ordinal)
        raws += _counted(question, code_R, weight_R, groups)
    if unknown:
        people.notes.append(f"{unknown} answers left out: they are not among their question's references")
    people.notes[:] = [f"{wave.name}: {note}" for note in people.notes]
    return raws, people
