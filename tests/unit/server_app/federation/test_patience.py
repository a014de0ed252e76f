"""How long the server waits for nodes that hang, on a clock that only waiting moves."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import FakeGrid, catalogue_of, replying
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from in_process import flower_task

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import wire
from server_app.federation import grid as grids
from server_app.federation import groups as federations
from server_app.federation.grid import LEAST_SECONDS, LONGEST_PAUSE, PATIENCE, OverlapGrid
from server_app.federation.groups import JOIN_SECONDS, Federation
from server_app.predictor.pretraining import pretrain

TIMEOUT = 600.0
REQUEST = wire.ScoreRequest(np.array([0]), np.full((1, 2), 0.5), ("js",))
NEVER = math.inf


class TimedGrid(FakeGrid):
    """Nodes answer so many seconds after they were asked, by the kind of message and its number at that node.

    Attributes:
        now: the clock.
        thawed: node -> when it goes on; what it got before then is answered after that.
    """

    def __init__(self, nodes, seconds):
        super().__init__(nodes)
        self.now, self.seconds, self.thawed = 0.0, seconds, {}
        self._ready = {}

    def push_messages(self, messages):
        messages = list(messages)
        keys = super().push_messages(messages)
        for key, message in zip(keys, messages, strict=True):
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            wait = self.seconds(node, kind, len(self.sent(node, kind)))
            self._ready[key] = max(self.now, self.thawed.get(node, 0.0)) + wait
        return keys

    def pull_messages(self, message_ids):
        return super().pull_messages([key for key in message_ids if self._ready[key] <= self.now])

    def sent(self, node, kind):
        return [m for m in self.pushed if (m.metadata.dst_node_id, m.metadata.message_type) == (node, kind)]

    def sleep(self, seconds):
        self.now += seconds


def trained(message):
    """A sound answer to a message of PluralLLM's training or validation."""
    metrics = {"num-examples": 5, "loss": 0.5}
    if message.metadata.message_type == "evaluate":
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 5, "errors": [0.5]})}), reply_to=message)
    here = message.content["arrays"]["weights"].numpy()
    arrays = ArrayRecord({"weights": Array((here + 1).astype(np.float32))})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)}), reply_to=message)


def node(name):
    """A group's node, which answers whatever it is asked."""
    reward = {("js", wire.TARGET_SIDE): np.array([0.5])}
    query = replying(wire.GroupReply(name, reward))
    return lambda message: (trained if message.metadata.message_type in ("train", "evaluate") else query)(message)


@pytest.fixture
def timed(monkeypatch):
    """What makes a grid with a clock, of nodes 1, 2, ... with groups A, B, ...; seconds(node, kind, number)."""

    def make(count, seconds):
        grid = TimedGrid({n: node("ABCDE"[n - 1]) for n in range(1, count + 1)}, seconds)
        clock = SimpleNamespace(monotonic=lambda: grid.now, sleep=grid.sleep)
        for module in (grids, federations):
            monkeypatch.setattr(module, "time", clock)
        return grid

    return make


def ask(overlap, nodes, kind=wire.VOTE):
    return overlap.send_and_receive(
        [overlap.create_message(RecordDict(), kind, n, "0") for n in nodes], timeout=TIMEOUT
    )


@pytest.mark.parametrize(("usual", "waited"), [(4.0, LEAST_SECONDS), (20.0, 200.0), (100.0, TIMEOUT)])
def test_a_first_message_is_waited_for_ten_times_as_long_as_half_of_the_nodes_took(timed, usual, waited):
    grid = timed(3, lambda n, kind, number: {1: 1.0, 2: usual, 3: NEVER}[n])
    assert len(ask(OverlapGrid(grid), (1, 2, 3))) == 2
    assert waited <= grid.now <= min(TIMEOUT, waited + PATIENCE * 3 * LONGEST_PAUSE) + LONGEST_PAUSE


def test_a_message_that_all_have_answered_before_is_waited_for_ten_times_as_long(timed):
    grid = timed(2, lambda n, kind, number: 9.0 if n == 1 or number < 3 else NEVER)
    overlap = OverlapGrid(grid)
    for _ in range(2):
        ask(overlap, (1, 2))
    before = grid.now
    grid.sleep(1000.0)  # what passes between rounds is no round
    ask(overlap, (1, 2))
    assert 90.0 <= grid.now - before - 1000.0 <= 91.0


def test_in_a_simulation_everybody_is_waited_for_and_asked_every_time(timed):
    grid = timed(2, lambda n, kind, number: 1.0 if n == 1 else NEVER)
    overlap = OverlapGrid(grid)
    overlap.simulated = True
    for _ in range(2):
        ask(overlap, (1, 2))
    assert grid.now >= 2 * TIMEOUT
    assert len(grid.sent(2, wire.VOTE)) == 2
    assert grid.sent(2, wire.ROLL_CALL) == []


ROUNDS, ROUND_SECONDS = 60, 4.0


def pretrained(grid, nodes):
    config = Config.load({"pluralllm.rounds": ROUNDS})
    start = ArrayRecord({"w": Array(np.zeros(2, dtype=np.float32))})
    with flower_task():
        done = pretrain(OverlapGrid(grid), config, start, nodes=nodes, progress=lambda *_: None)
    assert len(done.losses) == ROUNDS


def at_work(n, kind, number):
    return {"train": ROUND_SECONDS, "evaluate": ROUND_SECONDS}.get(kind, 1.0)


def test_a_node_that_hangs_stalls_pluralllm_for_one_minute_and_takes_part_again_once_it_goes_on(timed):
    grid = timed(3, at_work)
    grid.thawed[3] = 200.0
    pretrained(grid, (1, 2, 3))
    asked = ROUNDS + 1  # with the validation after the last
    usual = asked * (ROUND_SECONDS + LONGEST_PAUSE)
    assert asked * ROUND_SECONDS + LEAST_SECONDS <= grid.now + ROUND_SECONDS <= usual + LEAST_SECONDS + ROUND_SECONDS
    missed = ROUNDS - len(grid.sent(3, "train"))
    # from the stall's end at 60 s to the first round after 200 s + what its answer takes, at 4 s a round
    assert (
        (200 - LEAST_SECONDS) / (ROUND_SECONDS + LONGEST_PAUSE) <= missed <= (200 - LEAST_SECONDS) / ROUND_SECONDS + 2
    )
    assert len(grid.sent(3, wire.ROLL_CALL)) == 1


def test_a_message_that_was_lost_costs_its_node_that_round_and_the_one_in_which_it_answers_the_roll_call(timed):
    grid = timed(3, lambda n, kind, number: NEVER if (n, kind, number) == (3, "train", 5) else at_work(n, kind, number))
    pretrained(grid, (1, 2, 3))
    assert grid.now <= (ROUNDS + 1) * (ROUND_SECONDS + LONGEST_PAUSE) + LEAST_SECONDS
    assert len(grid.sent(3, "train")) == ROUNDS - 1
    assert len(grid.sent(3, "evaluate")) == 1


@pytest.mark.parametrize("late", [NEVER, LEAST_SECONDS + 5.0])
def test_a_node_that_hangs_again_and_again_is_left_out_for_longer_each_time(timed, late):
    """It answers every roll call by the next question, and nothing else: one is enough at first, then it takes 2, 4."""
    grid = timed(2, lambda n, kind, number: 4.0 if n == 1 else {wire.ROLL_CALL: 1.0}.get(kind, late))
    overlap = OverlapGrid(grid)
    asked = []
    for number in range(1, 71):
        before = len(grid.sent(2, wire.VOTE))
        ask(overlap, (1, 2))
        if len(grid.sent(2, wire.VOTE)) > before:
            asked.append(number)
    assert asked == [1, 3, 6, 11, 20, 37, 70]


def test_a_node_that_answers_in_time_again_is_trusted_as_before(timed):
    lost = {1, 2, 5}
    grid = timed(
        2, lambda n, kind, number: NEVER if n == 2 and kind == wire.VOTE and number in lost else min(4.0, 5.0 - n)
    )
    overlap = OverlapGrid(grid)
    for _ in range(10):
        ask(overlap, (1, 2))
    # asked the 1st (lost), 3rd (lost), 6th, 7th, 8th (lost) and 10th time: one roll call again after the last loss
    assert len(grid.sent(2, wire.VOTE)) == 6
    assert len(grid.sent(2, wire.ROLL_CALL)) == 1 + 2 + 1


def test_a_roll_call_that_was_lost_too_is_sent_again(timed):
    grid = timed(2, lambda n, kind, number: NEVER if (n, number) == (2, 1) else 4.0)
    overlap = OverlapGrid(grid)
    while grid.now < 2 * TIMEOUT:
        ask(overlap, (1, 2))
    assert len(grid.sent(2, wire.ROLL_CALL)) == 2
    # all rounds of 4 s, but the first and those of the 600 s after it
    assert len(grid.sent(1, wire.VOTE)) - len(grid.sent(2, wire.VOTE)) == pytest.approx(TIMEOUT / 4.0, rel=0.1)


@pytest.mark.parametrize("patience", [0.0, 10.0, 120.0])
@pytest.mark.parametrize("hung", [(2,), (1, 2)])
def test_the_join_ends_when_its_key_says_so(timed, patience, hung):
    grid = timed(2, lambda n, kind, number: NEVER if n in hung else 5.0)
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=TIMEOUT)
    if len(hung) == 2:
        with pytest.raises(UserError, match="0 groups joined"):
            federation.gather(("A", "B"), patience=patience)
    else:
        federation.gather(("A", "B"), patience=patience)
        assert federation.present == ("A",)
    assert patience <= grid.now <= max(patience, JOIN_SECONDS) + 2 * federations.JOIN_PAUSE


def test_a_lost_roll_call_is_made_good_within_the_join(timed):
    grid = timed(2, lambda n, kind, number: NEVER if (n, number) == (2, 1) else 5.0)
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=TIMEOUT)
    federation.gather(("A", "B"), patience=120.0)
    assert federation.present == ("A", "B")
    assert LEAST_SECONDS < grid.now < LEAST_SECONDS + 2 * 5.0 + 2.0


def test_a_node_that_hung_while_the_others_were_set_up_is_set_up_before_it_scores(timed):
    grid = timed(2, lambda n, kind, number: NEVER if (n, kind, number) == (2, wire.TARGETS, 1) else 1.0)
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=TIMEOUT)
    federation.gather(("A", "B"), patience=10.0)
    federation.send_catalogue(catalogue_of([2, 2], train=[True, False]))
    weights = ArrayRecord({"w": Array(np.ones(1, np.float32))})
    assert set(federation.send_targets(weights, fault=lambda reply: None)) == {"A"}
    grid.sleep(2.0)
    for _ in range(2):
        rewards = federation.score(REQUEST)["js", wire.TARGET_SIDE]
    np.testing.assert_array_equal(rewards, [[0.5], [0.5]])
    assert len(grid.sent(2, wire.TARGETS)) == 2
    assert len(grid.sent(1, wire.TARGETS)) == 1
