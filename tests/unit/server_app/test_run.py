import logging

import numpy as np
import pytest
from fakes import catalogue_of

from appa_flwr.config import Config
from appa_flwr.errors import UserError
from server_app.run import fitting_questions, make_rule

LENGTHS = Config.load({"policy.max-sequence-length": 30, "rollout.response-length": 10})
CATALOGUE = catalogue_of([2, 2, 2, 2], train=[True, False, True, False])


def test_only_questions_that_fit_the_sequence_length_are_used(caplog):
    # 20 tokens of prompt and 10 of answer make 30, which just fits
    with caplog.at_level(logging.WARNING):
        train_J, test_J = fitting_questions(LENGTHS, CATALOGUE, [21, 21, 20, 20])
    assert (train_J.tolist(), test_J.tolist()) == ([2], [3])
    assert "2 questions are left out" in caplog.text


@pytest.mark.parametrize("tokens_Q", [[5, 500, 5, 500], [500, 5, 500, 5]])
def test_a_length_that_no_training_or_no_held_out_question_fits_is_an_error(tokens_Q):
    with pytest.raises(UserError, match=r"policy\.max-sequence-length = 30 .* shortest prompt has 5 tokens"):
        fitting_questions(LENGTHS, CATALOGUE, tokens_Q)


@pytest.mark.parametrize("rule", ["average", "min", "alpha", "appa"])
def test_every_rule_is_made_with_its_own_keys(rule):
    config = Config.load({"rule": rule, "appa.alpha": -2.0, "appa.fairness-threshold": 1.5, "appa.ema-decay": 0.5})
    made = make_rule(config)
    reward_GJ = np.array([[0.2, 0.4], [0.8, 0.6]])
    result = made.apply(made.init(2), reward_GJ, reward_GJ)
    np.testing.assert_allclose(result.state.history_G, [0.15, 0.35])  # half of .3 and half of .7
    if rule == "alpha":  # log of the mean of exp(-2 r), divided by -2
        np.testing.assert_allclose(result.aggregate_J[1], np.log((np.exp(-0.8) + np.exp(-1.2)) / 2) / -2)
    if rule == "appa":
        assert result.fell_back is False  # no index reaches a threshold above one
