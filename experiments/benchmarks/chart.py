"""The one picture of the benchmarks: stacked bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO

from matplotlib.figure import Figure

from appa_flwr.report.plots import BLUE, GREEN, ORANGE


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float]]], *, axis: str) -> bytes:
    """A PNG of one bar a row, its sum next to it; all rows have the same parts, three at most."""
    figure = Figure(figsize=(8, 1.2 + 0.32 * len(rows)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    parts = list(rows[0][1])
    left = [0.0] * len(rows)
    for part, colour in zip(parts, (BLUE, ORANGE, GREEN), strict=False):
        values = [row[part] for _, row in rows]
        axes.barh(range(len(rows)), values, left=left, color=colour, height=0.8, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for number, total in enumerate(left):
        axes.text(total, number, f" {total:.3g}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(axis)
    axes.legend()
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
