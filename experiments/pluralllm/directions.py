"""A population prior with directions: not only what the other groups answered on average, but how they differ.

A few directions tell, on every question, how the answer changes as one moves from one kind of group to another. A
group's few context answers say where it lies on them, and so what it answers elsewhere. They are found by alternating
least squares (matrix factorisation): each group finds its position on the directions it is given, and sums over groups
give the next. All of it is in square roots of shares: equal steps there are about equally far in Jensen-Shannon
distance, and rare answers neither vanish nor dominate as in shares and in logs.

The sums can be solved for every group's answers, as a test shows, so no run exchanges them: this is an experiment.

Axis letters: G groups, Q questions, K options, N questions a group answered, F directions, W = 1 + F: the mean, the
directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from appa_flwr.seeds import child_seed
from pluralllm.data import FloatArray, GroupData, OptionEmbedding
from pluralllm.model import POSITION_SHRINKAGE
from pluralllm.population import MIN_GROUPS, population_sums, prior_from_sums

NUM_DIRECTIONS = 3
# rounds of alternating least squares; from the second on, scores on two real surveys moved by less than 0.005
DIRECTION_ROUNDS = 5
# groups whose answers to a question are this near each other, in squared roots of shares, do not differ
LEAST_VARIANCE = 1e-6


class DirectionSums(NamedTuple):
    """Sums over the groups that answered: position x root of the answer, position, its outer product, and 1."""

    product_QKF: FloatArray
    total_QF: FloatArray
    square_QFF: FloatArray
    count_Q: FloatArray

    def without(self, data: GroupData, position_F: FloatArray) -> DirectionSums:
        """The sums without one group's share, given the position it had in them."""
        own = direction_sums([data], [position_F], num_questions=len(self.count_Q))
        return DirectionSums(*(whole - share for whole, share in zip(self, own, strict=True)))


def starting_position(group: str, *, seed: int, num_directions: int = NUM_DIRECTIONS) -> FloatArray:
    """A group's position (F,) before there are directions: random, the same wherever it is computed."""
    return np.random.default_rng(child_seed(seed, "population", group)).standard_normal(num_directions)


def position(data: GroupData, prior_QK: FloatArray, direction_QKF: FloatArray) -> FloatArray:
    """Where a group lies on the directions, (F,), from all its answers to questions that have a prior.

    Ridge regression, as the network does with the context alone.
    """
    known_N = prior_QK[data.question_N].any(axis=1)
    rows, answer_NK = data.question_N[known_N], data.answer_NK[known_N]
    residual_L = (np.sqrt(answer_NK) - np.sqrt(prior_QK[rows])).ravel()
    direction_LF = direction_QKF[rows].reshape(len(residual_L), direction_QKF.shape[-1])
    square_FF = direction_LF.T @ direction_LF + POSITION_SHRINKAGE * np.eye(direction_LF.shape[1])
    found_F: FloatArray = np.linalg.solve(square_FF, direction_LF.T @ residual_L)
    return found_F


def direction_sums(
    groups: Sequence[GroupData], position_GF: Sequence[FloatArray], *, num_questions: int
) -> DirectionSums:
    """The sums over one group or more, each at its position."""
    (size_F,), num_options = position_GF[0].shape, groups[0].answer_NK.shape[1]
    sums = DirectionSums(
        np.zeros((num_questions, num_options, size_F)),
        np.zeros((num_questions, size_F)),
        np.zeros((num_questions, size_F, size_F)),
        np.zeros(num_questions),
    )
    for data, position_F in zip(groups, position_GF, strict=True):
        rows = data.question_N
        sums.product_QKF[rows] += np.sqrt(data.answer_NK)[..., None] * position_F
        sums.total_QF[rows] += position_F
        sums.square_QFF[rows] += np.outer(position_F, position_F)
        sums.count_Q[rows] += 1
    return sums


def directions_from_sums(sums: DirectionSums, prior_QK: FloatArray) -> FloatArray:
    """Least squares for the directions, given the groups' positions and the mean of the same groups.

    Returns:
        (Q, K, F) in square roots of shares, uncorrelated and of mean squared length 1 over the questions that have any.
        Zeros where there is no prior or at most F groups answered, who are too few to tell directions from chance, and
        for directions in which groups do not differ.
    """
    product_QKF = sums.product_QKF - np.sqrt(prior_QK)[..., None] * sums.total_QF[:, None]
    num_directions = product_QKF.shape[-1]
    known_Q = prior_QK.any(axis=1) & (sums.count_Q > num_directions)
    variance = np.einsum("qff->", sums.square_QFF) / max(1, num_directions * int(sums.count_Q.sum()))
    ridge_FF = max(float(variance), np.finfo(np.float64).tiny) * np.eye(num_directions)
    # as if one more group of average position had answered as the mean does
    raw_QFK = np.linalg.solve(sums.square_QFF + ridge_FF, product_QKF.transpose(0, 2, 1))
    raw_QKF = raw_QFK.transpose(0, 2, 1) * known_Q[:, None, None]
    variance_F, basis_FF = np.linalg.eigh(np.einsum("qkf,qkg->fg", raw_QKF, raw_QKF) / max(1, int(known_Q.sum())))
    real_F = variance_F * variance > LEAST_VARIANCE
    scale_F = np.divide(real_F, np.sqrt(variance_F, where=real_F, out=np.ones_like(variance_F)))
    direction_QKF: FloatArray = raw_QKF @ (basis_FF * scale_F)
    return direction_QKF


def fit_population(
    groups: Sequence[GroupData],
    embedding: OptionEmbedding,
    *,
    seed: int,
    min_groups: int = MIN_GROUPS,
    num_directions: int = NUM_DIRECTIONS,
) -> tuple[tuple[FloatArray, ...], FloatArray]:
    """Exchange sums for as many rounds as it takes; 0 directions leave the mean alone.

    Returns:
        For each group the table (Q, K, 1 + F) that the network takes, its own share removed; and that of any group
        outside the sums.
    """
    _, count_Q = population_sums(groups, embedding)
    kept = [count_Q[data.question_N] >= min_groups for data in groups]
    groups = [GroupData(g.group, g.question_N[n], g.answer_NK[n]) for g, n in zip(groups, kept, strict=True)]
    sums = population_sums(groups, embedding)
    prior_QK = prior_from_sums(*sums, min_groups=min_groups)
    position_GF = [starting_position(data.group, seed=seed, num_directions=num_directions) for data in groups]
    summed = direction_sums(groups, position_GF, num_questions=len(prior_QK))
    for _ in range(DIRECTION_ROUNDS - 1):
        direction_QKF = directions_from_sums(summed, prior_QK)
        position_GF = [position(data, prior_QK, direction_QKF) for data in groups]
        summed = direction_sums(groups, position_GF, num_questions=len(prior_QK))

    def table(mean_QK: FloatArray, found: DirectionSums) -> FloatArray:
        return np.concatenate([mean_QK[..., None], directions_from_sums(found, mean_QK)], axis=-1)

    own = (
        table(prior_from_sums(*sums, own=data, min_groups=min_groups), summed.without(data, position_F))
        for data, position_F in zip(groups, position_GF, strict=True)
    )
    return tuple(own), table(prior_QK, summed)
