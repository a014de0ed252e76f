"""The pictures of a report, each drawn by one function from frames and returned as the bytes of a PNG.

Axis letters: I iterations, G groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from appa_flwr.analysis.intervals import Interval
from appa_flwr.report import style
from appa_flwr.report.frames import method_name, spans

SPIDER_GROUPS = range(3, 25)
"""Two spokes are no plane, and the names of more than two dozen collide: then the table has the scores."""
HEALTH = {
    "fairness_index": "Fairness index",
    "reward": "Aggregated reward",
    "format_score": "Format score",
    "kl": "KL to the reference (nats)",
    "entropy": "Entropy (nats a token)",
    "policy_loss": "Policy loss",
    "value_loss": "Value loss",
    "clip_fraction": "Clipped tokens (share)",
}
"""Column of a rule's rounds -> title."""
CURVES = {
    # column: (name, colour, line)
    "avg_as": ("held out, mean, predictions", style.BLUE, "-"),
    "min_as": ("held out, worst group, predictions", style.BLUE, "--"),
    "survey_avg_as": ("held out, mean, survey", style.VERMILION, "-"),
    "survey_min_as": ("held out, worst group, survey", style.VERMILION, "--"),
}


@style.picture
def worst_group(intervals: pd.DataFrame, *, rule: str) -> Figure:
    """Min AS of every method, a panel each kind of target; without bounds there is the point alone."""
    levels = intervals[(intervals["less"] == "") & (intervals["measure"] == "Min AS")]
    shown = spans(levels, "method").rename(index=lambda method: method_name(method, rule))
    figure = style.figure(1.2 + 0.34 * len(shown))
    panels = figure.subplots(1, shown.shape[1], sharey=True, squeeze=False)[0]
    for axes, kind, (_, column) in zip(panels, shown.columns.get_level_values(0), shown.items(), strict=True):
        for row, span in enumerate(column):
            if not isinstance(span, Interval):
                continue
            arms = np.nan_to_num([[span.value - span.low], [span.high - span.value]])
            axes.errorbar(span.value, row, xerr=arms, fmt="o", color=style.BLUE, capsize=3)
            axes.annotate(
                f"{span.value:.3f}", (span.value, row), xytext=(0, 4), textcoords="offset points", ha="center"
            )
        axes.set_yticks(range(len(shown)), [style.label(str(row)) for row in shown.index])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.set_title(f"Min AS against {kind}")
    figure.suptitle("The worst-off group by method; 95 % over questions")
    return figure


@style.picture
def spider(scores_GM: pd.DataFrame, *, title: str, rule: str = "") -> Figure:
    """Per-group alignment scores of several methods on one polar picture.

    Source: "Per-Group Alignment: Spider Plot Analysis". The radial axis does not start at 0 (it says where), since
    scores differ by a few hundredths. `scores_GM` has a row a group, as many as `SPIDER_GROUPS` has, clockwise from the
    top, and a column a method: scores in [0, 1], a gap where there is none; `rule` is that of PPO.
    """
    figure = style.figure(7.5)
    axes: Any = figure.add_subplot(projection="polar", theta_offset=np.pi / 2, theta_direction=-1)
    angles_G = np.linspace(0, 2 * np.pi, len(scores_GM), endpoint=False)
    round_trip = [*range(len(scores_GM)), 0]
    others = itertools.cycle(style.OTHER_STYLES)
    for method, scores_G in scores_GM.items():
        _, colour, marker, dash = style.METHOD_STYLE.get(str(method)) or ("", *next(others), "-")
        look: style.Look = {"color": colour, "linestyle": dash, "marker": marker}
        name = style.label(method_name(str(method), rule))
        axes.plot(angles_G[round_trip], scores_G.to_numpy(float)[round_trip], label=name, **look)
    step = 0.05
    floor = max(0.0, math.floor(np.nanmin(scores_GM) / step - 0.5) * step)
    top = max(floor + step, min(1.0, math.ceil(np.nanmax(scores_GM) / step) * step))
    axes.set_ylim(floor, top)
    # Between two spokes, so that the numbers do not lie on a line of scores.
    axes.set_rlabel_position(180.0 / len(scores_GM))
    axes.tick_params(axis="y", labelsize=8, labelcolor=style.DARK_GREY, zorder=10)
    axes.set_xticks(angles_G, [style.label(str(group)) for group in scores_GM.index], fontsize=8)
    for angle, text in zip(angles_G, axes.get_xticklabels(), strict=True):
        side = round(math.sin(angle), 6)  # names start or end at the rim, and are centred at its poles
        text.set_horizontalalignment("left" if side > 0 else "right" if side < 0 else "center")
    figure.suptitle(f"{title}\nThe centre is {floor:.2f}, the rim {top:.2f}")
    style.legend(figure, axes)
    return figure


@style.picture
def weights(rounds: pd.DataFrame, groups: Sequence[str]) -> Figure:
    """A line a group over the rounds of a rule: its weight; dotted equal weights, grey where the plain mean was taken.

    The groups that end highest have colours and names, as many as there are colours, the others are grey. Where a group
    gave nothing is a gap.
    """
    figure = style.figure(4.4)
    title = "Weight per group; dotted: all equal; grey: not used, plain mean taken"
    axes = figure.add_subplot(ylabel="weight (share)", title=title)
    values_IG = rounds.set_index("iteration").reindex(columns=[f"weights/{group}" for group in groups]).astype(float)
    values_IG.columns = pd.Index(groups)
    ranked = [*values_IG.ffill().iloc[-1].sort_values(ascending=False, kind="stable").index]
    axes.plot(values_IG[ranked[len(style.GROUP_COLOURS) :]], color=style.LIGHT_GREY, linewidth=0.8, zorder=2)
    for group, colour in zip(ranked, style.GROUP_COLOURS, strict=False):
        style.curve(axes, values_IG[group], color=colour, label=style.label(group), zorder=3)
    axes.axhline(1 / len(groups), color=style.DARK_GREY, linestyle=":", linewidth=1.2)
    style.legend(figure, axes)
    _over(axes, rounds)
    return figure


def _over(axes: Axes, rounds: pd.DataFrame) -> None:
    """The axis of iterations, grey where the rule took the plain mean."""
    numbers = rounds["iteration"].to_numpy(float)
    for number in numbers[rounds["fell_back"].eq(True)]:
        axes.axvspan(number - 0.5, number + 0.5, color=style.SHADE, linewidth=0, zorder=0)
    axes.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    axes.set_xlabel("iteration")


@style.picture
def learning_curve(iterations: pd.DataFrame) -> Figure:
    """What the policy earns while it learns: sampled training answers, and greedy ones to a few held-out questions."""
    figure = style.figure(4.4)
    axes = figure.add_subplot(ylabel="score (0 to 1)", title="Learning curve")
    by_number = iterations.set_index("iteration")
    mean_I = by_number.filter(like="rewards/").astype(float).mean(axis=1)
    axes.plot(mean_I, color=style.LIGHT_GREY, label="training, mean of groups", zorder=1)
    for column, (name, colour, line) in CURVES.items():
        points = by_number.reindex(columns=[f"held_out/{column}"]).iloc[:, 0].astype(float).dropna()
        if len(points):
            style.curve(axes, points, color=colour, linestyle=line, label=name, zorder=3)
    style.legend(figure, axes)
    _over(axes, iterations)
    return figure


@style.picture
def health(rounds: pd.DataFrame) -> Figure:
    """Small pictures of what tells a healthy run from a sick one; grey where the rule took the plain mean."""
    shown = [column for column in HEALTH if column in rounds]
    figure = style.figure(1.05 * (1 + len(shown)))
    for place, column in enumerate(shown, start=1):
        axes = figure.add_subplot(-(-len(shown) // 2), 2, place, title=HEALTH[column])
        style.curve(axes, rounds.set_index("iteration")[column].astype(float), color=style.BLUE)
        _over(axes, rounds)
    return figure


@style.picture
def loss(losses: Sequence[float]) -> Figure:
    """PluralLLM's loss over its federated rounds."""
    figure = style.figure(3.2)
    axes = figure.add_subplot(
        xlabel="federated round", ylabel="loss\n(mean over groups)", title="PluralLLM pretraining"
    )
    style.curve(axes, pd.Series(losses, index=range(1, len(losses) + 1)), color=style.BLUE)
    return figure
