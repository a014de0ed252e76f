"""Pretraining with nodes that send what they like, and with noise: numbers worked out by hand.

Every node moves the weights by the same step in each round; steps are the numbers below.
"""

from __future__ import annotations

import numpy as np
import pytest
from fakes import FakeGrid
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from in_process import flower_task
from scipy.integrate import quad
from scipy.stats import norm

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import wire
from pluralllm.residual import SHARES_KEY
from server_app.federation.grid import OverlapGrid
from server_app.predictor.pretraining import pretrain
from server_app.predictor.strategies import epsilon

PLAIN = {"pluralllm.validate-every": 0, "pluralllm.strategy": "fedavg"}
ROBUST = ("fedmedian", "fedtrimmedavg", "krum", "multikrum")


def node(step, *, num_examples=10):
    def answer(message: Message) -> Message:
        size = len(message.content["arrays"]["weights"].numpy()) // len(step)  # all arrays are of one size here
        sent = wire.split_weights(message.content["arrays"], dict.fromkeys(step, (size,)))
        moved = ArrayRecord({name: Array(sent[name].numpy() + np.float32(step[name])) for name in sent})
        arrays = wire.join_weights(moved)
        metrics = MetricRecord({"num-examples": num_examples, "loss": 0.5})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return answer


def pretrained(nodes, *, size=1, most=None, extra=None, **keys):
    """The weights `w` and `b`, both 0 before, and those of `extra` after one round with these nodes."""
    given = {f"pluralllm.{name.replace('_', '-')}": value for name, value in {"rounds": 1, **keys}.items()}
    config = Config.load({**PLAIN, "federation.reply-timeout": 0.01, **given})
    start = {name: Array(np.zeros(size, np.float32)) for name in ("w", "b")} | (extra or {})
    with flower_task():
        grid = OverlapGrid(FakeGrid(nodes))
        done = pretrain(grid, config, ArrayRecord(start), nodes=tuple(nodes), most=most or {}, progress=lambda *_: None)
    return {name: array.numpy() for name, array in done.weights.items()}


def trained(nodes, **given):
    found = pretrained(nodes, **given)
    return np.concatenate([found["w"], found["b"]])


def steps(*pairs, **kwargs):
    return {n: node({"w": w, "b": b}, **kwargs) for n, (w, b) in enumerate(pairs)}


HONEST = ((3, 4), (3, 4), (3, 4), (3, 4))


def test_one_node_s_huge_weights_count_for_ten_steps_and_are_named(caplog):
    # 5 is the median's length, so 50 is the longest: (30, -40); the mean of four (3, 4) and this
    found = trained(steps(*HONEST, (3e7, -4e7)))
    np.testing.assert_allclose(found, [42 / 5, -24 / 5], rtol=1e-5)
    assert caplog.messages == [
        "node 4: its step is 10000000 times as long as the round's median, and counts for 10 times"
    ]


def test_a_step_whose_square_is_no_float32_is_cut_too():
    assert np.isfinite(trained(steps(*HONEST, (3e30, 3e30)))).all()


def test_of_two_the_shorter_step_is_the_measure():
    np.testing.assert_allclose(trained(steps((0.3, 0.4), (3000.0, 4000.0))), [3.3 / 2, 4.4 / 2], rtol=1e-5)


def test_ten_times_is_let_through(caplog):
    np.testing.assert_allclose(trained(steps(*HONEST, (30, 40))), [42 / 5, 56 / 5], rtol=1e-6)
    assert caplog.messages == []


def test_where_nobody_moves_a_node_that_does_is_no_mistake():
    np.testing.assert_allclose(trained(steps((0, 0), (0, 0), (3, 4))), [1, 4 / 3], rtol=1e-6)


def test_a_count_beyond_the_questions_there_are_is_refused(caplog):
    nodes = steps((1, 1), num_examples=30) | {1: node({"w": 9, "b": 9}, num_examples=10**12)}
    np.testing.assert_allclose(trained(nodes, most={0: (30, 5), 1: (30, 5)}), [1, 1])
    assert caplog.messages == [
        "node 1: its training reply cannot be used: `num-examples` is more than its groups have answered"
    ]


@pytest.mark.parametrize("noise", [0.0, 5.0])
def test_how_much_a_view_counts_is_no_node_s_to_change(noise):
    """A share beyond [0, 1] makes predictions that are none."""
    shares = Array(np.array([0.5, 0.25], np.float32))
    nodes = {0: node({"w": 1, "b": 1, SHARES_KEY: -7}), 1: node({"w": 2, "b": 2, SHARES_KEY: 0})}
    found = pretrained(nodes, size=2, extra={SHARES_KEY: shares}, rounds=2, dp_noise=noise)
    assert found[SHARES_KEY].tolist() == [0.5, 0.25]
    assert found["w"][0] != 0


@pytest.mark.parametrize("strategy", ROBUST)
def test_a_robust_strategy_does_without_the_node_that_pulls_the_other_way(strategy):
    nodes = steps(*HONEST, (-9, -9))
    np.testing.assert_allclose(trained(nodes), [3 / 5, 7 / 5], rtol=1e-5)  # the plain mean does not
    np.testing.assert_allclose(trained(nodes, strategy=strategy), [3, 4], rtol=1e-6)


def test_what_each_robust_strategy_makes_of_five_nodes_with_one_that_is_bad():
    nodes = steps((1, 1), (1.2, 1.2), (1.5, 1.5), (5, 5), (90, 90))
    for strategy, left in {
        "fedmedian": 1.5,
        "fedtrimmedavg": (1.2 + 1.5 + 5) / 3,  # without one on each side
        "krum": 1.2,  # the one whose two nearest are nearest: .04 + .09, twice
        "multikrum": (1 + 1.2 + 1.5 + 5) / 4,  # without the one that is farthest from its own
    }.items():
        np.testing.assert_allclose(trained(nodes, strategy=strategy), [left] * 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "count", "needed"),
    [("krum", 4, 5), ("multikrum", 4, 5), ("fedtrimmedavg", 2, 3), ("fedmedian", 2, 3)],
)
def test_too_few_nodes_are_refused(strategy, count, needed):
    with pytest.raises(UserError, match=rf'strategy = "{strategy}".* needs {needed} nodes .*; there are {count}$'):
        trained(steps(*[(1, 1)] * count), strategy=strategy)
    trained(steps(*[(1, 1)] * needed), strategy=strategy)
    keys = {"pluralllm.strategy": strategy, "data.num-groups": count}
    with pytest.raises(UserError, match=f"there are {count}$"):
        Config.load(keys)  # a simulation is refused before it starts
    Config.load({**keys, "pluralllm.rounds": 0})  # and one that trains nothing is not
    Config.load({**keys, "pluralllm.checkpoint": "weights.safetensors"})


def test_private_steps_are_cut_to_the_length_given_and_weigh_the_same():
    nodes = {0: node({"w": 3, "b": 4}, num_examples=30), 1: node({"w": 0, "b": 0.5})}
    found = trained(nodes, dp_noise=1e-9, dp_clip=1.0)
    np.testing.assert_allclose(found, [0.6 / 2, 1.3 / 2], rtol=1e-5)


def test_noise_is_of_the_size_asked_for_and_nobody_can_know_it():
    def noise() -> np.ndarray:
        return trained(steps(*[(0, 1e-9)] * 4), size=20_000, dp_noise=2.0, dp_clip=0.5)

    one, other = noise(), noise()
    assert one.std() == pytest.approx(2.0 * 0.5 / 4, rel=0.02)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03  # the run's seed is the same


def test_fewer_nodes_hide_one_another_less_and_get_more_noise():
    nodes = steps(*[(0, 1e-9)] * 4, (0, 0)) | {5: lambda message: None}  # Flower cannot clip a step of length 0
    assert trained(nodes, size=40_000, dp_noise=2.0).std() == pytest.approx(2.0 / 4, rel=0.02)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"validate-every": 10}, "needs pluralllm.validate-every = 0"),
        ({"strategy": "fedadam"}, "needs pluralllm.strategy = fedavg or fedprox"),
        ({"strategy": "fedavg", "fraction": 0.5}, "needs pluralllm.fraction = 1"),
    ],
)
def test_noise_that_would_promise_too_much_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        Config.load({**PLAIN, "pluralllm.dp-noise": 1.0, **{f"pluralllm.{key}": value for key, value in keys.items()}})


def test_steps_of_the_others_do_not_hang_on_what_one_node_sends():
    """Else the noise would be for too little: the whole difference must be of the one node, twice the clip at most."""
    others = ((1e-3, 0), (1e-3, 0), (1, 0), (1, 0))
    means = [trained(steps(*others, mine), dp_noise=1e-12, dp_clip=1.0) for mine in ((9, 0), (-1e-3, 0), (-9, 0))]
    total = 2e-3 + 2
    np.testing.assert_allclose([5 * mean[0] for mean in means], [total + 1, total - 1e-3, total - 1], rtol=1e-4)


@pytest.mark.parametrize(("noise", "rounds"), [(2.0, 1), (8.0, 100), (40.0, 100), (1.0, 3)])
def test_epsilon_is_where_two_runs_differ_by_delta(noise, rounds):
    """By the definition: the part of N(mu, 1) that exceeds e^epsilon times N(0, 1).

    The two runs differ most where one node sends a step of the clip's length, and in the other the opposite.
    """
    mean = [trained(steps((0, 1), (0, way)), dp_noise=1e-12, dp_clip=0.5)[1] for way in (9, -9)]
    noise_of_a_round = noise * 0.5 / 2
    mu = rounds**0.5 * (mean[0] - mean[1]) / noise_of_a_round
    found = epsilon(noise, rounds, delta=1e-5)
    begin = found / mu + mu / 2  # from here on the likelihood ratio is above e^epsilon
    delta, _ = quad(lambda x: norm.pdf(x, mu) - np.exp(found + norm.logpdf(x)), begin, begin + 30, epsabs=1e-12)
    assert delta == pytest.approx(1e-5, rel=1e-4)


def test_much_noise_tells_nothing():
    assert epsilon(1e9, 1) == 0.0
