"""The picture of a survey: what each group answered, and how far the groups differ.

Axis letters: G groups, Q questions, K answer options.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from appa_flwr.analysis.alignment import GROUPS_TO_COMPARE, as_arrays, known_targets, shared_rewards
from appa_flwr.core.files import replace_file
from appa_flwr.report import style
from appa_flwr.survey.types import FloatArray, Survey

FILE: Final = "survey.png"
MAX_GROUPS: Final = 60


def divergence_from_mean(survey: Survey) -> FloatArray:
    """The groups' mean divergence from their common mean, for each question that at least two of them answered.

    One minus what answering that mean would score in the `js` reward, in [0, 1], 0 where all agree.
    """
    target_GQK, option_QK = as_arrays(survey.questions, survey.answers)
    compared_Q = known_targets(target_GQK, option_QK).sum(axis=0) >= GROUPS_TO_COMPARE
    target_GQK, option_QK = target_GQK[:, compared_Q], option_QK[compared_Q]
    reward_GQ = shared_rewards(np.nanmean(target_GQK, axis=0), target_GQK, option_QK, metric="js")
    return np.asarray(1.0 - np.nanmean(reward_GQ, axis=0))


def draw(survey: Survey, path: Path) -> Path:
    """Write the picture of at least one group as a PNG, and return its path; an older one is replaced.

    Raises:
        UserError: it cannot be written.
    """
    with warnings.catch_warnings():
        # A script that the font lacks is drawn as boxes; the survey is none the worse for it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        replace_file(path, _picture(survey, divergence_from_mean(survey)), parents=True)
    return path


@style.picture
def _picture(survey: Survey, divergence_Q: FloatArray) -> Figure:
    figure = style.figure(max(0.19 * min(len(survey.groups), MAX_GROUPS), 3.0) + 0.8)
    coverage, disagreement = figure.subplots(1, 2, width_ratios=[2, 3])
    _bars(coverage, survey)
    disagreement.plot(np.arange(1, len(divergence_Q) + 1), np.sort(divergence_Q)[::-1], color=style.BLUE)
    disagreement.set(ylabel="0 = all agree, at most 1", title="Disagreement: mean JS divergence from the groups' mean")
    disagreement.set_xlabel(f"{len(divergence_Q)} questions that two groups or more answered, by rank")
    disagreement.set_ylim(bottom=0)
    return figure


def _bars(axes: Axes, survey: Survey) -> None:
    """Bars of answered questions per group, the fullest group on top."""
    ranked = sorted(survey.groups, key=lambda name: -len(survey.answers[name]))
    shown = ranked[:MAX_GROUPS]
    bars = axes.barh(range(len(shown)), [len(survey.answers[name]) for name in shown], color=style.BLUE, height=0.75)
    axes.bar_label(bars, padding=2, fontsize=6)
    style.rows(axes, [style.label(name) for name in shown])
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(x=0.08)
    more = len(ranked) - len(shown)
    axes.set_title(f"Coverage: {len(ranked)} groups" + (f", the {more} smallest not shown" if more else ""))
    axes.set_xlabel(f"questions, of {len(survey.questions)}")
