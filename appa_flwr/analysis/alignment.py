"""Alignment scores of one method under one metric, as shown in the tables of results.

Legend: G groups, Q questions, K options, R questions whose answer could be read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis.equations import fairness_index
from appa_flwr.core.arrays import BoolArray, FloatArray
from appa_flwr.protocol.rewards import find
from appa_flwr.survey.types import Question, answer_table

GROUPS_TO_COMPARE = 2
"""Fewest groups that a question of the Fairness Index needs, since a single group cannot be treated unequally."""

TINY = 1e-9
"""Smaller standard deviations of shares are rounding errors."""


@dataclass(frozen=True, eq=False)
class Scores:
    """One method's result under one metric, in [0, 1]; a group without a single reward is NaN in `per_group_G`."""

    per_group_G: FloatArray
    avg_as: float
    min_as: float
    fairness_index: float


def alignment_scores(reward_GQ: npt.ArrayLike) -> Scores:
    """Equations 18 and 19, alignment scores: AS_g = mean_q r_gq, Avg AS = mean_g AS_g, Min AS = min_g AS_g.

    In a sparse survey a group's score is the mean over its own questions, and the Fairness Index (Equation 4) the mean
    over the questions of at least two groups, since one group alone cannot be treated unequally. Rewards (G, Q) in
    [0, 1] are NaN where a group has no target; groups without any target are left out of mean and minimum.

    Raises:
        ValueError: not (G, Q), infinite, or not a single reward.
    """
    reward_GQ = np.asarray(reward_GQ, dtype=np.float64)
    fairness = fairness_index(reward_GQ, min_groups=GROUPS_TO_COMPARE)
    present_GQ = ~np.isnan(reward_GQ)
    if not present_GQ.any():
        raise ValueError("there is no reward to average: every (group, question) pair is NaN")
    has_any_G = present_GQ.any(axis=1)
    per_group_G = np.full(reward_GQ.shape[0], np.nan)
    per_group_G[has_any_G] = reward_GQ[has_any_G].mean(axis=1, where=present_GQ[has_any_G])
    return Scores(per_group_G, float(np.nanmean(per_group_G)), float(np.nanmin(per_group_G)), fairness)


def as_arrays(
    questions: Sequence[Question], answers: Mapping[str, Mapping[str, FloatArray]]
) -> tuple[FloatArray, BoolArray]:
    """Convert answers to distributions (G, Q, K), 0 on padding and NaN where a group has none, and options (Q, K)."""
    sizes_Q = np.array([len(question.options) for question in questions])
    option_QK = np.arange(sizes_Q.max()) < sizes_Q[:, None]
    tables = [answer_table(questions, mine, sizes_Q.max()) for mine in answers.values()]
    return np.reshape(tables, (len(tables), *option_QK.shape)), option_QK  # there may be no group


def known_targets(target_GQK: FloatArray, option_QK: BoolArray) -> BoolArray:
    """Mask (G, Q) of existing targets, False for a row of NaN."""
    return np.logical_not(np.isnan(np.where(option_QK, target_GQK, 0.0)).any(axis=2))


def shared_rewards(answer_QK: FloatArray, target_GQK: FloatArray, option_QK: BoolArray, *, metric: str) -> FloatArray:
    """Rewards (G, Q) of the same answers for all groups; NaN where a group's target is a row of NaN."""
    known_GQ = known_targets(target_GQK, option_QK)
    safe_GQK = np.where(known_GQ[:, :, None], target_GQK, option_QK / option_QK.sum(axis=1, keepdims=True))
    return np.where(known_GQ, find(metric)(answer_QK, safe_GQK, option_QK), np.nan)


def deviation_correlation(prediction_GQK: FloatArray, truth_GQK: FloatArray, option_QK: BoolArray) -> float:
    """Correlation of predicted with true deviations from the groups' mean, pooled over (group, question, option).

    A deviation is a group's share of an option minus the mean over the groups that answered the question; predictions
    are centred over the same groups. Common parts cancel: a predictor with equal predictions for all groups scores 0.
    NaN if true shares never differ. Both inputs are shares (G, Q, K), truths rows of NaN where a group has none.
    """
    valid_GQK = known_targets(truth_GQK, option_QK)[:, :, None] & option_QK
    true_L, predicted_L = (_centred(value_GQK, valid_GQK) for value_GQK in (truth_GQK, prediction_GQK))
    if not valid_GQK.any() or true_L.std() < TINY:
        return float("nan")
    return float(np.corrcoef(true_L, predicted_L)[0, 1]) if predicted_L.std() > TINY else 0.0


def _centred(value_GQK: FloatArray, valid_GQK: BoolArray) -> FloatArray:
    """Valid values minus their mean over the groups, flattened (L,)."""
    kept_GQK = np.where(valid_GQK, value_GQK, 0.0)
    mean_QK = kept_GQK.sum(axis=0) / np.maximum(valid_GQK.any(axis=2).sum(axis=0), 1)[:, None]
    deviation_L: FloatArray = (kept_GQK - mean_QK)[valid_GQK]
    return deviation_L
