"""predictions.parquet: what PluralLLM predicts for each group and held-out question, a row an option; in simulations.

Legend: G groups, J questions, K options.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from appa_flwr.run.pair_scores import read_columns
from appa_flwr.run.run_files import PREDICTIONS_FILE
from appa_flwr.survey.types import FloatArray, Question

COLUMNS = ("question", "text", "group", "option", "share")


def as_rows(target_GJK: FloatArray, *, groups: Sequence[str], questions: Sequence[Question]) -> pd.DataFrame:
    """Distributions (G, J, K), padded, as rows."""
    rows = [
        (question.question_id, question.text, group, option, share)
        for j, question in enumerate(questions)
        for group, target_JK in zip(groups, target_GJK, strict=True)
        for option, share in zip(question.options, target_JK[j], strict=False)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def read(folder: Path) -> pd.DataFrame | None:
    """The file's rows, None where there is none; errors as of `pair_scores.read`."""
    return read_columns(folder / PREDICTIONS_FILE, COLUMNS)


def of_question(predicted: pd.DataFrame | None, text: str, options: Sequence[str]) -> pd.DataFrame | None:
    """The predictions for a question with these options, a row a group; None where the run has not asked it so."""
    if predicted is None:
        return None
    for _, rows in predicted[predicted["text"].str.strip() == text.strip()].groupby("question", sort=False):
        if set(rows["option"]) == set(options):
            return rows.pivot(index="group", columns="option", values="share").loc[rows["group"].unique(), [*options]]
    return None
