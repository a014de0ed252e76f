"""Alignment scores on dense and sparse rewards."""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.analysis.alignment import alignment_scores, skill_score


def test_dense_rewards_by_hand():
    scores = alignment_scores([[0.2, 0.4], [0.6, 0.4]])
    np.testing.assert_allclose(scores.per_group_G, [0.3, 0.5])
    assert scores.avg_as == pytest.approx(0.4)
    # the minimum of the groups' averages, not the smallest reward .2 nor the mean of the questions' minima .3
    assert scores.min_as == pytest.approx(0.3)
    # (.8 + 1) / 2
    assert scores.fairness_index == pytest.approx(0.9)


def test_sparse_rewards():
    nan = np.nan
    scores = alignment_scores([[0.2, 0.9, nan], [0.6, nan, nan], [nan, nan, nan]])
    np.testing.assert_allclose(scores.per_group_G, [0.55, 0.6, nan])
    # groups weigh the same however many questions they have: (.55 + .6) / 2
    assert scores.avg_as == pytest.approx(0.575)
    assert scores.min_as == pytest.approx(0.55)
    # only question 1 has two groups to compare
    assert scores.fairness_index == pytest.approx(0.8)
    # where no question has two, nobody is treated unequally
    assert alignment_scores([[0.2, nan], [nan, 0.9]]).fairness_index == 1.0


def test_skill_by_hand():
    # .3 away where the uniform answer is .4 away: a quarter of the way gone
    assert skill_score(0.7, 0.6) == pytest.approx(25.0)
    assert skill_score(1.0, 0.6) == 100.0
    assert skill_score(0.6, 0.6) == 0.0
    assert skill_score(0.2, 0.6) == pytest.approx(-100.0)  # twice as far
    assert np.isnan(skill_score(0.9, 1.0))


@pytest.mark.parametrize(
    ("reward_GQ", "message"),
    [([0.5], "groups, questions"), ([[np.inf]], "finite"), ([[np.nan]], "no reward")],
)
def test_bad_rewards_are_errors(reward_GQ, message):
    with pytest.raises(ValueError, match=message):
        alignment_scores(reward_GQ)
