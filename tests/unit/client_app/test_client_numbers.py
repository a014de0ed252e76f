"""A group's numbers: votes, and rewards.

Axis letters: Q public questions, J scored answers, K options.
"""

import numpy as np
import pytest
from nodes import prepared_node, uniform_request

from appa_flwr.protocol import queries, rewards, votes
from appa_flwr.protocol.queries import Query, RewardQuery
from client_app.numbers import score
from server_app.questions import run_survey

SIZES = (2, 5, 3, 4)
OPTION_QK = np.arange(max(SIZES))[None] < np.array(SIZES)[:, None]
METRICS = ("js", "js-distance", "wasserstein", "cosine", "borda")


def by_hand(metric: str, prediction: np.ndarray, target: np.ndarray) -> float:
    """One reward over real options only; what a metric is worth, its own tests and the reference say."""
    return float(rewards.METRICS[metric](prediction[None], target[None], np.full((1, len(target)), True))[0])


def test_an_unreadable_answer_is_worth_nothing_and_an_unknown_question_has_no_reward():
    weight_QK = np.random.default_rng(2).random(OPTION_QK.shape) * OPTION_QK
    target_QK = weight_QK / weight_QK.sum(1, keepdims=True)
    target_QK[3] = np.nan
    prediction_JK = np.full((5, 5), 0.2)
    prediction_JK[[1, 4]] = np.nan
    prediction_JK[2, 1] = np.nan  # half an answer is none either
    prediction_JK[0, 2:] = np.nan  # but beyond the two options of question 0 nothing counts
    request = RewardQuery(np.array([0, 0, 1, 3, 3]), prediction_JK, METRICS)
    for metric, reward_J in score(request, target_QK, OPTION_QK).items():
        assert reward_J[0] == pytest.approx(by_hand(metric, np.array([0.2, 0.2]), target_QK[0, :2]))
        assert reward_J[[1, 2]].tolist() == [0.0, 0.0]
        assert np.isnan(reward_J[[3, 4]]).all()  # the group has no answer there, readable or not
    nothing = RewardQuery(request.question_J[:0], prediction_JK[:0], METRICS)
    assert [reward_J.size for reward_J in score(nothing, target_QK, OPTION_QK).values()] == [0] * len(METRICS)


def test_rewards_come_from_each_groups_own_table():
    """Answering with one group's own table earns that group, and no other, all of the reward."""
    node, catalogue = prepared_node()
    everyone = run_survey(node.config).groups
    for group in everyone:
        asked = uniform_request(catalogue, prediction_JK=node.targets(group))
        for name, own in node.numbers(asked.query()).items():
            reward_J = own["js targets reward"]
            assert (reward_J > 1 - 1e-12).all() == (name == group)


def test_a_fresh_draw_takes_another_context_and_the_same_draw_the_same():
    node, catalogue = prepared_node(pluralllm__architecture="attention")

    def reward_GJ(draw: int) -> np.ndarray:
        asked = uniform_request(catalogue, context_seed=draw).query()
        return np.stack([own["js targets reward"] for own in node.numbers(asked).values()])

    drawn = {draw: reward_GJ(draw) for draw in (0, 1, 2)}
    assert not np.allclose(drawn[0], drawn[1])
    assert not np.allclose(drawn[1], drawn[2])
    for draw in (2, 0, 1):
        np.testing.assert_array_equal(reward_GJ(draw), drawn[draw])


@pytest.mark.parametrize(
    ("task", "kind", "ballot"),
    [
        ("dpa", queries.VOTES, "mode"),
        ("opa", queries.VOTES, "ranking"),
        ("dpa", queries.ANSWERS, "distribution"),
        ("dpa", queries.PREDICTIONS, "distribution"),
    ],
)
def test_a_group_votes_and_answers_by_its_training_answers_and_else_its_predictions(task, kind, ballot):
    """Predictions hold no answer at all, and nothing holds a held-out one."""
    node, catalogue = prepared_node(task=task)
    for group, own in node.numbers(Query(kind)).items():
        truth_QK = node.truth(group)
        own_Q = ~np.isnan(truth_QK).any(1) & catalogue.train_Q & (kind != queries.PREDICTIONS)
        assert own_Q.any() == (kind != queries.PREDICTIONS)
        opinion_QK = np.where(own_Q[:, None], truth_QK, node.targets(group))
        np.testing.assert_array_equal(own["votes"], votes.cast(opinion_QK, catalogue.option_QK, kind=ballot))
