"""The frame of scores, scores.parquet: what every group gave each answer to a held-out question.

Legend: G groups, Q questions, R rows.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.run.run_files import SCORES_FILE
from appa_flwr.survey.types import FloatArray

COLUMNS = ("method", "metric", "against", "group", "question", "reward")
PREDICTIONS, SURVEY = "predictions", "survey"
"""Targets that answers are compared with: predictions, or the groups' survey answers."""


def as_rows(
    method: str, metric: str, against: str, reward_GQ: FloatArray, *, groups: Sequence[str], questions: Sequence[str]
) -> pd.DataFrame:
    """Rewards (G, Q) as rows, one for each that is not NaN."""
    group_R, question_R = np.nonzero(~np.isnan(reward_GQ))
    keys = (method, metric, against, np.asarray(groups, object)[group_R], np.asarray(questions, object)[question_R])
    return pd.DataFrame(dict(zip(COLUMNS, (*keys, reward_GQ[group_R, question_R]), strict=True)))


def put(folder: Path, rows: pd.DataFrame) -> None:
    """Add rows of scores to a run's folder, in place of those it has of the same methods.

    Raises:
        UserError: the file cannot be read or written; what was there before is intact.
    """
    if rows.empty:  # where the server sees the groups' sums alone
        return
    kept = read(folder)
    kept = kept[~kept["method"].isin(rows["method"])]
    replace_rows(folder / SCORES_FILE, pd.concat([kept, rows], ignore_index=True) if len(kept) else rows)


def replace_rows(path: Path, rows: pd.DataFrame) -> None:
    """Write a file of rows as a whole; errors as of `put`."""
    data = io.BytesIO()
    rows.to_parquet(data, index=False)
    replace_file(path, data.getvalue())


def read(folder: Path) -> pd.DataFrame:
    """The scores of a run's folder, without rows where it has no file.

    Raises:
        UserError: the file cannot be read, has other columns, or a number that is none or there twice.
    """
    path = folder / SCORES_FILE
    if not path.exists():
        return pd.DataFrame(columns=[*COLUMNS])
    try:
        rows = pd.read_parquet(path)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
    if tuple(rows.columns) != COLUMNS:
        raise UserError(f"{path}: has the columns {', '.join(rows.columns)}, not {', '.join(COLUMNS)}")
    *keys, value = COLUMNS
    if len(rows) and (rows[value].dtype.kind != "f" or rows.duplicated(keys).any()):
        raise UserError(f"{path}: has to hold one number, {value}, for each {', '.join(keys)}")
    return rows


def table(rows: pd.DataFrame, method: str, *, metric: str, against: str) -> pd.DataFrame:
    """A method's rewards, a row a group and a column a question; empty where it has none."""
    scored = rows[(rows["method"] == method) & (rows["metric"] == metric) & (rows["against"] == against)]
    return scored.pivot(index="group", columns="question", values="reward")


def aligned(first: pd.DataFrame, second: pd.DataFrame) -> tuple[FloatArray, FloatArray] | None:
    """Rewards (G, Q) of two tables where both have one, else NaN; None where they have none in common."""
    first, second = first.align(second, join="inner")
    hole = first.isna() | second.isna()
    if hole.all(axis=None):
        return None
    return first.mask(hole).to_numpy(float), second.mask(hole).to_numpy(float)
