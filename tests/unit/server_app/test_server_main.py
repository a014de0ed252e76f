import logging

import numpy as np
import pytest
from fakes import FakeGrid

from appa_flwr.config import Config
from appa_flwr.errors import UserError
from server_app.federation.grid import OverlapGrid
from server_app.main import Run, make_rule
from server_app.run_folder import RunFolder

NUM_QUESTIONS = 40


@pytest.fixture
def run(tmp_path):
    config = Config.load(
        {
            "data.num-questions": NUM_QUESTIONS,
            "embedding.dim": 8,
            "policy.max-sequence-length": 30,
            "rollout.response-length": 10,
            "run.output-dir": str(tmp_path),
            "run-name": "r",
        }
    )
    return Run(OverlapGrid(FakeGrid({})), config, RunFolder(config))


def test_only_questions_that_fit_the_sequence_length_are_used(run, caplog):
    train_J, test_J = run._train_J.tolist(), run._test_J.tolist()
    longest = {train_J[0], test_J[0]}
    # 20 tokens of prompt and 10 of answer make 30, which just fits
    prompts = [[0] * (21 if q in longest else 20) for q in range(NUM_QUESTIONS)]
    with caplog.at_level(logging.WARNING):
        run._leave_out_long(prompts)
    assert run._train_J.tolist() == train_J[1:]
    assert run._test_J.tolist() == test_J[1:]
    assert "2 questions are left out" in caplog.text


def test_a_length_that_no_held_out_question_fits_is_an_error(run):
    held_out = set(run._test_J.tolist())
    prompts = [[0] * (500 if q in held_out else 5) for q in range(NUM_QUESTIONS)]
    with pytest.raises(UserError, match=r"max-sequence-length = 30 .* shortest prompt has 5 tokens"):
        run._leave_out_long(prompts)


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
