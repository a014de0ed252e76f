"""The one picture of the benchmarks: stacked bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from appa_flwr.report.plots import style


@style.picture
def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float]]], *, axis: str) -> Figure:
    """One bar a row, with the sum next to it.

    Args:
        rows: names, and up to three parts that all rows have.
        axis: what the parts measure.
    """
    figure = style.figure(1.2 + 0.32 * len(rows), width=8)
    axes = figure.add_subplot(xlabel=axis)
    left = np.zeros(len(rows))
    for part, colour in zip(rows[0][1], (style.BLUE, style.ORANGE, style.GREEN), strict=False):
        values = np.array([row[part] for _, row in rows])
        bars = axes.barh(range(len(rows)), values, left=left, color=colour, height=0.8, label=part)
        left += values
    axes.bar_label(bars, [f"{total:.3g}" for total in left], padding=4, fontsize=9)
    axes.margins(x=0.1)
    style.rows(axes, [name for name, _ in rows])
    axes.legend()
    return figure
