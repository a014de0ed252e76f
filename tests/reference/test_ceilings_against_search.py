"""Ceilings against a general solver on cases small enough for it."""

import numpy as np
import pytest
from scipy.optimize import minimize

from appa_flwr.analysis.ceilings import shared_answer
from appa_flwr.protocol.rewards import METRICS


@pytest.mark.parametrize("objective", ["average", "min"])
@pytest.mark.parametrize("seed", range(3))
def test_js_against_slsqp_over_all_questions_at_once(seed, objective):
    num_groups, num_questions, num_options = 3, 3, 3
    targets_GQK = np.random.default_rng(seed).dirichlet(np.full(num_options, 0.7), (num_groups, num_questions))
    options_QK = np.ones((num_questions, num_options), bool)

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
    answer_QK = shared_answer(targets_GQK, options_QK, metric="js", objective=objective)
    assert scores_G(np.append(answer_QK, 0.0)).min() == pytest.approx(-solved.fun, abs=1e-6)
