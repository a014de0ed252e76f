"""A grid's own picture: fairness against the worst group, as in the paper."""

import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from appa_flwr.report import style
from appa_flwr.report.frames import method_name

REFERENCES = {"base": (style.GREY, "--"), "sft": (style.BLUE, "-.")}
"""Method drawn as a line -> colour, dash."""
RULE_STYLES = tuple(zip((style.GREEN, style.ORANGE, style.SKY, style.YELLOW, style.BLACK), "^PdX<", strict=True))
"""(colour, marker) of each rule."""
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
