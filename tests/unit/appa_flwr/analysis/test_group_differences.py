"""What predictions hold of the differences between groups: by hand, and what must change nothing.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from appa_flwr.analysis.group_differences import deviations

NOTHING = math.nan


def of_first_options(shares_G: tuple[float, ...]) -> np.ndarray:
    """Shares (G, 1, 2) of one question with two options, from those of the first option."""
    share_G = np.array(shares_G)
    return np.stack([share_G, 1.0 - share_G], axis=1)[:, None]


def compared(prediction_GQK, truth_GQK, option_QK=None) -> tuple[float, ...]:
    option_QK = np.ones(truth_GQK.shape[1:], dtype=bool) if option_QK is None else option_QK
    return tuple(vars(deviations(prediction_GQK, truth_GQK, option_QK)).values())


def about(*numbers: float) -> tuple[object, ...]:
    """In the order r, r2, order."""
    return tuple(pytest.approx(number, abs=1e-9, nan_ok=True) for number in numbers)


@pytest.mark.parametrize(
    ("predicted", "true", "expected"),
    [
        # deviations +.1 and -.1 where +.2 and -.2 are right: half of each is missed, a quarter of its square
        ((0.7, 0.5), (0.8, 0.4), (1.0, 0.75, 1.0)),
        # -.1 and +.1: missed by .3, 1 - .09 / .04
        ((0.5, 0.7), (0.8, 0.4), (-1.0, -1.25, 0.0)),
        # true .4, 0, -.4, predicted .1, .1, -.2; r = .12 / sqrt(.32 x .06); R2 = 1 - (.09 + .01 + .04) / .32; of the
        # pairs the first is a tie
        ((0.6, 0.6, 0.3), (0.9, 0.5, 0.1), (0.75**0.5, 0.5625, 2.5 / 3)),
    ],
)
def test_numbers_worked_by_hand(predicted, true, expected):
    assert compared(of_first_options(predicted), of_first_options(true)) == about(*expected)


def test_of_two_groups_only_clear_differences_must_be_told():
    # the second and the third are more than .05 from the first, not from each other; the third alone is told rightly
    found = deviations(of_first_options((0.5, 0.4, 0.7)), of_first_options((0.50, 0.56, 0.60)), np.ones((1, 2), bool))
    assert found.order == 0.5
    # and where none is clear, there is nothing to tell
    assert math.isnan(compared(of_first_options((0.6, 0.4)), of_first_options((0.52, 0.48)))[2])


@pytest.fixture
def world() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predictions and answers of 5 groups to 12 questions of two to four options, and which options are real."""
    rng = np.random.default_rng(3)
    option_QK = np.arange(4) < rng.integers(2, 5, size=(12, 1))
    both = []
    for _ in range(2):
        share_GQK = rng.random((5, 12, 4)) * option_QK
        both.append(share_GQK / share_GQK.sum(2, keepdims=True))
    return *both, option_QK


def test_the_same_prediction_for_all_groups_says_nothing_of_differences(world):
    prediction_GQK, truth_GQK, option_QK = world
    for same_QK in (prediction_GQK[0], truth_GQK.mean(0)):
        found = deviations(np.broadcast_to(same_QK, truth_GQK.shape), truth_GQK, option_QK)
        assert (found.r, found.r2, found.order) == about(0.0, 0.0, 0.5)


def test_what_all_groups_have_in_common_changes_nothing(world):
    prediction_GQK, truth_GQK, option_QK = world
    shift_QK = np.random.default_rng(4).normal(size=option_QK.shape)
    plain = compared(prediction_GQK, truth_GQK, option_QK)
    assert compared(prediction_GQK + shift_QK, truth_GQK, option_QK) == about(*plain)
    assert compared(prediction_GQK, truth_GQK + shift_QK, option_QK) == about(*plain)
    # neither does padding, whatever stands there
    wild_GQK = np.where(option_QK, prediction_GQK, 99.0)
    assert compared(wild_GQK, np.where(option_QK, truth_GQK, NOTHING), option_QK) == plain


def test_an_answer_that_is_not_there_counts_neither_for_its_group_nor_in_the_mean(world):
    prediction_GQK, truth_GQK, option_QK = world
    asked = truth_GQK.copy()
    asked[3] = NOTHING  # a group without answers
    asked[1:, 5] = NOTHING  # a question of one group alone
    without = np.delete(np.delete(truth_GQK, 3, axis=0), 5, axis=1)
    expected = compared(
        np.delete(np.delete(prediction_GQK, 3, axis=0), 5, axis=1), without, np.delete(option_QK, 5, axis=0)
    )
    assert compared(prediction_GQK, asked, option_QK) == about(*expected)
    assert compared(prediction_GQK, truth_GQK, option_QK) != about(*expected)


def test_a_question_of_one_option_divides_nobody():
    two = of_first_options((0.6, 0.6, 0.3)), of_first_options((0.9, 0.5, 0.1))
    more = [np.concatenate([value, [[[1.0, 0.0]]] * 3], axis=1) for value in two]
    assert compared(*more, np.array([[True, True], [True, False]])) == compared(*two)


def test_where_nobody_else_has_answered_nothing_can_be_said():
    alone_GQK = of_first_options((0.6, NOTHING, NOTHING))
    assert compared(np.nan_to_num(alone_GQK), alone_GQK) == about(*[NOTHING] * 3)


@pytest.mark.parametrize("share", [0.5, 0.1])  # a mean of three times 0.1 is not 0.1 to the last bit
def test_groups_that_all_answer_the_same_have_no_differences_to_hold(share):
    found = compared(of_first_options((0.6, 0.5, 0.4)), of_first_options((share,) * 3))
    assert found == about(NOTHING, NOTHING, NOTHING)
