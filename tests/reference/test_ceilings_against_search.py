"""Ceilings against general solvers and a grid on cases small enough for them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog, minimize

from appa_flwr.analysis.ceilings import shared_answer
from appa_flwr.protocol.rewards import METRICS

GRID = 100


def _simplex_grid() -> np.ndarray:
    """All distributions over three options in steps of 1 / GRID."""
    return np.array([(i, j, GRID - i - j) for i in range(GRID + 1) for j in range(GRID + 1 - i)]) / GRID


def _value(targets_GQK: np.ndarray, options_QK: np.ndarray, *, metric: str, objective: str) -> float:
    answer_QK = shared_answer(targets_GQK, options_QK, metric=metric, objective=objective)
    score_G = METRICS[metric](answer_QK, targets_GQK, options_QK).mean(axis=1)
    return score_G.mean() if objective == "average" else score_G.min()


def _targets(seed: int, num_groups: int, num_questions: int, num_options: int) -> tuple[np.ndarray, np.ndarray]:
    """Targets (G, Q, K), and the options (Q, K), all real."""
    targets_GQK = np.random.default_rng(seed).dirichlet(np.full(num_options, 0.7), (num_groups, num_questions))
    return targets_GQK, np.ones((num_questions, num_options), bool)


@pytest.mark.parametrize("metric", ["js", "wasserstein", "cosine"])
@pytest.mark.parametrize("seed", range(3))
def test_one_question_against_every_point_of_a_grid(metric, seed):
    targets_GQK, options_QK = _targets(seed, 4, 1, 3)
    reward_GC = METRICS[metric](_simplex_grid(), targets_GQK, options_QK)
    for objective, best in (("average", reward_GC.mean(axis=0).max()), ("min", reward_GC.min(axis=0).max())):
        value = _value(targets_GQK, options_QK, metric=metric, objective=objective)
        # never worse than the grid, and better by no more than half a grid cell allows
        assert best - 1e-4 <= value <= best + 0.02


@pytest.mark.parametrize("objective", ["average", "min"])
@pytest.mark.parametrize("seed", range(3))
def test_js_against_slsqp_over_all_questions_at_once(seed, objective):
    num_groups, num_questions, num_options = 3, 3, 3
    targets_GQK, options_QK = _targets(seed, num_groups, num_questions, num_options)

    def scores_G(flat):
        answer_QK = np.maximum(flat[:-1].reshape(num_questions, num_options), 1e-12)
        score_G = METRICS["js"](answer_QK, targets_GQK, options_QK).mean(axis=1)
        return score_G if objective == "min" else score_G.mean(keepdims=True)

    # The last variable is the objective itself, which no score (or not their mean) may lie under.
    start = np.append(np.full(num_questions * num_options, 1 / num_options), 0.5)
    solved = minimize(
        lambda flat: -flat[-1],
        start,
        method="SLSQP",
        bounds=[(1e-9, 1.0)] * (start.size - 1) + [(0.0, 1.0)],
        constraints=[
            {"type": "ineq", "fun": lambda flat: scores_G(flat) - flat[-1]},
            {"type": "eq", "fun": lambda flat: flat[:-1].reshape(num_questions, -1).sum(axis=1) - 1.0},
        ],
        options={"ftol": 1e-12, "maxiter": 500},
    )
    value = _value(targets_GQK, options_QK, metric="js", objective=objective)
    assert value == pytest.approx(-solved.fun, abs=1e-6)


@pytest.mark.parametrize("objective", ["average", "min"])
@pytest.mark.parametrize("seed", range(3))
def test_wasserstein_against_one_linear_program(seed, objective):
    num_groups, num_questions, num_options = 4, 5, 4
    targets_GQK, options_QK = _targets(seed, num_groups, num_questions, num_options)
    # Variables: y (Q, K), |excess| (G, Q, K), and the minimum v. Maximise v or the mean score.
    num_y, num_e = num_questions * num_options, num_groups * num_questions * num_options
    cumulate = np.kron(np.eye(num_questions), np.tril(np.ones((num_options, num_options))))
    rows, limits = [], []
    for group in range(num_groups):
        excess = np.zeros((num_y, num_e + 1))
        excess[:, group * num_y : (group + 1) * num_y] = np.eye(num_y)
        wanted = cumulate @ targets_GQK[group].ravel()
        for sign in (1.0, -1.0):
            rows.append(np.hstack([sign * cumulate, -excess]))
            limits.append(sign * wanted)
        cost = np.zeros((1, num_y + num_e + 1))
        cost[0, num_y + group * num_y : num_y + (group + 1) * num_y] = 1 / (num_questions * (num_options - 1))
        cost[0, -1] = 1.0
        rows.append(cost)
        limits.append([1.0])
    gain = np.zeros(num_y + num_e + 1)
    if objective == "min":
        gain[-1] = 1.0
    else:
        gain[num_y:-1] = -1 / (num_groups * num_questions * (num_options - 1))
    solved = linprog(
        -gain,
        A_ub=np.vstack(rows),
        b_ub=np.concatenate(limits),
        A_eq=np.kron(np.eye(num_questions), np.ones((1, num_options))) @ np.eye(num_y, num_y + num_e + 1),
        b_eq=np.ones(num_questions),
        bounds=[(0, None)] * (num_y + num_e) + [(0, 1)],
    )
    best = -solved.fun + (0.0 if objective == "min" else 1.0)
    value = _value(targets_GQK, options_QK, metric="wasserstein", objective=objective)
    assert value == pytest.approx(best, abs=1e-6)
