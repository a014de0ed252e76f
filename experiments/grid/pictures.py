"""A grid's pictures: fairness against the worst group, as in the paper, and the worst group by each method."""

import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from appa_flwr.report import style
from appa_flwr.report.frames import method_name
from appa_flwr.run.records import LOOK_UPS

REFERENCES = {"base": (style.GREY, "--"), "sft": (style.BLUE, "-.")}
"""Method drawn as a line -> colour, dash."""
RULE_STYLES = tuple(zip((style.GREEN, style.ORANGE, style.SKY, style.YELLOW, style.BLACK), "^PdX<", strict=True))
"""(colour, marker) of each rule."""
LINES = dict(zip(("uniform", *LOOK_UPS), (":", "--", "-."), strict=True))
"""Method without training that is drawn as a line -> dash."""
COLUMN = 5.0
"""Inches; scaled to the width of a paper's column, the text has the size of the paper's text."""


@style.picture
def trade_off(summary: pd.DataFrame, rules: Sequence[str], *, metric: str, title: str) -> Figure:
    """Min AS against the Fairness Index; base and SFT are lines, as references for the rules.

    Source: "Fairness-Alignment Trade-off Analysis". Bars are the standard deviation over seeds (ddof 1).
    """
    figure = Figure((COLUMN, 3.6))
    axes = figure.add_subplot(xlabel="Fairness index", ylabel=f"Min AS ({metric}, predictions)", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(5))  # more ticks would overlap at a column's width
    styles, by_method = itertools.cycle(RULE_STYLES), summary.groupby("method")[["fi", "min_as"]]
    mean, spread = by_method.mean(), by_method.std().fillna(0.0)
    for name in filter(mean.index.__contains__, REFERENCES):
        colour, dash = REFERENCES[name]
        axes.axhline(mean["min_as"][name], color=colour, linestyle=dash, label=method_name(name))
    for name in filter(mean.index.__contains__, rules):
        colour, marker = next(styles)
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 9, "linestyle": "none", "capsize": 2}
        axes.errorbar(*mean.loc[name], *spread.loc[name, ["min_as", "fi"]], label=style.label(name), **look)
    figure.legend(loc="outside right upper")
    return figure


@style.picture
def worst_group(levels: pd.DataFrame, rules: Sequence[str], *, title: str) -> Figure:
    """Min AS against survey answers of SFT and of each rule, with 95 % intervals; others are lines.

    `levels` has a row for each method, with `value`, `low` and `high`.
    """
    by_method = levels.set_index("method")[["value", "low", "high"]]
    shown = [name for name in ("sft", *rules) if name in by_method.index]
    figure = Figure((style.WIDTH, 1.2 + 0.4 * len(shown)))
    axes = figure.add_subplot(xlabel="Min AS, against survey answers", title=title)
    for place, name in enumerate(shown):
        value, low, high = by_method.loc[name].to_numpy(float)
        axes.plot([low, high], [place, place], color=style.BLUE, marker="|", markersize=10)
        axes.plot(value, place, color=style.BLUE, marker="o", markersize=7)
    for name in filter(by_method.index.__contains__, LINES):
        axes.axvline(by_method["value"][name], color=style.GREY, linestyle=LINES[name], label=method_name(name))
    axes.set_yticks(range(len(shown)), [style.label(method_name(name)) for name in shown])
    axes.invert_yaxis()
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=len(LINES))
    return figure
