"""Table and picture of `appa ask`: a policy's answer to a question beside what the groups are predicted to say.

Axis letters: G groups, A answers, K options.
"""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from appa_flwr.analysis.alignment import shared_rewards
from appa_flwr.analysis.ceilings import SOLVED_METRICS, NotSolved, shared_answer
from appa_flwr.analysis.fairness import FloatArray
from appa_flwr.report.plots import style
from appa_flwr.run.predictions import of_question

OURS = "this policy"
CEILINGS = {"best answer, average": "average", "best answer, worst served": "min"}
TITLE_WIDTH = 90  # characters


@dataclass(frozen=True)
class Asked:
    """A question and who answers it how, a row each with a share an option.

    Attributes:
        answers: the policy's, then the best shared answers and the uniform one where there are predictions.
        predicted: of the groups, None where the run has none for the question.
        metric: the run's, which scores answers against predictions.
    """

    question: str
    answers: pd.DataFrame
    predicted: pd.DataFrame | None
    metric: str

    @classmethod
    def of(
        cls,
        question: str,
        options: Sequence[str],
        answer_K: FloatArray,
        *,
        predictions: pd.DataFrame | None,
        metric: str,
    ) -> Asked:
        """An answer beside what the run's `predictions` give for its question."""
        predicted = of_question(predictions, question, options)
        answers = {OURS: answer_K}
        if predicted is not None:
            target_G1K, option_1K = predicted.to_numpy(float)[:, None], np.ones((1, len(options)), dtype=bool)
            for name, objective in CEILINGS.items() if metric in SOLVED_METRICS else ():
                with contextlib.suppress(NotSolved):
                    answers[name] = shared_answer(target_G1K, option_1K, metric=metric, objective=objective)[0]
            answers["uniform answer"] = np.full(len(options), 1 / len(options))
        shown = pd.DataFrame.from_dict(answers, orient="index", columns=[*options])
        return cls(question, shown, predicted, metric)

    def table(self) -> Table:
        """The answers, with their scores on this question alone: the groups' mean, and the worst-served group's."""
        options = [*self.answers.columns]
        if self.predicted is None:
            table = Table("option", "share")
            for option, share in self.answers.loc[OURS].items():
                table.add_row(Text(str(option)), f"{share:.2f}")
            return table
        table, target_G1K = Table(), self.predicted.to_numpy(float)[:, None]
        for title in ("answer", *options, f"{self.metric}, mean", "worst served"):
            table.add_column(Text(title))
        for name, row in self.answers.iterrows():
            option_1K = np.ones((1, len(options)), dtype=bool)
            score_G = shared_rewards(row.to_numpy()[None], target_G1K, option_1K, metric=self.metric)[:, 0]
            worst = f"{score_G.min():.3f} {self.predicted.index[int(score_G.argmin())]}"
            table.add_row(str(name), *(f"{share:.2f}" for share in row), f"{score_G.mean():.3f}", Text(worst))
        table.add_section()
        for group, row in self.predicted.iterrows():
            table.add_row(Text(f"predicted: {group}"), *(f"{share:.2f}" for share in row), "", "")
        return table

    @style.picture
    def draw(self) -> Figure:
        """A bar a row of the table, divided into the shares of the options, as PNG."""
        predicted = self.predicted.rename(lambda group: f"predicted: {group}") if self.predicted is not None else None
        bars = pd.concat([self.answers, predicted])
        figure = style.figure(1.2 + 0.36 * len(bars))
        axes = figure.add_subplot(xlabel="share", title=textwrap.fill(self.question, TITLE_WIDTH))
        left = np.zeros(len(bars))
        for number, option in enumerate(bars.columns):
            share, colour = bars[option].to_numpy(), style.GROUP_COLOURS[number % len(style.GROUP_COLOURS)]
            axes.barh(range(len(bars)), share, left=left, color=colour, height=0.65, label=style.label(str(option)))
            left += share
        axes.set_xlim(0, 1)
        style.rows(axes, [*map(style.label, bars.index)])
        style.legend(figure, axes)
        return figure
