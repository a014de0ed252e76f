"""A grid's pictures, as the paper has them: fairness against the worst group, and training by rule.

Axis letters: I iterations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from appa_flwr.core.files import replace_file
from appa_flwr.report import style
from appa_flwr.report.style import RULE_STYLE
from appa_flwr.run.records import Iteration, SummaryRow
from appa_flwr.run.run_files import METRICS, SUMMARY
from experiments.grid.plan import Trial

COLUMN = 5.0
"""Inches; shown at the width of a paper's column its text is as small as the paper's."""
FEW_TICKS = 5
SHOWN_FIRST = ("base", "sft")
PPO = "ppo"

Methods = Mapping[str, tuple[str, Mapping[int, Trial]]]
"""Name in tables and pictures -> name in the runs' files, and its trials by seed."""


def write(output: Path, setting: tuple[str, str, str], methods: Methods) -> None:
    """Write a setting's pictures; those that nothing is known for are left out.

    Raises:
        UserError: a run's file or a picture cannot be read or written.
    """
    for name, picture in _pictures(methods, title=", ".join(setting)):
        replace_file(output / "plots" / f"{'-'.join(setting)}-{name}.png", picture, parents=True)


def _pictures(methods: Methods, *, title: str) -> Iterator[tuple[str, bytes]]:
    rules = {name: trials for name, (method, trials) in methods.items() if method == PPO}
    if not rules:
        return
    config = next(iter(next(iter(rules.values())).values())).config
    metric = config.reward_metric
    shown = [name for name in (*SHOWN_FIRST, *rules) if name in methods]
    scores = {name: summary_rows(*methods[name], metric) for name in shown}
    yield "trade-off", trade_off(scores, metric=metric, title=title)
    lines = {rule: [METRICS.read(trial.folder) or () for trial in trials.values()] for rule, trials in rules.items()}
    yield "fairness", by_iteration(lines, lambda line: line.fairness_index, axis="Fairness index", title=title)
    yield "weights", by_iteration(lines, _weight_range, axis="largest less smallest weight", title=title)
    yield "worst", by_iteration(lines, _worst_reward, axis=f"worst group's reward ({metric})", title=title, smooth=9)


def summary_rows(method: str, trials: Mapping[int, Trial], metric: str) -> list[SummaryRow]:
    """A method's scores in each of its trials."""
    found = (row for trial in trials.values() for row in SUMMARY.read(trial.folder) or ())
    return [row for row in found if (row.method, row.metric) == (method, metric)]


def _weight_range(line: Iteration) -> float:
    return max(line.weights.values()) - min(line.weights.values())


def _worst_reward(line: Iteration) -> float:
    return min((reward for reward in line.rewards.values() if pd.notna(reward)), default=float("nan"))


@style.picture
def trade_off(scores: Mapping[str, list[SummaryRow]], *, metric: str, title: str) -> Figure:
    """Min AS against the Fairness Index; base and SFT are lines, since rules are to be read against them.

    Source: "Fairness-Alignment Trade-off Analysis". Bars are the standard deviation over seeds (ddof 1).
    """
    figure = style.figure(3.6, width=COLUMN)
    axes = figure.add_subplot(xlabel="Fairness index", ylabel=f"Min AS ({metric})", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(FEW_TICKS))  # more would touch each other at a column's width
    others = itertools.cycle(style.OTHER_STYLES)
    for name, rows in scores.items():
        fairness, lowest = np.array([row.fi for row in rows]), np.array([row.min_as for row in rows])
        if name in SHOWN_FIRST:
            shown, colour, _, dash = style.METHOD_STYLE[name]
            axes.axhline(lowest.mean(), color=colour, linestyle=dash, label=shown)
            continue
        colour, marker = RULE_STYLE.get(name) or next(others)
        bars = (lowest.std(ddof=1), fairness.std(ddof=1)) if len(rows) > 1 else (None, None)
        axes.errorbar(
            fairness.mean(), lowest.mean(), *bars, color=colour, marker=marker, markersize=9, linestyle="none",
            capsize=2, label=style.label(name),
        )  # fmt: skip
    style.legend(figure, axes)
    return figure


@style.picture
def by_iteration(
    lines: Mapping[str, list[tuple[Iteration, ...]]],
    pick: Callable[[Iteration], float],
    *,
    axis: str,
    title: str,
    smooth: int = 1,
) -> Figure:
    """A number over the iterations by rule, mean over seeds with the range over them shaded."""
    figure = style.figure(3.2, width=COLUMN)
    axes: Axes = figure.add_subplot(xlabel="PPO iteration", ylabel=axis, title=title)
    others = itertools.cycle(style.OTHER_STYLES)
    for rule, runs in lines.items():
        colour, _ = RULE_STYLE.get(rule) or next(others)
        table = pd.DataFrame({seed: {line.iteration: pick(line) for line in run} for seed, run in enumerate(runs)})
        table = table.sort_index().rolling(smooth, center=True, min_periods=1).mean()
        axes.plot(table.index, table.mean(axis=1), color=colour, label=style.label(rule))
        axes.fill_between(table.index, table.min(axis=1), table.max(axis=1), color=colour, alpha=0.15, linewidth=0)
    style.legend(figure, axes)
    return figure
