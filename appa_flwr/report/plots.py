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
from matplotlib.ticker import MaxNLocator

from appa_flwr.analysis.intervals import Interval
from appa_flwr.report import style
from appa_flwr.report.frames import method_name, spans

LEAST_SPIDER_GROUPS = 3
FEW_SPOKES = 12
"""Above this, the names round a spider plot would collide and are written along their spokes."""
MOST_NAMED_GROUPS = 12
"""Above this, lines of single groups cannot be told apart: all are grey and the extremes are named."""
NAMED_LOWEST, NAMED_HIGHEST = 4, 3
HEALTH = {
    # column: (title, unit)
    "fairness_index": ("Fairness index", "0 to 1"),
    "reward": ("Aggregated reward", "mean, 0 to 1"),
    "format_score": ("Format score", "mean, 0 to 1"),
    "kl": ("KL to the reference", "nats"),
    "entropy": ("Entropy", "nats per token"),
    "policy_loss": ("Policy loss", "loss"),
    "value_loss": ("Value loss", "loss"),
    "clip_fraction": ("Clipped tokens", "share, 0 to 1"),
}
CURVES = {
    # column: (name, colour, line)
    "avg_as": ("held out, mean, predictions", style.BLUE, "-"),
    "min_as": ("held out, worst group, predictions", style.BLUE, "--"),
    "survey_avg_as": ("held out, mean, survey", style.VERMILION, "-"),
    "survey_min_as": ("held out, worst group, survey", style.VERMILION, "--"),
}


def worst_group(intervals: pd.DataFrame, *, rule: str) -> bytes:
    """Min AS of every method, a panel each kind of target."""
    levels = intervals[(intervals["less"] == "") & (intervals["measure"] == "Min AS")]
    shown = spans(levels, "method").rename(index=lambda method: method_name(method, rule))
    return dots(shown, title="The worst-off group by method; 95 % over questions")


@style.picture
def dots(spans: pd.DataFrame, *, title: str) -> Figure:
    """A row each row of `frames.spans`, a panel each column; without bounds there is the point alone."""
    figure = style.figure(1.2 + 0.34 * len(spans))
    panels = figure.subplots(1, spans.shape[1], sharey=True, squeeze=False)[0]
    titles = spans.columns.map("{0[1]} against {0[0]}".format)
    for axes, panel_title, (_, column) in zip(panels, titles, spans.items(), strict=True):
        known = [(row, span) for row, span in enumerate(column) if isinstance(span, Interval)]
        for row, span in known:
            arms = np.nan_to_num([[span.value - span.low], [span.high - span.value]])
            axes.errorbar(span.value, row, xerr=arms, fmt="o", color=style.BLUE, capsize=3)
            axes.annotate(
                f"{span.value:.3f}", (span.value, row), xytext=(0, 4), textcoords="offset points", ha="center"
            )
        if any(span.low <= 0 <= span.high for _, span in known):
            axes.axvline(0.0, color=style.GREY, linestyle="--", linewidth=1)
        style.rows(axes, [style.label(str(row)) for row in spans.index])
        axes.set_title(str(panel_title))
    figure.suptitle(title)
    return figure


@style.picture
def spider(scores_GM: pd.DataFrame, *, title: str, rule: str = "") -> Figure:
    """Per-group alignment scores of several methods on one polar picture.

    Source: "Per-Group Alignment: Spider Plot Analysis". The radial axis does not start at 0 (it says where), since
    scores differ by a few hundredths. `scores_GM` has a row a group, `LEAST_SPIDER_GROUPS` or more, clockwise from the
    top, and a column a method: scores in [0, 1], a gap where there is none; `rule` is that of PPO.
    """
    few = len(scores_GM) <= FEW_SPOKES
    figure = style.figure(6.5 if few else 8.0, width=9.0)
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
    low, high = np.nanmin(scores_GM), np.nanmax(scores_GM)
    floor = max(0.0, math.floor(low / step - 0.5) * step)
    top = max(floor + step, min(1.0, math.ceil(high / step) * step))
    axes.set_ylim(floor, top)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], prune="upper"))
    # Between two spokes, so that the numbers do not lie on a line of scores.
    axes.set_rlabel_position((180.0 if few else 540.0) / len(scores_GM))
    axes.tick_params(axis="y", labelsize=8, labelcolor=style.DARK_GREY, zorder=10)
    axes.set_xticks(angles_G, [])
    for angle, group in zip(angles_G, scores_GM.index, strict=True):
        _name_spoke(axes, style.label(str(group)), angle=float(angle), rim=top, upright=few)
    figure.suptitle(f"{title}\nThe centre is {floor:.2f}, the rim {top:.2f}")
    style.legend(figure, axes)
    return figure


def _name_spoke(axes: Axes, name: str, *, angle: float, rim: float, upright: bool) -> None:
    """Writes a group's name outside its spoke (radians, clockwise from the top), along it where not upright."""
    distance, edge = 6.0, 1e-6
    x, y = math.sin(angle), math.cos(angle)
    at_pole = upright and abs(x) < edge
    axes.annotate(
        name,
        xy=(angle, rim),
        xytext=(distance * x, distance * y),
        textcoords="offset points",
        ha="center" if at_pole else "left" if x > -edge and angle < math.pi else "right",
        va="center" if not at_pole else "bottom" if y > 0 else "top",
        rotation=0.0 if upright else 90.0 - math.degrees(angle) + (0.0 if angle < math.pi else 180.0),
        rotation_mode="anchor",
        fontsize=10 if upright else 8,
        annotation_clip=False,
    )


@style.picture
def weights(rounds: pd.DataFrame, groups: Sequence[str]) -> Figure:
    """A line a group over the rounds of a rule: its weight; dotted equal weights, grey where the plain mean was taken.

    Up to `MOST_NAMED_GROUPS` groups each has its colour and dash, named at the right in the order in which the lines
    end. Of more, all are grey and only the lowest and highest at the end are named. Where a group gave nothing is a
    gap.
    """
    figure = style.figure(4.4)
    title = "Weight per group; dotted: all equal; grey: not used, plain mean taken"
    axes = figure.add_subplot(ylabel="weight (share)", title=title)
    values_IG = rounds.set_index("iteration").reindex(columns=[f"weights/{group}" for group in groups]).astype(float)
    values_IG.columns = pd.Index(groups)
    ranked = [*values_IG.ffill().iloc[-1].dropna().sort_values(kind="stable").index]
    many = len(groups) > MOST_NAMED_GROUPS
    named = ranked[:NAMED_LOWEST] + ranked[NAMED_LOWEST:][-NAMED_HIGHEST:] if many else [*groups]
    if many:
        axes.plot(values_IG, color=style.LIGHT_GREY, linewidth=0.8, zorder=2)
    handles = {}
    for number, group in enumerate(named):
        second, colour = divmod(number, len(style.GROUP_COLOURS))
        look: style.Look = {"linestyle": "--", "marker": "s"} if second else {"linestyle": "-", "marker": "o"}
        handles[group] = style.curve(axes, values_IG[group], color=style.GROUP_COLOURS[colour], zorder=3, **look)
    axes.axhline(1 / len(groups), color=style.DARK_GREY, linestyle=":", linewidth=1.2)
    order = [group for group in reversed(ranked) if group in named]
    above = f"extremes of {len(groups)} at the end" if many else None
    names = [style.label(group) for group in order]
    figure.legend([handles[group] for group in order], names, loc="outside right center", title=above)
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
def health(rounds: pd.DataFrame, *, threshold: float | None = None) -> Figure:
    """Small pictures of what tells a healthy run from a sick one; grey where the rule took the plain mean.

    A rule's reward and the plain mean have scales of their own, so each has its line. The threshold is APPA's tau;
    above 1 (never fall back) it is not drawn.
    """
    shown = {column: names for column, names in HEALTH.items() if column in rounds}
    figure = style.figure(1.05 * (1 + len(shown)))
    panels = figure.subplots(-(-len(shown) // 2), 2, squeeze=False)
    by_number = rounds.set_index("iteration")
    for axes, (column, (title, unit)) in zip(panels.flat, shown.items(), strict=False):
        axes.set(title=title, ylabel=unit)
        values_I, plain_I = by_number[column].astype(float), by_number["fell_back"].eq(True)
        style.curve(axes, values_I.mask(plain_I) if column == "reward" else values_I, color=style.BLUE)
        if column == "reward" and plain_I.any():
            style.curve(axes, values_I.where(plain_I), color=style.VERMILION, label="plain mean taken")
            axes.legend()
        if column == "fairness_index" and threshold is not None and threshold <= 1:
            axes.axhline(threshold, color=style.VERMILION, linestyle="--")
        _over(axes, rounds)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    for axes in panels.flat[len(shown) :]:
        axes.remove()
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
