"""Intervals of paired differences: two policies were scored on the same held-out questions, in one run or in several.

Legend: G groups, Q questions, S seeds, B resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from appa_flwr.fairness import FloatArray, fairness_per_question
from appa_flwr.scores import GROUPS_TO_COMPARE

Measure = Literal["Avg AS", "Min AS", "FI"]
MEASURES: tuple[Measure, ...] = ("Avg AS", "Min AS", "FI")

LEVEL = 0.95
RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A difference and the percentile interval of its bootstrap.

    Attributes:
        difference: as measured.
        low: end of the interval.
        high: end of the interval.
    """

    difference: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        """As in "+0.012 (+0.003 to +0.021)"."""
        return f"{self.difference:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


def paired_differences(
    pairs: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[Measure, Interval]:
    """How far the first policy of each pair lies above the second in Avg AS, Min AS and FI, each with an interval.

    The bootstrap draws the questions of a run anew, the same for both policies, and with several runs first the runs:
    with a single run the interval is about other questions, not about another training.

    Args:
        pairs: for each seed the rewards (G, Q) of both policies, NaN where a group has nothing to compare with; the
            runs of different seeds may have different questions.
        level: of the interval, in (0, 1).
        resamples: B.
        seed: of the draws.

    Raises:
        ValueError: no pair, or two arrays of different shapes or different holes.
    """
    arrays = [(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)) for a, b in pairs]
    if not arrays:
        raise ValueError("there is no pair of scores to compare")
    for first_GQ, second_GQ in arrays:
        if first_GQ.shape != second_GQ.shape or (np.isnan(first_GQ) != np.isnan(second_GQ)).any():
            raise ValueError("both policies of a pair must be scored by the same groups on the same questions")
    rng = np.random.default_rng(seed)
    whole = _differences(arrays, [np.ones((1, a.shape[1])) for a, _ in arrays])  # (measures, S, 1)
    # Each run's questions are drawn once a resample, and the runs by how often each counts in it.
    drawn = _differences(arrays, [_counts(rng, a.shape[1], resamples) for a, _ in arrays])  # (measures, S, B)
    runs_BS = _counts(rng, len(arrays), resamples)
    mean_MB = np.einsum("msb,bs->mb", drawn, runs_BS) / len(arrays)
    tail = 100 * (1 - level) / 2
    low_M, high_M = np.nanpercentile(mean_MB, [tail, 100 - tail], axis=1)
    return {
        measure: Interval(float(whole[m].mean()), float(low_M[m]), float(high_M[m]))
        for m, measure in enumerate(MEASURES)
    }


def _counts(rng: np.random.Generator, size: int, resamples: int) -> FloatArray:
    """(B, size) how often each of `size` things is drawn in `size` draws with replacement."""
    return rng.multinomial(size, np.full(size, 1 / size), size=resamples).astype(np.float64)


def _differences(arrays: Sequence[tuple[FloatArray, FloatArray]], counts: Sequence[FloatArray]) -> FloatArray:
    """(measures, S, B) of every run under counts (B, Q) of its questions."""
    by_run = [_measures(a, c_BQ) - _measures(b, c_BQ) for (a, b), c_BQ in zip(arrays, counts, strict=True)]
    return np.stack(by_run, axis=1)


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
