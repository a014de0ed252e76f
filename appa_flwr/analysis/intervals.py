"""Bootstrap intervals of scores and of paired differences of methods on the same held-out questions, over runs.

The least of noisy means is too low where groups score nearly alike, and drawing questions around these means lowers it
once more. Questions are therefore drawn around group means that are shrunk towards their centre by the noise in them.

Legend: G groups, Q questions, M measures, S seeds, B resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
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
    """An estimate over all questions such as these, and its interval.

    `sample` is the number of the sample itself, as in the paper's tables; `sd` its standard deviation over runs (ddof
    1), NaN for a single run. Only for Min AS the estimate is another number than the sample's.
    """

    value: float
    low: float
    high: float
    sample: float
    sd: float = field(default=float("nan"), compare=False)

    @property
    def excludes_zero(self) -> bool:
        """True if the interval lies on one side of 0."""
        return self.low > 0 or self.high < 0

    def uncorrected(self) -> "Interval":
        """Around the sample's number, for answers fitted to the very questions: their minimum is not too low."""
        bias = self.sample - self.value
        return Interval(self.sample, self.low + bias, self.high + bias, self.sample, self.sd)


NUMBERS = tuple(number.name for number in fields(Interval))
WORST = MEASURES.index("Min AS")


def bootstrap(runs: Sequence[Sequence[npt.ArrayLike]], *, resamples: int = RESAMPLES) -> dict[Measure, Interval]:
    """Avg AS, Min AS and FI of a method, or of one method minus another: means over runs, with intervals.

    The bootstrap resamples the questions of each run, the same for both methods, and the runs if there are several.
    With a single run the interval covers the choice of questions, but not the randomness of training. FI has the
    paper's safeguards. The bounds are NaN for one run of one question.

    Min AS is estimated without the bias of a minimum. If b are the draws, as far from the sample's number m as they are
    from the truth in a world of shrunk group means (`_shrunk`), the estimate is 2 m - mean(b), and the interval goes
    from 2 m - the upper to 2 m - the lower percentile of b (basic bootstrap). Avg AS and FI have percentile intervals.

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
    both = [_minus(run, _counts(rng, size, resamples)) for run, size in zip(arrays, sizes, strict=True)]
    sample_SM, drawn_SMB = (np.stack(part) for part in zip(*both, strict=True))
    mean_MB = np.einsum("smb,bs->mb", drawn_SMB, _counts(rng, len(runs), resamples)) / len(runs)
    tail = 100 * (1 - LEVEL) / 2
    low_M, high_M = np.nanpercentile(mean_MB, [tail, 100 - tail], axis=1)
    sample_M = sample_SM.mean(axis=0)
    value_M = sample_M.copy()
    turned = 2 * sample_M[WORST] - np.array([drawn_SMB[:, WORST].mean(), high_M[WORST], low_M[WORST]])
    if len(arrays[0]) == 1:  # of few questions the estimate may leave the range
        turned = turned.clip(0.0, 1.0)
    value_M[WORST], low_M[WORST], high_M[WORST] = turned
    if sizes == [1]:  # a single question has no spread, and its bounds would look certain
        low_M = high_M = np.full(len(MEASURES), np.nan)
    sd_M = sample_SM.std(axis=0, ddof=1) if len(runs) > 1 else np.full(len(MEASURES), np.nan)
    numbers = np.stack([value_M, low_M, high_M, sample_M, sd_M], axis=1)
    return {measure: Interval(*map(float, row)) for measure, row in zip(MEASURES, numbers, strict=True)}


def _counts(rng: np.random.Generator, size: int, resamples: int) -> FloatArray:
    """Counts (B, size) of each of `size` items in `size` draws with replacement."""
    return rng.multinomial(size, np.full(size, 1 / size), size=resamples).astype(np.float64)


def _minus(run: Sequence[FloatArray], count_BQ: FloatArray) -> tuple[FloatArray, FloatArray]:
    first, *others = (_measures(reward_GQ, count_BQ) for reward_GQ in run)
    return (first[0] - others[0][0], first[1] - others[0][1]) if others else first


def _measures(reward_GQ: FloatArray, count_BQ: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Avg AS, Min AS and FI of the sample (M,), and of resamples (M, B), with each question weighted by its count.

    Min AS of a resample is the sample's, moved by as much as the least of the shrunk means moves with the draw. A group
    without rewards in a resample is left out of its mean, and does not move.
    """
    reward_GQ = reward_GQ[~np.isnan(reward_GQ).all(axis=1)]
    present_GQ = ~np.isnan(reward_GQ)
    fairness_Q = fairness_per_answer(reward_GQ, min_groups=GROUPS_TO_COMPARE)
    used_Q = ~np.isnan(fairness_Q)
    fairness, fairness_B = 1.0, np.ones(len(count_BQ))
    with np.errstate(invalid="ignore"):
        mean_BG = count_BQ @ np.where(present_GQ, reward_GQ, 0.0).T / (count_BQ @ present_GQ.T.astype(np.float64))
        if used_Q.any():
            fairness = fairness_Q[used_Q].mean()
            fairness_B = count_BQ[:, used_Q] @ fairness_Q[used_Q] / count_BQ[:, used_Q].sum(1)
    mean_G = np.nanmean(reward_GQ, axis=1)
    move_BG = np.nan_to_num(mean_BG - mean_G)
    move_BG -= move_BG.mean(axis=0)
    true_G = _shrunk(mean_G, move_BG, present_GQ.sum(axis=1))
    least_B = mean_G.min() + (true_G + move_BG).min(axis=1) - true_G.min()
    sample_M = np.array([mean_G.mean(), mean_G.min(), fairness])
    return sample_M, np.stack([np.nanmean(mean_BG, axis=1), least_B, fairness_B])


def _shrunk(mean_G: FloatArray, move_BG: FloatArray, size_G: npt.NDArray[np.int64]) -> FloatArray:
    """Empirical Bayes: c + t / (t + v_g) (m_g - c) for group means m_g, t = max(0, var(m_g) - mean(v_g)).

    The noise v_g = s / n_g of a mean of n_g answers is that of the draws around the groups' common movement, which
    leaves their order as it is; s is common to all groups. The centre c is the mean with weights 1 / (t + v_g).
    """
    groups = len(mean_G)
    apart_G = np.square(move_BG - move_BG.mean(axis=1, keepdims=True)).mean(axis=0) * groups / max(groups - 1, 1)
    noise_G = (apart_G @ size_G) / ((1 - 1 / size_G).sum() or 1.0) / size_G
    if not noise_G.any():  # a single group, or one question
        return mean_G
    true = max(0.0, mean_G.var(ddof=1) - noise_G.mean())
    centre = np.average(mean_G, weights=1 / (true + noise_G))
    return np.asarray(centre + true / (true + noise_G) * (mean_G - centre))
