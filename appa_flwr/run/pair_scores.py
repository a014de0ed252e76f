"""The table of scores, scores.parquet: each group's reward for each answer to a held-out question.

Legend: G groups, Q questions, R rows.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.errors import UserError, first_line
from appa_flwr.core.files import read_hashed, replace_hashed
from appa_flwr.run.schema import SCORES_FILE

COLUMNS = ("method", "metric", "against", "group", "question", "reward")
ROUNDING = 1e-6  # by which a reward may leave 0 to 1
TARGETS = SURVEY, PREDICTIONS = "survey", "predictions"
"""Kinds of targets of the rewards, in the order of tables: the groups' survey answers, and PluralLLM's predictions."""


def as_rows(
    method: str, metric: str, against: str, reward_GQ: FloatArray, *, groups: Sequence[str], questions: Sequence[str]
) -> pd.DataFrame:
    """Convert rewards (G, Q) to rows, one for each reward that is not NaN."""
    group_R, question_R = np.nonzero(~np.isnan(reward_GQ))
    keys = (method, metric, against, np.asarray(groups, object)[group_R], np.asarray(questions, object)[question_R])
    return pd.DataFrame(dict(zip(COLUMNS, (*keys, reward_GQ[group_R, question_R]), strict=True)))


def put(folder: Path, rows: pd.DataFrame) -> None:
    """Add rows of scores to a run's folder; they replace earlier rows of the same methods and metrics.

    Raises:
        UserError: the file cannot be read or written; the earlier file is intact.
    """
    kept, new = read(folder), pd.MultiIndex.from_frame(rows[["method", "metric"]])
    kept = kept[~pd.MultiIndex.from_frame(kept[["method", "metric"]]).isin(new)]
    scores = pd.concat([kept, rows], ignore_index=True) if len(kept) else rows
    replace_hashed(folder / SCORES_FILE, scores.to_parquet(index=False))


def read(folder: Path) -> pd.DataFrame:
    """Read the scores of a run's folder; an empty table if it has no file.

    Raises:
        UserError: the file cannot be read, or has other columns, a reward outside 0 to 1, or two rewards of one pair.
    """
    path = folder / SCORES_FILE
    if not path.exists():
        return pd.DataFrame(columns=[*COLUMNS])
    try:
        rows = pd.read_parquet(io.BytesIO(read_hashed(path)))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)}); without it only means are left") from None
    if tuple(rows.columns) != COLUMNS:
        raise UserError(f"{path}: has the columns {', '.join(rows.columns)}, not {', '.join(COLUMNS)}")
    if not (pd.to_numeric(rows["reward"], errors="coerce").between(-ROUNDING, 1.0 + ROUNDING)).all():
        raise UserError(f"{path}: has a reward that is not a number from 0 to 1")
    if rows.duplicated([*COLUMNS[:-1]]).any():
        raise UserError(f"{path}: has two rewards for the same {', '.join(COLUMNS[:-1])}")
    return rows


def table(rows: pd.DataFrame, method: str, *, metric: str, against: str) -> pd.DataFrame:
    """A method's rewards with one row per group and one column per question; empty if it has none."""
    scored = rows[(rows["method"] == method) & (rows["metric"] == metric) & (rows["against"] == against)]
    return scored.pivot(index="group", columns="question", values="reward")


def aligned(first: pd.DataFrame, second: pd.DataFrame) -> tuple[FloatArray, FloatArray] | None:
    """Rewards (G, Q) of two tables, NaN unless both have one; None if they have no pair in common."""
    first, second = first.align(second, join="inner")
    hole = first.isna() | second.isna()
    if hole.all(axis=None):
        return None
    return first.mask(hole).to_numpy(float), second.mask(hole).to_numpy(float)
