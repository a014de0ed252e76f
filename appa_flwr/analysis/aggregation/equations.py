"""The paper's equations of aggregation and weights, as pure functions; `Rule` holds parameters to their ranges.

Legend: G groups, J rollouts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis.fairness import FloatArray
from appa_flwr.config.ranges import EMA_DECAY


def alpha_aggregate(reward_GJ: npt.ArrayLike, *, alpha: float) -> FloatArray:
    """Equation 2, alpha aggregation (Park et al.): Agg_alpha(r_j) = (1/alpha) log mean_g exp(alpha r_gj).

    -inf is the minimum, 0 the mean, inf the maximum. Around the extreme c = max r (alpha > 0) or min r (alpha < 0) it
    equals c + log1p(mean expm1(alpha (r - c))) / alpha, where no exponent is positive: nothing overflows and a small
    alpha loses no digits. The result (J,) lies between the lowest and the highest reward of each rollout.

    Raises:
        ValueError: rewards that are not (G, J) and finite.
    """
    reward_GJ = _finite("reward_GJ", reward_GJ)
    if alpha == 0.0:
        return np.asarray(reward_GJ.mean(axis=0))
    extreme_J, exponent_GJ = _around_extreme(reward_GJ, alpha)
    return np.asarray(extreme_J + np.log1p(np.expm1(exponent_GJ).mean(axis=0)) / alpha)


def alpha_weights(reward_GJ: npt.ArrayLike, *, alpha: float) -> FloatArray:
    """Groups' influence under Equation 2: d Agg_alpha / d r_gj = exp(alpha r_gj) / sum_g' exp(alpha r_g'j).

    Its mean over rollouts (G,), which sums to 1; groups that tie for an extreme share it. Raises as `alpha_aggregate`.
    """
    reward_GJ = _finite("reward_GJ", reward_GJ)
    if alpha == 0.0:
        return np.full(len(reward_GJ), 1.0 / len(reward_GJ))
    share_GJ = np.exp(_around_extreme(reward_GJ, alpha)[1])
    return np.asarray((share_GJ / share_GJ.sum(axis=0)).mean(axis=1))


def adaptive_aggregate(
    reward_GJ: npt.ArrayLike, weight_G: npt.ArrayLike, *, fairness: float, fairness_threshold: float
) -> FloatArray:
    """Equation 3, adaptive aggregation: mean_g r_gj where FI >= tau, else log mean_g exp(alpha_g r_gj).

    `weight_G` is the paper's alpha_g from `reversed_softmax`, `fairness` its FI, `fairness_threshold` its tau.

    Raises:
        ValueError: shapes that do not fit, or numbers that are not finite.
    """
    reward_GJ = _finite("reward_GJ", reward_GJ)
    weight_G = _finite("weight_G", weight_G, axes=1, groups=len(reward_GJ))
    if fairness >= fairness_threshold:
        return np.asarray(reward_GJ.mean(axis=0))
    # alpha_g is near 1/G, so exp(.) is near 1 and its mean would keep few digits of the rewards.
    return np.asarray(np.log1p(np.expm1(weight_G[:, None] * reward_GJ).mean(axis=0)))


def historical_alignment(history_G: npt.ArrayLike, reward_GJ: npt.ArrayLike, *, decay: float = EMA_DECAY) -> FloatArray:
    """Equation 5, historical alignment: h_g^t = lambda h_g^(t-1) + (1 - lambda) mean_j r_gj, with h_g^0 = 0.

    `history_G` is h^(t-1), `reward_GJ` the alignment rewards of iteration t, `decay` the paper's lambda.

    Raises:
        ValueError: shapes that do not fit, or numbers that are not finite.
    """
    reward_GJ = _finite("reward_GJ", reward_GJ)
    history_G = _finite("history_G", history_G, axes=1, groups=len(reward_GJ))
    return np.asarray(decay * history_G + (1.0 - decay) * reward_GJ.mean(axis=1))


def reversed_softmax(history_G: npt.ArrayLike, *, temperature: float) -> FloatArray:
    """Equation 6, reversed softmax: alpha_g^t = exp((1 - h_g^(t-1)) / T) / sum_g' exp((1 - h_g'^(t-1)) / T).

    (G,), largest for the group with the lowest history; sums to 1.

    Raises:
        ValueError: a history that is not (G,) and finite.
    """
    history_G = _finite("history_G", history_G, axes=1)
    logit_G = (1.0 - history_G) / temperature
    weight_G = np.exp(logit_G - logit_G.max())
    return np.asarray(weight_G / weight_G.sum())


def _finite(name: str, values: npt.ArrayLike, *, axes: int = 2, groups: int | None = None) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    fits = array.ndim == axes and array.size > 0 and groups in (None, len(array))
    if not fits or not np.isfinite(array).all():
        wanted = ("G" if groups is None else str(groups), "J")[:axes]
        raise ValueError(f"{name} must be finite and of shape ({', '.join(wanted)}), got shape {array.shape}")
    return array


def _around_extreme(reward_GJ: FloatArray, alpha: float) -> tuple[FloatArray, FloatArray]:
    """The extreme c (J,), and alpha (r - c) (G, J): 0 where a group attains it, else negative."""
    extreme_J = reward_GJ.max(axis=0) if alpha > 0 else reward_GJ.min(axis=0)
    gap_GJ = reward_GJ - extreme_J
    # A huge alpha drives an exponent to -inf, whose exp is the right 0; an infinite one times 0 would be nan.
    with np.errstate(over="ignore", invalid="ignore"):
        return extreme_J, np.where(gap_GJ == 0.0, 0.0, alpha * gap_GJ)
