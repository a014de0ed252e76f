"""The paper's reward metrics, which compare an answer with a group's target.

Legend: G groups, J rollouts, K answer options (padded to the longest question; `options` is True for a real option).
`...` stands for any leading axes that broadcast.

Every metric takes `(prediction, target, options)`, float arrays (..., K) and a boolean mask (..., K), all of them
broadcasting against each other except along K, and returns float64 rewards (...) in [0, 1], where 1 is best. Values at
padded positions are ignored. NaN at a real option marks a missing vector: its reward is NaN.

Each metric raises a ValueError for different K, a row without options, or an infinite value. Metrics of distributions,
which need not be normalised, also raise it for a negative value or zero mass.
"""

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from appa_flwr.core.arrays import BoolArray, FloatArray
from appa_flwr.core.errors import unknown_name

Metric = Callable[..., FloatArray]

TIE_DIGITS = 12  # decimals to which scores that differ by rounding alone are equal

_BASE_OF_UNIT_RANGE = 2.0
_LOG1P_FLOOR = np.nextafter(-1.0, 0.0)


def _metric(function: Metric) -> Metric:
    """Decorate a metric: check its arrays, set padding to 0, clip its rewards to [0, 1]."""

    @functools.wraps(function)
    def checked(
        prediction: npt.ArrayLike, target: npt.ArrayLike, options: npt.ArrayLike, **settings: float
    ) -> FloatArray:
        first, second = np.asarray(prediction, dtype=np.float64), np.asarray(target, dtype=np.float64)
        mask = np.asarray(options, dtype=bool)
        if min(first.ndim, second.ndim, mask.ndim) < 1 or not first.shape[-1] == second.shape[-1] == mask.shape[-1]:
            shapes = f"{first.shape}, {second.shape} and {mask.shape}"
            raise ValueError(f"prediction, target and options must agree in their last axis K, got {shapes}")
        if not mask.any(axis=-1).all():
            raise ValueError("every row needs at least one real option")
        first, second = np.where(mask, first, 0.0), np.where(mask, second, 0.0)
        if np.isinf(first).any() or np.isinf(second).any():
            raise ValueError("values must not be infinite")
        # Rounding errors can move a reward out of [0, 1].
        return np.asarray(np.clip(function(first, second, mask, **settings), 0.0, 1.0))

    return checked


@_metric
def js(prediction: FloatArray, target: FloatArray, options: BoolArray) -> FloatArray:
    """Equation 16, Jensen-Shannon reward: 1 - JSD(prediction || target), the divergence with base-2 logarithms.

    The reward is 1 for equal distributions, 0 for disjoint ones.
    """
    return 1.0 - _divergence(prediction, target, base=_BASE_OF_UNIT_RANGE)


@_metric
def js_distance(
    prediction: FloatArray, target: FloatArray, options: BoolArray, *, base: float = _BASE_OF_UNIT_RANGE
) -> FloatArray:
    """1 - Jensen-Shannon distance (the square root of the divergence), the score in the code of GPO and PluralLLM.

    With base 2 of the logarithm the reward spans [0, 1]. Base `np.e`, scipy's default, allows comparison with published
    figures; its reward is at least 1 - sqrt(ln 2) = 0.167.
    """
    return np.asarray(1.0 - np.sqrt(_divergence(prediction, target, base=base)))


@_metric
def wasserstein(prediction: FloatArray, target: FloatArray, options: BoolArray) -> FloatArray:
    """Equation 14, Wasserstein reward: 1 - W1(prediction, target) / (K - 1).

    W1 is the cost of moving mass along the positions 1..K of the real options, in one dimension the summed distance of
    the two cumulative distributions. Padding, wherever it stands, takes up no position. Raises ValueError for K = 1.
    """
    num_options = options.sum(axis=-1)
    if (num_options < 2).any():
        raise ValueError("the Wasserstein reward needs at least two options (its scale is K - 1), got a row with one")
    excess = np.cumsum(distribution(prediction) - distribution(target), axis=-1)
    # A padded slot repeats the cumulative value before it; only real options may count.
    cost = np.where(options, np.abs(excess), 0.0).sum(axis=-1)
    return np.asarray(1.0 - cost / (num_options - 1))


@_metric
def cosine(prediction: FloatArray, target: FloatArray, options: BoolArray) -> FloatArray:
    """Equation 15, cosine similarity reward: (1 + cos(prediction, target)) / 2 of two vectors of any sum.

    A zero vector has no direction; its cosine with anything is taken as 0, so the reward is 0.5.
    """
    dot = (_unit(prediction) * _unit(target)).sum(axis=-1)
    return np.asarray((1.0 + dot) / 2.0)


@_metric
def borda(prediction: FloatArray, target: FloatArray, options: BoolArray) -> FloatArray:
    """Equation 17, Borda reward: sum_k (K - k + 1) [rank(prediction)_k = rank(target)_k] / (K (K + 1) / 2).

    Both arguments are preference scores: higher is preferred, ties are ranked in option order. A distribution can be
    used directly, a ranking as K minus each option's position. `rank(.)_k` is the option in position k.
    """
    same = ranking(prediction, options) == ranking(target, options)
    num_options = options.sum(axis=-1, keepdims=True)
    # Padding ranks after every real option, where the worth is zero.
    worth = np.maximum(num_options - np.arange(options.shape[-1]), 0)
    reward = (same * worth).sum(axis=-1) / worth.sum(axis=-1)
    missing = np.isnan(prediction).any(axis=-1) | np.isnan(target).any(axis=-1)
    return np.where(missing, np.nan, reward)


def ranking(scores: npt.ArrayLike, options: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Option indices (..., K) from most to least preferred by scores (..., K), ties in option order, padding last.

    Scores that are equal to `TIE_DIGITS` decimals are a tie: sums of weights depend in their last bits on the order of
    a survey's rows.
    """
    scores, options = np.broadcast_arrays(np.asarray(scores, dtype=np.float64), np.asarray(options, dtype=bool))
    return np.lexsort((-np.where(options, scores, 0.0).round(TIE_DIGITS), ~options), axis=-1)


METRICS: dict[str, Metric] = {
    "js": js,
    "js-distance": js_distance,
    "wasserstein": wasserstein,
    "cosine": cosine,
    "borda": borda,
}
"""Metrics by their names in config and reports."""


def find(name: str) -> Metric:
    """Look up a metric of `METRICS`; raises UserError for an unknown name."""
    if name not in METRICS:
        raise unknown_name("metric", name, valid=METRICS)
    return METRICS[name]


def _divergence(prediction: FloatArray, target: FloatArray, *, base: float) -> FloatArray:
    """Jensen-Shannon divergence (...), at least 0.

    With s = p + q and d = (p - q) / s it is sum_k s/4 [(1+d) log(1+d) + (1-d) log(1-d)]: exactly symmetric, and exactly
    0 for p = q. The entropy form has cancellation errors near p = q, which the square root of the distance amplifies.
    """
    p, q = distribution(prediction), distribution(target)
    total = p + q
    tilt = (p - q) / np.where(total == 0.0, 1.0, total)
    terms = total * (_xlogx_shifted(tilt) + _xlogx_shifted(-tilt))
    return np.asarray(np.maximum(terms.sum(axis=-1) / (4.0 * np.log(base)), 0.0))


def _xlogx_shifted(d: FloatArray) -> FloatArray:
    """(1 + d) log(1 + d) for d >= -1, with its limit 0 at -1."""
    return np.asarray((1.0 + d) * np.log1p(np.maximum(d, _LOG1P_FLOOR)))


def distribution(values: FloatArray) -> FloatArray:
    """Values (..., K) scaled to sum to one; raises ValueError for a negative value, or if all are 0."""
    if (values < 0.0).any():
        raise ValueError("a distribution has no negative entries")
    top = values.max(axis=-1, keepdims=True)
    if (top == 0.0).any():
        raise ValueError("a distribution needs a positive sum over its options")
    # Scaled by the largest entry first, so that no sum can overflow.
    scaled = values / top
    return np.asarray(scaled / scaled.sum(axis=-1, keepdims=True))


def _unit(values: FloatArray) -> FloatArray:
    """Vectors of length one, or zero where the vector is zero."""
    top = np.abs(values).max(axis=-1, keepdims=True)
    scaled = values / np.where(top == 0.0, 1.0, top)
    length = np.sqrt((scaled**2).sum(axis=-1, keepdims=True))
    return scaled / np.where(length == 0.0, 1.0, length)
