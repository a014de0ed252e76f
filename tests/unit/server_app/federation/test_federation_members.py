"""Who is asked what while groups join and after one has gone.

Axis letters: G groups.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from fakes import FakeGrid, Node, replying
from flwr.app import Error, Message, MetricRecord, RecordDict
from in_process import flower_task

from appa_flwr import wire
from appa_flwr.config import Config
from appa_flwr.errors import UserError
from server_app.federation import groups as federations
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Federation
from server_app.predictor.pretraining import initial_weights, pretrain

TRAIN = "train"


class ChangingGrid(FakeGrid):
    """A grid whose nodes come and go: look number i finds the nodes of `looks[i]`, the last of them from then on."""

    def __init__(self, nodes: dict[int, Node], looks: list[list[int]]) -> None:
        super().__init__(nodes)
        self.looks = looks

    def get_node_ids(self) -> Iterable[int]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def asked(self, kind: str) -> list[int]:
        return [m.metadata.dst_node_id for m in self.pushed if m.metadata.message_type == kind]


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(federations, "time", Clock())


def named(name: str) -> Node:
    return replying(wire.GroupReply(name))


def test_a_group_that_has_joined_is_not_asked_again_while_the_server_waits_for_others():
    grid = ChangingGrid({1: named("A"), 2: named("B"), 3: named("C")}, [[1], [1], [1, 2], [1, 2, 3]])
    federation = Federation(OverlapGrid(grid), min_groups=3, timeout=5.0)
    federation.gather(("A", "B", "C"), patience=60.0)
    assert federation.groups == ("A", "B", "C")
    assert grid.asked(wire.ROLL_CALL) == [1, 2, 3]


def test_a_group_that_leaves_before_the_others_have_come_does_not_count():
    grid = ChangingGrid({1: named("A"), 2: named("B")}, [[1], [2]])
    with pytest.raises(UserError, match=r"1 groups joined \(B\); federation\.min-groups = 2; missing: A"):
        Federation(OverlapGrid(grid), min_groups=2, timeout=5.0).gather(("A", "B"), patience=federations.JOIN_PAUSE / 2)


def test_a_group_under_a_name_that_was_not_asked_for_is_named_in_the_error():
    grid = FakeGrid({1: named("Kenya"), 2: named("Pero")})
    says = r"1 groups joined \(Kenya\); federation\.min-groups = 2; missing: Peru; there, but not in `groups`: Pero"
    with pytest.raises(UserError, match=says):
        Federation(OverlapGrid(grid), min_groups=2, timeout=5.0).gather(("Kenya", "Peru"), patience=0.0)


@pytest.mark.timeout(30)
def test_pretraining_goes_on_without_a_group_that_has_gone_and_never_asks_a_stranger():
    def trained(message: Message) -> Message:
        metrics = MetricRecord({"num-examples": 5, "loss": 0.5})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    def group(name: str) -> Node:
        return lambda message: (trained if message.metadata.message_type == TRAIN else named(name))(message)

    def gone(message: Message) -> Message:
        if message.metadata.message_type == TRAIN:
            return Message(Error(5, "node is gone"), reply_to=message)
        return named("B")(message)

    # Node 2 hosts B and goes after the roll call; node 9 hosts a group that is not in this run.
    grid = ChangingGrid({1: group("A"), 2: gone, 9: group("X")}, [[1, 2, 9], [1, 9]])
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=5.0)
    federation.gather(("A", "B"), patience=0.0)
    config = Config.load(
        {"pluralllm.rounds": 2, "embedding.dim": 8, "federation.min-groups": 1, "pluralllm.validate-every": 0}
    )
    with flower_task():
        found = pretrain(
            federation.grid,
            config,
            initial_weights(config),
            nodes=federation.homes(federation.groups),
            progress=lambda step, of, loss: None,
        )
    assert [entry.loss for entry in found.rounds] == [0.5, 0.5]
    assert sorted(grid.asked(TRAIN)) == [1, 1, 2, 2]
