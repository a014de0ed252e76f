"""A grid's pictures, as in the paper: fairness against the worst group, and training by rule.

Axis letters: I iterations.
"""

import itertools
from collections.abc import Iterator, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from appa_flwr.report import style
from appa_flwr.report.style import RULE_STYLE
from appa_flwr.run.pair_scores import PREDICTIONS

COLUMN = 5.0
"""Inches; scaled to the width of a paper's column, the text has the size of the paper's text."""
FEW_TICKS = 5
LINES = ("base", "sft")


def pictures(
    summary: pd.DataFrame, iterations: pd.DataFrame, rules: Sequence[str], *, metric: str, title: str
) -> Iterator[tuple[str, bytes]]:
    """Yield name and PNG of a setting's pictures, from its runs' summaries and iterations, if they have data."""
    known = summary[(summary["metric"] == metric) & (summary["against"] == PREDICTIONS)]
    if known["method"].isin(rules).any():
        yield "trade-off", trade_off(known, rules, metric=metric, title=title)
    if iterations.empty:
        return
    weights, rewards = (iterations.filter(regex=f"^{what}/").astype(float) for what in ("weights", "rewards"))
    curves = {
        "fairness": ("Fairness index", iterations["fairness_index"], 1),
        "weights": ("largest less smallest weight", weights.max(axis=1) - weights.min(axis=1), 1),
        "worst": (f"worst group's reward ({metric})", rewards.min(axis=1), 9),
    }
    for name, (axis, values, smooth) in curves.items():
        yield name, by_iteration(iterations.assign(value=values), axis=axis, title=title, smooth=smooth)


@style.picture
def trade_off(summary: pd.DataFrame, rules: Sequence[str], *, metric: str, title: str) -> Figure:
    """Min AS against the Fairness Index; base and SFT are lines, as references for the rules.

    Source: "Fairness-Alignment Trade-off Analysis". Bars are the standard deviation over seeds (ddof 1).
    """
    figure = style.figure(3.6, width=COLUMN)
    axes = figure.add_subplot(xlabel="Fairness index", ylabel=f"Min AS ({metric})", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(FEW_TICKS))  # more ticks would overlap at a column's width
    others, by_method = itertools.cycle(style.OTHER_STYLES), summary.groupby("method")[["fi", "min_as"]]
    mean, spread = by_method.mean(), by_method.std().fillna(0.0)
    for name in filter(mean.index.__contains__, LINES):
        label, colour, _, dash = style.METHOD_STYLE[name]
        axes.axhline(mean["min_as"][name], color=colour, linestyle=dash, label=label)
    for name in filter(mean.index.__contains__, rules):
        colour, marker = RULE_STYLE.get(name) or next(others)
        look: style.Look = {"color": colour, "marker": marker, "markersize": 9, "linestyle": "none", "capsize": 2}
        axes.errorbar(*mean.loc[name], *spread.loc[name, ["min_as", "fi"]], label=style.label(name), **look)
    style.legend(figure, axes)
    return figure


@style.picture
def by_iteration(iterations: pd.DataFrame, *, axis: str, title: str, smooth: int = 1) -> Figure:
    """The column `value` over the iterations by rule: the mean over seeds, with the range over seeds shaded."""
    figure = style.figure(3.2, width=COLUMN)
    axes: Axes = figure.add_subplot(xlabel="PPO iteration", ylabel=axis, title=title)
    others = itertools.cycle(style.OTHER_STYLES)
    for rule, rows in iterations.groupby("method", sort=False):
        colour, _ = RULE_STYLE.get(str(rule)) or next(others)
        table = rows.pivot(index="iteration", columns="seed", values="value")
        table = table.rolling(smooth, center=True, min_periods=1).mean()
        axes.plot(table.index, table.mean(axis=1), color=colour, label=style.label(str(rule)))
        axes.fill_between(table.index, table.min(axis=1), table.max(axis=1), color=colour, alpha=0.15, linewidth=0)
    style.legend(figure, axes)
    return figure
