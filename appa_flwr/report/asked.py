"""The table of `appa ask`: a policy's answer to a question beside what the groups are predicted to say.

Axis letters: G groups, A answers, K options.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from rich.table import Table
from rich.text import Text

from appa_flwr.analysis.alignment import shared_rewards
from appa_flwr.analysis.ceilings import SOLVED_METRICS, shared_answer
from appa_flwr.analysis.fairness import FloatArray
from appa_flwr.run.predictions import of_question

OURS = "this policy"


def answers_table(
    question: str, options: Sequence[str], answer_K: FloatArray, *, predictions: pd.DataFrame | None, metric: str
) -> Table:
    """Shares of the answers, a row each; of a question that the run has `predictions` for, how they score too.

    The score is by the run's metric, on this question alone: the groups' mean, and the worst-served group's.
    """
    predicted = of_question(predictions, question, options)
    if predicted is None:
        table = Table("option", "share")
        for option, share in zip(options, answer_K, strict=True):
            table.add_row(Text(option), f"{share:.2f}")
        return table
    target_GK = predicted.to_numpy(float)
    option_1K = np.ones((1, len(options)), dtype=bool)
    answers = {OURS: answer_K}
    if metric in SOLVED_METRICS:
        for name, objective in (("for the average", "average"), ("for the worst served", "min")):
            best = shared_answer(target_GK[:, None], option_1K, metric=metric, objective=objective)[0]
            answers[f"best shared answer, {name}"] = best
    answers["uniform answer"] = np.full(len(options), 1 / len(options))
    table = Table()
    for title in ("answer", *options, f"{metric}, mean", "worst served"):
        table.add_column(Text(title))
    for name, shown_K in answers.items():
        score_G = shared_rewards(shown_K[None], target_GK[:, None], option_1K, metric=metric)[:, 0]
        worst = f"{score_G.min():.3f} {predicted.index[int(score_G.argmin())]}"
        table.add_row(name, *(f"{share:.2f}" for share in shown_K), f"{score_G.mean():.3f}", Text(worst))
    table.add_section()
    for group, target_K in zip(predicted.index, target_GK, strict=True):
        table.add_row(Text(f"predicted: {group}"), *(f"{share:.2f}" for share in target_K), "", "")
    return table
