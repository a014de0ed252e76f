"""Rewards against a loop over single answers without padding, and votes.

Axis letters: Q public questions, J scored answers, K options.
"""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.protocol import rewards, wire
from client_app import scoring

SIZES = (2, 5, 3, 4)
OPTION_QK = np.arange(max(SIZES))[None] < np.array(SIZES)[:, None]
METRICS = ("js", "js-distance", "wasserstein", "cosine", "borda")


def by_hand(metric: str, prediction: np.ndarray, target: np.ndarray) -> float:
    """One reward over real options only; what a metric is worth, its own tests and the reference say."""
    return float(rewards.METRICS[metric](prediction[None], target[None], np.full((1, len(target)), True))[0])


def table(seed: int) -> np.ndarray:
    """A distribution for every question; what stands on padding must not matter."""
    rng = np.random.default_rng(seed)
    table_QK = np.where(OPTION_QK, rng.dirichlet(np.ones(5), size=4), 0.0)
    table_QK /= table_QK.sum(1, keepdims=True)
    table_QK[1, :2] = [table_QK[1, :2].sum(), 0.0]  # an option nobody chose
    return table_QK


@pytest.mark.parametrize("num_answers", [60, 0])
def test_rewards_equal_a_slow_loop_over_answers(num_answers):
    rng = np.random.default_rng(0)
    question_J = rng.integers(4, size=num_answers)
    prediction_JK = rng.dirichlet(np.full(5, 0.5), size=num_answers)
    prediction_JK[:20] = np.round(prediction_JK[:20], 1)  # ties and zeros
    prediction_JK[:20, 0] += 0.1
    prediction_JK[rng.integers(2, size=num_answers) == 1] *= 3.0  # need not sum to one
    target_QK = table(1)
    request = wire.ScoreRequest(question_J, prediction_JK, METRICS)
    reward_J = scoring.score(request, target_QK, OPTION_QK)
    assert list(reward_J) == list(METRICS)
    for metric in METRICS:
        pairs = ((prediction_JK[j, : SIZES[q]], target_QK[q, : SIZES[q]]) for j, q in enumerate(question_J))
        expected = [by_hand(metric, *pair) for pair in pairs]
        np.testing.assert_allclose(reward_J[metric], expected, atol=1e-9, err_msg=metric)


def test_an_unreadable_answer_is_worth_nothing_and_an_unknown_question_has_no_reward():
    target_QK = table(2)
    target_QK[3] = np.nan
    prediction_JK = np.full((5, 5), 0.2)
    prediction_JK[[1, 4]] = np.nan
    prediction_JK[2, 1] = np.nan  # half an answer is none either
    prediction_JK[0, 2:] = np.nan  # but beyond the two options of question 0 nothing counts
    request = wire.ScoreRequest(np.array([0, 0, 1, 3, 3]), prediction_JK, METRICS)
    for metric, reward_J in scoring.score(request, target_QK, OPTION_QK).items():
        assert reward_J[0] == pytest.approx(by_hand(metric, np.array([0.2, 0.2]), target_QK[0, :2]))
        assert reward_J[[1, 2]].tolist() == [0.0, 0.0]
        assert np.isnan(reward_J[[3, 4]]).all()  # the group has no answer there, readable or not
