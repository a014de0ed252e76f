"""Whether a population can tell aggregation rules apart: what the best shared answers would leave the worst group.

Where the best answers for the average serve the worst group as well as the best answers for that group, no rule can
gain anything over the mean; and where the fairness index of good answers is over the threshold, APPA is the mean.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis.ceilings import ceiling
from appa_flwr.analysis.fairness import fairness_of_cells
from appa_flwr.protocol.rewards import METRICS
from appa_flwr.survey.arrays import as_arrays
from appa_flwr.survey.generate import Population, ground_truth

# a smaller gap between the two ceilings is lost among the differences between runs
CLEAR_GAP = 0.01


@dataclass(frozen=True)
class Disagreement:
    """What is at stake among these groups, on these questions, by this metric.

    Attributes:
        size: standard deviation of shares around the mean over the groups.
        min_of_average: the worst group's score, in [0, 1], at the shared answers that are best for the average.
        min_of_fairest: the same at the answers that are best for the worst group.
        fairness: fairness index (Equation 4) of the answers that are best for the average.
    """

    size: float
    min_of_average: float
    min_of_fairest: float
    fairness: float

    @property
    def gap(self) -> float:
        """What a rule can win for the worst group."""
        return self.min_of_fairest - self.min_of_average

    def sentence(self, *, threshold: float) -> str:
        """In plain words, with APPA's threshold."""
        verdict = "rules can differ" if self.gap > CLEAR_GAP else "no rule can do better than the mean here"
        side = "under" if self.fairness < threshold else "over"
        return (
            f"groups differ by {self.size:.3f} (standard deviation of shares); the best answers for the average leave "
            f"the worst group at {self.min_of_average:.3f}, the best for it at {self.min_of_fairest:.3f}: {verdict}. "
            f"The fairness index of the first is {self.fairness:.4f}, {side} the threshold {threshold:g}"
        )


def disagreement(targets_GQK: npt.ArrayLike, options_QK: npt.ArrayLike, *, metric: str) -> Disagreement:
    """Of targets (G, Q, K), rows of NaN where a group has none; arguments and errors are those of `ceiling`."""
    targets_GQK = np.asarray(targets_GQK, dtype=np.float64)
    option_QK = np.asarray(options_QK, dtype=np.bool_)
    known_GQ = ~np.any(np.isnan(np.where(option_QK, targets_GQK, 0.0)), axis=2)

    def scores(objective: str) -> npt.NDArray[np.float64]:
        answer_QK = ceiling(targets_GQK, option_QK, metric=metric, objective=objective).answer_QK
        score_GQ = np.full(known_GQ.shape, np.nan)
        for score_Q, target_QK, known_Q in zip(score_GQ, targets_GQK, known_GQ, strict=True):
            score_Q[known_Q] = METRICS[metric](answer_QK[known_Q], target_QK[known_Q], option_QK[known_Q])
        return score_GQ

    average_GQ, fairest_GQ = scores("average"), scores("min")
    cell_GQK = known_GQ[:, :, None] & option_QK
    kept_GQK = np.where(cell_GQK, targets_GQK, 0.0)
    mean_QK = kept_GQK.sum(axis=0) / np.maximum(known_GQ.sum(axis=0), 1)[:, None]
    there_G = known_GQ.any(axis=1)
    return Disagreement(
        size=float((kept_GQK - mean_QK)[cell_GQK].std()),
        min_of_average=float(np.nanmean(average_GQ[there_G], axis=1).min()),
        min_of_fairest=float(np.nanmean(fairest_GQ[there_G], axis=1).min()),
        fairness=fairness_of_cells(average_GQ, min_groups=2),
    )


def generated_population(**drawn: Unpack[Population]) -> Disagreement:
    """Of the true answers behind a generated survey, to all its questions, by JS."""
    return disagreement(*as_arrays(*ground_truth(**drawn)), metric="js")
