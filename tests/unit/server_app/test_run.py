import logging

import pytest
from fakes import catalogue_of

from appa_flwr.aggregation import RULES, parameters
from appa_flwr.config import Config
from appa_flwr.config.sections import kebab
from appa_flwr.errors import UserError
from server_app.federation.catalogue import fitting_questions
from server_app.ppo.strategy import make_rule

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


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_made_with_its_own_keys(rule):
    other = {"alpha": -2, "fairness_threshold": 1.5, "ema_decay": 0.5, "temperature": 1, "min_mean": 0.1, "max_cov": 3}
    config = Config.load({"rule": rule, **{f"appa.{kebab(name)}": value for name, value in other.items()}})
    assert make_rule(config).model_dump() == {name: other[name] for name in parameters(rule)}
