"""Federated pretraining on the server: what chance may not decide."""

from __future__ import annotations

import itertools
from typing import get_args

import numpy as np
import pytest
from fakes import FakeGrid
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from in_process import flower_task

from appa_flwr.config import Config
from server_app.grid import PromptGrid
from server_app.pretraining import pretrain

NODES = 3
UNVALIDATED = {"pluralllm-validate-every": 0}


@pytest.mark.parametrize("strategy", get_args(Config.model_fields["pluralllm_strategy"].annotation))
def test_the_order_in_which_nodes_answer_changes_no_bit(strategy):
    rng = np.random.default_rng(0)
    trained = [rng.normal(size=1000).astype(np.float32) for _ in range(NODES)]

    def node(n):
        def answer(message: Message) -> Message:
            content = {
                "arrays": ArrayRecord({"w": Array(trained[n])}),
                "metrics": MetricRecord({"num-examples": 10 + n, "loss": 0.5 + 0.1 * n}),
            }
            return Message(RecordDict(content), reply_to=message)

        return answer

    config = Config.load({"pluralllm-strategy": strategy, "pluralllm-rounds": 1, **UNVALIDATED})
    found = set()
    for places in itertools.permutations(range(NODES)):
        late = {node_id: 2 * place for node_id, place in enumerate(places)}
        grid = PromptGrid(FakeGrid({n: node(n) for n in range(NODES)}, polls_to_wait=late))
        start = ArrayRecord({"w": Array(np.zeros(1000, dtype=np.float32))})
        with flower_task():
            done = pretrain(grid, config, start, nodes=range(NODES), progress=lambda step, of, loss: None)
        found.add((done.weights["w"].numpy().tobytes(), done.rounds))
    assert len(found) == 1


STEPS = np.array([[0.25, -0.5], [-0.75, 0.125]])  # each node's change of the weights, the same in every round
EXAMPLES = np.array([30, 10])


def rounds(**changes):
    """Weights after each of 2 rounds, and the messages sent: two nodes that always move by `STEPS`."""
    grid = FakeGrid({n: moving(n) for n in range(2)})
    config = Config.load({"pluralllm-rounds": 2, **UNVALIDATED, **{k.replace("_", "-"): v for k, v in changes.items()}})
    start = ArrayRecord({"w": Array(np.zeros(2, dtype=np.float32))})
    with flower_task():
        done = pretrain(PromptGrid(grid), config, start, nodes=range(2), progress=lambda step, of, loss: None)
    sent = [message.content["arrays"]["w"].numpy() for message in grid.pushed]
    return sent[2], done.weights["w"].numpy(), [message.content for message in grid.pushed]


def moving(n):
    def answer(message: Message) -> Message:
        here = message.content["arrays"]["w"].numpy()
        content = {
            "arrays": ArrayRecord({"w": Array((here + STEPS[n]).astype(np.float32))}),
            "metrics": MetricRecord({"num-examples": int(EXAMPLES[n]), "loss": 0.5}),
        }
        return Message(RecordDict(content), reply_to=message)

    return answer


MEAN = (30 * STEPS[0] + 10 * STEPS[1]) / 40


def test_nodes_weigh_as_many_answers_as_they_trained_on():
    first, second, _ = rounds(pluralllm_strategy="fedavg")
    np.testing.assert_allclose(first, MEAN, rtol=1e-6)
    np.testing.assert_allclose(second, 2 * MEAN, rtol=1e-6)
    assert MEAN.tolist() == [0.0, -0.34375]


def test_fedprox_is_fedavg_on_the_server_and_tells_the_groups_its_mu():
    first, second, sent = rounds(pluralllm_strategy="fedprox", pluralllm_proximal_mu=0.25)
    np.testing.assert_allclose([first, second], [MEAN, 2 * MEAN], rtol=1e-6)
    assert [content["config"]["proximal-mu"] for content in sent] == [0.25] * 4
    _, _, sent = rounds(pluralllm_strategy="fedavg", pluralllm_proximal_mu=0.25)
    assert all("proximal-mu" not in content["config"] for content in sent)


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        # eta is 0.1 x 1/5 in the first round; the second and last of two falls again: 0.1 x 2/5 x min(1, 1 / (2/3)).
        # fedadagrad: d / sqrt(d^2), then d / sqrt(2 d^2)
        ("fedadagrad", (0.02, 0.02 + 0.04 / np.sqrt(2))),
        # fedyogi: m = .1 d, v = .01 d^2; then m = .19 d, v = .02 d^2 (v was under d^2)
        ("fedyogi", (0.02, 0.02 + 0.04 * 0.19 / np.sqrt(0.02))),
        # fedadam: the same m, v = .0199 d^2; Flower corrects by sqrt(1 - .99^(t+1)) / (1 - .9^(t+1))
        (
            "fedadam",
            (
                0.02 * np.sqrt(1 - 0.99**2) / (1 - 0.9**2),
                0.02 * np.sqrt(1 - 0.99**2) / (1 - 0.9**2)
                + 0.04 * np.sqrt(1 - 0.99**3) / (1 - 0.9**3) * 0.19 / np.sqrt(0.0199),
            ),
        ),
    ],
)
def test_adaptive_strategies_step_as_their_papers_say(strategy, steps):
    first, second, _ = rounds(pluralllm_strategy=strategy, pluralllm_server_learning_rate=0.1)
    # where the mean change is 0, nothing moves; elsewhere the size of the change cancels
    np.testing.assert_allclose(first, [0.0, -steps[0]], rtol=1e-4, atol=1e-12)
    np.testing.assert_allclose(second, [0.0, -steps[1]], rtol=1e-4, atol=1e-12)


def test_who_takes_part_depends_on_the_seed_and_the_round_alone():
    def asked(seed, nodes):
        grid = FakeGrid({n: moving(0) for n in nodes})
        config = Config.load({"pluralllm-rounds": 8, "pluralllm-fraction": 0.5, "seed": seed, **UNVALIDATED})
        start = ArrayRecord({"w": Array(np.zeros(2, dtype=np.float32))})
        prompt = PromptGrid(grid)
        prompt.members = (99,)
        with flower_task():
            pretrain(prompt, config, start, nodes=nodes, progress=lambda step, of, loss: None)
        assert prompt.members == (99,)  # as before
        return [nodes.index(message.metadata.dst_node_id) for message in grid.pushed]

    chosen = asked(1, (4, 5, 6, 7))
    assert len(chosen) == 16
    assert set(chosen) == {0, 1, 2, 3}
    assert chosen == asked(1, (17, 3, 12, 9))  # ids are chance
    assert chosen != asked(2, (4, 5, 6, 7))


def validated(errors_RN, *, cells=(20, 10), **changes):
    """What is kept of rounds in which every weight is the round's number and the two nodes report these errors."""
    asked = []

    def node(n):
        def answer(message: Message) -> Message:
            here = message.content["arrays"]["w"].numpy()
            if message.metadata.message_type == "evaluate":
                error = errors_RN[round(float(here[0])) - 1][n]
                asked.append(round(float(here[0])))
                if error is None:
                    return Message(Error(5, "node is gone"), reply_to=message)
                metrics = MetricRecord({"num-examples": cells[n], "error": error})
                return Message(RecordDict({"metrics": metrics}), reply_to=message)
            content = {
                "arrays": ArrayRecord({"w": Array(here + np.float32(1))}),
                "metrics": MetricRecord({"num-examples": 5, "loss": 0.5}),
            }
            return Message(RecordDict(content), reply_to=message)

        return answer

    config = Config.load(
        {
            "pluralllm-strategy": "fedavg",
            "pluralllm-rounds": len(errors_RN),
            "pluralllm-validate-every": 1,
            **{k.replace("_", "-"): v for k, v in changes.items()},
        }
    )
    start = ArrayRecord({"w": Array(np.zeros(2, dtype=np.float32))})
    grid = PromptGrid(FakeGrid({n: node(n) for n in range(2)}))
    with flower_task():
        done = pretrain(grid, config, start, nodes=range(2), progress=lambda step, of, loss: None)
    assert done.weights["w"].numpy()[0] == done.chosen
    return done, asked


def test_the_round_of_the_lowest_validation_error_is_kept():
    # (20 x .3 + 10 x .3) / 30, (20 x .1 + 10 x .4) / 30, (20 x .4 + 10 x .1) / 30
    done, _ = validated([(0.3, 0.3), (0.1, 0.4), (0.4, 0.1)])
    assert [entry.validation for entry in done.rounds] == pytest.approx([0.3, 0.2, 0.3])
    assert done.chosen == 2


def test_only_some_rounds_are_validated_and_the_last_always():
    done, asked = validated([(0.5, 0.5)] * 5, pluralllm_validate_every=2)
    assert asked == [2, 2, 4, 4, 5, 5]
    assert [entry.validation for entry in done.rounds] == [None, 0.5, None, 0.5, 0.5]
    assert done.chosen == 2  # the first of equals


def test_without_validation_the_last_round_is_kept():
    done, asked = validated([(0.1, 0.1), (0.5, 0.5)], **UNVALIDATED)
    assert (done.chosen, asked) == (2, [])
    done, asked = validated([(0.1, 0.1), (0.5, 0.5)], cells=(0, 0))  # nobody has enough answers to say
    assert (done.chosen, asked) == (2, [1, 1, 2, 2])
    assert [entry.validation for entry in done.rounds] == [None, None]


@pytest.mark.parametrize("bad", [None, float("nan"), -0.1, 1.5])
def test_a_node_that_reports_no_usable_error_is_left_out(bad, caplog):
    done, _ = validated([(0.3, bad), (0.2, 0.4)])
    assert done.rounds[0].validation == pytest.approx(0.3)
    assert done.chosen == 2
    assert "gone" in caplog.text or "cannot be used" in caplog.text


def test_no_rounds_leave_the_start():
    start = ArrayRecord({"w": Array(np.zeros(2, dtype=np.float32))})
    config = Config.load({"pluralllm-rounds": 0})
    done = pretrain(PromptGrid(FakeGrid({})), config, start, nodes=(), progress=lambda step, of, loss: None)
    assert (done.weights, done.rounds, done.chosen) == (start, (), 0)
