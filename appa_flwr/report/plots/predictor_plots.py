"""Pictures of the preference predictor: its training, and its scores against the groups' own answers.

No axis letters: everything here is one number of a named part and predictor.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from appa_flwr.report.accuracy import GroupScores
from appa_flwr.report.plots import style
from appa_flwr.run.cards import Round


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
