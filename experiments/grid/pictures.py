"""A grid's picture, as in the paper: fairness against the worst group."""

import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from appa_flwr.report import style

COLUMN = 5.0
"""Inches; scaled to the width of a paper's column, the text has the size of the paper's text."""


@style.picture
def trade_off(summary: pd.DataFrame, rules: Sequence[str], *, metric: str, title: str) -> Figure:
    """Min AS against the Fairness Index; base and SFT are lines, as references for the rules.

    Source: "Fairness-Alignment Trade-off Analysis". Bars are the standard deviation over seeds (ddof 1).
    """
    figure = Figure((COLUMN, 3.6))
    axes = figure.add_subplot(xlabel="Fairness index", ylabel=f"Min AS ({metric})", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(5))  # more ticks would overlap at a column's width
    others, by_method = itertools.cycle(style.OTHER_STYLES), summary.groupby("method")[["fi", "min_as"]]
    mean, spread = by_method.mean(), by_method.std().fillna(0.0)
    for name in filter(mean.index.__contains__, ("base", "sft")):
        label, colour, _, dash = style.METHOD_STYLE[name]
        axes.axhline(mean["min_as"][name], color=colour, linestyle=dash, label=label)
    for name in filter(mean.index.__contains__, rules):
        colour, marker = next(others)
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 9, "linestyle": "none", "capsize": 2}
        axes.errorbar(*mean.loc[name], *spread.loc[name, ["min_as", "fi"]], label=style.label(name), **look)
    figure.legend(loc="outside right upper")
    return figure
