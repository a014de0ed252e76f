"""Scores of answers from sums over the groups: what `appa_flwr.analysis.alignment` finds from single rewards.

Axis letters: J answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis.aggregation.sums import fairness_of_sums
from appa_flwr.analysis.alignment import GROUPS_TO_COMPARE
from appa_flwr.protocol import sum_messages as messages
from appa_flwr.protocol import wire
from server_app.federation.secure_sums import SecureSums, Summed

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SummedScores:
    """One metric's and one side's sums over the groups.

    Attributes:
        reward_J, square_J: sums of rewards and of their squares.
        count_J: groups with a reward.
        own: the sum of the groups' own scores.
        number: groups with a score.
        per_group: group -> its own score, NaN where it lets none out.
    """

    reward_J: FloatArray
    square_J: FloatArray
    count_J: FloatArray
    own: float
    number: int
    per_group: Mapping[str, float]

    @property
    def known(self) -> bool:
        """True if some group has something to compare with."""
        return self.number > 0

    @property
    def avg_as(self) -> float:
        """Mean over groups of their own scores."""
        return self.own / self.number if self.number else math.nan

    @property
    def min_as(self) -> float:
        """The lowest of them; NaN unless all let theirs out."""
        given = [score for score in self.per_group.values() if not math.isnan(score)]
        return min(given) if given and len(given) >= self.number else math.nan

    @property
    def mean_J(self) -> FloatArray:
        """Mean reward of each answer; NaN where no group has one."""
        return np.divide(self.reward_J, self.count_J, out=np.full_like(self.reward_J, np.nan), where=self.count_J > 0)

    def fairness(self, used_J: npt.NDArray[np.bool_]) -> float:
        """The Fairness Index over some answers, NaN where there is none."""
        if not used_J.any():
            return math.nan
        used_J = used_J & (self.count_J >= GROUPS_TO_COMPARE)
        return fairness_of_sums(self.reward_J[used_J], self.square_J[used_J], groups=self.count_J[used_J])


def scores(secure: SecureSums, request: wire.ScoreRequest) -> dict[tuple[str, str], SummedScores]:
    """(metric, side) -> the sums of the groups' scores of answers; see `SecureSums.total` for what it raises."""
    keys = [(metric, side) for side in request.sides for metric in request.metrics]
    size = len(request.question_J)
    shapes: dict[str, tuple[int, ...]] = {}
    for metric, side in keys:
        name = f"{metric} {side}"
        shapes |= dict.fromkeys((f"{name} reward", f"{name} square", f"{name} known"), (size,))
        shapes |= dict.fromkeys((f"{name} own", f"{name} groups"), (1,))
    summed = secure.total(messages.SCORES, wire.pack_score_request(request), shapes)
    names = secure.names
    return {(metric, side): _of(summed, f"{metric} {side}", names) for metric, side in keys}


def _of(summed: Summed, name: str, names: tuple[str, ...]) -> SummedScores:
    sums = summed.sums
    own = {group: _in_range(summed.released.get(group, {}).get(name, math.nan)) for group in names}
    return SummedScores(
        reward_J=sums[f"{name} reward"],
        square_J=sums[f"{name} square"],
        count_J=np.round(sums[f"{name} known"]),
        own=float(sums[f"{name} own"][0]),
        number=round(float(sums[f"{name} groups"][0])),
        per_group=own,
    )


def _in_range(score: float) -> float:
    return score if 0.0 <= score <= 1.0 else math.nan
