"""Pretraining with nodes that send what they like: numbers worked out by hand.

Every node moves the weights by the same step in each round; steps are the numbers below.
"""

from __future__ import annotations

import numpy as np
from fakes import FakeGrid
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from in_process import flower_task

from appa_flwr.config import Config
from appa_flwr.protocol import wire
from pluralllm.residual import SHARES_KEY
from server_app.federation.grid import OverlapGrid
from server_app.predictor.pretraining import pretrain

PLAIN = {"pluralllm.strategy": "fedavg"}


def node(step, *, num_examples=10):
    def answer(message: Message) -> Message:
        if message.metadata.message_type == "evaluate":  # nobody has answers to held-out questions
            metrics = MetricRecord({"num-examples": 0, "errors": [0.0] * 7})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)
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
    config = Config.load({**PLAIN, "run.reply-timeout": 0.01, **given})
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


def test_how_much_a_view_counts_is_no_node_s_to_change():
    """A share beyond [0, 1] makes predictions that are none."""
    shares = Array(np.array([0.5, 0.25], np.float32))
    nodes = {0: node({"w": 1, "b": 1, SHARES_KEY: -7}), 1: node({"w": 2, "b": 2, SHARES_KEY: 0})}
    found = pretrained(nodes, size=2, extra={SHARES_KEY: shares}, rounds=2)
    assert found[SHARES_KEY].tolist() == [0.5, 0.25]
    assert found["w"][0] != 0
