"""A group's round of PluralLLM, and its validation.

Axis letters: P weights, N answered questions.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from client_node import asked_of, config_of, prepared_node
from client_node import weights as named_weights
from flwr.app import Array, ArrayRecord

from appa_flwr.config import Config
from appa_flwr.protocol import asks
from appa_flwr.protocol.asks import Catalogue
from appa_flwr.protocol.messages import join_weights
from appa_flwr.protocol.rewards import js_distance
from client_app import predictor
from pluralllm.data import GroupData, group_data
from pluralllm.residual import SHARES, SHARES_KEY, START_SHARES
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


def train(config, start, data, public, *, number):
    return predictor.train(config, start, data, public, round_number=number)


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


def test_an_update_is_the_step_times_the_number_of_answers():
    """Start + sum of steps / sum of answers is FedAvg, in plain to every digit of float32."""
    node, catalogue = prepared_node(pluralllm__learning_rate=0.01)
    asked = asked_of(asks.UPDATE, catalogue, node.config)
    start_P = asked.arrays["weights"]
    for group, own in node.numbers(asked).items():
        data = node.context_of(group)
        after_P, loss = train(node.config, start_P, data, catalogue, number=1)
        assert own["answers"] == len(data)
        assert own["loss"] == pytest.approx(len(data) * loss)
        back_P = (start_P + own["step"] / own["answers"]).astype(np.float32)
        np.testing.assert_array_equal(back_P, after_P)
        assert (after_P != start_P).any()


def test_steps_fall_at_the_end(start, public, groups):
    def moved(rounds):
        keys = {"local-steps": 1, "rounds": rounds}
        config = Config.load({**CONFIG.flat(), **{f"pluralllm.{key}": value for key, value in keys.items()}})
        return train(config, start, groups[1], public, number=50)[0].astype(np.float64) - start

    # round 50 of 100 is before the last third, round 50 of 50 the end of it: 1 of 50 / 3 rounds is left
    halfway, at_the_end = moved(100), moved(50)
    assert np.abs(halfway).max() > 1e-4
    np.testing.assert_allclose(at_the_end, 3 / 50 * halfway, atol=1e-6)


def test_validation_tells_what_each_share_of_the_views_would_be_worth(public, groups):
    whole = groups[1]
    mine, truth = whole.first(8), GroupData(whole.group, whole.question_N[8:], whole.answer_NK[8:])
    public = replace(public, train_Q=np.isin(np.arange(len(public.questions)), mine.question_N))
    given = named_weights(CONFIG)

    def predicted(shares):
        chosen = ArrayRecord({**given, SHARES_KEY: Array(np.array(shares, dtype=np.float32))})
        return predictor.load(CONFIG, join_weights(chosen), public).targets(mine)[truth.question_N]

    case = truth.answer_NK, public.option_QK[truth.question_N]
    expected = [(1 - js_distance(predicted(shares), *case, base=np.e)).sum() for shares in SHARES]
    assert np.ptp(expected) > 1e-3
    ours = predictor.load(CONFIG, join_weights(given), public)
    np.testing.assert_allclose(predictor.errors(ours, mine, truth, ARCHITECTURE), expected, atol=1e-5)
    assert ours.model.shares == START_SHARES  # as it came
