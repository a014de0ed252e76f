"""Ceilings: the best scores of one shared answer per question, which no policy with one answer for all can exceed.

Legend: G groups, Q questions, K answer options (padded, `options` True for a real option), N the real options of all
questions in a row, E their pairs with groups, L their pairs with positions.

Two objectives, both over the groups' alignment scores (Equations group-as and avg-min-as): their mean, and the worst
group's score, which depends on all questions jointly. Each is one convex program over the answers to all questions,
formulated with cvxpy and solved by Clarabel.
"""

import math
import warnings
from collections.abc import Callable

import cvxpy as cp
import numpy as np
import numpy.typing as npt
from scipy import sparse

from appa_flwr.analysis.alignment import known_targets
from appa_flwr.core.arrays import BoolArray, FloatArray, IntArray
from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.protocol.rewards import METRICS

Program = tuple[cp.Expression, cp.Constraint]
"""The groups' scores (G,) of answers (N,) before normalisation, and the constraint on the answers."""

OBJECTIVES = ("average", "min")
"""`average`: the mean of the groups' scores; `min`: the worst group's score."""

_CLARABEL = {"tol_gap_abs": 1e-7, "tol_gap_rel": 1e-7, "time_limit": 120.0}
# With Clarabel's default of .99, objective `min` was not solved for the 121 groups of GlobalOpinionQA, and with .9 not
# for 1,000 groups.
_STEP_FRACTIONS = (0.9, 0.8)
MOST_SHARES = 25_000
"""Most shares in the targets of `sample`: all metrics and objectives together take some ten seconds."""

_TINY = 1e-12  # smallest share of an option, so that the sum of each question's shares is positive


class NotSolved(UserError):
    """The solver did not find the best shared answers."""


def sample(options_QK: BoolArray, *, groups: int, seed: int) -> IntArray:
    """Draw the questions, in order, whose best shared answers are found in seconds: all, if they are few.

    The solver's time grows faster than the number of shares in all groups' targets; beyond `MOST_SHARES` as many random
    questions are drawn as stay below, none for very many groups.
    """
    drawn = np.random.default_rng(seed).permutation(len(options_QK))
    return np.sort(drawn[groups * np.cumsum(options_QK[drawn].sum(axis=1)) <= MOST_SHARES])


def shared_answer(targets_GQK: npt.ArrayLike, options_QK: npt.ArrayLike, *, metric: str, objective: str) -> FloatArray:
    """Compute the best shared answer to every question for one objective: shares (Q, K), 0 at padding.

    The objective is within 1e-6 of its maximum, or within 1e-4 if the solver stalls. If several answers are best, the
    result is one of them.

    Targets (G, Q, K) are inputs of the metric, NaN where a group has none. A question without any target gets the
    uniform answer. Groups without any target are ignored.

    Raises:
        NotSolved: the solver failed, or took two minutes.
        UserError: a metric that is none of `SOLVED_METRICS`, or an unknown objective.
        ValueError: shapes that do not fit, no target at all, or targets that the metric rejects.
    """
    if metric not in SOLVED_METRICS:
        raise unknown_name("metric", metric, valid=SOLVED_METRICS)
    if objective not in OBJECTIVES:
        raise unknown_name("objective", objective, valid=OBJECTIVES)
    targets_GQK, options_QK, present_GQ = _checked_targets(targets_GQK, options_QK)
    METRICS[metric](targets_GQK, targets_GQK, options_QK)  # raises ValueError for targets that the metric rejects
    question_N = np.nonzero(options_QK)[0]
    # A group's score is the mean over its own questions, so each pair's weight is 1 / (number of these questions).
    pair_GN = (present_GQ / present_GQ.sum(axis=1, keepdims=True))[:, question_N]
    target_GN = targets_GQK[:, options_QK]
    answer_N = cp.Variable(len(question_N), nonneg=True)
    _solve(_PROGRAMS[metric](answer_N, target_GN, pair_GN, question_N), objective=objective)
    answer_QK = np.zeros(options_QK.shape)
    answer_QK[options_QK] = np.maximum(answer_N.value, _TINY)
    answer_QK = np.where(present_GQ[..., None].any(axis=0), answer_QK, options_QK)
    shares_QK: FloatArray = answer_QK / answer_QK.sum(axis=1, keepdims=True)
    return shares_QK


def _solve(program: Program, *, objective: str) -> None:
    """Give the program's answers the values that maximise the objective; raises NotSolved."""
    score_G, constraint = program
    goal = cp.min(score_G) if objective == "min" else cp.sum(score_G) / score_G.size
    problem = cp.Problem(cp.Maximize(goal), [constraint])
    failed = ""
    for fraction in _STEP_FRACTIONS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # from cvxpy if the solver stalls
                problem.solve(solver=cp.CLARABEL, max_step_fraction=fraction, **_CLARABEL)
        except cp.SolverError as error:
            failed = str(error)
            continue
        if problem.status in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
            return
        failed = f"Clarabel ends as {problem.status}"
    raise NotSolved(f"no best shared answers for the objective {objective}: {failed}")


def _js(answer_N: cp.Variable, target_GN: FloatArray, pair_GN: FloatArray, question_N: IntArray) -> Program:
    """The sum of y log(2y / (y + t)) + t log(2t / (y + t)) is the divergence times 2 log 2; for t = 0 it is linear."""
    group_E, option_E = np.nonzero((pair_GN > 0.0) & (target_GN > 0.0))
    answer_E, target_E = answer_N[option_E], _shares(target_GN, question_N)[group_E, option_E]
    middle_E = (answer_E + target_E) / 2.0
    divergence_E = cp.rel_entr(answer_E, middle_E) + cp.rel_entr(target_E, middle_E)
    pair_GE = sparse.csr_array((pair_GN[group_E, option_E], (group_E, np.arange(len(group_E)))))
    linear_GN = math.log(2.0) * pair_GN * (target_GN == 0.0)
    score_G = 1.0 - (pair_GE @ divergence_E + linear_GN @ answer_N) / (2.0 * math.log(2.0))
    return score_G, _sums(question_N) @ answer_N == 1.0


def _wasserstein(answer_N: cp.Variable, target_GN: FloatArray, pair_GN: FloatArray, question_N: IntArray) -> Program:
    """The sum of the distances of the cumulative distributions, divided by K - 1."""
    sum_QN = _sums(question_N)
    cumulate_NN = sparse.tril(sum_QN.T @ sum_QN, format="csr")
    group_E, option_E = np.nonzero(pair_GN)
    target_E = (_shares(target_GN, question_N) @ cumulate_NN.T)[group_E, option_E]
    weight_E = (pair_GN / (np.bincount(question_N) - 1)[question_N])[group_E, option_E]
    distance_E = cp.abs((cumulate_NN @ answer_N)[option_E] - target_E)
    weight_GE = sparse.csr_array((weight_E, (group_E, np.arange(len(group_E)))))
    score_G = 1.0 - weight_GE @ distance_E
    return score_G, sum_QN @ answer_N == 1.0


def _cosine(answer_N: cp.Variable, target_GN: FloatArray, pair_GN: FloatArray, question_N: IntArray) -> Program:
    """Cosines are linear in the answer's direction, a unit vector; shorter vectors are allowed, but score less."""
    length_GN = np.sqrt(target_GN**2 @ _sums(question_N).T)[:, question_N]
    direction_GN = target_GN / np.where(length_GN == 0.0, 1.0, length_GN)
    score_G = (1.0 + (pair_GN * direction_GN) @ answer_N) / 2.0
    return score_G, _sums(question_N) @ answer_N**2 <= 1.0


_PROGRAMS: dict[str, Callable[[cp.Variable, FloatArray, FloatArray, IntArray], Program]] = {
    "js": _js,
    "wasserstein": _wasserstein,
    "cosine": _cosine,
}

SOLVED_METRICS = tuple(_PROGRAMS)
"""Metrics with ceilings: `js-distance` can have several local optima, and rankings are not a convex set."""


def _sums(question_N: IntArray) -> sparse.csr_array:
    """Matrix (Q, N) that sums over the options of each question."""
    return sparse.csr_array((np.ones(len(question_N)), (question_N, np.arange(len(question_N)))))


def _shares(target_GN: FloatArray, question_N: IntArray) -> FloatArray:
    shares_GN: FloatArray = target_GN / (target_GN @ _sums(question_N).T)[:, question_N]
    return shares_GN


def _checked_targets(targets_GQK: npt.ArrayLike, options_QK: npt.ArrayLike) -> tuple[FloatArray, BoolArray, BoolArray]:
    """Targets of the groups that have any (uniform where absent, with weight 0), options, and the mask of targets."""
    targets_GQK = np.asarray(targets_GQK, dtype=np.float64)
    options_QK = np.asarray(options_QK, dtype=bool)
    if targets_GQK.ndim != 3 or targets_GQK.shape[1:] != options_QK.shape or not options_QK.any(axis=-1).all():
        shapes = f"{targets_GQK.shape} and {options_QK.shape}"
        raise ValueError(f"expected targets (G, Q, K) and options (Q, K) with an option in every row, got {shapes}")
    present_GQ = known_targets(targets_GQK, options_QK)
    if not present_GQ.any():
        raise ValueError("there is no target to meet: every (group, question) pair is absent")
    targets_GQK = np.where(options_QK, np.where(present_GQ[..., None], targets_GQK, 1.0), 0.0)
    has_any_G = present_GQ.any(axis=1)
    return targets_GQK[has_any_G], options_QK, present_GQ[has_any_G]
