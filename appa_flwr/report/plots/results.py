"""Pictures of results: scores per group, and the way from base to ceiling.

Axis letters: G groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from appa_flwr.report.artifacts import is_known
from appa_flwr.report.findings import Way
from appa_flwr.report.plots import style
from appa_flwr.run.records import LOOK_UPS

LEAST_SPIDER_GROUPS = 3
MOST_UPRIGHT_NAMES = 12
"""Above this, the names round a spider plot would collide and are written along their spokes."""
RULE_STYLE: Mapping[str, tuple[str, str]] = {
    "average": (style.BLUE, "o"),
    "min": (style.PURPLE, "s"),
    "appa": (style.VERMILION, "*"),
}


@style.picture
def spider(per_group: Mapping[str, Mapping[str, float]], groups: Sequence[str], *, metric: str) -> Figure:
    """Per-group alignment scores of several methods on one polar picture.

    Source: "Per-Group Alignment: Spider Plot Analysis". The radial axis does not start at 0 (it says where), since
    scores differ by a few hundredths. `per_group` is method or rule -> group -> score in [0, 1], a gap where there is
    none; `groups` are `LEAST_SPIDER_GROUPS` names or more, clockwise from the top.
    """
    upright = len(groups) <= MOST_UPRIGHT_NAMES
    figure = style.figure(6.5 if upright else 8.0, width=9.0)
    axes: Any = figure.add_subplot(projection="polar")
    axes.set_theta_zero_location("N")
    axes.set_theta_direction(-1)
    angles_G = np.linspace(0, 2 * np.pi, len(groups), endpoint=False)
    round_trip = [*range(len(groups)), 0]
    others = itertools.cycle(style.OTHER_STYLES)
    for method, scores in per_group.items():
        if method in style.METHOD_STYLE:
            name, colour, marker, dash = style.METHOD_STYLE[method]
        else:
            name, (colour, marker), dash = style.label(method), RULE_STYLE.get(method) or next(others), "-"
        angles, values = angles_G[round_trip], style.as_array(scores.get(group) for group in groups)[round_trip]
        width, above = (2.2, 4) if method == "ppo" else (1.5, 3)
        look: style.Look = {"color": colour, "linestyle": dash, "marker": marker, "linewidth": width, "zorder": above}
        axes.plot(angles, values, label=name, **look)
        if method == "ppo" and np.isfinite(values).all():
            axes.fill(angles, values, color=colour, alpha=0.12)
    measured = [value for scores in per_group.values() for value in scores.values() if is_known(value)]
    step = 0.05
    floor = max(0.0, math.floor(min(measured, default=0.0) / step - 0.5) * step)
    top = max(floor + step, min(1.0, math.ceil(max(measured, default=1.0) / step) * step))
    axes.set_ylim(floor, top)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], prune="upper"))
    # Between two spokes, so that the numbers do not lie on a line of scores.
    axes.set_rlabel_position((180.0 if upright else 540.0) / len(groups))
    axes.tick_params(axis="y", labelsize=8, labelcolor=style.DARK_GREY, zorder=10)
    axes.set_xticks(angles_G, [])
    for angle, group in zip(angles_G, groups, strict=True):
        _name_spoke(axes, style.label(group), angle=float(angle), rim=top, upright=upright)
    figure.suptitle(f"Alignment score per group ({metric}); the centre is {floor:.2f}, the rim {top:.2f}")
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


def spread(positions: Sequence[float], *, gap: float, low: float, high: float) -> list[float]:
    """Moves positions apart so that labels placed there do not overlap.

    They keep their order and end up in [low, high], at least `gap` apart, or less where they cannot all fit.
    """
    steps = min(gap, (high - low) / max(len(positions) - 1, 1)) * np.arange(len(positions))
    order = np.argsort(positions, kind="stable")
    wanted = np.array(positions)[order] - steps
    # Pushed rightwards only and leftwards only: both keep the gaps, so their mean does, and it favours no side.
    rightwards = np.maximum.accumulate(wanted)
    leftwards = np.minimum.accumulate(wanted[::-1])[::-1]
    placed = np.empty(len(positions))
    placed[order] = np.clip((rightwards + leftwards) / 2, low, high - steps[-1]) + steps
    return [float(place) for place in placed]


@style.picture
def way_to_ceiling(ways: Sequence[tuple[str, Way]], *, metric: str) -> Figure:
    """A bar from base to ceiling a (name of the targets, way), filled as far as PPO came."""
    edge = 0.04
    figure = style.figure(0.9 + 1.25 * len(ways))
    axes = figure.add_subplot(
        xlabel=f"alignment score ({metric}, 0 to 1)", title="The way from base to the best shared answer"
    )
    values = [value for _, way in ways for value in way.positions.values()]
    span = max(max(values) - min(values), 0.01)
    axes.set_xlim(min(values) - edge * span, max(values) + edge * span)
    names = []
    for row, (targets, way) in enumerate(ways):
        _draw_way(axes, way, row=row)
        covered = "no way to go" if way.covered is None else f"{way.covered:.0%} covered"
        names.append(f"{way.measure}\n{targets}\n{covered}")
    style.rows(axes, names)
    axes.set_ylim(len(ways) - 0.35, -0.65)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return figure


def _draw_way(axes: Axes, way: Way, *, row: int) -> None:
    """One bar with its markers; the names hang below, moved apart and joined to the markers by thin lines."""
    thickness, label_gap, label_depth, line_start = 0.30, 0.115, 0.36, 0.18
    ceiling_name = next(method for method in way.positions if method.startswith("ceiling"))
    base, ceiling, ppo = way.positions["base"], way.positions[ceiling_name], way.positions["ppo"]
    axes.barh(row, ceiling - base, left=base, height=thickness, color=style.SHADE, zorder=2)
    gained = ppo >= base
    look: style.Look = {"color": style.ORANGE if gained else style.LIGHT_GREY, "hatch": None if gained else "///"}
    axes.barh(row, ppo - base, left=base, height=thickness, zorder=2, edgecolor="white", linewidth=0, **look)
    low, high = axes.get_xlim()
    gap = label_gap * (high - low)
    places = spread(list(way.positions.values()), gap=gap, low=low + gap / 2, high=high - gap / 2)
    for (method, value), place in zip(way.positions.items(), places, strict=True):
        name, colour, marker, _ = style.METHOD_STYLE[method]
        name = {ceiling_name: "Ceiling"}.get(method, "Look-up" if method in LOOK_UPS else name.removesuffix(" answer"))
        axes.plot(value, row, marker=marker, color=colour, markersize=9, markeredgewidth=2, zorder=4)
        axes.plot([value, place], [row + line_start, row + label_depth - 0.02], color=style.GREY, linewidth=0.8)
        axes.text(place, row + label_depth, f"{name} {value:.3f}", ha="center", va="top", fontsize=9, color=colour)
