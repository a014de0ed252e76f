"""The Fairness Index: how evenly the groups are served by the same answers.

Legend: G groups, J rollouts or questions. A group that did not answer is a row of NaN.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from appa_flwr.config.ranges import MAX_COV, MIN_MEAN

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def fairness_index(reward_GJ: npt.ArrayLike, *, min_groups: int = 1) -> float:
    """Equation 4, Fairness Index: mean_j 1 / (1 + CoV_j^2), CoV_j = std_g(r_gj) / mean_g(r_gj).

    The deviation divides by the number of groups. Safeguards of Appendix "Experiment Configurations": a question with
    equal rewards counts 1, even if they are all 0; else it is left out where its mean is under `MIN_MEAN`, and its CoV
    is capped at `MAX_COV`. If no question is left the index is 1.

    Rewards (G, J) lie in [0, 1], NaN where a group has none: each question compares the groups that have it, and is
    left out if these are fewer than `min_groups`. The index is in [1 / (1 + MAX_COV^2), 1], and 1 means equal rewards.

    Raises:
        ValueError: not (G, J), or infinite.
    """
    fairness_J = fairness_per_question(reward_GJ, min_groups=min_groups)
    used_J = ~np.isnan(fairness_J)
    return float(fairness_J[used_J].mean()) if used_J.any() else 1.0


def fairness_per_question(reward_GJ: npt.ArrayLike, *, min_groups: int) -> FloatArray:
    """Terms of the mean in `fairness_index`: (J,), NaN for a question that is left out."""
    reward_GJ = np.asarray(reward_GJ, dtype=np.float64)
    if reward_GJ.ndim != 2 or np.isinf(reward_GJ).any():
        raise ValueError(f"expected rewards (groups, questions), finite or NaN, got shape {reward_GJ.shape}")
    present_GJ = ~np.isnan(reward_GJ)
    compared_J = present_GJ.sum(axis=0) >= min_groups
    fairness_J = np.full(reward_GJ.shape[1], np.nan)
    if not reward_GJ[:, compared_J].size:
        return fairness_J
    reward_GJ, present_GJ = reward_GJ[:, compared_J], present_GJ[:, compared_J]
    mean_J, std_J = reward_GJ.mean(axis=0, where=present_GJ), reward_GJ.std(axis=0, where=present_GJ)
    # Rounding lets the deviation of equal numbers come out above 0, so equality is decided on the numbers.
    equal_J = np.nanmax(reward_GJ, axis=0) == np.nanmin(reward_GJ, axis=0)
    cov_J = np.divide(std_J, mean_J, out=np.full_like(mean_J, MAX_COV), where=mean_J > 0.0)
    index_J = np.where(equal_J, 1.0, 1.0 / (1.0 + np.minimum(cov_J, MAX_COV) ** 2))
    fairness_J[compared_J] = np.where(equal_J | (mean_J >= MIN_MEAN), index_J, np.nan)
    return fairness_J


def present_groups(reward_GJ: FloatArray) -> BoolArray:
    """Mask of the groups that answered: (G,) True where a row of rewards (G, J) holds numbers, False where it is NaN.

    Raises:
        ValueError: not (G, J) with J >= 1, infinite, a row that is NaN only in part, or no group at all.
    """
    if reward_GJ.ndim != 2 or reward_GJ.shape[1] == 0:
        raise ValueError(f"expected rewards (groups, rollouts) with at least one rollout, got {reward_GJ.shape}")
    if np.isinf(reward_GJ).any():
        raise ValueError("rewards must not be infinite")
    absent_GJ = np.isnan(reward_GJ)
    partial_G = absent_GJ.any(axis=1) & ~absent_GJ.all(axis=1)
    if partial_G.any():
        rows = ", ".join(str(row) for row in np.flatnonzero(partial_G))
        raise ValueError(f"a missing group must be NaN for every rollout; NaN only in part in row(s) {rows}")
    present_G = np.asarray(~absent_GJ.any(axis=1), dtype=np.bool_)
    if not present_G.any():
        raise ValueError("no group answered: every row of rewards is NaN")
    return present_G
