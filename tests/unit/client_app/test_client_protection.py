"""What a policy does to rewards: withheld, counted, rounded, blurred.

Axis letters: J scored answers, Q questions, K options.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

import numpy as np
import pytest

from appa_flwr.owner.ledger import Ledger
from appa_flwr.owner.owner_policy import SIMULATION, OwnerPolicy
from appa_flwr.protocol import wire
from appa_flwr.survey.types import Question
from client_app import scoring
from client_app.outgoing import Refused
from client_app.protection import Protection

OPTIONS = ("yes", "no", "maybe")
PUBLIC = wire.Catalogue(
    tuple(Question(f"q{i}", f"question {i}", OPTIONS) for i in range(2)),
    np.array([True, False]),
    np.zeros((2, 3, 4), np.float32),
    np.ones((2, 3), bool),
    np.zeros(2, bool),
)
SIDE_QK = np.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
ANSWERS = np.array([[1.0, 0.0, 0.0], [0.2, 0.2, 0.6], [np.nan] * 3, [0.1, 0.1, 0.8], [1.0, 0.0, 0.0]])
ASKED = wire.ScoreRequest(np.array([0, 0, 0, 1, 0]), ANSWERS, ("js", "cosine"))


def released(protection, request=ASKED, *, side=wire.TARGET_SIDE, side_QK=SIDE_QK, group="Avaria"):
    scored = scoring.score(request, side_QK, PUBLIC.option_QK)
    return scored, protection.released(request, scored, side_QK, PUBLIC, group=group, side=side)


def protection(tmp_path, **owner_policy):
    return Protection(OwnerPolicy(**owner_policy), Ledger(tmp_path / "a.sqlite"))


def test_a_simulation_gives_what_was_computed():
    for side in (wire.TARGET_SIDE, wire.TRUTH_SIDE):
        scored, left = released(Protection(SIMULATION, None), side=side)
        assert left == scored


def test_own_answers_stay_where_the_owner_has_not_said_otherwise(tmp_path):
    _, left = released(protection(tmp_path), side=wire.TRUTH_SIDE)
    assert all(np.isnan(reward_J).all() for reward_J in left.values())
    assert protection(tmp_path).ledger.spent("Avaria: truth") == {}
    scored, left = released(protection(tmp_path, truth=True), side=wire.TRUTH_SIDE)
    np.testing.assert_equal(left, scored)


def test_what_tells_something_is_counted_once(tmp_path):
    mine = protection(tmp_path)
    for _ in range(2):
        scored, left = released(mine)
        np.testing.assert_equal(left, scored)
    # two metrics; to q0 two different answers that can be read, one of them twice
    assert mine.ledger.spent("Avaria: targets") == {"q0": 4, "q1": 2}
    released(mine, group="Belmora")
    assert mine.ledger.spent("Avaria: targets") == {"q0": 4, "q1": 2}


def test_the_same_answer_against_another_table_is_another_score_with_noise_of_its_own(tmp_path):
    mine = protection(tmp_path, reward_noise=0.01)
    (scored, left), (others, there) = (released(mine, side_QK=table_QK) for table_QK in (SIDE_QK, SIDE_QK[:, ::-1]))
    assert mine.ledger.spent("Avaria: targets") == {"q0": 8, "q1": 4}
    noise_J, other_J = left["cosine"] - scored["cosine"], there["cosine"] - others["cosine"]
    assert abs(noise_J[0] - other_J[0]) > 1e-9


def test_what_stands_in_padding_makes_no_other_answer(tmp_path):
    mine = protection(tmp_path)
    padded = replace(PUBLIC, option_QK=np.array([[True, True, False]] * 2))
    for junk in (0.0, 0.3, np.nan):
        asked = wire.ScoreRequest(np.array([0]), np.array([[0.4, 0.6, junk]]), ("js",))
        mine.released(asked, {"js": np.array([0.5])}, SIDE_QK, padded, group="Avaria", side=wire.TARGET_SIDE)
    assert mine.ledger.spent("Avaria: targets") == {"q0": 1}


def test_scores_against_predictions_end_with_the_allowance(tmp_path):
    mine = protection(tmp_path, scores_per_question=4)
    released(mine)
    released(mine)  # nothing new
    more = wire.ScoreRequest(np.array([0]), np.array([[0.3, 0.3, 0.4]]), ("js",))
    with pytest.raises(Refused) as refused:
        released(mine, more)
    assert refused.value.code == wire.SPENT
    both = wire.ScoreRequest(np.array([0, 1]), np.array([[0.3, 0.3, 0.4], [0.2, 0.2, 0.6]]), ("js",))
    with pytest.raises(Refused):
        released(mine, both)
    assert mine.ledger.spent("Avaria: targets") == {"q0": 4, "q1": 2}  # what did not leave was not spent
    released(mine, wire.ScoreRequest(np.array([1]), more.prediction_JK, ("js",)))  # the other question has some left


def test_scores_against_own_answers_end_one_by_one(tmp_path):
    mine = protection(tmp_path, truth=True, truth_scores_per_question=3)
    scored, left = released(mine, side=wire.TRUTH_SIDE)
    np.testing.assert_array_equal(left["js"], scored["js"])
    # the first answer's cosine is the third score of q0
    np.testing.assert_array_equal(np.isnan(left["cosine"]), [False, True, False, False, False])


def test_a_question_without_an_answer_costs_nothing(tmp_path):
    mine = protection(tmp_path, truth=True)
    _, left = released(mine, side=wire.TRUTH_SIDE, side_QK=np.array([[np.nan] * 3, SIDE_QK[1]]))
    assert np.isnan(left["js"]).tolist() == [True, True, True, False, True]
    assert mine.ledger.spent("Avaria: truth") == {"q1": 2}


def test_rewards_are_rounded(tmp_path):
    scored, left = released(protection(tmp_path, reward_decimals=2))
    np.testing.assert_array_equal(left["js"], scored["js"].round(2))
    assert (left["js"] != scored["js"]).any()


def test_noise_is_the_same_for_the_same_answer_and_another_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "token_bytes", lambda count: b"7" * count)
    many = wire.ScoreRequest(np.zeros(400, np.int64), np.random.default_rng(0).dirichlet([2, 2, 2], 400), ("js",))
    mine = protection(tmp_path, reward_noise=0.05)
    scored, left = released(mine, many)
    _, again = released(mine, many)
    np.testing.assert_array_equal(left["js"], again["js"])
    noise_J = (left["js"] - scored["js"])[scored["js"] < 0.85]  # those are not cut at 1
    assert abs(noise_J.mean()) < 0.02
    assert noise_J.std() == pytest.approx(0.05, rel=0.15)
    _, other = released(mine, many, group="Belmora")
    assert np.abs(other["js"] - left["js"]).max() > 0.05
    _, unread = released(mine)
    assert unread["js"][2] == 0.0  # or the server would take it for a lie
