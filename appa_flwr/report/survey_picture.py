"""The picture of a survey: what each group answered, and how far the groups differ.

Drawn in the style of `appa_flwr.report.plots`, without pyplot.

Axis letters: G groups, Q questions, K answer options.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from appa_flwr.core.files import replace_file
from appa_flwr.protocol import rewards
from appa_flwr.report import style
from appa_flwr.survey.types import FloatArray, Survey

FILE: Final = "survey.png"
MAX_GROUPS: Final = 180
_MAX_NAME_CHARS: Final = 34
_GROUPS_PER_COLUMN: Final = 60
_COLUMN_WIDTH, _QUESTIONS_WIDTH = 4.6, 7.4  # inches
_CURVE_HEIGHT, _FRAME, _NOTHING = 2.2, 0.8, 0.01  # inches
_GROUP_HEIGHT = 0.19  # inches of a row
_FONT: Final = 8
_ROOM_FOR_COUNT: Final = 1.08  # of the longest bar


def divergence_from_mean(survey: Survey) -> dict[str, float]:
    """Mean divergence of the groups from their common mean, per question.

    The mean over groups of the Jensen-Shannon divergence (base 2) between a group's distribution and the mean of all
    groups': one minus what answering that mean would score in the `js` reward.

    Returns:
        Question id -> value in [0, 1], 0 where all agree; only questions that at least two groups answered.
    """
    found: dict[str, float] = {}
    for question in survey.questions:
        key = question.question_id
        rows = [mine[key] for mine in survey.answers.values() if key in mine]
        if len(rows) < 2:  # one group cannot disagree
            continue
        share_GK = np.stack(rows)
        mean_GK = np.broadcast_to(share_GK.mean(axis=0), share_GK.shape)
        found[key] = float(1.0 - rewards.js(mean_GK, share_GK, np.ones(share_GK.shape, dtype=bool)).mean())
    return found


def draw(survey: Survey, path: Path) -> Path:
    """Write the picture of at least one group as a PNG; an older one is replaced, its folder is made.

    Returns:
        The path.

    Raises:
        UserError: it cannot be written.
    """
    with warnings.catch_warnings():
        # A script that the font lacks is drawn as boxes; the survey is none the worse for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        replace_file(path, _picture(survey, divergence_from_mean(survey)), parents=True)
    return path


@style.picture
def _picture(survey: Survey, by_question: Mapping[str, float]) -> Figure:
    shown = min(len(survey.groups), MAX_GROUPS)
    columns = math.ceil(shown / _GROUPS_PER_COLUMN)
    rows = math.ceil(shown / columns)
    left = rows * _GROUP_HEIGHT + _FRAME
    right = _CURVE_HEIGHT + _FRAME
    height = max(left, right)
    made = style.figure(height, width=columns * _COLUMN_WIDTH + _QUESTIONS_WIDTH)
    # Each half keeps its own height: few groups are not stretched, and many do not stretch the questions.
    halves: Any = made.subfigures(1, 2, width_ratios=[columns * _COLUMN_WIDTH, _QUESTIONS_WIDTH])
    groups, questions = halves
    grid = groups.add_gridspec(2, columns, height_ratios=[left, max(height - left, _NOTHING)])
    _coverage([groups.add_subplot(grid[0, column]) for column in range(columns)], survey, rows)
    if by_question:
        grid = questions.add_gridspec(2, 1, height_ratios=[right, max(height - right, _NOTHING)])
        _curve(questions.add_subplot(grid[0]), np.sort(list(by_question.values()))[::-1])
    return made


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME_CHARS else name[: _MAX_NAME_CHARS - 1].rstrip() + "…"


def _coverage(columns: Sequence[Axes], survey: Survey, rows: int) -> None:
    """Bars of answered questions per group, the fullest group on top of the first column."""
    ranked = sorted(survey.groups, key=lambda name: -len(survey.answers[name]))
    for column, axes in enumerate(columns):
        names = ranked[:MAX_GROUPS][column * rows : (column + 1) * rows]
        bars = axes.barh(
            range(len(names)), [len(survey.answers[name]) for name in names], color=style.BLUE, height=0.75
        )
        axes.bar_label(bars, padding=2, fontsize=_FONT - 2)
        axes.set_yticks(range(len(names)), [_short(name) for name in names], fontsize=_FONT)
        axes.set_ylim(rows - 0.4, -0.6)
        axes.set_xlim(0, _ROOM_FOR_COUNT * len(survey.answers[ranked[0]]))
        axes.grid(False, axis="y")
        axes.set_xlabel(f"questions, of {len(survey.questions)}")
    more = len(ranked) - MAX_GROUPS
    columns[0].set_title(f"Coverage: {len(ranked)} groups" + (f", the {more} smallest not shown" if more > 0 else ""))


def _curve(axes: Axes, value_Q: FloatArray) -> None:
    """Disagreement of all questions, the largest first."""
    median = float(np.median(value_Q))
    rank_Q = np.arange(1, len(value_Q) + 1)
    axes.fill_between(rank_Q, value_Q, color=style.SKY, alpha=0.4, linewidth=0)
    axes.plot(rank_Q, value_Q, color=style.BLUE)
    axes.axhline(median, color=style.GREY, linestyle="--", linewidth=1)
    label: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "ha": "right", "fontsize": _FONT}
    axes.annotate(f"median {median:.3f}", (len(value_Q), median), **label)
    axes.set_xlim(1, max(len(value_Q), 2))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{len(value_Q)} questions that two groups or more answered, by rank")
    axes.set_ylabel("0 = all agree, at most 1")
    axes.set_title("Disagreement: mean JS divergence from the groups' mean")
