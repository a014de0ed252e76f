import logging

import pytest
from fakes import FakeGrid

from appa_flwr.aggregation import RULES, parameters
from appa_flwr.config import Config
from appa_flwr.config.sections import kebab
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


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_made_with_its_own_keys(rule):
    other = {"alpha": -2, "fairness_threshold": 1.5, "ema_decay": 0.5, "temperature": 1, "min_mean": 0.1, "max_cov": 3}
    config = Config.load({"rule": rule, **{f"appa.{kebab(name)}": value for name, value in other.items()}})
    assert make_rule(config).model_dump() == {name: other[name] for name in parameters(rule)}
