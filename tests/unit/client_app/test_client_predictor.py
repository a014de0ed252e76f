"""A group's round of PluralLLM, and its validation.

Axis letters: P weights, N answered questions.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from nodes import asked_of, prepared_node
from nodes import weights as named_weights
from small import config_of

from appa_flwr.config import Config
from appa_flwr.protocol import queries
from appa_flwr.protocol.messages import join_weights
from appa_flwr.protocol.queries import Catalogue
from appa_flwr.protocol.rewards import js_distance
from client_app import predictor
from pluralllm import data
from pluralllm.data import GroupData, group_data, validation_questions
from pluralllm.residual import SHARES, SHARES_KEY
from pluralllm.training import build
from server_app.questions import build_catalogue, run_survey

CONFIG = config_of(
    pluralllm__local_steps=Config.load({}).pluralllm.local_steps,
    pluralllm__rounds=100,  # from round 5 on steps no longer rise, and they do not fall yet
    pluralllm__learning_rate=0.01,
)
ARCHITECTURE = CONFIG.pluralllm.architecture


@pytest.fixture(scope="module")
def start() -> np.ndarray:
    torch.manual_seed(1)
    return join_weights(ArrayRecord(build(ARCHITECTURE).state_dict()))


@pytest.fixture(scope="module")
def public() -> Catalogue:
    return build_catalogue(CONFIG)


@pytest.fixture(scope="module")
def groups(public) -> list[GroupData]:
    """Three groups, of which the first keeps 5 answers."""
    kept = []
    for g, (name, mine) in enumerate(run_survey(CONFIG).answers.items()):
        answers = dict(list(mine.items())[: 5 if g == 0 else None])
        kept.append(group_data(name, answers, public=public))
    return kept


def train(config, start, data, public, *, number, proximal=0.0):
    return predictor.train(config, start, data, public, round_number=number, proximal=proximal)


def test_a_round_is_drawn_from_seed_group_and_round_alone(start, public, groups):
    torch.manual_seed(99)  # the process's own generator must not matter
    before = start.copy()
    first, again = (train(CONFIG, start, groups[0], public, number=7) for _ in range(2))
    np.testing.assert_array_equal(first[0], again[0])
    assert first[1] == again[1]
    np.testing.assert_array_equal(start, before)
    assert np.abs(first[0] - start).max() > 1e-3
    namesake = GroupData("Another", groups[0].question_N, groups[0].answer_NK)
    assert (train(CONFIG, start, groups[0], public, number=8)[0] != first[0]).any()
    assert (train(CONFIG, start, namesake, public, number=7)[0] != first[0]).any()
    other = Config.load({**CONFIG.flat(), "seed": 5})
    assert (train(other, start, groups[0], public, number=7)[0] != first[0]).any()


@pytest.mark.parametrize("number", [1, 3])
def test_an_update_is_the_step_times_the_number_of_answers(number):
    """Start + sum of steps / sum of answers is FedAvg. Of three rounds the last alone has validation questions."""
    node, catalogue = prepared_node(pluralllm__learning_rate=0.01, pluralllm__rounds=3)
    asked = asked_of(queries.UPDATE, catalogue, node.config)
    asked = replace(asked, settings=asked.settings | {"round": number})
    start_P = asked.arrays["weights"]
    for group, own in node.numbers(asked).items():
        context = node.context_of(group)
        part = context if number == 3 else context.only(~validation_questions(catalogue))
        assert len(part) == own["answers"] <= len(context)
        assert (len(part) < len(context)) == (number == 1)
        after_P, loss, _ = train(node.config, start_P, part, catalogue, number=number)
        assert own["loss"] == pytest.approx(len(part) * loss)
        back_P = (start_P + own["step"] / own["answers"]).astype(np.float32)
        np.testing.assert_array_equal(back_P, after_P)
        assert (after_P != start_P).any()


def test_a_group_s_proximal_term_pulls_towards_the_server_s_weights(start, public, groups):
    """SGD of two steps: the second gradient has mu times the first step added, in which all else is the same."""
    keys = {"pluralllm.strategy": "fedadam", "pluralllm.learning-rate": 0.01, "pluralllm.local-steps": 2}
    config = Config.load({**CONFIG.flat(), **keys})
    free, pulled = (train(config, start, groups[1], public, number=1, proximal=mu)[0] for mu in (0.0, 0.5))
    one = Config.load({**config.flat(), "pluralllm.local-steps": 1})
    first = train(one, start, groups[1], public, number=1)[0].astype(float) - start
    np.testing.assert_allclose(free.astype(float) - pulled, 0.01 * 0.5 * first, atol=1e-7)
    assert np.abs(first).max() > 1e-4


def test_steps_fall_at_the_end(start, public, groups):
    def moved(rounds):
        keys = {"local-steps": 1, "rounds": rounds}
        config = Config.load({**CONFIG.flat(), **{f"pluralllm.{key}": value for key, value in keys.items()}})
        return train(config, start, trained, public, number=50)[0].astype(np.float64) - start

    trained = groups[1].only(~validation_questions(public))  # the same answers in all rounds
    # round 50 of 100 is before the last third, round 50 of 50 the end of it: 1 of 50 / 3 rounds is left
    halfway, at_the_end = moved(100), moved(50)
    assert np.abs(halfway).max() > 1e-4
    np.testing.assert_allclose(at_the_end, 3 / 50 * halfway, atol=1e-6)


def test_validation_tells_what_each_share_of_the_views_would_gain(public, groups, monkeypatch):
    """Each answer to a validation question is predicted by a group that has given all its other training answers."""
    public = replace(public, option_QK=public.option_QK.copy())
    monkeypatch.setattr(data, "VALIDATION_FRACTION", 0.5)
    mine = groups[1].only(public.train_Q)
    truth = mine.only(validation_questions(public))
    config = Config.load({**CONFIG.flat(), "pluralllm.num-context-questions": 512})
    weights = named_weights(config)

    def errors(shares):
        chosen = ArrayRecord({**weights, SHARES_KEY: Array(np.array(shares, dtype=np.float32))})
        ours = predictor.load(config, join_weights(chosen), replace(public, train_Q=np.zeros_like(public.train_Q)))
        for q, answer_K in zip(truth.question_N, truth.answer_NK, strict=True):
            predicted_K = ours.targets(mine.only(np.arange(len(public.questions)) != q))[q]
            yield 1 - js_distance(predicted_K[None], answer_K[None], public.option_QK[[q]]).item()

    error_VN = np.array([[*errors(shares)] for shares in SHARES])
    gain_VN = error_VN[0] - error_VN
    assert np.ptp(gain_VN.sum(axis=1)) > 1e-3
    count, gain_V, square_V = predictor.validation_gains(config, join_weights(weights), mine, public)
    assert 5 < count == len(truth)
    np.testing.assert_allclose([gain_V, square_V], [gain_VN.sum(axis=1), (gain_VN**2).sum(axis=1)], atol=1e-5)
    public.option_QK[truth.question_N[0], 1:] = False  # any answer to a question with one option is right
    assert predictor.validation_gains(config, join_weights(weights), mine, public)[0] == count - 1


def test_where_all_training_questions_would_be_validation_questions_there_are_none(public, monkeypatch):
    monkeypatch.setattr(data, "VALIDATION_FRACTION", 0.5)
    marked = validation_questions(public)
    assert 0 < marked.sum() < public.train_Q.sum()
    assert not validation_questions(replace(public, train_Q=marked)).any()
