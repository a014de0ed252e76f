"""Tables with one row a respondent, counted into one distribution a group and question; OpinionQA's waves too.

Which columns are groups is said (`data.group-by`), or known of the World Values Survey (`wvs`); all others with 2 to
`MAX_OPTIONS` different answers are questions, and their names the questions' texts.

Axis letters: K answer options, R respondents, G groups of one attribute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from appa_flwr.core.errors import UserError
from appa_flwr.survey import wvs
from appa_flwr.survey.cells import MAX_OPTIONS, MIN_OPTIONS, CellError, Reason, is_refusal, parse_quantity
from appa_flwr.survey.tables import PRIVATE, PUBLIC_REQUIRED, SurveyRow, SurveyTable, delimiter_of
from appa_flwr.survey.types import FloatArray

if TYPE_CHECKING:
    import pandas as pd

IntArray = npt.NDArray[np.intp]

NONE: Final = -1
"""Code of a respondent without a usable answer, or in no group."""
MAX_GROUPS: Final = 200
MAX_COLUMNS: Final = 10_000
FIRST_ROW: Final = 2  # behind the header
_NOT_ASKED: Final = frozenset({"", ".", "na", "n/a", "nan", "null"})  # as statistics packages write an empty cell
_WEIGHT: Final = re.compile(r"(?:w_|p|post_?|final_?)?(?:weights?|wgt|wt|wght)(?:_w?\d+)?", re.IGNORECASE)
_WHOLE: Final = re.compile(r"(-?\d{1,40})\.0+")  # how a column of whole numbers with gaps is often written
_NUM_SHOWN: Final = 4  # names in a message


def are_rows(table: SurveyTable, group_by: Sequence[str]) -> bool:
    """True if a row is a respondent: columns of groups are named, or known, and it is none of the other layouts."""
    others = ({"options"}, {"option", "question"}, {"selections"}, {PRIVATE})
    return bool(group_by or wvs.is_wvs(table.header)) and not any(names <= table.columns for names in others)


def by_group(table: SurveyTable, group_by: Sequence[str], weight: str) -> SurveyTable:
    """One row per question and group; all are numbered as the header, where a question stands.

    Args:
        table: of a .csv, .tsv, .xlsx or .dta file.
        group_by: columns whose values are groups, each an attribute if there are several.
        weight: column of weights; empty = one whose name says so, or none.

    Raises:
        UserError: the file cannot be read as a table, has no such column, or has no question.
    """
    source = table.source
    if len(table.header) > MAX_COLUMNS:
        raise UserError(f"{source}: has {len(table.header)} columns; at most {MAX_COLUMNS} can be")
    if twice := next((name for k, name in enumerate(table.header) if name in table.header[:k]), ""):
        raise UserError(f"{source}: column {twice} occurs twice")
    people = _people(table)
    of_wvs = wvs.is_wvs(table.header)
    if of_wvs:
        people.columns = people.columns.map(wvs.code)
    group_by = group_by or [name for name in wvs.COUNTRY if name in people.columns][:1]
    weights = [weight] if weight else list(filter(_WEIGHT.fullmatch, people.columns))
    if missing := [name for name in (*group_by, *weights) if name not in people.columns]:
        raise UserError(f"{source}: has no column {missing[0]}; it has {_some([*people.columns])}")
    weight_R = np.array([weight_of(cell) for cell in people[weights[0]]]) if weights else np.ones(len(people))
    first = 1 if table.asks else FIRST_ROW
    rows = [SurveyRow(int(r) + first, {}, Reason.BAD_WEIGHT) for r in np.flatnonzero(np.isnan(weight_R))]
    groups = {name if group_by[1:] else "": groups_in(people[name], f"{source}: column {name}") for name in group_by}
    asked, left = 0, []
    for name in people.columns.difference([*group_by, *weights], sort=False):
        if of_wvs and not wvs.is_question(name):
            continue
        options, answer_R = _coded(people[name], wvs.NOT_ASKED if of_wvs else _NOT_ASKED)
        if not MIN_OPTIONS <= len(options) <= MAX_OPTIONS:
            left.append(name)
            continue
        asked += 1
        words = (
            wvs.in_words(name, options) if of_wvs else {"question": table.asks.get(name) or name, "options": options}
        )
        rows += counted({"question_id": name, **words}, 1, answer_R, weight_R, groups)
    if not asked:
        raise UserError(
            f"{source}: no other column than {', '.join(group_by)} has {MIN_OPTIONS} to {MAX_OPTIONS} answers"
        )
    says = [f"one row a respondent, {len(people)} of them, groups by {', '.join(group_by)}"]
    says += [f"weighted by {weights[0]}" if weights else "without weights"]
    says += [f"{asked} questions: {wvs.GUESSED if of_wvs else 'the other columns, options sorted'}"]
    says += [f"no questions are {_some(left)}"] if left else []
    columns = frozenset({*PUBLIC_REQUIRED, "attribute", "group", "ordinal", PRIVATE, "n"})
    return SurveyTable(source, columns, tuple(rows), "; ".join(filter(None, (table.layout, *says))))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more


def _people(table: SurveyTable) -> pd.DataFrame:
    file = Path(table.source)
    if file.suffix.lower() in (".csv", ".tsv"):
        return read_csv(file, delimiter=delimiter_of(file))
    if file.suffix.lower() not in (".xlsx", ".dta"):
        raise UserError(f"{file}: rows of respondents are read from .csv, .tsv, .xlsx and .dta")
    import pandas as pd

    cells = [
        ["" if (cell := row.cells.get(name)) is None else str(cell) for name in table.header] for row in table.rows
    ]
    frame = pd.DataFrame(cells, columns=list(table.header), dtype=object)
    return frame.assign(**{name: frame[name].str.strip() for name in frame.columns})


def read_csv(file: Path, *required: str, delimiter: str = ",") -> pd.DataFrame:
    """A CSV as text, blanks around cells removed.

    Raises:
        UserError: it cannot be read, lacks a required column, or has two of one name.
    """
    import pandas as pd

    try:
        # Nothing is a missing value but an empty cell: "None" and "NA" can be answers. As objects, because going
        # through the cells of an Arrow column one by one takes several times as long.
        frame: pd.DataFrame = pd.read_csv(
            file, dtype=object, na_filter=False, encoding="utf-8-sig", sep=delimiter, index_col=False
        )
    except (OSError, ValueError) as error:  # pandas' own parser errors and bad UTF-8 are ValueErrors
        cause = str(getattr(error, "strerror", None) or error).partition("\n")[0]
        raise UserError(f"{file}: cannot be read as CSV ({cause})") from None
    frame.columns = frame.columns.str.strip()
    if missing := [name for name in required if name not in frame.columns]:
        raise UserError(f"{file}: missing column {', '.join(missing)}")
    if not frame.columns.is_unique:
        raise UserError(f"{file}: column {frame.columns[frame.columns.duplicated()][0]} occurs twice")
    return frame.assign(**{name: frame[name].str.strip() for name in frame.columns})


def _coded(cells: pd.Series[str], not_asked: frozenset[str]) -> tuple[tuple[str, ...], IntArray]:
    """A column's answers in their order, one more than can be where they are many, and each respondent's (R,)."""
    answers: dict[str, str] = {}
    for cell in cells.unique():
        answer = whole[1] if (whole := _WHOLE.fullmatch(cell)) else cell
        if answer.casefold() not in not_asked:
            answers[cell] = answer
        if len(answers) > 2 * MAX_OPTIONS:  # such as a column of respondents' numbers; 1 and 1.0 are one answer
            break
    options = tuple(sorted(set(answers.values()), key=_place))
    code = {option: k for k, option in enumerate(options)}
    return options, np.array([code[answers[cell]] if cell in answers else NONE for cell in cells], dtype=np.intp)


def _place(option: str) -> tuple[bool, float, str]:
    """Numbers by size, then words; refusals last, as negative codes mostly are."""
    value = np.inf
    with suppress(ValueError):
        value = float(option)
    return is_refusal(option) or value < 0, value, option


def weight_of(cell: str) -> float:
    """A respondent's weight, NaN where it cannot be used."""
    weight = None
    with suppress(CellError):
        weight = parse_quantity(cell.replace(",", "."), Reason.BAD_WEIGHT)
    return np.nan if weight is None else weight


def groups_in(cells: pd.Series[str], where: str) -> tuple[IntArray, list[str]]:
    """Each respondent's group (R,), and the groups' names; one who did not say is in none.

    Raises:
        UserError: there are more than `MAX_GROUPS`, as in a column of respondents' numbers.
    """
    names = [name for name in sorted(set(cells)) if name and not is_refusal(name)]
    if len(names) > MAX_GROUPS:
        raise UserError(f"{where} has {len(names)} groups; at most {MAX_GROUPS} can be")
    codes = {name: code for code, name in enumerate(names)}
    return np.array([codes.get(cell, NONE) for cell in cells], dtype=np.intp), names


def counted(
    public: Mapping[str, object],
    number: int,
    answer_R: IntArray,
    weight_R: FloatArray,
    groups: Mapping[str, tuple[IntArray, Sequence[str]]],
    refused: Sequence[int] | None = None,
) -> Iterator[SurveyRow]:
    """A row for each group that was asked a question: weighted shares, and people who gave a substantive answer.

    `groups`: attribute, empty where it has no name -> the respondents' groups. `refused`: places of refusals among the
    options; None tells them by their words.
    """
    options: Sequence[str] = public["options"]  # type: ignore[assignment]
    size, told = (
        len(options),
        refused or [k for k, option in enumerate(options) if refused is None and is_refusal(option)],
    )
    substantive = [k for k in range(size) if k not in told]
    counted_R = (answer_R != NONE) & np.isfinite(weight_R)
    for attribute, (group_R, names) in groups.items():
        used_R = counted_R & (group_R != NONE)
        cell_R = group_R[used_R] * size + answer_R[used_R]
        shape = (len(names), size)
        count_GK = np.bincount(cell_R, minlength=len(names) * size).reshape(shape)
        weight_GK = np.bincount(cell_R, weights=weight_R[used_R], minlength=len(names) * size).reshape(shape)
        for name, count_K, sum_K in zip(names, count_GK, weight_GK, strict=True):
            if not count_K.any():
                continue  # the question was not asked of this group
            total = sum_K.sum()
            shares = (sum_K / total if total > 0 else sum_K).tolist()
            whose = {"attribute": attribute, "group": name} if attribute else {"group": name}
            yield SurveyRow(number, {**public, **whose, PRIVATE: shares, "n": int(count_K[substantive].sum())})
