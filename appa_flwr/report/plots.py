"""The pictures of a report, each drawn by one function from frames and returned as the bytes of a PNG.

Axis letters: I iterations, G groups.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from appa_flwr.report import style
from appa_flwr.report.frames import method_name, spans
from appa_flwr.run.read import BY
from appa_flwr.run.records import CEILINGS, PPO, TRIVIAL_BASELINES, Card

MOST_MARKED_POINTS = 30
VALUE_LOSS = "value_loss"
FALL = 0.1
"""Fall of the format score by which an iteration is marked."""
HEALTH = {
    "fairness_index": "Fairness index",
    "reward": "Aggregated reward",
    "entropy": "Entropy (nats a token)",
    "policy_loss": "Policy loss",
    VALUE_LOSS: "Value loss",
    "clip_fraction": "Clipped tokens (share)",
}
"""Column of a rule's rounds -> title."""


@style.picture
def methods(intervals: pd.DataFrame, *, rule: str) -> Figure:
    """Min AS and Avg AS of every method against the first kind of target: the estimate, and its interval.

    PPO is blue, what answers without training black, ceilings are grey; a gap sets them off. Without bounds only the
    estimate is drawn.
    """
    levels = intervals[(intervals["less"] == "") & (intervals["against"] == intervals["against"].iloc[0])]
    shown = spans(levels, ["method"], ["measure"])[["Min AS", "Avg AS"]]
    kinds = [2 if name in CEILINGS else 1 if name in TRIVIAL_BASELINES else 0 for name in shown.index]
    place_of = [row + 0.6 * kind for row, kind in enumerate(kinds)]
    figure = Figure((style.WIDTH, 1.0 + 0.34 * (place_of[-1] + 1)))
    for axes, (measure, column) in zip(figure.subplots(1, 2, sharey=True), shown.items(), strict=True):
        for name, kind, place, span in zip(shown.index, kinds, place_of, column, strict=True):
            colour = style.GREY if kind == 2 else style.BLUE if name.split(BY)[0] == PPO else style.BLACK
            axes.plot([span.low, span.high], [place, place], color=colour, linewidth=3, alpha=0.45)
            axes.plot(span.value, place, "o", color=colour, markersize=6)
            axes.annotate(
                f"{span.value:.3f}", (span.value, place), xytext=(0, 5), textcoords="offset points", ha="center", size=9
            )
        axes.set_yticks(place_of, [style.label(method_name(name, rule)) for name in shown.index])
        axes.set_ylim(place_of[-1] + 0.6, -0.9)
        axes.grid(visible=False, axis="y")
        axes.set_title("Min AS (estimated)" if measure == "Min AS" else "Avg AS")
    return figure


@style.picture
def slopes(groups: pd.DataFrame) -> Figure:
    """Every group's score after SFT and after PPO: one panel per further column, and one line per row.

    The lowest after PPO is red, other groups that lose are dashed.
    """
    before, *after = groups.columns
    figure = Figure((style.WIDTH, 1.6 + 0.17 * len(groups)))
    score_GP = groups.to_numpy(float)
    gap = 0.9 * float(np.ptp(score_GP)) / max(len(groups), 8)
    panels = figure.subplots(1, len(after), sharey=True, squeeze=False)[0]
    for axes, name, end_G in zip(panels, after, score_GP[:, 1:].T, strict=True):
        place = -math.inf
        for rank, g in enumerate(np.argsort(end_G, kind="stable")):
            start, end = float(score_GP[g, 0]), float(end_G[g])
            colour, place = style.GREY if rank else style.VERMILION, max(place + gap, end)  # names do not overlap
            axes.plot([0, 1], [start, end], "o-" if end >= start else "o--", color=colour, zorder=3)
            axes.plot([1, 1.15], [end, place], color=style.LIGHT_GREY, linewidth=0.8)
            axes.text(1.18, place, style.label(str(groups.index[g])), va="center", size=9, color=colour)
        axes.set_xticks([0, 1], [before, style.label(name)])
        axes.set_xlim(-0.1, 1.9)
        axes.grid(visible=False, axis="x")
    figure.axes[0].set_title("Groups' scores")
    return figure


@style.picture
def training(rounds: pd.DataFrame) -> Figure:
    """Reward, format score and KL over the rounds, small; `broken` rounds are marked."""
    by_number = rounds.set_index("iteration")
    rewards = by_number[["group_reward"]].rename(columns={"group_reward": "mean of groups"})
    rewards["worst group"] = by_number.filter(regex="^rewards/").astype(float).min(axis=1)
    panels = {"Reward": rewards, "Format score": by_number[["format_score"]]}
    if "kl" in by_number:
        panels["KL to SFT (nats)"] = by_number[["kl"]]
    figure = Figure((style.WIDTH, 2.6))
    for axes, (title, frame) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        _lines(axes, frame.astype(float), ticks=4)
        axes.set_title(title, size=11)
        axes.tick_params(labelsize=9)
        for number in broken(rounds):
            axes.axvline(number, color=style.VERMILION, linestyle="--", linewidth=1)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=2, fontsize=9)
    return figure


def broken(rounds: pd.DataFrame) -> list[int]:
    """Iterations in which the KL jumped, or the format score fell by more than `FALL`."""
    fell = rounds["format_score"].diff() < -FALL
    return [*rounds.loc[fell | rounds["kl_jumped"] if "kl_jumped" in rounds else fell, "iteration"]]


@style.picture
def more_of_training(rounds: pd.DataFrame, groups: Sequence[str]) -> Figure:
    """Panels over the rounds of a rule: the groups' weights, and further measures of the run's health.

    Rounds in which the rule took the plain mean are grey. Groups with the highest last weights have colours and names.
    """
    by_number = rounds.set_index("iteration")
    weights_IG = by_number.reindex(columns=[f"weights/{group}" for group in groups]).astype(float)
    ranked = weights_IG.set_axis([*groups], axis=1).T.sort_values(by_number.index[-1], ascending=False, kind="stable").T
    panels = {"Weight per group": ranked}
    measures = [column for column in HEALTH if column in rounds]
    if VALUE_LOSS in rounds and not rounds[VALUE_LOSS].any():  # the run has no value model
        measures.remove(VALUE_LOSS)
    panels |= {HEALTH[column]: by_number[[column]] for column in measures}
    curve = by_number.filter(regex="^held_out/.*/min_as$")  # with `eval.every`
    panels["Min AS on held-out questions"] = curve.rename(columns=lambda column: column.split("/")[1])
    return _panels(panels, xlabel="iteration", shaded=by_number.index[by_number["fell_back"].eq(True)])


@style.picture
def pretraining(card: Card) -> Figure:
    """PluralLLM's loss over its federated rounds, and the distance of each group's step from the others'."""
    curves = {
        "PluralLLM's loss, mean over groups": pd.DataFrame({"loss": card.losses}),
        "Distance of a group's step from the others' mean": pd.DataFrame(card.distances),
    }
    return _panels(
        {title: curve.rename(index=lambda row: row + 1) for title, curve in curves.items()}, xlabel="federated round"
    )


def _panels(panels: Mapping[str, pd.DataFrame], *, xlabel: str, shaded: Iterable[float] = ()) -> Figure:
    """One panel per frame, with one line per column over its index; columns beyond the colours are thin and grey."""
    known = {title: frame.astype(float).dropna(axis=1, how="all") for title, frame in panels.items()}
    shown = {title: frame for title, frame in known.items() if not frame.empty}
    figure = Figure((style.WIDTH, 2.2 * len(shown)))
    for place, (title, frame) in enumerate(shown.items(), start=1):
        axes = figure.add_subplot(len(shown), 1, place, title=title, xlabel=xlabel)
        _lines(axes, frame)
        for number in shaded:
            axes.axvspan(number - 0.5, number + 0.5, color=style.SHADE, linewidth=0, zorder=0)
        if frame.shape[1] > 1:
            axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _lines(axes: Axes, frame: pd.DataFrame, *, ticks: int = 10) -> None:
    """A line per column; columns beyond the colours are thin and grey."""
    axes.plot(frame.iloc[:, len(style.GROUP_COLOURS) :], color=style.LIGHT_GREY, linewidth=0.8, zorder=2)
    for (name, values), colour in zip(frame.items(), style.GROUP_COLOURS, strict=False):
        points = values.dropna()
        marker = "o" if len(points) <= MOST_MARKED_POINTS else None  # shows a single point
        axes.plot(points, marker=marker, color=colour, label=style.label(str(name)), zorder=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=ticks, min_n_ticks=1))
    axes.set_xlim(frame.index[0] - 0.5, frame.index[-1] + 0.5)
