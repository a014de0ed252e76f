"""Groups that come late, come back or restart while a run is under way."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import CATALOGUE, GOOD, KEY, REQUEST, FakeGrid
from flwr.app import Array, ArrayRecord, Error, Message

from appa_flwr.protocol import wire
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Federation

pytestmark = pytest.mark.usefixtures("no_pauses")


def living(name, reward_J=GOOD):
    """A node that has to be told the catalogue before it can score; what it was asked, too."""
    asked = []

    def answer(message):
        kind = message.metadata.message_type
        asked.append(kind)
        if kind == wire.SCORE and wire.CATALOGUE not in asked:
            return Message(Error(wire.FORGOTTEN, wire.REFUSALS[wire.FORGOTTEN]), reply_to=message)
        reply = wire.GroupReply(name, {KEY: reward_J} if kind == wire.SCORE else {})
        return Message(wire.pack_replies([reply]), reply_to=message)

    return answer, asked


@pytest.fixture
def at_work():
    """Groups A and B on nodes 1 and 2, ready to score, and the grid."""
    grid = FakeGrid({1: living("A")[0], 2: living("B", GOOD / 2)[0]})
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=0.02)
    federation.gather(("A", "B"), patience=0.0)
    federation.send_catalogue(CATALOGUE)
    federation.send_targets(ArrayRecord({"w": Array(np.ones(1, np.float32))}), fault=lambda reply: None)
    return federation, grid


def test_a_group_comes_back_from_a_new_node_and_gets_what_the_others_got(at_work, warnings):
    federation, grid = at_work
    gone = grid.nodes[2]
    grid.nodes[2] = lambda message: Message(Error(5, "node is gone"), reply_to=message)
    grid.nodes[7], asked = living("B", GOOD / 2)
    # Flower still lists the old node: nobody else may speak for its group
    assert np.isnan(federation.score(REQUEST)[KEY][1]).all()
    assert asked == []
    online = {1, 7}
    federation.grid.online = lambda: frozenset(online)
    np.testing.assert_array_equal(federation.score(REQUEST)[KEY], [GOOD, GOOD / 2])
    assert asked == [wire.ROLL_CALL, wire.CATALOGUE, wire.TARGETS, wire.SCORE]
    assert "back: B" in warnings()
    assert list(grid.get_node_ids()) == [1, 2, 7]
    assert list(federation.grid.get_node_ids()) == [1, 7]  # Flower's strategies ask the new one too
    grid.nodes[2] = gone  # and the old one may come again, but speaks for nobody
    online.add(2)
    np.testing.assert_array_equal(federation.score(REQUEST)[KEY], [GOOD, GOOD / 2])


def test_a_group_that_is_late_joins_and_gets_what_the_others_got(warnings):
    grid = FakeGrid({1: living("A")[0]})
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=0.02)
    federation.gather(("B", "A"), patience=0.0)
    federation.send_catalogue(CATALOGUE)
    federation.send_targets(ArrayRecord({"w": Array(np.ones(1, np.float32))}), fault=lambda reply: None)
    scores = federation.score(REQUEST)[KEY]
    assert np.isnan(scores[0]).all()
    np.testing.assert_array_equal(scores[1], GOOD)
    grid.nodes[7], asked = living("B", GOOD / 2)
    np.testing.assert_array_equal(federation.score(REQUEST)[KEY], [GOOD / 2, GOOD])
    assert asked == [wire.ROLL_CALL, wire.CATALOGUE, wire.TARGETS, wire.SCORE]
    assert "joined: B" in warnings()
    assert list(federation.grid.get_node_ids()) == [1, 7]


def test_a_node_that_has_restarted_under_its_own_id_is_set_up_again(at_work, warnings):
    federation, grid = at_work
    grid.nodes[2], asked = living("B", GOOD / 2)
    assert np.isnan(federation.score(REQUEST)[KEY][1]).all()
    np.testing.assert_array_equal(federation.score(REQUEST)[KEY], [GOOD, GOOD / 2])
    assert asked == [wire.SCORE, wire.CATALOGUE, wire.TARGETS, wire.SCORE]
    assert warnings()[-1] == "back: B"


def test_a_new_node_takes_no_group_that_is_there_and_brings_none(at_work, warnings):
    federation, grid = at_work
    grid.nodes[2] = lambda message: None
    grid.nodes[7], thief = living("A")
    grid.nodes[8], unrelated = living("Z")
    federation.grid.online = lambda: frozenset({1, 7, 8})
    for _ in range(2):
        scores = federation.score(REQUEST)[KEY]
        np.testing.assert_array_equal(scores[0], GOOD)
        assert np.isnan(scores[1]).all()
    assert federation.groups == ("A", "B")
    assert "another node speaks for group 'A', whose own is there; it is left out" in warnings()
    assert thief == [wire.ROLL_CALL] * 2  # its own may go yet
    assert unrelated == [wire.ROLL_CALL]


def test_a_node_that_came_too_early_is_not_forgotten(at_work):
    """Both restarted at once, and Flower has noticed only that A's node is gone."""
    federation, grid = at_work
    grid.nodes[1] = grid.nodes[2] = lambda message: None
    grid.nodes[7], _ = living("A")
    grid.nodes[8], _ = living("B", GOOD / 2)
    federation.grid.online = lambda: frozenset({2, 7, 8})
    scores = federation.score(REQUEST)[KEY]
    np.testing.assert_array_equal(scores[0], GOOD)
    assert np.isnan(scores[1]).all()
    federation.grid.online = lambda: frozenset({7, 8})
    np.testing.assert_array_equal(federation.score(REQUEST)[KEY], [GOOD, GOOD / 2])


def test_a_node_that_cannot_be_set_up_stays_missing_and_is_tried_again(at_work, warnings):
    federation, grid = at_work
    ready, _ = living("B", GOOD / 2)
    broken = [True]
    grid.nodes[2] = lambda message: (
        Message(Error(wire.FORGOTTEN if message.metadata.message_type == wire.SCORE else 5, "no"), reply_to=message)
        if broken[0]
        else ready(message)
    )
    for _ in range(2):
        assert np.isnan(federation.score(REQUEST)[KEY][1]).all()
    broken[0] = False
    np.testing.assert_array_equal(federation.score(REQUEST)[KEY], [GOOD, GOOD / 2])
    assert warnings()[-1] == "back: B"
