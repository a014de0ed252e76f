"""Alignment scores on dense and sparse rewards."""

import numpy as np
import pytest

from appa_flwr.analysis.alignment import alignment_scores, deviation_correlation


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


@pytest.mark.parametrize(
    ("reward_GQ", "message"),
    [([0.5], "groups, answers"), ([[np.inf]], "finite"), ([[np.nan]], "no reward")],
)
def test_bad_rewards_are_errors(reward_GQ, message):
    with pytest.raises(ValueError, match=message):
        alignment_scores(reward_GQ)


def of_first_options(*shares_G: float) -> np.ndarray:
    """Shares (G, 1, 2) of one question with two options, from those of the first option."""
    share_G = np.array(shares_G)
    return np.stack([share_G, 1.0 - share_G], axis=1)[:, None]


@pytest.mark.parametrize(
    ("predicted", "true", "r"),
    [
        ((0.7, 0.5), (0.8, 0.4), 1.0),  # deviations +.1 and -.1 where +.2 and -.2 are right
        ((0.5, 0.7), (0.8, 0.4), -1.0),
        # true .4, 0, -.4, predicted .1, .1, -.2: r = .12 / sqrt(.32 x .06)
        ((0.6, 0.6, 0.3), (0.9, 0.5, 0.1), 0.75**0.5),
        ((0.6, 0.6, 0.6), (0.9, 0.5, 0.1), 0.0),  # the same for all
        ((0.6, 0.5, 0.4), (0.1, 0.1, 0.1), np.nan),  # a mean of three times .1 is not .1 to the last bit
        ((0.6, 0.5, 0.4), (0.6, np.nan, np.nan), np.nan),  # nobody else has answered
    ],
)
def test_correlations_of_deviations_by_hand(predicted, true, r):
    prediction_GQK, truth_GQK = of_first_options(*predicted), of_first_options(*true)
    both = np.ones((1, 2), bool)
    assert deviation_correlation(prediction_GQK, truth_GQK, both) == pytest.approx(r, nan_ok=True)
    # a question of one option divides nobody
    more = [np.concatenate([value, [[[1.0, 0.0]]] * len(value)], axis=1) for value in (prediction_GQK, truth_GQK)]
    found = deviation_correlation(*more, np.array([[True, True], [True, False]]))
    assert found == pytest.approx(r, nan_ok=True)


def test_what_groups_have_in_common_padding_and_holes_change_no_correlation():
    rng = np.random.default_rng(3)
    option_QK = np.arange(4) < rng.integers(2, 5, size=(12, 1))
    prediction_GQK, truth_GQK = rng.random((2, 5, 12, 4)) * option_QK
    shift_QK = rng.normal(size=option_QK.shape)
    plain = deviation_correlation(prediction_GQK, truth_GQK, option_QK)
    assert deviation_correlation(prediction_GQK + shift_QK, truth_GQK + shift_QK, option_QK) == pytest.approx(plain)
    wild_GQK = np.where(option_QK, prediction_GQK, 99.0)
    assert deviation_correlation(wild_GQK, np.where(option_QK, truth_GQK, np.nan), option_QK) == plain
    holed_GQK = truth_GQK.copy()
    holed_GQK[3] = np.nan  # a group without answers
    holed_GQK[1:, 5] = np.nan  # a question of one group alone
    rest = [np.delete(np.delete(value, 3, axis=0), 5, axis=1) for value in (prediction_GQK, truth_GQK)]
    expected = deviation_correlation(*rest, np.delete(option_QK, 5, axis=0))
    assert deviation_correlation(prediction_GQK, holed_GQK, option_QK) == pytest.approx(expected)
    assert plain != pytest.approx(expected)
