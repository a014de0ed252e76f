"""The groups' numbers, where some of them fail or lie.

Axis letters: G groups, J answers.
"""

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from fakes import CATALOGUE, GONE, GOOD, KEY, REQUEST, WEIGHTS, failing, new_request, only
from flwr.app import ConfigRecord, Message, RecordDict
from nodes import FakeGrid
from runs import FakeGroups, at_work, federated, gathered, replying
from small import cases

from appa_flwr.core.errors import UserError
from appa_flwr.protocol import messages, queries, refusals
from appa_flwr.protocol.queries import RewardQuery
from server_app.federation.replies import TooFew

TRUTH_KEY = ("js", queries.TRUTH_REFERENCE)


def answering(name, answer):
    """A group's node that is set up like others, and answers requests for numbers by `bad_node`."""
    return only(messages.ASK, answer, replying(name))


def three(bad_node, *, min_groups=2):
    """Groups A, B and C on nodes 11, 12 and 13; A and C behave, B's node answers requests for numbers by `bad_node`."""
    nodes = {13: replying("C", reward_J=GOOD / 3), 12: bad_node, 11: replying("A", reward_J=GOOD)}
    return federated(nodes, CATALOGUE, ("A", "B", "C"), run__min_groups=min_groups)


def rewards(groups, request=REQUEST, key=KEY):
    answer = groups.ask(request.query())
    return answer.rows(f"{' '.join(key)} reward", groups.names)


def rows_of(*names, row=None, **more):
    """A reply with these rows, and more records."""
    size = 3  # answers
    filled = np.full((len(names), size), 0.5) if row is None else np.tile(row, (len(names), 1))
    return lambda message: Message(RecordDict({**messages.pack_reply(names, filled), **more}), reply_to=message)


BAD_NODES = {
    "too few": answering("B", rows_of("B", row=np.ones(2))),
    "none": answering("B", lambda message: Message(messages.pack_reply(["B"]), reply_to=message)),
    "NaN": replying("B", reward_J=[0.5, np.inf, 0.5]),
    "unknown": replying("B", reward_J=[0.5, np.nan, 0.5]),  # by its predictions a group knows every reward
    "above one": replying("B", reward_J=[0.5, 1.0 + 1e-9, 0.5]),
    "below zero": replying("B", reward_J=[0.5, -1e-9, 0.5]),
    "unknown group": answering("B", rows_of("Z")),
    "error reply": answering("B", GONE),
    "no reply": answering("B", lambda message: None),
    "another protocol": answering(
        "B", lambda message: Message(RecordDict({"x": ConfigRecord({"y": 1})}), reply_to=message)
    ),
    "a record more": answering("B", rows_of("B", row=[1] * 3, more=ConfigRecord({"x": 1}))),
    "100,000 numbers more": answering(
        "B", rows_of("B", row=[1] * 3, more=messages.arrays_record({"x": np.ones(10**5)}))
    ),
    "twice in one reply": answering("B", rows_of("B", "B")),
}


@pytest.mark.parametrize("kind", BAD_NODES)
def test_a_group_that_fails_counts_as_missing_and_the_others_stay(kind, warnings):
    reward_GJ = rewards(three(BAD_NODES[kind]))
    np.testing.assert_array_equal(reward_GJ, [GOOD, [np.nan] * 3, GOOD / 3])
    assert any("group B " in text for text in warnings())


def test_no_node_can_answer_for_a_group_that_lives_elsewhere():
    groups = three(replying("B", reward_J=GOOD / 2))
    groups.grid._grid.nodes[11] = liar = replying("A", "B", reward_J=np.ones(3))
    liar.catalogue = CATALOGUE
    np.testing.assert_array_equal(rewards(groups), [np.ones(3), GOOD / 2, GOOD / 3])


def test_on_the_truth_side_an_unknown_answer_is_no_fault():
    request = RewardQuery(REQUEST.question_J, REQUEST.prediction_JK, ("js",), (queries.TRUTH_REFERENCE,))
    groups = three(replying("B", reward_J=[0.5, np.nan, 1.0], key=TRUTH_KEY), min_groups=1)
    answer = groups.ask(request.query())
    assert answer.rows("js truth known", groups.names)[1].tolist() == [1, 0, 1]
    half = FakeGroups(["B"], lambda ask, name: {"js truth known": np.full(3, 0.5)})
    assert np.isnan(three(half, min_groups=1).ask(request.query()).rows("js truth known", groups.names)[1]).all()


def test_a_group_that_rewards_what_nobody_can_read_counts_as_missing():
    prediction_JK = np.array([[0.5, 0.5, np.nan], [np.nan] * 3, [0.2, 0.3, 0.5]])
    many = 4000  # for which a reply is as large as its request allows
    request = RewardQuery(np.tile(REQUEST.question_J, many), np.tile(prediction_JK, (many, 1)), ("js",))
    for lie in (0.0, 0.1):
        groups = federated(
            {11: replying("A", reward_J=[0.5, 0.0, 1.0] * many), 12: replying("B", reward_J=[1.0, lie, 1.0] * many)}
        )
        reward_GJ = rewards(groups, request)
        np.testing.assert_array_equal(reward_GJ[0], [0.5, 0.0, 1.0] * many)
        assert np.isnan(reward_GJ[1]).all() == (lie > 0)


@pytest.mark.parametrize("kind", [messages.CATALOGUE, messages.TARGETS])
@pytest.mark.parametrize(
    ("counts", "fits"),
    [([1, 3], True), ([3], False), ([1, 3, 1], False), ([1, -5], False), ([1, 4], False), ([1, 1 << 62], False)],
)
def test_a_count_is_that_of_its_own_group_and_of_no_more_questions_than_there_are(counts, fits, kind, warnings):
    def counting(names, counts):
        catalogue = {"answered": counts, "may": [], "noise": []}
        fields = catalogue if kind == messages.CATALOGUE else {"by_mean": counts}
        reply = messages.pack_reply(names, **fields)
        return only(kind, lambda message: Message(reply, reply_to=message), replying(names[-1]))

    groups = gathered({1: counting(["A"], [2]), 2: counting(["A", "B"], counts)}, ("A", "B"))
    answered = groups.send_catalogue(CATALOGUE)
    if kind == messages.CATALOGUE:
        assert answered == ({"A": 2, "B": 3} if fits else {"A": 2})
    else:
        groups.send_targets(WEIGHTS)
        assert groups.members.by_mean() == "A (2 of 3 questions)" + (", B (3 of 3 questions)" if fits else "")
    assert len(warnings()) == (1 if fits else 2)  # the second is on the next try


def test_a_node_whose_set_up_fails_is_tried_again_with_growing_pauses_and_heard_when_it_recovers(warnings):
    heard, tries, healthy = list[tuple[str, ...]](), list[int](), replying("B")

    def ill(message):
        tries.append(len(heard))
        return (GONE if len(tries) < 5 else healthy)(message)

    groups = at_work({1: replying("A"), 2: only(messages.CATALOGUE, ill, healthy)}, ("A", "B"))
    for _ in range(20):
        heard.append(groups.ask(new_request()).groups)
    # twice before the first request, then 2, 4 and 8 requests later
    assert tries == [0, 0, 1, 5, 13]
    assert heard == [("A",)] * 13 + [("A", "B")] * 7
    assert len([line for line in warnings() if "node 2 (B): its set-up failed" in line]) == 4


@pytest.mark.parametrize("claim", [[4.0, 8.02], [], [4.0], [math.nan, 8.0], [4.0, -8.0], [4.0, 1e13]])
def test_what_an_owner_says_of_noise_is_shown_if_it_can_be(claim, warnings):
    reply = messages.pack_reply(["B"], answered=[3], may=[], noise=claim)
    node = only(messages.CATALOGUE, lambda message: Message(reply, reply_to=message), replying("B"))
    groups = gathered({1: replying("A"), 2: node}, ("A", "B"))
    groups.send_catalogue(CATALOGUE)
    shown = "B: epsilon 4 a respondent (noise of 8 people)" if claim == [4.0, 8.02] else ""
    assert groups.members.noise() == shown
    assert any("epsilon" in line for line in warnings()) == (bool(claim) and not shown)


def test_below_the_quorum_the_error_says_who_answered_and_why_others_did_not():
    refusing = answering("B", failing(refusals.MAY_NOT_LEAVE["rewards"]))
    with pytest.raises(TooFew, match=r"2 of 3 groups \(A, C\).* at least 3 .*1 nodes refused: its own"):
        rewards(three(refusing, min_groups=3))


def test_a_catalogue_that_too_few_groups_take_ends_the_run():
    refusing = only(messages.CATALOGUE, failing(refusals.OTHER_CATALOGUE), replying("B"))
    with pytest.raises(TooFew, match=r"1 of 2 groups \(A\)"):
        federated({1: replying("A"), 2: refusing}, CATALOGUE, ("A", "B"), run__min_groups=2)


# --- answers are kept -------------------------------------------------------------------------------------------------


def test_the_same_request_is_asked_once(tmp_path):
    node = replying("A")
    sent = []
    for _ in range(2):  # a resumed run too
        groups = federated({1: node}, replies=tmp_path / "replies")
        for _ in range(2):
            request = groups.pending(REQUEST.query())
            sent.append(len(request.messages))
            answer = request.read(groups.grid.send_and_receive(request.messages, timeout=1.0))
            np.testing.assert_array_equal(answer.each("js targets reward"), [GOOD])
    assert (len(node.asked), sent) == (1, [1, 0, 0, 0])
    groups.ask(replace(REQUEST, context_seed=1).query())
    groups.send_targets(WEIGHTS)  # another context
    groups.ask(REQUEST.query())
    assert len(node.asked) == 3
    for path in (tmp_path / "replies").iterdir():
        path.write_bytes(b"x")
    with pytest.raises(UserError, match=r"replies/\w+\.npz: cannot be read"):
        groups.ask(REQUEST.query())


def test_a_group_that_was_away_is_asked_when_it_is_there_and_nobody_else(tmp_path):
    """In the same life of the run, and in the next; numbers on which others rest stay as they are."""
    nodes = {1: replying("A"), 2: replying("B", reward_J=GOOD / 2), 3: replying("C", reward_J=GOOD / 3)}
    away = FakeGrid({1: nodes[1], 2: nodes[2]})
    groups = at_work(away, ("A", "B", "C"), replies=tmp_path / "replies")
    nodes[2].silent.add("B")
    ask, history = REQUEST.query(), replace(REQUEST, context_seed=1).query()
    assert groups.ask(ask).groups == groups.ask(history, history=True).groups == ("A",)
    nodes[2].silent.clear()
    assert groups.ask(ask).groups == ("A", "B")
    groups.grid._late[2] = "message 1", math.inf  # nobody who is there lacks
    assert groups.pending(ask).messages == []
    groups = at_work(nodes, ("A", "B", "C"), replies=tmp_path / "replies")
    request = groups.pending(ask)
    assert [message.metadata.dst_node_id for message in request.messages] == [3]
    whole = request.read(groups.grid.send_and_receive(request.messages, timeout=1.0))
    np.testing.assert_array_equal(whole.rows("js targets reward", "ABC"), [GOOD, GOOD / 2, GOOD / 3])
    assert groups.pending(ask).messages == []
    assert groups.ask(history, history=True).groups == ("A",)
    assert [len(node.asked) for node in nodes.values()] == [2, 3, 1]


@pytest.mark.parametrize(("task", "kind", "row", "fits"), cases("wrong_inputs")["votes"]["rows"])
def test_no_group_has_more_than_one_vote(task, kind, row, fits):
    vote_QK = np.zeros(CATALOGUE.option_QK.shape)
    for q, size in enumerate(CATALOGUE.option_QK.sum(1)):
        vote_QK[q, :size] = row if size == 3 else [1, 0] if sum(row) < 2 else [2, 1]
    groups = federated({1: FakeGroups(["A"], lambda ask, name: {"votes": vote_QK})}, task=task)
    with nullcontext() if fits else pytest.raises(TooFew):
        assert groups.ask(queries.Query(kind)).groups == ("A",)
