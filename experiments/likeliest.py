"""Reconstruction of answers from replies: from sums over answers, and from training steps nearly linear in answers.

Axis letters: N answers, K options, M = N * K, R replies, S rounds of training, P weights.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares
from scipy.special import softmax
from sklearn.linear_model import Ridge, RidgeCV

from appa_flwr.core.errors import UserError

FloatArray = npt.NDArray[np.float64]

STARTS, SEARCH = 20, 200  # starting points of the search, and steps from each
SHIFT = 1e-4  # change of the answers' logarithms for numerical derivatives
RIDGES = np.geomspace(1e-4, 1e2, 19)  # penalties, of which leave-one-out chooses the best; steps have size 1


def by_sums(
    parts: Callable[[FloatArray], FloatArray], reply_R: FloatArray, shape: tuple[int, int], *, noise: float
) -> FloatArray:
    """Find the answers (N, K) whose replies are nearest to the observed replies, by least squares.

    Args:
        parts: maps answers (N, K) to each answer's part of each reply, (R, N); an answer affects only its own parts.
        reply_R: the observed replies; none is a `UserError`.
        shape: N, K.
        noise: typical error of a reply; with more noise the answers stay nearer to uniform ones.
    """
    if not len(reply_R):
        raise UserError("no reply")
    number, options = shape

    def answers(free_F: FloatArray) -> FloatArray:
        return np.asarray(softmax(np.c_[free_F.reshape(number, options - 1), np.zeros(number)], axis=1))

    def missed(free_F: FloatArray) -> FloatArray:
        return np.asarray(np.r_[parts(answers(free_F)).sum(axis=1) - reply_R, noise * free_F])

    def slope(free_F: FloatArray) -> FloatArray:
        shift_KF = SHIFT * np.tile(np.eye(options - 1), number)  # all answers are shifted at once
        here_RN = parts(answers(free_F))
        slope_RNK = np.stack([parts(answers(free_F + shift_F)) - here_RN for shift_F in shift_KF], axis=2) / SHIFT
        return np.asarray(np.r_[slope_RNK.reshape(len(reply_R), -1), noise * np.eye(len(free_F))])

    rng, size = np.random.default_rng(0), number * (options - 1)
    begin = [np.zeros(size), *rng.normal(size=(STARTS - 1, size))]
    fits = [least_squares(missed, start, slope, max_nfev=SEARCH) for start in begin]
    return answers(min(fits, key=lambda fit: fit.cost).x)


def by_steps(answer_SNK: FloatArray, step_SP: FloatArray, step_P: FloatArray, *, rounds: int) -> FloatArray:
    """Predict answers (N, K) by a ridge regression of known answers on the weights' changes in training on them.

    The part of a change that is not linear in the answers counts as noise of a round; a mean over rounds reduces it.

    Args:
        answer_SNK: the known answers.
        step_SP: change of the weights by a round of training on each known answer.
        step_P: mean change of the weights over `rounds` of training on the unknown answers.
        rounds: number of rounds.
    """
    answer_SM = answer_SNK.reshape(len(answer_SNK), -1)
    known_SX = np.c_[answer_SM, np.ones(len(answer_SM))]
    linear_SP = known_SX @ np.linalg.lstsq(known_SX, step_SP, rcond=None)[0]
    mean_SP = linear_SP + (step_SP - linear_SP) / np.sqrt(rounds)
    size = np.sqrt(step_SP.var(axis=0).sum())
    ridge = RidgeCV(RIDGES).fit(step_SP / size, answer_SM).alpha_ / rounds
    answer_M = Ridge(ridge).fit(mean_SP / size, answer_SM).predict(step_P[None] / size)[0]
    answer_NK = np.maximum(answer_M.reshape(answer_SNK.shape[1:]), 0.0)
    return np.asarray(answer_NK / answer_NK.sum(axis=1, keepdims=True))


def by_counts(vote_CM: FloatArray, count_M: FloatArray, groups: int) -> list[int]:
    """Find the candidates whose votes add up to the observed counts, one per group, each in turn until none improves.

    `vote_CM` has each candidate's votes, 0 or 1, and `count_M` the sum of the groups' votes. Of `STARTS` searches the
    best counts.
    """
    best: list[int] = []
    for start in np.random.default_rng(0).integers(len(vote_CM), size=(STARTS, groups)):
        chosen, before = [*map(int, start)], list[int]()
        while chosen != before:
            before = chosen.copy()
            for g in range(groups):
                others_M = vote_CM[chosen].sum(axis=0) - vote_CM[chosen[g]]
                chosen[g] = int((vote_CM @ (count_M - others_M)).argmax())
        best = min(best or chosen, chosen, key=lambda picked: np.abs(vote_CM[picked].sum(axis=0) - count_M).sum())
    return best
