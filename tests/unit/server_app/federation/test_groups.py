"""The groups as the server sees them, where some of them fail or lie.

Axis letters: G groups, Q questions, K options, J answers.
"""

from __future__ import annotations

import numpy as np
import pytest
from fakes import CATALOGUE, GOOD, KEY, REQUEST, FakeGrid, replying
from flwr.app import ConfigRecord, Error, Message, RecordDict

from appa_flwr.core.errors import UserError
from appa_flwr.protocol import wire
from server_app.federation import groups as federations
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Federation

pytestmark = pytest.mark.usefixtures("no_pauses")

TRUTH_KEY = ("js", wire.TRUTH_SIDE)


def gathered(nodes, expected=(), *, min_groups=1, timeout=0.02, patience=0.0):
    federation = Federation(OverlapGrid(FakeGrid(nodes)), min_groups=min_groups, timeout=timeout)
    federation.gather(expected, patience=patience)
    return federation


def named(*names):
    return replying(*map(wire.GroupReply, names))


def host(by_kind):
    """A node that answers each kind of message by its own node."""
    return lambda message: by_kind[message.metadata.message_type](message)


def scorer(name, reward_J=GOOD, key=KEY):
    return replying(wire.GroupReply(name, {key: np.asarray(reward_J)}))


def three(bad_node, *, min_groups=2):
    """Groups A, B and C on nodes 11, 12 and 13; A and C behave, B's node answers scoring as told."""
    nodes = {
        13: host({wire.ROLL_CALL: named("C"), wire.SCORE: scorer("C", GOOD / 3)}),
        12: host({wire.ROLL_CALL: named("B"), wire.SCORE: bad_node}),
        11: host({wire.ROLL_CALL: named("A"), wire.SCORE: scorer("A", GOOD)}),
    }
    return gathered(nodes, ("A", "B", "C"), min_groups=min_groups)


BAD_NODES = {
    "too few": scorer("B", GOOD[:2]),
    "none": replying(wire.GroupReply("B")),
    "NaN": scorer("B", [0.5, np.nan, 0.5]),
    "above one": scorer("B", [0.5, 1.0 + 1e-9, 0.5]),
    "below zero": scorer("B", [0.5, -1e-9, 0.5]),
    "unknown group": scorer("Z"),
    "error reply": lambda message: Message(Error(5, "node is gone"), reply_to=message),
    "no reply": lambda message: None,
    "another protocol": lambda message: Message(RecordDict({"x": ConfigRecord({"y": 1})}), reply_to=message),
    "twice in one reply": replying(wire.GroupReply("B", {KEY: GOOD}), wire.GroupReply("B", {KEY: GOOD})),
}


@pytest.mark.parametrize("kind", BAD_NODES)
def test_a_group_that_fails_counts_as_missing_and_the_others_stay(kind, warnings):
    federation = three(BAD_NODES[kind])
    reward_GJ = federation.score(REQUEST)[KEY]
    np.testing.assert_array_equal(reward_GJ, [GOOD, [np.nan] * 3, GOOD / 3])
    assert any("group B " in text for text in warnings())


def test_an_error_s_reason_reaches_the_log(warnings):
    three(BAD_NODES["error reply"]).score(REQUEST)
    assert "node 12: node is gone" in warnings()


def test_no_node_can_answer_for_a_group_that_lives_elsewhere(warnings):
    federation = three(scorer("B", GOOD / 2))
    forged = federation.grid._grid
    node = forged.nodes[11]
    forged.nodes[11] = lambda message: (
        replying(wire.GroupReply("A", {KEY: GOOD}), wire.GroupReply("B", {KEY: np.ones(3)}))(message)
        if message.metadata.message_type == wire.SCORE
        else node(message)
    )
    reward_GJ = federation.score(REQUEST)[KEY]
    np.testing.assert_array_equal(reward_GJ, [GOOD, GOOD / 2, GOOD / 3])
    assert any("does not host it" in text for text in warnings())


def test_groups_that_behave_are_stacked_in_a_fixed_order_without_a_warning(warnings):
    federation = three(scorer("B", GOOD / 2))
    assert federation.groups == ("A", "B", "C")
    reward_GJ = federation.score(REQUEST)[KEY]
    np.testing.assert_array_equal(reward_GJ, [GOOD, GOOD / 2, GOOD / 3])
    assert warnings() == []


def test_on_the_truth_side_an_unknown_answer_is_no_fault():
    request = wire.ScoreRequest(REQUEST.question_J, REQUEST.prediction_JK, ("js",), (wire.TRUTH_SIDE,))
    sparse = [0.5, np.nan, 1.0]
    federation = three(scorer("B", sparse, TRUTH_KEY), min_groups=1)
    np.testing.assert_array_equal(federation.score(request)[TRUTH_KEY][1], sparse)
    federation = three(scorer("B", [0.5, np.nan, 1.5], TRUTH_KEY), min_groups=1)
    with pytest.raises(UserError):
        federation.score(request)  # A and C sent no truth side either


def test_a_group_that_rewards_what_nobody_can_read_counts_as_missing(warnings):
    prediction_JK = np.array([[0.5, 0.5, np.nan], [np.nan] * 3, [0.2, 0.3, 0.5]])
    request = wire.ScoreRequest(REQUEST.question_J, prediction_JK, ("js",))
    honest = [0.5, 0.0, 1.0]
    for lie in (0.0, 0.1):
        nodes = {
            11: host({wire.ROLL_CALL: named("A"), wire.SCORE: scorer("A", honest)}),
            12: host({wire.ROLL_CALL: named("B"), wire.SCORE: scorer("B", [1.0, lie, 1.0])}),
        }
        reward_GJ = gathered(nodes, ("A", "B")).score(request)[KEY]
        np.testing.assert_array_equal(reward_GJ[0], honest)
        assert np.isnan(reward_GJ[1]).all() == (lie > 0)
    assert warnings() == ["group B counts as missing: js rewards above 0 for answers that nobody can read"]


def test_below_the_quorum_the_error_says_who_answered_and_what_was_asked():
    federation = three(BAD_NODES["no reply"], min_groups=3)
    with pytest.raises(UserError, match=r"2 of 3 groups \(A, C\) .* run\.min-groups = 3"):
        federation.score(REQUEST)


def test_two_groups_on_one_node_and_their_messages():
    federation = gathered({5: named("B", "A"), 9: named()}, min_groups=2)  # node 9 hosts nobody
    assert federation.groups == ("A", "B")
    assert len(federation.nodes_of(federation.groups)) == 1
    with pytest.raises(UserError, match="could score"):
        federation.score(REQUEST, iteration=4)
    sent = federation.grid._grid.pushed[2:]
    assert [(m.metadata.dst_node_id, m.metadata.group_id) for m in sent] == [(5, "4")]


@pytest.mark.parametrize(
    ("nodes", "expected", "min_groups", "message"),
    [
        ({1: named("A", "B"), 2: named("B")}, (), 1, "two nodes speak for group 'B'"),
        ({}, (), 1, r"0 groups joined \(none\); run\.min-groups = 1"),
        (
            {1: named("C"), 2: named("A")},
            ("C", "B", "A"),
            3,
            r"2 groups joined \(C, A\); run\.min-groups = 3; missing: B$",
        ),
        (
            {1: named("Kenya"), 2: named("Pero")},
            ("Kenya", "Peru"),
            2,
            r"1 groups joined \(Kenya\); .* = 2; missing: Peru; there, but not in `groups`: Pero$",
        ),
    ],
)
def test_a_roll_call_that_no_run_can_begin_with(nodes, expected, min_groups, message):
    with pytest.raises(UserError, match=message):
        gathered(nodes, expected, min_groups=min_groups)


def test_groups_that_are_missing_or_were_not_asked_for_take_no_part(warnings):
    federation = gathered({1: named("C"), 2: named("A"), 3: named("X")}, ("C", "B", "A"))
    assert federation.present == ("C", "A")  # in the order they were asked for
    assert len(federation.nodes_of(federation.groups)) == 2
    assert [text for text in warnings() if "did not join: B" in text]


def test_the_roll_is_called_again_until_all_are_there(monkeypatch):
    asked = []

    def counted(name):
        return lambda message: asked.append(name) or named(name)(message)

    grid, naps = FakeGrid({1: counted("A"), 3: counted("C")}), []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 2:
            del grid.nodes[3]  # C leaves while the others are waited for
        if len(naps) == 3:
            grid.nodes[2] = counted("B")

    monkeypatch.setattr(federations.time, "sleep", nap)
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=5.0)
    federation.gather(("A", "B"), patience=60.0)
    assert federation.groups == ("A", "B")
    assert naps == [federations.JOIN_PAUSE] * 3
    assert sorted(asked) == ["A", "B", "C"]  # whoever has answered is not asked again
    # from now on the run's nodes are all there is, also for Flower's stock strategies
    grid.nodes[9] = counted("Z")
    assert list(federation.grid.get_node_ids()) == [1, 2]


def test_a_group_that_left_before_the_roll_was_complete_is_missing(monkeypatch):
    grid = FakeGrid({1: named("A"), 2: named("B")})
    monkeypatch.setattr(federations.time, "sleep", lambda seconds: grid.nodes.pop(2, None))
    clock = iter(range(100))
    monkeypatch.setattr(federations.time, "monotonic", lambda: next(clock))
    federation = Federation(OverlapGrid(grid), min_groups=1, timeout=100.0)
    federation.gather(("A", "B", "C"), patience=40.0)
    assert federation.present == ("A",)
    assert federation.groups == ("A", "B", "C")  # which may come yet


@pytest.mark.parametrize(
    ("reward_J", "named"),
    [(np.ones(9), True), (np.linspace(0, 1, 9), False), (np.r_[np.full(8, 0.5), 0.6], False)],
)
def test_a_group_that_rewards_everything_alike_is_named(reward_J, named, warnings):
    prediction_JK = np.random.default_rng(0).dirichlet([1, 1, 1], 9)
    federation = three(scorer("B", reward_J))
    federation.grid._grid.nodes[11] = host({wire.SCORE: scorer("A", np.linspace(0, 1, 9))})
    federation.grid._grid.nodes[13] = host({wire.SCORE: scorer("C", np.linspace(0, 1, 9))})
    scores = federation.score(wire.ScoreRequest(np.zeros(9, np.int64), prediction_JK, ("js",)))
    np.testing.assert_array_equal(scores[KEY][1], reward_J)  # a lie cannot be told from a strange group
    assert warnings() == ["group B gives all answers the same reward"] * named


def test_few_answers_may_well_earn_the_same(warnings):
    three(scorer("B", [0.5, 0.5, 0.5])).score(REQUEST)
    assert warnings() == []


def voting(by_name):
    """One node a group; every group gives its votes."""
    replies = [wire.GroupReply(n, votes_QK=v, counts={"answered": 10 + i}) for i, (n, v) in enumerate(by_name.items())]
    federation = gathered(dict(enumerate(map(replying, replies))), min_groups=2)
    assert federation.send_catalogue(CATALOGUE) == {name: 10 + i for i, name in enumerate(by_name)}
    sent = wire.unpack_catalogue(federation.grid._grid.pushed[-1].content)
    assert sent.questions == CATALOGUE.questions
    return federation


GOOD_VOTES = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [3.0, 2.0, 1.0]])


@pytest.mark.parametrize(
    "votes",
    [
        None,
        GOOD_VOTES[:2],
        np.full((3, 3), np.nan),
        np.where(GOOD_VOTES == 1.0, np.inf, 0.0),
        -GOOD_VOTES,
        1000.0 * GOOD_VOTES,  # one group that would outvote all others
    ],
    ids=["none", "questions", "NaN", "inf", "negative", "huge"],
)
def test_votes_that_cannot_be_used_are_left_out(votes, warnings):
    federation = voting({"A": GOOD_VOTES, "B": votes, "C": GOOD_VOTES / 2})
    np.testing.assert_array_equal(federation.votes(), [GOOD_VOTES, GOOD_VOTES / 2])
    assert any("group B " in text for text in warnings())


def test_too_few_votes_are_an_error():
    with pytest.raises(UserError, match=r"only 1 of 2 groups \(A\) could vote"):
        voting({"A": GOOD_VOTES, "B": None}).votes()
    assert voting({"A": GOOD_VOTES, "B": None}).votes(needed=False) is None
    assert len(voting({"A": GOOD_VOTES, "B": GOOD_VOTES}).votes(needed=False)) == 2
