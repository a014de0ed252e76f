"""Federated pretraining on the server: what chance may not decide."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
from fakes import FakeGrid, replying
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from in_process import flower_task

from appa_flwr.config import Config
from appa_flwr.config.sections import PluralLLMSection
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import wire
from pluralllm.residual import SHARES_KEY
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Federation
from server_app.predictor.pretraining import pretrain

STRATEGIES = get_args(PluralLLMSection.model_fields["strategy"].annotation)


def pretrained(grid, nodes, *, size=2, seed=0, start=None, **changes):
    """What weights at 0 become on a grid."""
    keys = {"pluralllm." + name.replace("_", "-"): value for name, value in changes.items()}
    config = Config.load({"seed": seed, **keys})
    start = start or ArrayRecord({"w": Array(np.zeros(size, dtype=np.float32))})
    grid = grid if isinstance(grid, OverlapGrid) else OverlapGrid(grid)
    with flower_task():
        return pretrain(grid, config, start, nodes=nodes, progress=lambda *_: None)


STEPS = np.array([[0.25, -0.5], [-0.75, 0.125]])  # each node's change of the weights, the same in every round
EXAMPLES = np.array([30, 10])


def rounds(**changes):
    """Weights after each of 2 rounds, and the messages sent: two nodes that always move by `STEPS`."""
    grid = FakeGrid({n: moving(n) for n in range(2)})
    done = pretrained(grid, range(2), rounds=2, **changes)
    contents = [message.content for message in grid.pushed if message.metadata.message_type == "train"]
    return contents[2]["arrays"]["weights"].numpy(), done.weights["w"].numpy(), contents


def trainer(step, *, num_examples=5, loss=0.5):
    """A node that moves the weights by `step` in every round, and has no answers to held-out questions."""

    def answer(message: Message) -> Message:
        if message.metadata.message_type == "evaluate":
            return Message(record(num_examples=0, errors=[0.0] * 7), reply_to=message)
        here = message.content["arrays"]
        content = {
            "arrays": ArrayRecord({"weights": Array((here["weights"].numpy() + step).astype(np.float32))}),
            "metrics": MetricRecord({"num-examples": num_examples, "loss": loss}),
        }
        return Message(RecordDict(content), reply_to=message)

    return answer


def moving(n):
    return trainer(STEPS[n], num_examples=int(EXAMPLES[n]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_order_in_which_nodes_answer_changes_no_bit(strategy):
    rng = np.random.default_rng(0)
    nodes = {n: trainer(rng.normal(size=1000), num_examples=10 + n, loss=0.5 + 0.1 * n) for n in range(5)}
    found = set()
    for places in itertools.islice(itertools.permutations(range(5)), 0, None, 29):
        late = {node: 2 * place for node, place in enumerate(places)}
        done = pretrained(FakeGrid(nodes, polls_to_wait=late), range(5), size=1000, strategy=strategy, rounds=1)
        found.add((done.weights["w"].numpy().tobytes(), done.losses))
    assert len(found) == 1


MEAN = (30 * STEPS[0] + 10 * STEPS[1]) / 40


@pytest.mark.parametrize(("strategy", "sent_mu"), [("fedavg", [None] * 4), ("fedprox", [0.01] * 4)])
def test_nodes_weigh_as_many_answers_as_they_trained_on_and_fedprox_tells_them_its_mu(strategy, sent_mu):
    first, second, sent = rounds(strategy=strategy)
    np.testing.assert_allclose([first, second], [MEAN, 2 * MEAN], rtol=1e-6)
    assert MEAN.tolist() == [0.0, -0.34375]
    assert [content["config"].get("proximal-mu") for content in sent] == sent_mu


# What Flower's fedadam corrects the first and the second step by: sqrt(1 - .99^(t+1)) / (1 - .9^(t+1))
FIRST, SECOND = (np.sqrt(1 - 0.99**t) / (1 - 0.9**t) for t in (2, 3))


@pytest.mark.parametrize(
    ("strategy", "first_step", "second_step"),
    [
        # eta is .003 x 1/5 in the first round; the second and last of two falls again: .003 x 2/5 x min(1, 1 / (2/3)).
        # fedyogi: m = .1 d, v = .01 d^2; then m = .19 d, v = .02 d^2 (v was under d^2)
        ("fedyogi", 6e-4, 1.2e-3 * 0.19 / np.sqrt(0.02)),
        # fedadam: the same m, v = .0199 d^2
        ("fedadam", 6e-4 * FIRST, 1.2e-3 * SECOND * 0.19 / np.sqrt(0.0199)),
    ],
)
def test_adaptive_strategies_step_as_their_papers_say(strategy, first_step, second_step):
    first, second, _ = rounds(strategy=strategy)
    # where the mean change is 0, nothing moves; elsewhere the size of the change cancels
    np.testing.assert_allclose(first, [0.0, -first_step], rtol=1e-4, atol=1e-12)
    np.testing.assert_allclose(second, [0.0, -first_step - second_step], rtol=1e-4, atol=1e-12)


Spoil = Callable[[RecordDict], None]
BAD_NODE = 7


def arrays(**named) -> Spoil:
    """Other arrays in place of the sound one, of two float32."""
    made = {name: value if isinstance(value, Array) else Array(np.array(value)) for name, value in named.items()}
    return lambda content: content.update({"arrays": ArrayRecord(made)})


def metrics(**changes) -> Spoil:
    def spoil(content: RecordDict) -> None:
        for name, value in changes.items():
            content["metrics"][name.replace("_", "-")] = value

    return spoil


def a_bool_for_a_count(content: RecordDict) -> None:
    content["metrics"].__dict__["_data"]["num-examples"] = True  # Flower's own check would refuse it here


def zipped() -> bytes:
    """What NumPy's reader takes for a file of several arrays."""
    buffer = io.BytesIO()
    np.savez(buffer, w=TWO)
    return buffer.getvalue()


TWO = np.ones(2, dtype=np.float32)
SOUND = Array(TWO)
MALFORMED: dict[str, Spoil] = {
    "longer": arrays(weights=np.ones(3, dtype=np.float32)),
    "broadcast": arrays(weights=np.ones(1, dtype=np.float32)),
    "more axes": arrays(weights=np.ones((1, 2), dtype=np.float32)),
    "another name": arrays(v=TWO),
    "one array too many": arrays(weights=TWO, v=TWO),
    "float64": arrays(weights=TWO.astype(np.float64)),
    "integers": arrays(weights=TWO.astype(np.int32)),
    "text": arrays(weights=np.array(["a", "b"])),
    "another byte order": arrays(weights=TWO.astype(">f4")),
    "cut off": arrays(weights=Array(SOUND.dtype, SOUND.shape, SOUND.stype, SOUND.data[:-1])),
    "several files": arrays(weights=Array(SOUND.dtype, SOUND.shape, SOUND.stype, zipped())),
    "another encoding": arrays(weights=Array(SOUND.dtype, SOUND.shape, "torch", SOUND.data)),
    "another shape than it says": arrays(
        weights=Array("float32", (2,), SOUND.stype, Array(np.ones(3, np.float32)).data)
    ),
    "NaN weight": arrays(weights=np.array([1.0, math.nan], dtype=np.float32)),
    "infinite weight": arrays(weights=np.array([-math.inf, 1.0], dtype=np.float32)),
    "no arrays record": lambda content: content.pop("arrays"),
    "no metrics record": lambda content: content.pop("metrics"),
    "two array records": lambda content: content.update({"more": ArrayRecord({"weights": SOUND})}),
    "settings for metrics": lambda content: content.update({"metrics": ConfigRecord({"num-examples": 5, "loss": 0.5})}),
    "metrics for arrays": lambda content: content.update({"arrays": MetricRecord({"weights": 0.5})}),
    "extra metric": metrics(accuracy=0.5),
    "no count": lambda content: content["metrics"].pop("num-examples"),
    "no loss": lambda content: content["metrics"].pop("loss"),
    "count 0": metrics(num_examples=0),
    "count minus the others": metrics(num_examples=-int(EXAMPLES.sum())),
    "count is a bool": a_bool_for_a_count,
    "count 10.0": metrics(num_examples=10.0),
    "counts": metrics(num_examples=[10]),
    "loss NaN": metrics(loss=math.nan),
    "loss infinite": metrics(loss=math.inf),
    "losses": metrics(loss=[0.5]),
}


def trained_with(spoilt: dict[int, Spoil | None]):
    """Two rounds in which each node of `spoilt` sends a sound reply, or what its function makes of one."""

    def node(n, spoil):
        def answer(message: Message) -> Message:
            reply = moving(n % 2)(message)
            content = RecordDict(dict(reply.content))
            if spoil is not None and message.metadata.message_type == "train":
                spoil(content)
            return Message(content, reply_to=message)

        return answer

    grid = FakeGrid({n: node(n, spoil) for n, spoil in spoilt.items()})
    done = pretrained(grid, tuple(spoilt), strategy="fedadam", rounds=2)
    return done.weights["w"].numpy().tobytes(), done.losses


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_training_reply_leaves_what_the_sound_nodes_make_of_it(what, caplog):
    spoil = MALFORMED[what]
    alone = trained_with({0: None, 1: None})
    for places in ({BAD_NODE: spoil, 0: None, 1: None}, {0: None, 1: None, BAD_NODE: spoil}):
        caplog.clear()
        assert trained_with(places) == alone
        lines = [record.getMessage() for record in caplog.records if record.name == "appa.server"]
        assert len(lines) == 2  # one a round
        assert all(line.startswith(f"node {BAD_NODE}: its training reply cannot be used: ") for line in lines)
    with pytest.raises(UserError, match="round 1: no node sent weights that could be used"):
        trained_with({0: spoil, 1: spoil})


def validated(errors_N, *, num_answers=(20, 10), late=None, **changes):
    """What is kept of two rounds after whose last the nodes report these errors.

    There are seven choices: none, half or all of the learned features with none of the plain view, the same with half
    of it, and all of it. A single error stands for the same one for each. None is a lost node; a RecordDict goes out as
    it is.
    """

    def node(n):
        def answer(message: Message) -> Message:
            if message.metadata.message_type != "evaluate":
                return trainer(1)(message)
            error = errors_N[n]
            if error is None:
                return Message(Error(5, "node is gone"), reply_to=message)
            if not isinstance(error, RecordDict):
                errors = list(error) if isinstance(error, tuple) else [error] * 7
                error = record(num_examples=num_answers[n], errors=errors)
            return Message(error, reply_to=message)

        return answer

    nodes = range(len(num_answers))
    grid = FakeGrid({n: node(n) for n in nodes}, polls_to_wait=late)
    done = pretrained(grid, nodes, strategy="fedavg", rounds=2, **changes)
    assert sum(message.metadata.message_type == "evaluate" for message in grid.pushed) == len(nodes)
    assert done.weights["w"].numpy()[0] == 2
    return done


def test_the_weights_are_the_last_round_s_and_their_error_is_over_all_answers():
    assert validated((0.1, 0.4)).validation == pytest.approx(0.2)  # (20 x .1 + 10 x .4) / 30
    assert validated((0.21, None)).validation == pytest.approx(0.21)
    assert validated((0.1, 0.1), num_answers=(0, 0)).validation is None  # nobody has answers to say


def test_the_order_in_which_validation_replies_come_changes_no_bit():
    errors, num_answers = (0.1, 0.2, 0.3), (1, 1, 1)
    assert (0.1 + 0.2) + 0.3 != 0.1 + (0.2 + 0.3)
    orders = ({node: 2 * place for node, place in enumerate(places)} for places in itertools.permutations(range(3)))
    found = {validated(errors, num_answers=num_answers, late=late).validation for late in orders}
    assert len(found) == 1


def record(**values) -> RecordDict:
    return RecordDict({"metrics": MetricRecord({name.replace("_", "-"): value for name, value in values.items()})})


@pytest.mark.parametrize(
    "bad",
    [
        None,
        -0.1,
        1.5,
        RecordDict(),
        record(errors=[0.1] * 7),
        record(num_examples=10),
        record(num_examples=-10, errors=[0.1] * 7),
        record(num_examples=10.5, errors=[0.1] * 7),
        record(num_examples=[10], errors=[0.1] * 7),
        record(num_examples=10, errors=0.1),
        record(num_examples=10, errors=[0.1] * 6),
        record(num_examples=10, errors=[0.1] * 8),
        record(num_examples=10, errors=[*[0.1] * 6, 0.9]),
        record(num_examples=10, errors=[math.nan, *[0.1] * 6]),
        RecordDict({"others": MetricRecord({"num-examples": 10, "errors": [0.1] * 7})}),
        RecordDict({"metrics": ConfigRecord({"num-examples": 10, "errors": [0.1] * 7})}),
    ],
)
def test_a_node_that_reports_no_usable_error_is_left_out(bad, caplog):
    assert validated((0.3, bad)).validation == pytest.approx(0.3)
    assert "gone" in caplog.text or "cannot be used" in caplog.text


def test_a_network_without_choices_is_validated_by_a_single_error(caplog):
    done = validated(((0.2,), (0.1, 0.1, 0.1)), architecture="attention")
    assert done.validation == pytest.approx(0.2)
    assert caplog.text.count("its validation errors cannot be used") == 1
    assert done.weights.keys() == {"w"}


@pytest.mark.parametrize(
    ("errors_N", "validation", "shares"),
    [
        # (20 x .3 + 10 x .6) / 30 for the first choice, .3 for the second, (20 x .6 + 10 x .3) / 30 for the third
        (((0.3, 0.3, 0.6), (0.6, 0.3, 0.3)), 0.3, [0.5, 0.0]),
        (((0.4, 0.3, 0.2), (0.1, 0.3, 0.6)), 0.3, [0.0, 0.0]),
        (((0.3, 0.3, 0.3, 0.3, 0.3, 0.2), (0.3, 0.3, 0.3, 0.3, 0.3, 0.2)), 0.2, [1.0, 0.5]),
        # of equals the first
        (((0.3, 0.2, 0.2), (0.3, 0.2, 0.2)), 0.2, [0.5, 0.0]),
    ],
)
def test_the_kept_weights_say_how_much_each_view_counts(errors_N, validation, shares):
    start = ArrayRecord({"w": Array(np.zeros(2, np.float32)), SHARES_KEY: Array(np.array([0.25, 0.25], np.float32))})
    done = validated(tuple((*errors, *(7 - len(errors)) * (0.7,)) for errors in errors_N), start=start)
    assert done.validation == pytest.approx(validation)
    kept = done.weights[SHARES_KEY].numpy()
    assert (kept.dtype, kept.tolist()) == (np.float32, shares)


def test_no_rounds_leave_the_start():
    done = pretrained(FakeGrid({}), (), rounds=0)
    assert (done.weights["w"].numpy().tolist(), done.losses, done.validation) == ([0.0, 0.0], (), None)


@pytest.mark.timeout(30)
def test_pretraining_goes_on_without_a_group_that_has_gone_and_never_asks_an_unrelated_node():
    def node(name, reply):
        joins = replying(wire.GroupReply(name))
        return lambda message: (reply if message.metadata.message_type == "train" else joins)(message)

    # Node 2 hosts B and goes after the roll call; node 9 hosts a group that is not in this run.
    gone = node("B", lambda message: Message(Error(5, "node is gone"), reply_to=message))
    grid = FakeGrid({1: node("A", trainer(1)), 2: gone, 9: node("X", trainer(1))})
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=5.0)
    federation.gather(("A", "B"), patience=0.0)
    grid.get_node_ids = lambda: [1, 9]
    found = pretrained(federation.grid, federation.nodes_of(federation.groups), rounds=2)
    assert found.losses == (0.5, 0.5)
    asked = [m.metadata.dst_node_id for m in grid.pushed if m.metadata.message_type == "train"]
    assert sorted(asked) == [1, 1, 2, 2]
