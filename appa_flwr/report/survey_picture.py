"""The picture of a survey: what each group answered, and how far the groups differ.

Axis letters: G groups, Q questions, K answer options.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
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
MAX_GROUPS: Final = 60
_FRAME, _CURVE_HEIGHT, _GROUP_HEIGHT = 0.8, 3.0, 0.19  # inches
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
    made = style.figure(max(shown * _GROUP_HEIGHT, _CURVE_HEIGHT) + _FRAME)
    groups, questions = made.subplots(1, 2, width_ratios=[2, 3])
    _coverage(groups, survey)
    if by_question:
        _curve(questions, np.sort(list(by_question.values()))[::-1])
    else:
        questions.remove()
    return made


def _coverage(axes: Axes, survey: Survey) -> None:
    """Bars of answered questions per group, the fullest group on top."""
    ranked = sorted(survey.groups, key=lambda name: -len(survey.answers[name]))
    counts = [len(survey.answers[name]) for name in ranked[:MAX_GROUPS]]
    axes.bar_label(axes.barh(range(len(counts)), counts, color=style.BLUE, height=0.75), padding=2, fontsize=6)
    style.rows(axes, [style.label(name) for name in ranked[:MAX_GROUPS]])
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlim(0, _ROOM_FOR_COUNT * counts[0])
    axes.set_xlabel(f"questions, of {len(survey.questions)}")
    more = len(ranked) - MAX_GROUPS
    axes.set_title(f"Coverage: {len(ranked)} groups" + (f", the {more} smallest not shown" if more > 0 else ""))


def _curve(axes: Axes, value_Q: FloatArray) -> None:
    """Disagreement of all questions, the largest first."""
    median = float(np.median(value_Q))
    rank_Q = np.arange(1, len(value_Q) + 1)
    axes.fill_between(rank_Q, value_Q, color=style.SKY, alpha=0.4, linewidth=0)
    axes.plot(rank_Q, value_Q, color=style.BLUE)
    axes.axhline(median, color=style.GREY, linestyle="--", linewidth=1)
    label: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "ha": "right", "fontsize": 8}
    axes.annotate(f"median {median:.3f}", (len(value_Q), median), **label)
    axes.set(xlim=(1, max(len(value_Q), 2)), ylabel="0 = all agree, at most 1")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"{len(value_Q)} questions that two groups or more answered, by rank")
    axes.set_title("Disagreement: mean JS divergence from the groups' mean")
