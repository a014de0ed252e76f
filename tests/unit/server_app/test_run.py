from types import SimpleNamespace

import pytest
from fakes import catalogue_of

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from server_app.federation.catalogue import fitting_questions
from server_app.inputs import answer_tokens

LENGTHS = Config.load({"policy.max-sequence-length": 30, "ppo.response-length": 10})
CATALOGUE = catalogue_of([2, 2, 2, 2], train=[True, False, True, False])


def fitting(prompt_tokens_Q, answer_tokens_Q):
    return fitting_questions(LENGTHS, CATALOGUE, prompt_tokens_Q=prompt_tokens_Q, answer_tokens_Q=answer_tokens_Q)


@pytest.mark.parametrize(
    ("prompts", "answers", "unanswerable", "too_long"),
    [
        # 20 tokens of prompt and 10 of answer make 30, which just fits
        ([21, 21, 20, 20], [10, 10, 10, 10], 0, 2),
        ([5, 5, 5, 5], [11, 11, 10, 10], 2, 0),
        ([21, 21, 5, 5], [11, 10, 10, 2], 1, 1),  # one that neither fits is left out once
    ],
)
def test_only_questions_that_can_be_asked_and_answered_are_used(prompts, answers, unanswerable, too_long):
    found = fitting(prompts, answers)
    assert (found.train_J.tolist(), found.test_J.tolist()) == ([2], [3])
    assert (found.unanswerable, found.too_long) == (unanswerable, too_long)


@pytest.mark.parametrize("tokens_Q", [[5, 500, 5, 500], [500, 5, 500, 5]])
def test_a_length_that_no_training_or_no_held_out_question_fits_is_an_error(tokens_Q):
    with pytest.raises(UserError, match=r"policy\.max-sequence-length = 30 .* 5 tokens"):
        fitting(tokens_Q, [1] * 4)
    with pytest.raises(UserError, match=r"ppo\.response-length = 10 .* 5 tokens"):
        fitting([1] * 4, tokens_Q)


@pytest.mark.parametrize(("task", "tokens"), [("dpa", {2: 10, 12: 60, 13: 65}), ("opa", {2: 4, 26: 52, 27: 55})])
def test_an_answer_s_tokens_with_its_end(task, tokens):
    # by characters: K numbers of four with K - 1 commas and an end; K letters, of which the 27th is "AA"
    base = SimpleNamespace(tokenizer=lambda text, add_special_tokens: {"input_ids": [*text]})
    assert {size: answer_tokens(base, task, size) for size in tokens} == tokens
