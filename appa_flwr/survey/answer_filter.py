"""The private side of a survey: the answer that a row holds, which only the reader of that group looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from appa_flwr.survey.cells import CellError, Reason, parse_distribution, parse_quantity
from appa_flwr.survey.question_rows import Entry, PublicRow, Refusals
from appa_flwr.survey.tables import PRIVATE
from appa_flwr.survey.types import FloatArray


@dataclass(frozen=True)
class AnswerFilter:
    """Conditions under which answers count, as in `read.read_survey`."""

    refusals: Refusals
    min_respondents: int = 0
    min_questions: int = 1


@dataclass(frozen=True)
class Answer:
    """One usable answer, the row it came from, and what the source has next to it."""

    row: PublicRow
    shares: FloatArray
    respondents: float | None
    refusal_rate: float | None


def answer_of(row: PublicRow, entry: Entry, answer_filter: AnswerFilter) -> Answer:
    """The answer in a row to its question.

    Raises:
        CellError: why it cannot be used.
    """
    cells = row.row.cells
    if PRIVATE not in cells:
        raise CellError(Reason.MISSING)
    respondents = _respondents(cells, answer_filter.min_respondents)
    cell, num_options = cells[PRIVATE], len(entry.wording.options)
    shares = parse_distribution(cell, num_options, entry.kept)
    rate: float | None = None
    if answer_filter.refusals == "separate" and entry.kept is None:
        rate = _reported_rate(cells)
    elif answer_filter.refusals == "separate":
        rate = float(parse_distribution(cell, num_options)[list(entry.wording.refused)].sum())
    return Answer(row, shares, respondents, rate)


def _respondents(cells: Mapping[str, object], minimum: int) -> float | None:
    """Number of people who answered, where the row has it; what is no number counts only if there is a minimum."""
    try:
        respondents = parse_quantity(cells.get("n"), Reason.BAD_COUNT)
    except CellError:
        if minimum:
            raise
        return None
    if respondents is not None and respondents < minimum:
        raise CellError(Reason.FEW_RESPONDENTS)
    return respondents


def _reported_rate(cells: Mapping[str, object]) -> float | None:
    """The refusal rate of a row whose distribution is already without refusals."""
    rate = parse_quantity(cells.get("refusal_rate"), Reason.BAD_RATE, most=1.0)
    refused, answered = (parse_quantity(cells.get(name), Reason.BAD_COUNT) for name in ("refusals", "n"))
    if rate is None and refused is not None and answered:
        return refused / (answered + refused)
    return rate
