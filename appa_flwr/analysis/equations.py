"""The paper's equations of fairness, aggregation and weights, as pure functions of arrays.

Legend: G groups, J answers: the rollouts of an iteration, or a method's answers to the held-out questions. The
functions of fairness, and `training_reward`, take NaN where a group has no reward. The others take finite arrays of the
groups that answered, and parameters in the ranges of the section `appa`; they check neither, but `Rule.apply` does.
"""

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

from appa_flwr.config.sections import APPA_DEFAULTS
from appa_flwr.core.arrays import FloatArray

MIN_MEAN, MAX_COV = 1e-6, 10.0
"""mu_min and CoV_max: safeguards of Equation 4."""


def fairness_index(reward_GJ: npt.ArrayLike, *, min_groups: int = 1) -> float:
    """Equation 4, Fairness Index:

        FI = mean_j 1 / (1 + CoV_j²),   CoV_j = std_g(r_gj) / mean_g(r_gj)

    The deviation divides by the number of groups. Safeguards of Appendix "Experiment Configurations": an answer with
    equal rewards counts 1, even if they are all 0; other answers are left out if their mean is below `MIN_MEAN`, and
    their CoV is capped at `MAX_COV`. If no answer is left, the index is 1.

    Rewards (G, J) lie in [0, 1], NaN where a group has none: each answer compares the groups that have one, and is left
    out if these are fewer than `min_groups`. The index is in [1 / (1 + MAX_COV^2), 1], and 1 means equal rewards.

    Raises:
        ValueError: not (G, J), or infinite.
    """
    fairness_J = fairness_per_answer(reward_GJ, min_groups=min_groups)
    used_J = ~np.isnan(fairness_J)
    return float(fairness_J[used_J].mean()) if used_J.any() else 1.0


def fairness_per_answer(reward_GJ: npt.ArrayLike, *, min_groups: int) -> FloatArray:
    """Terms of the mean in `fairness_index`: (J,), NaN for an answer that is left out."""
    reward_GJ = np.asarray(reward_GJ, dtype=np.float64)
    if reward_GJ.ndim != 2 or np.isinf(reward_GJ).any():
        raise ValueError(f"expected rewards (groups, answers), finite or NaN, got shape {reward_GJ.shape}")
    present_GJ = ~np.isnan(reward_GJ)
    compared_J = present_GJ.sum(axis=0) >= min_groups
    fairness_J = np.full(reward_GJ.shape[1], np.nan)
    if not reward_GJ[:, compared_J].size:
        return fairness_J
    reward_GJ, present_GJ = reward_GJ[:, compared_J], present_GJ[:, compared_J]
    mean_J, std_J = reward_GJ.mean(axis=0, where=present_GJ), reward_GJ.std(axis=0, where=present_GJ)
    # Rounding can give equal numbers a deviation above 0, so equality is checked on the numbers.
    equal_J = np.nanmax(reward_GJ, axis=0) == np.nanmin(reward_GJ, axis=0)
    cov_J = np.divide(std_J, mean_J, out=np.full_like(mean_J, MAX_COV), where=mean_J > 0.0)
    index_J = np.where(equal_J, 1.0, 1.0 / (1.0 + np.minimum(cov_J, MAX_COV) ** 2))
    fairness_J[compared_J] = np.where(equal_J | (mean_J >= MIN_MEAN), index_J, np.nan)
    return fairness_J


def alpha_aggregate(reward_GJ: FloatArray, *, alpha: float) -> FloatArray:
    """Equation 2, alpha aggregation (Park et al.):

        Agg_α(r_j) = (1/α) log mean_g exp(α r_gj)

    α = -inf gives the minimum, 0 the mean, inf the maximum. With the extreme c = max r (α > 0) or min r (α < 0) it
    equals c + log1p(mean expm1(α (r - c))) / α. No exponent is positive, so nothing overflows, and a small α loses no
    digits. The result (J,) lies between the lowest and the highest reward of each rollout.
    """
    if alpha == 0.0:
        return np.asarray(reward_GJ.mean(axis=0))
    extreme_J, exponent_GJ = _around_extreme(reward_GJ, alpha)
    return np.asarray(extreme_J + np.log1p(np.expm1(exponent_GJ).mean(axis=0)) / alpha)


def alpha_weights(reward_GJ: FloatArray, *, alpha: float) -> FloatArray:
    """Groups' influence under Equation 2:

        ∂Agg_α / ∂r_gj = exp(α r_gj) / Σ_g' exp(α r_g'j)

    Returns the mean over rollouts (G,), which sums to 1; at infinite α, tied groups share the weight.
    """
    if alpha == 0.0:
        return np.full(len(reward_GJ), 1.0 / len(reward_GJ))
    share_GJ = np.exp(_around_extreme(reward_GJ, alpha)[1])
    return np.asarray((share_GJ / share_GJ.sum(axis=0)).mean(axis=1))


def training_reward(
    reward_GJ: npt.ArrayLike,
    format_score_J: npt.ArrayLike,
    parsed_J: npt.ArrayLike,
    *,
    alignment_weight: float = APPA_DEFAULTS.alignment_weight,
) -> FloatArray:
    """Equation 20, final reward, and 0 for a completely unparseable answer:

        r̃_gj = ω r_gj + (1 - ω) s_fmt,j

    Takes alignment rewards (G, J) and format scores (J,), all in [0, 1], and flags (J,), False for a completely
    unparseable answer, whose alignment reward is 0 too; returns training rewards (G, J). A row of NaN is a group that
    did not answer, and stays NaN. An incomplete ranking counts as parsed: its alignment is 0, and it earns (1 - ω)
    s_fmt.

    Raises:
        ValueError: the shapes do not fit.
    """
    reward_GJ = np.asarray(reward_GJ, dtype=np.float64)
    format_score_J = np.asarray(format_score_J, dtype=np.float64)
    parsed_J = np.asarray(parsed_J, dtype=bool)
    if reward_GJ.ndim != 2 or not reward_GJ.shape[1:] == format_score_J.shape == parsed_J.shape:
        shapes = f"{reward_GJ.shape}, {format_score_J.shape} and {parsed_J.shape}"
        raise ValueError(f"expected rewards (G, J) with format scores and parsed flags (J,), got {shapes}")
    mixed_GJ = alignment_weight * reward_GJ + (1.0 - alignment_weight) * format_score_J
    # A missing group must stay NaN for every rollout, also for unparseable ones.
    return np.where(parsed_J | np.isnan(reward_GJ), mixed_GJ, 0.0)


def adaptive_aggregate(
    reward_GJ: FloatArray, weight_G: FloatArray, *, fairness: float, fairness_threshold: float
) -> FloatArray:
    """Equation 3, adaptive aggregation:

        Agg(r_j) = mean_g r_gj if FI ≥ τ, else log mean_g exp(α_g r_gj)

    `weight_G` is the paper's α_g from `reversed_softmax`, `fairness` its FI, `fairness_threshold` its τ.
    """
    if fairness >= fairness_threshold:
        return np.asarray(reward_GJ.mean(axis=0))
    # α_g is near 1/G, so exp(.) is near 1, and its mean would keep few digits of the rewards.
    return np.asarray(np.log1p(np.expm1(weight_G[:, None] * reward_GJ).mean(axis=0)))


def historical_alignment(history_G: FloatArray, reward_GJ: FloatArray, *, decay: float) -> FloatArray:
    """Equation 5, historical alignment, from h_g⁰ = 0:

        h_gᵗ = λ h_gᵗ⁻¹ + (1 - λ) mean_j r_gj

    `history_G` is hᵗ⁻¹, `reward_GJ` the alignment rewards of iteration t, `decay` the paper's λ.
    """
    return np.asarray(decay * history_G + (1.0 - decay) * reward_GJ.mean(axis=1))


def reversed_softmax(history_G: FloatArray, *, temperature: float) -> FloatArray:
    """Equation 6, reversed softmax:

        α_gᵗ = exp((1 - h_gᵗ⁻¹) / T) / Σ_g' exp((1 - h_g'ᵗ⁻¹) / T)

    Weights (G,), largest for the group with the lowest history, that sum to 1.
    """
    return np.asarray(softmax((1.0 - history_G) / temperature))


def _around_extreme(reward_GJ: FloatArray, alpha: float) -> tuple[FloatArray, FloatArray]:
    """The extreme c (J,), and alpha (r - c) (G, J): 0 where a group attains it, else negative."""
    extreme_J = reward_GJ.max(axis=0) if alpha > 0 else reward_GJ.min(axis=0)
    gap_GJ = reward_GJ - extreme_J
    # A huge alpha gives an exponent of -inf, whose exp is correctly 0; an infinite alpha times 0 would be nan.
    with np.errstate(over="ignore", invalid="ignore"):
        return extreme_J, np.where(gap_GJ == 0.0, 0.0, alpha * gap_GJ)
