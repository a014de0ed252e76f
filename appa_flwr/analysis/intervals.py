"""Intervals of scores and paired differences: methods are scored on the same held-out questions, in one run or more.

Legend: G groups, Q questions, M measures, S seeds, B resamples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis.alignment import GROUPS_TO_COMPARE
from appa_flwr.analysis.fairness import FloatArray, fairness_per_question

Measure = Literal["Avg AS", "Min AS", "FI"]
MEASURES: tuple[Measure, ...] = ("Avg AS", "Min AS", "FI")

LEVEL = 0.95
RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A number as measured, and the percentile interval of its bootstrap."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """True if the interval lies on one side of 0."""
        return self.low > 0 or self.high < 0


def paired_differences(
    pairs: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[Measure, Interval]:
    """Differences between the two methods of each pair in Avg AS, Min AS and FI, each with an interval.

    The bootstrap draws the questions of a run anew, the same for both methods, and with several runs first the runs:
    with a single run the interval is about other questions, not about another training. FI is taken with the paper's
    safeguards.

    `pairs` are for each run the rewards (G, Q) of both methods, NaN where a group has nothing to compare with; runs may
    have different questions.

    Raises:
        ValueError: no pair, or two arrays of different shapes or different holes.
    """
    arrays = [(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)) for a, b in pairs]
    for first_GQ, second_GQ in arrays:
        if first_GQ.shape != second_GQ.shape or (np.isnan(first_GQ) != np.isnan(second_GQ)).any():
            raise ValueError("both methods of a pair must be scored by the same groups on the same questions")
    runs = [(first_GQ.shape[1], functools.partial(_difference, first_GQ, second_GQ)) for first_GQ, second_GQ in arrays]
    return _bootstrap(runs, level=level, resamples=resamples, seed=seed)


def levels(
    runs: Sequence[npt.ArrayLike], *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> dict[Measure, Interval]:
    """One method's Avg AS, Min AS and FI, each with an interval; `runs` are its rewards (G, Q) for each seed.

    All else is as for `paired_differences`.
    """
    arrays = [np.asarray(run, dtype=np.float64) for run in runs]
    by_run = [(reward_GQ.shape[1], functools.partial(_measures, reward_GQ)) for reward_GQ in arrays]
    return _bootstrap(by_run, level=level, resamples=resamples, seed=seed)


Statistic = Callable[[FloatArray], FloatArray]
"""Counts (B, Q) of a run's questions -> (measures, B)."""


def _bootstrap(
    runs: Sequence[tuple[int, Statistic]], *, level: float, resamples: int, seed: int
) -> dict[Measure, Interval]:
    """The mean over runs, each with its number of questions, under draws of runs and of each run's questions."""
    if not runs:
        raise ValueError("there is no run to measure")
    rng = np.random.default_rng(seed)
    whole_MS = np.stack([statistic(np.ones((1, size)))[:, 0] for size, statistic in runs], axis=1)
    drawn_MSB = np.stack([statistic(_counts(rng, size, resamples)) for size, statistic in runs], axis=1)
    mean_MB = np.einsum("msb,bs->mb", drawn_MSB, _counts(rng, len(runs), resamples)) / len(runs)
    tail = 100 * (1 - level) / 2
    low_M, high_M = np.nanpercentile(mean_MB, [tail, 100 - tail], axis=1)
    bounds = zip(MEASURES, whole_MS.mean(1), low_M, high_M, strict=True)
    return {measure: Interval(float(value), float(low), float(high)) for measure, value, low, high in bounds}


def _counts(rng: np.random.Generator, size: int, resamples: int) -> FloatArray:
    """(B, size) how often each of `size` things is drawn in `size` draws with replacement."""
    return rng.multinomial(size, np.full(size, 1 / size), size=resamples).astype(np.float64)


def _difference(first_GQ: FloatArray, second_GQ: FloatArray, count_BQ: FloatArray) -> FloatArray:
    return _measures(first_GQ, count_BQ) - _measures(second_GQ, count_BQ)


def _measures(reward_GQ: FloatArray, count_BQ: FloatArray) -> FloatArray:
    """(measures, B): Avg AS, Min AS and FI with each question counted so many times.

    A group none of whose questions are drawn takes no part, as one without any takes none.
    """
    present_GQ = ~np.isnan(reward_GQ)
    weight_BG = count_BQ @ present_GQ.T.astype(np.float64)
    with np.errstate(invalid="ignore"):
        mean_BG = count_BQ @ np.where(present_GQ, reward_GQ, 0.0).T / weight_BG
    fairness_Q = fairness_per_question(reward_GQ, min_groups=GROUPS_TO_COMPARE)
    used_Q = ~np.isnan(fairness_Q)
    fairness_B = np.ones(len(count_BQ))
    if used_Q.any():
        with np.errstate(invalid="ignore"):
            fairness_B = count_BQ[:, used_Q] @ fairness_Q[used_Q] / count_BQ[:, used_Q].sum(1)
    return np.stack([np.nanmean(mean_BG, axis=1), np.nanmin(mean_BG, axis=1), fairness_B])
