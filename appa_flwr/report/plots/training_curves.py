"""Pictures of training: what happened to the groups and to the policy, iteration by iteration.

Each function takes one or more iterations and returns a PNG.

Axis letters: I iterations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from appa_flwr.report.plots import style
from appa_flwr.run.records import CurvePoint, Iteration, RuleRound

MOST_NAMED_GROUPS = 12
"""Above this, lines of single groups cannot be told apart: all are grey and the extremes are named."""
NAMED_LOWEST, NAMED_HIGHEST = 4, 3
SMOOTHING_WINDOW = 5
PPO_ITERATION = "PPO iteration"

HEALTH: tuple[tuple[str, str, Callable[[Iteration], float]], ...] = (
    # title, unit, value
    ("Format score", "mean, 0 to 1", lambda line: line.format_score),
    ("KL to the reference", "nats", lambda line: line.kl),
    ("Entropy", "nats per token", lambda line: line.entropy),
    ("Policy loss", "loss", lambda line: line.policy_loss),
    ("Value loss", "loss", lambda line: line.value_loss),
    ("Clipped tokens", "share, 0 to 1", lambda line: line.clip_fraction),
    ("Response length", "tokens", lambda line: line.response_length),
)
HEALTH_COLUMNS = 2
CURVES: tuple[tuple[str, str, str, Callable[[CurvePoint], float | None]], ...] = (
    # name, colour, line, value
    ("held out, mean, predictions", style.BLUE, "-", lambda point: point.avg_as),
    ("held out, worst group, predictions", style.BLUE, "--", lambda point: point.min_as),
    ("held out, mean, survey", style.VERMILION, "-", lambda point: point.survey_avg_as),
    ("held out, worst group, survey", style.VERMILION, "--", lambda point: point.survey_min_as),
)


def _numbers(iterations: Sequence[RuleRound]) -> list[int]:
    return [line.iteration for line in iterations]


def _iteration_axis(axes: Axes, iterations: Sequence[RuleRound], *, name: str = PPO_ITERATION) -> None:
    axes.set_xlim(iterations[0].iteration - 0.5, iterations[-1].iteration + 0.5)
    style.whole_numbers(axes.xaxis)
    axes.set_xlabel(name)


def _shade_fall_back(axes: Axes, iterations: Sequence[RuleRound]) -> None:
    """Greys the iterations in which the rule took the plain mean, neighbours as one strip."""
    for fell_back, strip in itertools.groupby(iterations, key=lambda line: bool(line.fell_back)):
        numbers = _numbers(list(strip))
        if fell_back:
            axes.axvspan(numbers[0] - 0.5, numbers[-1] + 0.5, color=style.SHADE, linewidth=0, zorder=0)


def smoothed(values: pd.DataFrame, window: int) -> pd.DataFrame:
    """Centred mean over up to `window` measured rows; a row without a value stays without."""
    return values.rolling(window, center=True, min_periods=1).mean().where(values.notna())


@style.picture
def group_curves(
    iterations: Sequence[RuleRound],
    groups: Sequence[str],
    pick: Callable[[RuleRound], Mapping[str, float | None]],
    *,
    title: str,
    axis: str,
    below: str = PPO_ITERATION,
    smooth: bool = False,
    shade: bool = False,
    level: float | None = None,
) -> Figure:
    """One line a group over the iterations.

    Up to `MOST_NAMED_GROUPS` groups each has its colour and dash, named at the right in the order in which
    the lines end. Of more, all are grey and only the lowest and highest at the end are named. A value that `pick` does
    not find in an iteration leaves a gap. `below` says what the iterations are, `smooth` draws a centred mean over
    `SMOOTHING_WINDOW` of them in long runs, `shade` greys those in which the rule took the plain mean, `level` marks
    a value.
    """
    figure = style.figure(4.4)
    axes = figure.add_subplot(ylabel=axis)
    values = pd.DataFrame(
        {group: style.as_array(pick(line).get(group) for line in iterations) for group in groups},
        index=_numbers(iterations),
    )
    if smooth and len(iterations) > style.MOST_MARKED_POINTS:
        values, title = smoothed(values, SMOOTHING_WINDOW), f"{title} (mean over {SMOOTHING_WINDOW} iterations)"
    ranked = list(values.ffill().iloc[-1].dropna().sort_values(kind="stable").index)
    many = len(groups) > MOST_NAMED_GROUPS
    named = ranked[:NAMED_LOWEST] + ranked[NAMED_LOWEST:][-NAMED_HIGHEST:] if many else list(groups)
    if many:
        axes.plot(values, color=style.LIGHT_GREY, linewidth=0.8, zorder=2)
    handles = {}
    for number, group in enumerate(named):
        second, colour = divmod(number, len(style.GROUP_COLOURS))
        handles[group] = style.curve(
            axes,
            values.index,
            values[group],
            color=style.GROUP_COLOURS[colour],
            linestyle="--" if second else "-",
            marker="s" if second else "o",
            zorder=3,
        )
    if level is not None:
        axes.axhline(level, color=style.DARK_GREY, linestyle=":", linewidth=1.2)
    if shade:
        _shade_fall_back(axes, iterations)
    order = [group for group in reversed(ranked) if group in named]
    figure.legend(
        [handles[group] for group in order],
        [style.label(group) for group in order],
        loc="outside right center",
        title=f"extremes of {len(groups)} at the end" if many else None,
    )
    _iteration_axis(axes, iterations, name=below)
    axes.set_title(title)
    return figure


@style.picture
def learning_curve(iterations: Sequence[Iteration]) -> Figure:
    """What the policy earns while it learns: sampled training answers, and greedy ones to a few held-out questions."""
    figure = style.figure(4.4)
    axes = figure.add_subplot(ylabel="score (0 to 1)", title="Learning curve")
    rewards_IG = pd.DataFrame([dict(line.rewards) for line in iterations], index=_numbers(iterations), dtype=float)
    axes.plot(rewards_IG.mean(axis=1), color=style.LIGHT_GREY, label="training, mean of groups", zorder=1)
    points = [(line.iteration, line.held_out) for line in iterations if line.held_out is not None]
    numbers = [number for number, _ in points]
    for name, colour, line, pick in CURVES:
        values = style.as_array(pick(point) for _, point in points)
        if not np.isnan(values).all():
            style.curve(axes, numbers, values, color=colour, linestyle=line, label=name, zorder=3)
    style.legend(figure, axes)
    _iteration_axis(axes, iterations)
    return figure


@style.picture
def fairness(
    iterations: Sequence[RuleRound], *, threshold: float | None, title: str, below: str = PPO_ITERATION
) -> Figure:
    """FI (Equation 4) over the iterations, and those in which the rule took the plain mean.

    The threshold is the rule's tau, None for a rule without; above 1 (never fall back) it is not drawn.
    """
    figure = style.figure(3.8)
    axes = figure.add_subplot(ylabel="fairness index (0 to 1)", title=title)
    _shade_fall_back(axes, iterations)
    fairness_I = [line.fairness_index for line in iterations]
    style.curve(axes, _numbers(iterations), fairness_I, color=style.BLUE, label="FI", zorder=3)
    if threshold is not None and threshold <= 1:
        axes.axhline(threshold, color=style.VERMILION, linestyle="--", label=f"threshold {threshold:g}")
    if any(line.fell_back for line in iterations):
        axes.fill_between([], [], color=style.SHADE, label="plain mean taken")
    style.legend(figure, axes)
    _iteration_axis(axes, iterations, name=below)
    return figure


@style.picture
def ppo_health(iterations: Sequence[Iteration]) -> Figure:
    """Small pictures of what tells a healthy PPO from a sick one.

    A rule's reward and the plain mean that it takes on fair batches have scales of their own, so each has its line.
    """
    figure = style.figure(1.05 * (1 + len(HEALTH)))
    panels = figure.subplots(-(-(1 + len(HEALTH)) // HEALTH_COLUMNS), HEALTH_COLUMNS)
    of_reward, *others = panels.flat
    of_reward.set(title="Aggregated reward", ylabel="mean, 0 to 1")
    for fell_back, colour, name in ((False, style.BLUE, "by the rule"), (True, style.VERMILION, "plain mean taken")):
        values = [line.reward if bool(line.fell_back) == fell_back else math.nan for line in iterations]
        if not all(map(math.isnan, values)):
            style.curve(of_reward, _numbers(iterations), values, color=colour, label=name)
    if any(line.fell_back for line in iterations):
        of_reward.legend()
    for axes, (title, unit, pick) in zip(others, HEALTH, strict=True):
        style.curve(axes, _numbers(iterations), map(pick, iterations), color=style.BLUE)
        axes.set(title=title, ylabel=unit)
    for axes in panels.flat:
        _iteration_axis(axes, iterations, name=PPO_ITERATION if axes in panels[-1] else "")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    return figure
