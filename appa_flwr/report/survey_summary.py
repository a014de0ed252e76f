"""Output of `appa survey`: a bar per group, and why answers were left out.

Axis letters: G groups, Q questions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from rich.bar import Bar
from rich.console import RenderableType
from rich.table import Table

from appa_flwr.survey.read import UNREADABLE, summary
from appa_flwr.survey.types import Survey

BAR_CHARS: Final = 30
_FILE_PARTS: Final = 2  # a wave and its file


def tables(survey: Survey) -> Iterator[Table]:
    """The groups, those with most questions first, then the reasons of rejections where there are any.

    Names come from the survey: print with `markup=False`, or brackets in them would be taken for markup.
    """
    yield _groups(survey)
    if survey.rejections:
        yield _reasons(survey)


def _groups(survey: Survey) -> Table:
    counts = summary(survey)
    left_out = counts.drop(columns="kept")
    people = any(survey.respondents.values())
    refused = any(survey.refusal_rates.values())
    table = Table("group", "questions", "of all", "left out", "mostly because")
    if people:
        table.add_column("respondents (median)")
    if refused:
        table.add_column("refused (mean)")
    for position in np.argsort(-counts["kept"].to_numpy(), kind="stable"):
        name, kept = str(counts.index[position]), int(counts["kept"].iloc[position])
        out = left_out.iloc[position]
        texts: list[RenderableType] = [
            name,
            str(kept),
            Bar(len(survey.questions), 0, kept, width=BAR_CHARS),
            str(int(out.sum())),
            str(out.idxmax()) if out.any() else "",
        ]
        if people:
            respondents = list(survey.respondents.get(name, {}).values())
            texts.append(f"{np.median(respondents):.0f}" if respondents else "")
        if refused:
            rates = list(survey.refusal_rates.get(name, {}).values())
            texts.append(f"{np.mean(rates):.1%}" if rates else "")
        table.add_row(*texts)
    return table


def _reasons(survey: Survey) -> Table:
    table = Table("left out because", "answers", "groups", "first: file, row, group, question")
    for reason in dict.fromkeys(rejection.reason for rejection in survey.rejections):
        rejected = [rejection for rejection in survey.rejections if rejection.reason == reason]
        first = rejected[0]
        file = Path(*Path(first.source).parts[-_FILE_PARTS:])
        where = f"{file}, {first.row}, {first.group or UNREADABLE}, {first.question_id or UNREADABLE}"
        table.add_row(reason, str(len(rejected)), str(len({rejection.group for rejection in rejected})), where)
    return table
