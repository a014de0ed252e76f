"""The picture of results: scores per group.

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
from appa_flwr.report.plots import style

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
