"""Pictures of the preference predictor: its training, and its scores against the groups' own answers.

No axis letters: everything here is one number of a named part and predictor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from appa_flwr.report import accuracy
from appa_flwr.report.accuracy import ContextCurve, GroupScores
from appa_flwr.report.plots import style
from appa_flwr.run.cards import Round

LEVEL_DASHES: Mapping[str, str] = {"mean-of-others": "-.", "nearest-question": "--", "uniform": ":"}
CONTEXT_COLUMNS = 2


@style.picture
def loss_curve(rounds: Sequence[Round], *, chosen: int) -> Figure:
    """The predictor's loss over its federated rounds, and its validation error below where a round has one.

    The chosen round is the one whose weights were kept, 0 for none.
    """
    losses = {entry.round: entry.loss for entry in rounds}
    errors = {entry.round: entry.validation for entry in rounds if entry.validation is not None}
    panels = [("loss\n(mean over groups)", losses, style.BLUE, "o")]
    if errors:
        panels.append(("error, held-out\n(natural JS distance)", errors, style.VERMILION, "s"))
    figure = style.figure(1.0 + 2.2 * len(panels))
    stacked = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (name, points, colour, marker) in zip(stacked, panels, strict=True):
        style.curve(axes, points, points.values(), color=colour, marker=marker)
        if chosen:
            axes.axvline(chosen, color=style.DARK_GREY, linestyle=":", linewidth=1.4)
        axes.set_ylabel(name)
    style.whole_numbers(stacked[-1].xaxis)
    stacked[-1].set_xlabel("federated round")
    kept = f"; dotted: round {chosen}, the one kept" if chosen else ""
    stacked[0].set_title(f"PluralLLM pretraining; lower is better{kept}")
    return figure


@style.picture
def predictor_by_context(curves: Sequence[ContextCurve]) -> Figure:
    """The predictor's score against the number of context answers, next to the trivial baselines; a panel a curve."""
    styles = dict(zip(accuracy.PREDICTORS, style.OTHER_STYLES, strict=True))
    columns = min(CONTEXT_COLUMNS, len(curves))
    figure = style.figure(1.0 + 3.6 * -(-len(curves) // columns))
    grid = figure.subplots(-(-len(curves) // columns), columns, sharex=True, sharey=True, squeeze=False)
    panels = grid.flat[: len(curves)]
    for axes in grid.flat[len(curves) :]:
        axes.remove()
    handles: dict[str, Line2D] = {}
    for axes, curve in zip(panels, curves, strict=True):
        colour, marker = styles["pluralllm"]
        handles["pluralllm"] = style.curve(
            axes, curve.js, curve.js.values(), color=colour, marker=marker, markersize=6, zorder=3
        )
        for name, value in curve.levels.items():
            handles[name] = axes.axhline(value, color=styles[name][0], linestyle=LEVEL_DASHES[name], zorder=2)
        axes.margins(y=0.08)
        axes.set_title(_context_title(curve), fontsize=10)
    panels[0].set_xscale("log", base=2)
    sizes = sorted({size for curve in curves for size in curve.js})
    panels[0].set_xticks(sizes, [str(size) for size in sizes])
    panels[0].minorticks_off()
    for axes in panels[-columns:]:  # each is the lowest of its column
        axes.set_xlabel("context answers of the group (logarithmic)")
        axes.tick_params(labelbottom=True)
    figure.supylabel("JS against the groups' own answers (0 to 1)", fontsize=10)
    figure.suptitle("PluralLLM by context size; higher is better")
    names = {name: shown for name, shown in accuracy.PREDICTORS.items() if name in handles}
    found = [handles[name] for name in names]
    figure.legend(found, list(names.values()), loc="outside lower center", ncols=len(names))
    return figure


def _context_title(curve: ContextCurve) -> str:
    groups, _, questions = curve.part.partition(" / ")
    title = f"{groups} groups, {questions} questions, {curve.answers} answers"
    if curve.fewer is not None:
        title += f"\nmean of the others: {curve.fewer[0]:.0f} of {curve.fewer[1]:.0f} answers"
    return title


@style.picture
def predictor_by_group(groups: Sequence[GroupScores]) -> Figure:
    """A row a group: the predictor and the trivial baselines against the group's own held-out answers."""
    figure = style.figure(1.2 + 0.32 * len(groups))
    axes = figure.add_subplot(xlabel="JS against the group's own held-out answers (0 to 1)", title="PluralLLM by group")
    names = dict.fromkeys(name for group in groups for name in group.js)
    for name, (colour, marker) in zip(names, style.OTHER_STYLES, strict=False):
        points = [(group.js[name], row) for row, group in enumerate(groups) if name in group.js]
        look: style.Look = {"linestyle": "none", "color": colour, "marker": marker, "markersize": 6}
        axes.plot(*zip(*points, strict=True), label=style.label(name), **look)
    style.rows(axes, [style.label(group.name) + (" (unseen)" if group.unseen else "") for group in groups])
    style.legend(figure, axes)
    return figure
