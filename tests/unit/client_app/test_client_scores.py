"""Which scores of answers an owner lets leave: how many of a question, and own ones."""

from __future__ import annotations

import numpy as np
import pytest
from client_node import GROUP, Owned, refused, weights
from flwr.app import ArrayRecord

from appa_flwr.protocol import asks, messages, refusals
from appa_flwr.protocol.asks import ScoreRequest
from appa_flwr.protocol.rewards import js


def rewards(node, answer_JK, question_J, *, sides=(asks.TARGET_SIDE,), metrics=("js",)):
    """The reply's rewards by name; the code of a refusal."""
    request = ScoreRequest(np.array(question_J), np.array(answer_JK, dtype=np.float64), metrics, sides)
    asked = request.ask(asks.REWARDS)
    reply = node.ask(asked)
    return refused(reply) or node.numbers(asked)[GROUP]


def shares(node, *rows):
    """Answers (J, K), padded."""
    width = node.catalogue.option_QK.shape[1]
    return [[*row, *[0.0] * (width - len(row))] for row in rows]


def test_scores_against_predictions_end_with_the_allowance(tmp_path):
    node = Owned(tmp_path, "scores-per-question = 2").ready(training=20, held_out=10)
    two = shares(node, [1.0], [0.25, 0.75])
    unreadable = [[np.nan] * len(two[0])]
    for _ in range(2):  # the same answers again are nothing new, and one that nobody can read tells nothing
        assert not isinstance(rewards(node, [*two, *unreadable, two[0]], [0, 0, 0, 0]), int)
    spent = node.ledger.spent(f"scores by targets: {GROUP}")
    first = node.catalogue.questions[0].question_id
    assert spent == {first: 2}
    assert rewards(node, shares(node, [0.5, 0.5], [1.0]), [0, 1]) == refusals.SPENT
    assert node.ledger.spent(f"scores by targets: {GROUP}") == {first: 2}  # what did not leave was not spent
    assert not isinstance(rewards(node, shares(node, [1.0]), [1]), int)  # the other question has some left


def test_against_own_answers_what_has_no_score_left_is_unknown(tmp_path):
    policy = "scores-per-question = 1\nmay-leave = ['rewards', 'truth']"
    node = Owned(tmp_path, policy).ready(training=20, held_out=10)
    known = np.flatnonzero(~np.isnan(node.truth(GROUP)).any(1) & ~node.catalogue.train_Q)[:2]
    asked = shares(node, [1.0], [0.25, 0.75], [1.0])
    left = rewards(node, asked, [known[0], known[0], known[1]], sides=(asks.TRUTH_SIDE,))
    assert left["js truth known"].tolist() == [1.0, 0.0, 1.0]


def test_own_answers_are_compared_with_only_where_the_owner_says_so(tmp_path):
    node = Owned(tmp_path).ready(training=20, held_out=10)
    rows = np.flatnonzero(~np.isnan(node.truth(GROUP)).any(1))
    left = rewards(node, shares(node, *[[1.0]] * len(rows)), rows, sides=(asks.TRUTH_SIDE,))
    assert not left["js truth known"].any()
    assert node.ledger.spent(f"scores by truth: {GROUP}") == {}


# --- own scores ---------------------------------------------------------------------------------------------------


def own_score(node, answer_JK, question_J):
    asked = ScoreRequest(np.array(question_J), np.array(answer_JK), ("js",)).ask(asks.OWN_SCORES)
    return node.numbers(asked)[GROUP]["js targets"].tolist()


def test_an_own_score_is_a_mean_over_questions_that_can_be_read(tmp_path):
    """Many answers to one question, or unreadable ones beside it, would make it that question's score."""
    node = Owned(tmp_path, "least-answers = 3").ready(training=20, held_out=10)
    corner, even = shares(node, [1.0], [0.5, 0.5])
    nothing = [np.nan] * len(corner)
    assert own_score(node, [corner, even], [0, 1]) == [0.0, 0.0]
    for unreadable in (nothing, [0.5, np.nan, *corner[2:]]):  # all of it, or a part
        assert own_score(node, [corner, unreadable, unreadable], [0, 1, 2]) == [0.0, 0.0]
    many = own_score(node, [*[corner] * 50, even, even], [*[0] * 50, 1, 2])
    single = own_score(node, [corner, even, even], [0, 1, 2])
    assert many == single
    expected = js(np.array([corner, even, even]), node.targets(GROUP)[:3], node.catalogue.option_QK[:3]).mean()
    assert single == [round(float(expected), 2), 1.0]


@pytest.mark.parametrize(("limit", "given"), [(3, [1.0, 1.0, 0.0]), (0, [0.0, 0.0, 0.0])])
def test_own_scores_end_with_the_allowance(limit, given, tmp_path):
    node = Owned(tmp_path, f"least-answers = 3\nown-score = {limit}").ready(training=20, held_out=10)
    first = shares(node, [1.0], [1.0], [1.0])
    own_score(node, first, [0, 1, 2])
    assert own_score(node, first, [0, 1, 2])[1] == given[0]  # sent again it is free
    node.run(2)  # by other weights the same request has another score
    other = ArrayRecord({name: 0.9 * value for name, value in weights(node.config).to_torch_state_dict().items()})
    assert node.take(node.cut(training=20, held_out=10)) == 0
    assert node.send(messages.TARGETS, messages.pack_weights(other)).has_content()
    got = [own_score(node, shares(node, [1.0 - n / 10, n / 10], [1.0], [1.0]), [0, 1, 2])[1] for n in range(3)]
    assert got == given
