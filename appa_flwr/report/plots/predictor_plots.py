"""Pictures of the preference predictor: its training, and its scores against the groups' own answers.

No axis letters: everything here is one number of a named part and predictor.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from appa_flwr.report.accuracy import GroupScores
from appa_flwr.report.plots import style


@style.picture
def loss_curve(losses: Sequence[float]) -> Figure:
    """The predictor's loss over its federated rounds."""
    figure = style.figure(3.2)
    axes = figure.add_subplot(xlabel="federated round", ylabel="loss\n(mean over groups)")
    style.curve(axes, range(1, len(losses) + 1), losses, color=style.BLUE, marker="o")
    style.whole_numbers(axes.xaxis)
    axes.set_title("PluralLLM pretraining; lower is better")
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
