"""Groups that are missing, leave, come late, come back or restart."""

import numpy as np
import pytest
from fakes import CATALOGUE, GONE, GOOD, failing, new_request, silent
from nodes import FakeGrid
from runs import at_work, federated, gathered, replying
from small import cases

from appa_flwr.core.errors import UserError
from appa_flwr.protocol import messages, refusals


@pytest.mark.parametrize(("nodes", "expected", "min_groups", "message"), cases("wrong_inputs")["groups"]["rows"])
def test_groups_that_no_run_can_begin_with(nodes, expected, min_groups, message):
    grid = FakeGrid({node: replying(*names) if names else silent for node, names in enumerate(nodes)})
    with pytest.raises(UserError, match=message):
        gathered(grid, expected, run__min_groups=min_groups)


def test_groups_that_are_missing_or_were_not_asked_for_take_no_part(warnings):
    groups = federated({1: replying("C"), 2: replying("A"), 3: replying("X")}, CATALOGUE, ("C", "B", "A"))
    assert groups.members.present == ("C", "A")  # in the order they were asked for
    assert [text for text in warnings() if "did not join: B" in text]
    assert groups.members.without("truth") == ()


# --- groups that come late, come back or restart ----------------------------------------------------------------------


WHOLE_LIFE = [messages.HELLO, messages.CATALOGUE, messages.TARGETS, messages.ASK]


def again(groups):
    """The groups' rewards, of a request that has not been asked."""
    return groups.ask(new_request()).rows("js targets reward", groups.names)


def working(nodes, expected=("A", "B")):
    groups = at_work(nodes, expected)
    return groups, groups.grid._grid


def test_a_group_comes_back_from_a_new_node_and_gets_what_the_others_got(warnings):
    groups, grid = working({1: replying("A"), 2: replying("B", reward_J=GOOD / 2)})
    gone = grid.nodes[2]
    grid.nodes[2] = GONE
    grid.nodes[7] = new = replying("B", reward_J=GOOD / 2)
    # Flower still lists the old node: nobody else may speak for its group
    assert np.isnan(again(groups)[1]).all()
    assert new.kinds == []
    online = {1, 7}
    groups.grid.get_node_ids = lambda: set(online)
    np.testing.assert_array_equal(again(groups), [GOOD, GOOD / 2])
    assert new.kinds == WHOLE_LIFE
    assert "back: B" in warnings()
    grid.nodes[2] = gone  # and the old one may come again, but speaks for nobody
    online.add(2)
    np.testing.assert_array_equal(again(groups), [GOOD, GOOD / 2])


def test_nodes_that_have_restarted_or_come_late_are_set_up_side_by_side():
    first = {1: replying("A"), 2: replying("B", reward_J=GOOD / 2), 3: replying("C")}
    groups, grid = working(first, ("A", "B", "C", "late"))
    grid.nodes[2] = second = replying("B", reward_J=GOOD / 2)
    grid.nodes[3] = third = replying("C")
    assert np.isnan(again(groups)[1:]).all()
    grid.nodes[4] = late = replying("late", reward_J=GOOD / 3)
    pushes = grid.events.count("push")
    np.testing.assert_array_equal(again(groups), [GOOD, GOOD / 2, GOOD, GOOD / 3])
    assert second.kinds == third.kinds == [messages.ASK, *late.kinds] == [messages.ASK, *WHOLE_LIFE]
    assert grid.events.count("push") - pushes == 4  # a greeting, a catalogue and targets for all three, and the request


def test_a_new_node_takes_no_group_that_is_there_and_brings_none():
    groups, grid = working({1: replying("A"), 2: replying("B")})
    grid.nodes[2] = lambda message: None
    grid.nodes[7] = thief = replying("A")
    grid.nodes[8] = unrelated = replying("Z")
    groups.grid.get_node_ids = lambda: {1, 7, 8}
    for _ in range(2):
        reward_GJ = again(groups)
        np.testing.assert_array_equal(reward_GJ[0], GOOD)
        assert np.isnan(reward_GJ[1]).all()
    assert groups.names == ("A", "B")
    assert unrelated.kinds == [messages.HELLO]
    assert messages.ASK not in thief.kinds


def test_a_late_node_is_not_asked_and_keeps_its_group(warnings):
    groups, grid = working({1: replying("A"), 2: replying("B", reward_J=GOOD / 2)})
    node, asked = grid.nodes[2], []
    grid.nodes[2] = lambda message: asked.append(message.metadata.message_type)
    grid.nodes[7] = thief = replying("B")
    for _ in range(3):
        assert np.isnan(again(groups)[1]).all()
    assert asked == [messages.ASK]
    assert thief.kinds == []
    groups.grid._late.clear()  # it has answered
    grid.nodes[2] = node
    np.testing.assert_array_equal(again(groups), [GOOD, GOOD / 2])
    assert "back: B" in warnings()


def test_a_node_that_comes_back_for_another_group_loses_its_own():
    groups, grid = working({1: replying("A"), 2: replying("B")})
    grid.nodes[2] = other = replying("Z")
    for _ in range(3):
        assert np.isnan(again(groups)[1]).all()
    assert other.kinds == [messages.ASK, messages.HELLO]
    assert groups.members.present == ("A",)


def test_a_node_that_came_too_early_is_not_forgotten():
    """Both restarted at once, and Flower has noticed only that A's node is gone."""
    groups, grid = working({1: replying("A"), 2: replying("B", reward_J=GOOD / 2)})
    grid.nodes[1] = grid.nodes[2] = lambda message: None
    grid.nodes[7], grid.nodes[8] = replying("A"), replying("B", reward_J=GOOD / 2)
    groups.grid.get_node_ids = lambda: {2, 7, 8}
    reward_GJ = again(groups)
    np.testing.assert_array_equal(reward_GJ[0], GOOD)
    assert np.isnan(reward_GJ[1]).all()
    groups.grid.get_node_ids = lambda: {7, 8}
    np.testing.assert_array_equal(again(groups), [GOOD, GOOD / 2])


def test_a_node_whose_owner_refuses_the_catalogue_is_asked_nothing_more(warnings):
    code, node, asked = refusals.OTHER_CATALOGUE, replying("B"), []

    def answer(message):
        asked.append(kind := message.metadata.message_type)
        return (failing(code) if kind == messages.CATALOGUE else node)(message)

    groups, _ = working({1: replying("A"), 2: answer})
    for _ in range(2):
        np.testing.assert_array_equal(again(groups), [GOOD, [np.nan] * 3])
    assert asked == [messages.HELLO, messages.CATALOGUE]
    assert f"node 2: {refusals.REFUSALS[code]}" in warnings()
    assert (groups.members.present, groups.names) == (("A",), ("A", "B"))
