"""The Fairness Index and the final reward: hand-worked numbers and every safeguard."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from appa_flwr.analysis.equations import fairness_index, training_reward

rewards = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    elements=st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
)


@pytest.mark.parametrize(
    ("reward_GJ", "fairness"),
    [
        # (.2, .6): mean .4, deviation .2, CoV .5, 1 / 1.25 = .8; equal rewards: 1; mean of both .9
        ([[0.2, 0.5], [0.6, 0.5]], 0.9),
        # a missing group is left out
        ([[0.2, 0.5], [np.nan, np.nan], [0.6, 0.5]], 0.9),
        # question 2 would be left out for its mean, but its groups are treated alike: (.8 + 1) / 2
        ([[0.2, 0.0], [0.6, 0.0]], 0.9),
        # unequal rewards with a mean of 5e-7 are left out; with one of 2e-6 CoV = 1, (.8 + .5) / 2
        ([[0.2, 0.0], [0.6, 1e-6]], 0.8),
        ([[0.2, 0.0], [0.6, 4e-6]], 0.65),
        # nothing left is fair
        ([[0.0], [1e-7]], 1.0),
    ],
)
def test_fairness_by_hand(reward_GJ, fairness):
    assert fairness_index(reward_GJ) == pytest.approx(fairness, abs=1e-12)


def test_equal_rewards_whose_deviation_rounds_above_zero():
    reward_GJ = np.full((3, 1), 0.1)
    assert np.std(reward_GJ) > 0.0
    assert fairness_index(reward_GJ) == 1.0
    # Their mean lies under the threshold, so a deviation taken for real would leave the question out.
    assert np.full((3, 1), 1e-8).std(axis=0) > 0.0
    assert fairness_index([[1e-8, 0.2], [1e-8, 0.6], [1e-8, 0.4]]) == pytest.approx(
        # (.2, .6, .4): mean .4, variance (.04 + .04 + 0) / 3, CoV^2 = .0266667 / .16 = 1/6; 1 / (7/6) = 6/7
        (1 + 6 / 7) / 2
    )


def test_cov_is_capped():
    # 200 groups, one of them served: CoV = sqrt(199) = 14.1, capped at 10
    reward_GJ = np.zeros((200, 1))
    reward_GJ[0] = 1.0
    assert fairness_index(reward_GJ) == pytest.approx(1 / 101)
    # 50 of them: CoV = sqrt(49) = 7
    assert fairness_index(reward_GJ[:50]) == pytest.approx(1 / 50)


@given(rewards)
def test_jains_index_and_equal_rewards_count_one(reward_GJ):
    # 1 / (1 + CoV^2) = (sum r)^2 / (G sum r^2), Jain's index, whatever the scale and the order of the groups
    squares_J = len(reward_GJ) * (reward_GJ**2).sum(axis=0)
    jain_J = np.divide(reward_GJ.sum(axis=0) ** 2, squares_J, where=squares_J > 0, out=np.ones_like(squares_J))
    assert fairness_index(reward_GJ) == pytest.approx(jain_J.mean(), abs=1e-12)


def test_training_reward_by_hand():
    nan = np.nan
    reward = training_reward([[1.0, 0.2, 0.7], [0.0, 0.6, 0.7], [nan] * 3], [1.0, 0.5, 2 / 3], [True, True, False])
    # .85 * 1 + .15 * 1; .85 * .2 + .15 * .5 = .17 + .075; unparsed; .15; .85 * .6 + .075 = .585; a missing group
    np.testing.assert_allclose(reward, [[1.0, 0.245, 0.0], [0.15, 0.585, 0.0], [nan] * 3], atol=1e-15)
    # two letters of four: no alignment, .15 * .5
    assert training_reward([[0.0]], [0.5], [True]).item() == pytest.approx(0.075)
    with pytest.raises(ValueError, match="expected rewards"):
        training_reward(np.zeros((1, 2)), np.zeros(3), np.ones(3, bool))
