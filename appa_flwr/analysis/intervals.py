"""Bootstrap intervals of scores and of paired differences of methods on the same held-out questions, over runs.

Legend: G groups, Q questions, M measures, S seeds, B resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis.alignment import GROUPS_TO_COMPARE
from appa_flwr.analysis.equations import fairness_per_answer
from appa_flwr.core.arrays import FloatArray

Measure = Literal["Avg AS", "Min AS", "FI"]
MEASURES: tuple[Measure, ...] = ("Avg AS", "Min AS", "FI")

LEVEL = 0.95
RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A measured number, and the percentile interval of its bootstrap."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """True if the interval lies on one side of 0."""
        return self.low > 0 or self.high < 0


def bootstrap(runs: Sequence[Sequence[npt.ArrayLike]], *, resamples: int = RESAMPLES) -> dict[Measure, Interval]:
    """Avg AS, Min AS and FI of a method, or of one method minus another: means over runs, with intervals.

    The bootstrap resamples the questions of each run, the same for both methods, and the runs if there are several.
    With a single run the interval covers the choice of questions, but not the randomness of training. FI has the
    paper's safeguards. The bounds are NaN for one run of one question.

    `runs` has for each run one method's rewards (G, Q), or those of two methods, of which the second is subtracted; NaN
    where a group has no target. Runs may have different questions.

    Raises:
        ValueError: no run, or two arrays of different shapes or different holes.
    """
    if not runs:
        raise ValueError("there is no run to measure")
    arrays = [[np.asarray(reward_GQ, dtype=np.float64) for reward_GQ in run] for run in runs]
    for first_GQ, *others in arrays:
        for other_GQ in others:
            if first_GQ.shape != other_GQ.shape or (np.isnan(first_GQ) != np.isnan(other_GQ)).any():
                raise ValueError("both methods of a pair must be scored by the same groups on the same questions")
    rng, sizes = np.random.default_rng(0), [run[0].shape[1] for run in arrays]
    whole_MS = np.hstack([_minus(run, np.ones((1, size))) for run, size in zip(arrays, sizes, strict=True)])
    drawn = [_minus(run, _counts(rng, size, resamples)) for run, size in zip(arrays, sizes, strict=True)]
    mean_MB = np.einsum("smb,bs->mb", np.stack(drawn), _counts(rng, len(runs), resamples)) / len(runs)
    tail = 100 * (1 - LEVEL) / 2
    low_M, high_M = np.nanpercentile(mean_MB, [tail, 100 - tail], axis=1)
    if sizes == [1]:  # a single question has no spread, and its bounds would look certain
        low_M = high_M = np.full(len(MEASURES), np.nan)
    bounds = zip(MEASURES, whole_MS.mean(1), low_M, high_M, strict=True)
    return {measure: Interval(float(value), float(low), float(high)) for measure, value, low, high in bounds}


def _counts(rng: np.random.Generator, size: int, resamples: int) -> FloatArray:
    """Counts (B, size) of each of `size` items in `size` draws with replacement."""
    return rng.multinomial(size, np.full(size, 1 / size), size=resamples).astype(np.float64)


def _minus(run: Sequence[FloatArray], count_BQ: FloatArray) -> FloatArray:
    first_MB, *others = (_measures(reward_GQ, count_BQ) for reward_GQ in run)
    return first_MB - others[0] if others else first_MB


def _measures(reward_GQ: FloatArray, count_BQ: FloatArray) -> FloatArray:
    """Avg AS, Min AS and FI (M, B), with each question weighted by its count in each resample.

    A group without rewards in a resample is left out of its mean and minimum.
    """
    present_GQ = ~np.isnan(reward_GQ)
    fairness_Q = fairness_per_answer(reward_GQ, min_groups=GROUPS_TO_COMPARE)
    used_Q = ~np.isnan(fairness_Q)
    fairness_B = np.ones(len(count_BQ))
    with np.errstate(invalid="ignore"):
        mean_BG = count_BQ @ np.where(present_GQ, reward_GQ, 0.0).T / (count_BQ @ present_GQ.T.astype(np.float64))
        if used_Q.any():
            fairness_B = count_BQ[:, used_Q] @ fairness_Q[used_Q] / count_BQ[:, used_Q].sum(1)
    return np.stack([np.nanmean(mean_BG, axis=1), np.nanmin(mean_BG, axis=1), fairness_B])
