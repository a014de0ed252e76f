"""Search for sets of groups on which aggregation rules can differ: one group against others that agree.

A gap between the best answers for the average and for the worst group opens where one group stands against a bloc. The
search looks at half of the questions; the gap on the other half is what may be believed, since the best of many sets
is also the luckiest.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from appa_flwr.analysis.alignment import known_targets
from appa_flwr.analysis.ceilings import SOLVED_METRICS, unsolved
from appa_flwr.analysis.fairness import BoolArray, FloatArray
from appa_flwr.analysis.group_differences import group_differences
from appa_flwr.core.errors import UserError
from appa_flwr.protocol.rewards import METRICS
from appa_flwr.survey.arrays import as_arrays
from appa_flwr.survey.types import Survey

LEAST_COMMON = 30
"""Questions of one half that two groups must both have answered to be compared."""


@dataclass(frozen=True)
class GroupSet:
    """One group against a bloc, the others.

    Attributes:
        searched_gap: Min AS at the best answers for the worst group less that at the best for the average, on the half
            of the questions that the set was chosen by.
        gap: the same on the other half.
        questions: of the other half, those that the outlier and one of the bloc or more have answered.
    """

    outlier: str
    others: tuple[str, ...]
    searched_gap: float
    gap: float
    questions: int


def search(survey: Survey, *, metric: str, size: int, most: int, seed: int = 0) -> list[GroupSet]:
    """Sets whose outlier lies furthest from a bloc that is close together, those first.

    Sets have `size` groups, at least 3; the `most` of them that are returned have another outlier each. The seed halves
    the questions.

    Raises:
        UserError: fewer than 3 groups wanted, too few groups with enough questions in common, or the metric has no
            ceilings.
    """
    if metric not in SOLVED_METRICS:
        raise unsolved(metric)
    if size < 3:
        raise UserError(f"a set of {size} groups has no bloc; give at least 3")
    target_GQK, option_QK = as_arrays(survey.questions, survey.answers)
    half_Q = np.random.default_rng(seed).permutation(len(option_QK)) % 2 == 0
    distance_GG = _distances(target_GQK[:, half_Q], option_QK[half_Q], metric=metric)
    blocs = [bloc for outlier in range(len(distance_GG)) if (bloc := _bloc(distance_GG, outlier, size)) is not None]
    if not blocs:
        raise UserError(f"no {size} groups have {LEAST_COMMON} questions in common pair by pair; try fewer groups")
    found = []
    for _, members in sorted(blocs, key=lambda bloc: -bloc[0])[:most]:
        gaps, counts = [], []
        for part_Q in (half_Q, ~half_Q):
            kept_GQK = target_GQK[members][:, part_Q]
            known_GQ = known_targets(kept_GQK, option_QK[part_Q])
            told_Q = known_GQ[0] & known_GQ[1:].any(axis=0)
            gaps.append(group_differences(kept_GQK[:, told_Q], option_QK[part_Q][told_Q], metric=metric).gap)
            counts.append(int(told_Q.sum()))
        outlier, *others = (survey.groups[g] for g in members)
        found.append(GroupSet(outlier, tuple(others), gaps[0], gaps[1], counts[1]))
    return found


def _distances(target_GQK: FloatArray, option_QK: BoolArray, *, metric: str) -> FloatArray:
    """(G, G) mean of 1 - score over the questions that both have answered; NaN where these are too few."""
    known_GQ = known_targets(target_GQK, option_QK)
    safe_GQK = np.where(known_GQ[:, :, None], target_GQK, option_QK / option_QK.sum(axis=1, keepdims=True))
    distance_GG = np.full((len(known_GQ), len(known_GQ)), np.nan)
    for g, mine_QK in enumerate(safe_GQK):
        both_GQ = known_GQ & known_GQ[g]
        count_G = both_GQ.sum(axis=1)
        sum_G = ((1.0 - METRICS[metric](mine_QK, safe_GQK, option_QK)) * both_GQ).sum(axis=1)
        enough_G = count_G >= LEAST_COMMON
        distance_GG[g, enough_G] = sum_G[enough_G] / count_G[enough_G]
    return distance_GG


def _bloc(distance_GG: FloatArray, outlier: int, size: int) -> tuple[float, list[int]] | None:
    """The bloc furthest from this group and closest together, grown group by group; None if there is none.

    How far the outlier lies from the others less how far these lie apart, and the positions of all, the outlier first.
    """
    near = [int(g) for g in np.flatnonzero(~np.isnan(distance_GG[outlier])) if g != outlier]
    best: tuple[float, list[int]] | None = None
    for first in near:
        others = [first]
        while len(others) < size - 1:
            worth_G = distance_GG[outlier] - distance_GG[:, others].mean(axis=1)  # NaN where groups cannot be compared
            worth_G[[outlier, *others]] = np.nan
            if np.isnan(worth_G).all():
                break
            others.append(int(np.nanargmax(worth_G)))
        if len(others) == size - 1:
            inside_GG = distance_GG[np.ix_(others, others)]
            within = inside_GG[np.triu_indices(len(others), 1)].mean()
            apart = float(distance_GG[outlier, others].mean() - within)
            if best is None or apart > best[0]:
                best = apart, [outlier, *others]
    return best
