"""The population prior: what the other groups answered on average, and how they differ, from sums over groups.

The mean says what any group is likely to answer. How groups differ is told by a few directions: on every question, how
the answer changes as one moves from one kind of group to another. A group's few context answers say where it lies
on them, and so what it answers elsewhere. Directions are found by alternating least squares (matrix factorisation):
each group finds its own position on the directions it is sent, and sums over groups give the next. All of it is in
square roots of shares: equal steps there are about equally far in Jensen-Shannon distance, and rare answers neither
vanish nor dominate as in shares and in logs.

It tells more about the groups than weights do, so it is off unless asked for. A question that fewer than `min_groups`
groups answered has no prior. The sums behind the directions can be solved for every group's answers: they are for
simulations, and `client_app.population` refuses them elsewhere.

Axis letters: Q questions, K options, N questions the group answered, F directions, W = 1 + F: the mean, the directions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from appa_flwr.errors import UserError
from appa_flwr.seeds import child_seed
from pluralllm.data import BoolArray, FloatArray, GroupData, IntArray, OptionEmbedding

# with three a group that removes its own share still does not see a single other group's answer
MIN_GROUPS = 3
NUM_DIRECTIONS = 3
# rounds of alternating least squares; from the second on, scores on two real surveys moved by less than 0.005
DIRECTION_ROUNDS = 5
# groups whose answers to a question are this near each other, in squared roots of shares, do not differ
LEAST_VARIANCE = 1e-6
# a group's position is drawn to 0 as much as this many average questions draw it to where it lies
POSITION_SHRINKAGE = 1.0


def population_sums(groups: Iterable[GroupData], embedding: OptionEmbedding) -> tuple[FloatArray, IntArray]:
    """Add up the groups' answers question by question.

    A node sends these sums for its groups, and the server adds the nodes' sums.

    Args:
        groups: answers to train on; held-out answers must not be among them.
        embedding: the public table of Q questions.

    Returns:
        (Q, K) sum of answer distributions, and (Q,) number of groups that answered.
    """
    sum_QK = np.zeros(embedding.option_QK.shape)
    count_Q = np.zeros(len(sum_QK), dtype=np.int64)
    for data in groups:
        sum_QK[data.question_N] += data.answer_NK
        count_Q[data.question_N] += 1
    return sum_QK, count_Q


def prior_from_sums(
    sum_QK: FloatArray, count_Q: IntArray, *, own: GroupData | None = None, min_groups: int = MIN_GROUPS
) -> FloatArray:
    """Mean answer of the others to each question.

    Args:
        sum_QK: (Q, K) from `population_sums`.
        count_Q: (Q,) from `population_sums`.
        own: the answers of a group whose share is within the sums and must not be; None for a group that is not.
        min_groups: groups that must have answered a question for it to have a prior, the own counted; >= 1.

    Returns:
        (Q, K) distributions; a row of zeros where there is no prior.

    Raises:
        UserError: a `min_groups` under 1, or an own answer that the sums do not hold.
    """
    if min_groups < 1:
        raise UserError(f"population prior: the minimum number of groups is {min_groups}; use at least 1")
    others_QK, others_Q = np.array(sum_QK, dtype=np.float64), np.array(count_Q)
    others_QK[count_Q < min_groups] = 0.0
    if own is not None:
        others_QK[own.question_N] -= own.answer_NK
        others_Q[own.question_N] -= 1
        if (others_Q < 0).any():
            raise UserError(f"population prior: the sums do not hold the answers of group '{own.group}'")
    others_QK = np.clip(others_QK, 0.0, None)  # a difference of float32 shares can end just under 0
    others_QK[others_Q < 1] = 0.0  # rounding leaves crumbs of a share that stood alone
    total_Q1 = others_QK.sum(axis=1, keepdims=True)
    prior_QK: FloatArray = np.divide(others_QK, total_Q1, out=np.zeros_like(others_QK), where=total_Q1 > 0.0)
    return prior_QK


@dataclass(frozen=True)
class DirectionSums:
    """Sums over groups, of their position on F directions and of their answers; nodes' sums add up.

    Attributes:
        product_QKF: sum of position times square root of the answer.
        total_QF: sum of the positions of the groups that answered.
        square_QFF: sum of the positions' outer products.
        count_Q: number of groups that answered.
    """

    product_QKF: FloatArray
    total_QF: FloatArray
    square_QFF: FloatArray
    count_Q: IntArray

    def named(self) -> dict[str, FloatArray]:
        """The sums as they travel: name -> numbers."""
        return {name: np.asarray(array, dtype=np.float64) for name, array in vars(self).items()}

    @classmethod
    def of(cls, named: Mapping[str, FloatArray]) -> DirectionSums:
        """The sums of `named`, among whatever else has a name."""
        product_QKF, total_QF, square_QFF, count_Q = (named[field.name] for field in fields(cls))
        return cls(product_QKF, total_QF, square_QFF, np.rint(count_Q).astype(np.int64))

    def __add__(self, other: DirectionSums) -> DirectionSums:
        """Sums over the groups of both."""
        return DirectionSums(
            self.product_QKF + other.product_QKF,
            self.total_QF + other.total_QF,
            self.square_QFF + other.square_QFF,
            self.count_Q + other.count_Q,
        )

    def without(self, data: GroupData, position_F: FloatArray) -> DirectionSums:
        """The sums without one group's share, given the position it had in them."""
        own = direction_sums(data, position_F, num_questions=len(self.count_Q))
        return DirectionSums(
            self.product_QKF - own.product_QKF,
            self.total_QF - own.total_QF,
            self.square_QFF - own.square_QFF,
            self.count_Q - own.count_Q,
        )


def starting_position(group: str, *, seed: int, num_directions: int = NUM_DIRECTIONS) -> FloatArray:
    """A group's position (F,) before there are directions: random, the same wherever it is computed."""
    return np.random.default_rng(child_seed(seed, "population", group)).standard_normal(num_directions)


def position(data: GroupData, prior_QK: FloatArray, direction_QKF: FloatArray) -> FloatArray:
    """Where a group lies on the directions, (F,), from all its answers to questions that have a prior.

    Ridge regression, as the network does with the context alone; it stays with the group.
    """
    rows = data.question_N[prior_QK[data.question_N].any(axis=1)]
    answer_NK = data.answer_NK[np.isin(data.question_N, rows)]
    residual_L = (np.sqrt(answer_NK) - np.sqrt(prior_QK[rows])).ravel()
    direction_LF = direction_QKF[rows].reshape(len(residual_L), direction_QKF.shape[-1])
    square_FF = direction_LF.T @ direction_LF + POSITION_SHRINKAGE * np.eye(direction_LF.shape[1])
    found_F: FloatArray = np.linalg.solve(square_FF, direction_LF.T @ residual_L)
    return found_F


def direction_sums(data: GroupData, position_F: FloatArray, *, num_questions: int) -> DirectionSums:
    """One group's share of the sums."""
    (num_directions,) = position_F.shape
    product_QKF = np.zeros((num_questions, data.answer_NK.shape[1], num_directions))
    total_QF, square_QFF = (
        np.zeros((num_questions, num_directions)),
        np.zeros((num_questions, num_directions, num_directions)),
    )
    count_Q = np.zeros(num_questions, dtype=np.int64)
    product_QKF[data.question_N] = np.sqrt(data.answer_NK)[..., None] * position_F
    total_QF[data.question_N] = position_F
    square_QFF[data.question_N] = np.outer(position_F, position_F)
    count_Q[data.question_N] = 1
    return DirectionSums(product_QKF, total_QF, square_QFF, count_Q)


def directions_from_sums(sums: DirectionSums, prior_QK: FloatArray) -> FloatArray:
    """Least squares for the directions, given the groups' positions.

    Args:
        sums: over groups; for a group within them its share taken out by `without`.
        prior_QK: the mean of the same groups from `prior_from_sums`, zeros where there is none.

    Returns:
        (Q, K, F) in square roots of shares, uncorrelated and of mean squared length 1 over the questions that have
        them. Zeros where there is no prior or at most F groups answered, who are too few to tell directions from chance
        and whose answers as many sums could give away; zeros also for directions in which groups do not differ.
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


def with_directions(prior_QK: FloatArray, direction_QKF: FloatArray | None = None) -> FloatArray:
    """Put the mean and the directions into one table (Q, K, 1 + F), as the network and the episodes take it."""
    parts = [prior_QK[..., None]] if direction_QKF is None else [prior_QK[..., None], direction_QKF]
    return np.concatenate(parts, axis=-1)


@dataclass(frozen=True)
class Population:
    """The prior of every group within the sums, its own share removed, and that of any group outside of them.

    Attributes:
        own: for each group (Q, K, 1 + F).
        outside: (Q, K, 1 + F) for a group outside the sums.
    """

    own: tuple[FloatArray, ...]
    outside: FloatArray


def fit_population(
    groups: Sequence[GroupData],
    embedding: OptionEmbedding,
    *,
    seed: int,
    min_groups: int = MIN_GROUPS,
    num_directions: int = NUM_DIRECTIONS,
) -> Population:
    """Exchange sums for as many rounds as it takes, as a federation does, without the messages.

    Args:
        groups: answers to train on.
        embedding: the public table of Q questions.
        seed: of the starting positions.
        min_groups: as in `prior_from_sums`.
        num_directions: F, 0 for the mean alone.
    """
    _, count_Q = population_sums(groups, embedding)
    groups = [_kept(data, count_Q >= min_groups) for data in groups]
    sums = population_sums(groups, embedding)
    prior_QK = prior_from_sums(*sums, min_groups=min_groups)
    position_GF = [starting_position(data.group, seed=seed, num_directions=num_directions) for data in groups]
    summed = _summed(groups, position_GF, num_questions=len(prior_QK))
    for _ in range(DIRECTION_ROUNDS - 1):
        direction_QKF = directions_from_sums(summed, prior_QK)
        position_GF = [position(data, prior_QK, direction_QKF) for data in groups]
        summed = _summed(groups, position_GF, num_questions=len(prior_QK))
    own = []
    for data, position_F in zip(groups, position_GF, strict=True):
        others_QK = prior_from_sums(*sums, own=data, min_groups=min_groups)
        own.append(with_directions(others_QK, directions_from_sums(summed.without(data, position_F), others_QK)))
    return Population(tuple(own), with_directions(prior_QK, directions_from_sums(summed, prior_QK)))


def _kept(data: GroupData, allowed_Q: BoolArray) -> GroupData:
    kept_N = allowed_Q[data.question_N]
    return GroupData(data.group, data.question_N[kept_N], data.answer_NK[kept_N])


def _summed(groups: Iterable[GroupData], position_GF: Iterable[FloatArray], *, num_questions: int) -> DirectionSums:
    pairs = zip(groups, position_GF, strict=True)
    return functools.reduce(operator.add, (direction_sums(*pair, num_questions=num_questions) for pair in pairs))
