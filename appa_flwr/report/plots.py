"""The pictures of a report, each drawn by one function from frames and returned as the bytes of a PNG.

Axis letters: I iterations, G groups.
"""

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from appa_flwr.analysis.intervals import Interval
from appa_flwr.report import style
from appa_flwr.report.frames import method_name, spans
from appa_flwr.run.records import Card

MOST_MARKED_POINTS = 30
VALUE_LOSS = "value_loss"
HEALTH = {
    "fairness_index": "Fairness index",
    "reward": "Aggregated reward",
    "format_score": "Format score",
    "kl": "KL to the reference (nats)",
    "entropy": "Entropy (nats a token)",
    "policy_loss": "Policy loss",
    VALUE_LOSS: "Value loss",
    "clip_fraction": "Clipped tokens (share)",
}
"""Column of a rule's rounds -> title."""


@style.picture
def worst_group(intervals: pd.DataFrame, *, rule: str) -> Figure:
    """Min AS of every method, one panel per kind of target: the sample's as a point, and the estimate's interval.

    The sample's Min AS can lie below the interval (see `bootstrap`). Without bounds only the point is drawn.
    """
    levels = intervals[(intervals["less"] == "") & (intervals["measure"] == "Min AS")]
    shown = spans(levels, ["method"]).rename(index=lambda method: method_name(method, rule))
    figure = Figure((style.WIDTH, (0.6 + 0.36 * len(shown)) * shown.shape[1]))
    panels = figure.subplots(shown.shape[1], 1, squeeze=False)[:, 0]
    for axes, kind, (_, column) in zip(panels, shown.columns.get_level_values(0), shown.items(), strict=True):
        for row, span in enumerate(column):
            if not isinstance(span, Interval):
                continue
            middle, arm = (span.low + span.high) / 2, (span.high - span.low) / 2
            axes.errorbar(middle, row, xerr=arm, fmt="none", ecolor=style.BLUE, capsize=3)
            axes.plot(span.sample, row, "o", color=style.BLUE)
            axes.annotate(
                f"{span.sample:.3f}", (span.sample, row), xytext=(0, 4), textcoords="offset points", ha="center"
            )
        axes.set_yticks(range(len(shown)), [style.label(str(row)) for row in shown.index])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.set_title(f"Min AS against {kind}, 95 % interval")
    return figure


@style.picture
def training(rounds: pd.DataFrame, groups: Sequence[str]) -> Figure:
    """Panels over the rounds of a rule: the mean reward, the groups' weights, and measures of the run's health.

    Rounds in which the rule took the plain mean are grey. Groups with the highest last weights have colours and names.
    """
    by_number = rounds.set_index("iteration")
    weights_IG = by_number.reindex(columns=[f"weights/{group}" for group in groups]).astype(float)
    ranked = weights_IG.set_axis([*groups], axis=1).T.sort_values(by_number.index[-1], ascending=False, kind="stable").T
    panels = {"Mean reward of the groups": by_number[["group_reward"]], "Weight per group": ranked}
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
        axes.plot(frame.iloc[:, len(style.GROUP_COLOURS) :], color=style.LIGHT_GREY, linewidth=0.8, zorder=2)
        for (name, values), colour in zip(frame.items(), style.GROUP_COLOURS, strict=False):
            points = values.dropna()
            marker = "o" if len(points) <= MOST_MARKED_POINTS else None  # shows a single point
            axes.plot(points, marker=marker, color=colour, label=style.label(str(name)), zorder=3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
        for number in shaded:
            axes.axvspan(number - 0.5, number + 0.5, color=style.SHADE, linewidth=0, zorder=0)
        axes.set_xlim(frame.index[0] - 0.5, frame.index[-1] + 0.5)
        if frame.shape[1] > 1:
            axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
