"""The groups as the server sees them, where some of them fail, lie, leave or come late.

Axis letters: G groups, Q questions, K options, J answers.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fake_groups import FakeGroups, replying
from fakes import CATALOGUE, GOOD, KEY, REQUEST, FakeGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import asks, messages, refusals
from appa_flwr.protocol.asks import Ask, ScoreRequest
from server_app.federation import members as federation
from server_app.federation.ask import TooFew
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Groups

pytestmark = pytest.mark.usefixtures("no_pauses")

TRUTH_KEY = ("js", asks.TRUTH_SIDE)
WEIGHTS = ArrayRecord({"w": Array(np.ones(1, np.float32))})


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Nobody waits for more nodes to join."""
    monkeypatch.setattr(federation, "SETTLING_SECONDS", 0.0)


def gathered(nodes, expected=(), *, min_groups=1, answers=None, patience=0.0, keys=None):
    config = Config.load({"run.min-groups": min_groups, "run.reply-timeout": 0.02})
    groups = Groups(OverlapGrid(FakeGrid(nodes)), config, answers=answers, keys=keys)
    groups.gather(expected, patience=patience)
    return groups


def scorer(name, reward_J=GOOD, key=KEY):
    return replying(name, rewards={key: np.asarray(reward_J, dtype=float)})


def answering(name, answer):
    """A group's node that is set up like others, and answers requests for numbers as told."""
    node = scorer(name)
    return lambda message: (answer if message.metadata.message_type == messages.ASK else node)(message)


def three(bad_node, *, min_groups=2):
    """Groups A, B and C on nodes 11, 12 and 13; A and C behave, B's node answers requests for numbers as told."""
    nodes = {13: scorer("C", GOOD / 3), 12: bad_node, 11: scorer("A", GOOD)}
    groups = gathered(nodes, ("A", "B", "C"), min_groups=min_groups)
    groups.send_catalogue(CATALOGUE)
    return groups


def rewards(groups, request=REQUEST, key=KEY):
    answer = groups.ask(request.ask(asks.REWARDS))
    return answer.rows(f"{' '.join(key)} reward", groups.names)


def rows_of(*names, row=None):
    """A reply with these rows."""
    size = 11  # three arrays of three answers, and two single numbers
    filled = np.full((len(names), size), 0.5) if row is None else np.tile(row, (len(names), 1))
    return lambda message: Message(messages.pack_reply(names, filled), reply_to=message)


BAD_NODES = {
    "too few": answering("B", rows_of("B", row=np.ones(10))),
    "none": answering("B", lambda message: Message(messages.pack_reply(["B"]), reply_to=message)),
    "NaN": scorer("B", [0.5, np.inf, 0.5]),
    "unknown": scorer("B", [0.5, np.nan, 0.5]),  # by its predictions a group knows every reward
    "above one": scorer("B", [0.5, 1.0 + 1e-9, 0.5]),
    "below zero": scorer("B", [0.5, -1e-9, 0.5]),
    "unknown group": answering("B", rows_of("Z")),
    "error reply": answering("B", lambda message: Message(Error(5, "node is gone"), reply_to=message)),
    "no reply": answering("B", lambda message: None),
    "another protocol": answering(
        "B", lambda message: Message(RecordDict({"x": ConfigRecord({"y": 1})}), reply_to=message)
    ),
    "twice in one reply": answering("B", rows_of("B", "B")),
}


@pytest.mark.parametrize("kind", BAD_NODES)
def test_a_group_that_fails_counts_as_missing_and_the_others_stay(kind, warnings):
    reward_GJ = rewards(three(BAD_NODES[kind]))
    np.testing.assert_array_equal(reward_GJ, [GOOD, [np.nan] * 3, GOOD / 3])
    assert any("group B " in text for text in warnings())


def test_an_errors_reason_reaches_the_log(warnings):
    rewards(three(BAD_NODES["error reply"]))
    assert "node 12: node is gone" in warnings()


def test_no_node_can_answer_for_a_group_that_lives_elsewhere(warnings):
    groups = three(scorer("B", GOOD / 2))
    forged = groups.grid._grid
    honest = forged.nodes[11]
    forged.nodes[11] = _both(honest)
    np.testing.assert_array_equal(rewards(groups), [GOOD, GOOD / 2, GOOD / 3])
    assert any("does not host it" in text for text in warnings())


def _both(honest):
    """The node answers for B too, with rewards of 1."""

    def answer(message):
        reply = honest(message)
        if message.metadata.message_type != messages.ASK:
            return reply
        row_GN = messages.unpack_reply(reply.content, numbers=(np.float64, 2)).numbers
        forged = np.concatenate([row_GN, np.ones_like(row_GN)])
        return Message(messages.pack_reply(["A", "B"], forged), reply_to=message)

    return answer


def test_groups_that_behave_are_stacked_in_a_fixed_order_without_a_warning(warnings):
    groups = three(scorer("B", GOOD / 2))
    assert groups.names == ("A", "B", "C")
    np.testing.assert_array_equal(rewards(groups), [GOOD, GOOD / 2, GOOD / 3])
    answer = groups.ask(REQUEST.ask(asks.REWARDS))
    np.testing.assert_allclose(answer.mean("js targets reward"), (GOOD + GOOD / 2 + GOOD / 3) / 3)
    assert warnings() == []


def test_on_the_truth_side_an_unknown_answer_is_no_fault():
    request = ScoreRequest(REQUEST.question_J, REQUEST.prediction_JK, ("js",), (asks.TRUTH_SIDE,))
    groups = three(scorer("B", [0.5, np.nan, 1.0], TRUTH_KEY), min_groups=1)
    answer = groups.ask(request.ask(asks.REWARDS))
    assert answer.rows("js truth known", groups.names)[1].tolist() == [1, 0, 1]


def test_a_group_that_rewards_what_nobody_can_read_counts_as_missing(warnings):
    prediction_JK = np.array([[0.5, 0.5, np.nan], [np.nan] * 3, [0.2, 0.3, 0.5]])
    request = ScoreRequest(REQUEST.question_J, prediction_JK, ("js",))
    for lie in (0.0, 0.1):
        groups = gathered({11: scorer("A", [0.5, 0.0, 1.0]), 12: scorer("B", [1.0, lie, 1.0])}, ("A", "B"))
        groups.send_catalogue(CATALOGUE)
        reward_GJ = rewards(groups, request)
        np.testing.assert_array_equal(reward_GJ[0], [0.5, 0.0, 1.0])
        assert np.isnan(reward_GJ[1]).all() == (lie > 0)
    assert warnings() == ["group B counts as missing: js rewards above 0 for answers that nobody can read"]


@pytest.mark.parametrize(
    ("reward_J", "named"),
    [(np.ones(9), True), (np.linspace(0, 1, 9), False), (np.r_[np.full(8, 0.5), 0.6], False)],
)
def test_a_group_that_rewards_everything_alike_is_named(reward_J, named, warnings):
    prediction_JK = np.random.default_rng(0).dirichlet([1, 1, 1], 9)
    nodes = {1: scorer("A", np.linspace(0, 1, 9)), 2: scorer("B", reward_J)}
    groups = gathered(nodes, ("A", "B"))
    groups.send_catalogue(CATALOGUE)
    reward_GJ = rewards(groups, ScoreRequest(np.zeros(9, np.int64), prediction_JK, ("js",)))
    np.testing.assert_array_equal(reward_GJ[1], reward_J)  # a lie cannot be told from a strange group
    assert warnings() == ["group B gives all answers the same reward"] * named


@pytest.mark.parametrize(("counts", "expected"), [([7, 3], {"A": 5, "B": 3}), ([3], {"A": 5}), ([7, 3, 1], {"A": 5})])
def test_a_count_of_answers_is_that_of_its_own_group(counts, expected, warnings):
    def counting(names, counts):
        def answer(message):
            if message.metadata.message_type != messages.CATALOGUE:
                return replying(names[-1])(message)
            return Message(messages.pack_reply(names, answered=counts, may=[]), reply_to=message)

        return answer

    groups = gathered({1: counting(["A"], [5]), 2: counting(["A", "B"], counts)}, ("A", "B"))
    assert groups.send_catalogue(CATALOGUE) == expected
    assert len(warnings()) == 1


GOOD_VOTES = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [3.0, 2.0, 1.0]])


@pytest.mark.parametrize(
    "votes",
    [np.full((3, 3), np.nan), np.where(GOOD_VOTES == 1.0, np.inf, 0.0), -GOOD_VOTES, 1000.0 * GOOD_VOTES],
    ids=["NaN", "inf", "negative", "huge"],
)
def test_votes_that_cannot_be_used_are_left_out(votes, warnings):
    given = {"A": GOOD_VOTES, "B": votes, "C": GOOD_VOTES / 2}
    groups = gathered({n: FakeGroups([name], lambda ask, name: {"votes": given[name]}) for n, name in enumerate(given)})
    groups.send_catalogue(CATALOGUE)
    answer = groups.ask(Ask(asks.VOTES))
    assert answer.groups == ("A", "C")
    np.testing.assert_array_equal(answer.each("votes"), [GOOD_VOTES, GOOD_VOTES / 2])
    assert any("group B " in text for text in warnings())


def test_below_the_quorum_the_error_says_who_answered_and_why_others_did_not():
    code = refusals.MAY_NOT_LEAVE["rewards"]
    refusing = answering("B", lambda message: Message(Error(code, refusals.REFUSALS[code]), reply_to=message))
    with pytest.raises(
        TooFew, match=r"2 of 3 groups \(A, C\) could give rewards, and 3 must.*1 nodes refused: its own"
    ):
        rewards(three(refusing, min_groups=3))


# --- answers are kept -------------------------------------------------------------------------------------------------


def test_the_same_request_is_asked_once(tmp_path):
    node = scorer("A")
    computed = []
    for _ in range(2):  # a resumed run too
        groups = gathered({1: node}, answers=tmp_path / "answers")
        groups.send_catalogue(CATALOGUE)
        for _ in range(2):
            answer = groups.ask(REQUEST.ask(asks.REWARDS), meanwhile=lambda: computed.append(1))
            np.testing.assert_array_equal(answer.each("js targets reward"), [GOOD])
    assert (len(node.asked), len(computed)) == (1, 4)
    groups.ask(REQUEST.ask(asks.REWARDS, other=1))
    groups.send_targets(WEIGHTS)  # another world
    groups.ask(REQUEST.ask(asks.REWARDS))
    assert len(node.asked) == 3
    for path in (tmp_path / "answers").iterdir():
        path.write_bytes(b"x")
    with pytest.raises(UserError, match=r"answers/\w+\.npz: cannot be read"):
        groups.ask(REQUEST.ask(asks.REWARDS))


# --- who is there -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "expected", "min_groups", "message"),
    [
        ({1: replying("A", "B"), 2: replying("B")}, (), 1, "two nodes speak for group 'B'"),
        ({}, (), 1, r"0 groups joined \(none\); run\.min-groups = 1"),
        (
            {1: replying("C"), 2: replying("A")},
            ("C", "B", "A"),
            3,
            r"2 groups joined \(C, A\); run\.min-groups = 3; missing: B$",
        ),
        (
            {1: replying("Kenya"), 2: replying("Pero")},
            ("Kenya", "Peru"),
            2,
            r"1 groups joined \(Kenya\); .* = 2; missing: Peru; there, but not in `groups`: Pero$",
        ),
    ],
)
def test_groups_that_no_run_can_begin_with(nodes, expected, min_groups, message):
    with pytest.raises(UserError, match=message):
        gathered(nodes, expected, min_groups=min_groups)


def test_groups_that_are_missing_or_were_not_asked_for_take_no_part(warnings):
    groups = gathered({1: replying("C"), 2: replying("A"), 3: replying("X")}, ("C", "B", "A"))
    assert groups.present == ("C", "A")  # in the order they were asked for
    assert [text for text in warnings() if "did not join: B" in text]
    groups.send_catalogue(CATALOGUE)
    assert groups.without("truth") == ()


def clocked(monkeypatch, grid, events):
    """A clock that only waiting moves; events: time -> what happens to the grid then."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds
        for at in [at for at in events if at <= now[0]]:
            events.pop(at)(grid)

    monkeypatch.setattr(federation.time, "sleep", sleep)
    monkeypatch.setattr(federation.time, "monotonic", lambda: now[0])
    return now


def counted(name, asked):
    node = replying(name)
    return lambda message: asked.append(name) or node(message)


def test_nodes_are_greeted_until_all_are_there(monkeypatch):
    asked = []
    grid = FakeGrid({1: counted("A", asked), 3: counted("C", asked)})
    now = clocked(monkeypatch, grid, {1.0: lambda grid: grid.nodes.update({2: counted("B", asked)})})
    groups = Groups(OverlapGrid(grid), Config.load({"run.min-groups": 1}))
    groups.gather(("A", "B"), patience=60.0)
    assert (groups.names, now[0]) == (("A", "B"), 1.0)
    assert sorted(asked) == ["A", "B", "C"]  # whoever has answered is not asked again


def test_where_nobody_is_named_a_run_waits_until_nobody_joins_any_more(monkeypatch):
    monkeypatch.setattr(federation, "SETTLING_SECONDS", 3.0)
    grid, asked = FakeGrid({1: counted("A", []), 2: counted("B", [])}), []
    now = clocked(
        monkeypatch,
        grid,
        {
            2.0: lambda grid: grid.nodes.update({3: counted("C", asked)}),
            4.5: lambda grid: grid.nodes.update({4: counted("D", asked)}),
            9.0: lambda grid: grid.nodes.update({5: counted("E", asked)}),
        },
    )
    groups = Groups(OverlapGrid(grid), Config.load({"run.min-groups": 2}))
    groups.gather((), patience=60.0)
    assert groups.names == ("A", "B", "C", "D")
    assert now[0] == 7.5


def test_a_group_that_left_before_all_were_there_is_missing(monkeypatch):
    grid = FakeGrid({1: replying("A"), 2: replying("B")})
    clocked(monkeypatch, grid, {1.0: lambda grid: grid.nodes.pop(2)})
    groups = Groups(OverlapGrid(grid), Config.load({"run.min-groups": 1}))
    groups.gather(("A", "B", "C"), patience=40.0)
    assert groups.present == ("A",)
    assert groups.names == ("A", "B", "C")  # which may come yet


# --- groups that come late, come back or restart ----------------------------------------------------------------------


def living(name, reward_J=GOOD):
    """A node that has to be told the catalogue before it can score; what it was asked, too."""
    asked, node = [], scorer(name, reward_J)

    def answer(message):
        asked.append(kind := message.metadata.message_type)
        if kind == messages.ASK and messages.CATALOGUE not in asked:
            return Message(Error(refusals.FORGOTTEN, refusals.REFUSALS[refusals.FORGOTTEN]), reply_to=message)
        return node(message)

    return answer, asked


WHOLE_LIFE = [messages.HELLO, messages.CATALOGUE, messages.TARGETS, messages.ASK]
numbers = itertools.count()


def again(groups):
    """The groups' rewards, of a request that has not been asked."""
    answer = groups.ask(REQUEST.ask(asks.REWARDS, number=next(numbers)))
    return answer.rows("js targets reward", groups.names)


def at_work(nodes, expected=("A", "B")):
    groups = gathered(nodes, expected)
    groups.send_catalogue(CATALOGUE)
    groups.send_targets(WEIGHTS)
    return groups, groups.grid._grid


def test_a_group_comes_back_from_a_new_node_and_gets_what_the_others_got(warnings):
    groups, grid = at_work({1: living("A")[0], 2: living("B", GOOD / 2)[0]})
    gone = grid.nodes[2]
    grid.nodes[2] = lambda message: Message(Error(5, "node is gone"), reply_to=message)
    grid.nodes[7], asked = living("B", GOOD / 2)
    # Flower still lists the old node: nobody else may speak for its group
    assert np.isnan(again(groups)[1]).all()
    assert asked == []
    online = {1, 7}
    groups.grid.online = lambda: set(online)
    np.testing.assert_array_equal(again(groups), [GOOD, GOOD / 2])
    assert asked == WHOLE_LIFE
    assert "back: B" in warnings()
    grid.nodes[2] = gone  # and the old one may come again, but speaks for nobody
    online.add(2)
    np.testing.assert_array_equal(again(groups), [GOOD, GOOD / 2])


def test_a_group_that_is_late_joins_and_gets_what_the_others_got():
    groups, grid = at_work({1: living("A")[0]}, ("B", "A"))
    assert np.isnan(again(groups)[0]).all()
    grid.nodes[7], asked = living("B", GOOD / 2)
    np.testing.assert_array_equal(again(groups), [GOOD / 2, GOOD])
    assert asked == WHOLE_LIFE


def test_nodes_that_have_restarted_are_set_up_again_side_by_side():
    groups, grid = at_work({1: living("A")[0], 2: living("B", GOOD / 2)[0], 3: living("C")[0]}, ("A", "B", "C"))
    grid.nodes[2], second = living("B", GOOD / 2)
    grid.nodes[3], third = living("C")
    assert np.isnan(again(groups)[1:]).all()
    pushes = grid.events.count("push")
    np.testing.assert_array_equal(again(groups), [GOOD, GOOD / 2, GOOD])
    assert second == third == [messages.ASK, *WHOLE_LIFE]
    assert grid.events.count("push") - pushes == 4  # a greeting, a catalogue and targets for both, and the request


def test_a_new_node_takes_no_group_that_is_there_and_brings_none(warnings):
    groups, grid = at_work({1: living("A")[0], 2: living("B")[0]})
    grid.nodes[2] = lambda message: None
    grid.nodes[7], thief = living("A")
    grid.nodes[8], unrelated = living("Z")
    groups.grid.online = lambda: {1, 7, 8}
    for _ in range(2):
        reward_GJ = again(groups)
        np.testing.assert_array_equal(reward_GJ[0], GOOD)
        assert np.isnan(reward_GJ[1]).all()
    assert groups.names == ("A", "B")
    assert "another node speaks for group 'A', whose own is there; it is left out" in warnings()
    assert unrelated == [messages.HELLO]
    assert messages.ASK not in thief


def test_a_node_that_came_too_early_is_not_forgotten():
    """Both restarted at once, and Flower has noticed only that A's node is gone."""
    groups, grid = at_work({1: living("A")[0], 2: living("B", GOOD / 2)[0]})
    grid.nodes[1] = grid.nodes[2] = lambda message: None
    grid.nodes[7], grid.nodes[8] = living("A")[0], living("B", GOOD / 2)[0]
    groups.grid.online = lambda: {2, 7, 8}
    reward_GJ = again(groups)
    np.testing.assert_array_equal(reward_GJ[0], GOOD)
    assert np.isnan(reward_GJ[1]).all()
    groups.grid.online = lambda: {7, 8}
    np.testing.assert_array_equal(again(groups), [GOOD, GOOD / 2])


def test_a_node_that_cannot_be_set_up_stays_missing_and_is_tried_again():
    groups, grid = at_work({1: living("A")[0], 2: living("B", GOOD / 2)[0]})
    ready, _ = living("B", GOOD / 2)
    broken = [True]

    def answer(message):
        code = refusals.FORGOTTEN if message.metadata.message_type == messages.ASK else 5
        return Message(Error(code, "no"), reply_to=message) if broken[0] else ready(message)

    grid.nodes[2] = answer
    for _ in range(2):
        assert np.isnan(again(groups)[1]).all()
    broken[0] = False
    np.testing.assert_array_equal(again(groups), [GOOD, GOOD / 2])


def test_a_node_whose_owner_refuses_the_catalogue_is_asked_nothing_more(warnings):
    code, asked = refusals.FEW_ANSWERS, []
    node = scorer("B")

    def answer(message):
        asked.append(kind := message.metadata.message_type)
        refused = Message(Error(code, refusals.REFUSALS[code]), reply_to=message)
        return refused if kind == messages.CATALOGUE else node(message)

    groups, _ = at_work({1: scorer("A"), 2: answer})
    for _ in range(2):
        np.testing.assert_array_equal(again(groups), [GOOD, [np.nan] * 3])
    assert asked == [messages.HELLO, messages.CATALOGUE]
    assert f"node 2: {refusals.REFUSALS[code]}" in warnings()
    assert (groups.present, groups.names) == (("A",), ("A", "B"))
