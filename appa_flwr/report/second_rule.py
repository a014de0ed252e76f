"""What a report says first: whether the run's rule serves the worst-served group better than the baseline's rule.

Both policies come from one SFT model and were trained on the same questions (`baseline-rule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from appa_flwr.analysis.intervals import Interval, levels
from appa_flwr.report.artifacts import RunArtifacts
from appa_flwr.report.comparison import METHOD, NAMES, Compared, compare
from appa_flwr.report.plots import style
from appa_flwr.run.pair_scores import table
from appa_flwr.run.resume import finished
from appa_flwr.run.run_files import rule_folder

BEST_SHARED = "ceiling-min"
BEST_NAME = "best shared answer\nto the predictions"


@dataclass(frozen=True)
class SecondRule:
    """The policies by `baseline-rule` and by the run's, which has its differences to the other, against one target.

    `best` is Min AS of the best shared answers for the worst-served group, None where they are not known.
    """

    baseline: Compared
    ours: Compared
    best: Interval | None

    @property
    def rows(self) -> list[tuple[str, Interval]]:
        """Name and Min AS, from the baseline to the best."""
        known = [(one.run.settings.rule, one.scores["Min AS"]) for one in (self.baseline, self.ours)]
        return known + ([] if self.best is None else [(BEST_NAME, self.best)])


def second_rule(run: RunArtifacts) -> list[SecondRule]:
    """Against the survey answers, if they are known, and then the predictions; empty without a second policy, or
    where this run has no scores of its own policy, or knows the groups' scores as sums alone.
    """
    rule = run.settings.baseline_rule
    folder = run.folder / rule_folder(rule)
    scored = run.pair_scores is not None and run.row(METHOD, run.training_metric) is not None
    if not rule or rule == run.settings.rule or not scored or not finished(folder):
        return []
    found = compare([folder, run.folder])
    return [SecondRule(baseline, ours, _best(ours)) for baseline, ours in zip(found[::2], found[1::2], strict=True)]


def _best(ours: Compared) -> Interval | None:
    assert ours.run.pair_scores is not None
    frame = table(ours.run.pair_scores, BEST_SHARED, metric=ours.run.training_metric, against=ours.against)
    return None if frame.empty else levels([frame.to_numpy(float)])["Min AS"]


def sentence(found: SecondRule) -> str:
    """Which rule serves the worst-served group better, or that this cannot be told."""
    less = found.ours.less_first
    assert less is not None
    rules = found.ours.run.settings.rule, found.baseline.run.settings.rule
    worst, mean = (
        f"{found.ours.scores[name].value:.3f} against {found.baseline.scores[name].value:.3f} "
        "({:+.3f}, {:+.3f} to {:+.3f})".format(*vars(less[name]).values())
        for name in ("Min AS", "Avg AS")
    )
    if not less["Min AS"].excludes_zero:
        verdict = "Whether {} serves the worst-served group better than {} cannot be told from this run"
    else:
        verdict = (
            f"The worst-served group is served {'better' if less['Min AS'].value > 0 else 'worse'} by {{}} than by {{}}"
        )
    best = (
        "" if found.best is None else f"; the best answer that all groups could share gives it {found.best.value:.3f}"
    )
    where = f"Against the {NAMES[found.ours.against]}"
    return f"{verdict.format(*rules)}. {where}: Min AS {worst}{best}; Avg AS {mean}."


@style.picture
def picture(found: Sequence[SecondRule]) -> Figure:
    """The worst-served group's score by each rule and by the best shared answer, with intervals by questions."""
    figure = style.figure(1.2 + 0.4 * max(len(one.rows) for one in found))
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, one in zip(panels, found, strict=True):
        value, low, high = np.array([(span.value, span.low, span.high) for _, span in one.rows]).T
        axes.errorbar(value, range(len(value)), xerr=(value - low, high - value), fmt="o", color=style.BLUE, capsize=3)
        for row, number in enumerate(value):
            axes.annotate(f"{number:.3f}", (number, row), xytext=(0, 6), textcoords="offset points", ha="center")
        style.rows(axes, [name for name, _ in one.rows])
        axes.margins(y=0.3)
        axes.set_title(f"Min AS against the {NAMES[one.ours.against]}")
    figure.suptitle("The worst-served group after PPO, by rule; 95 % over questions")
    return figure
