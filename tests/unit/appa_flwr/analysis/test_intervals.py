"""Paired intervals: hand-worked numbers, coverage on drawn data, identities, bad input."""

import numpy as np
import pytest

from appa_flwr.analysis.alignment import alignment_scores
from appa_flwr.analysis.intervals import MEASURES, bootstrap


def test_differences_are_those_of_the_tables():
    rng = np.random.default_rng(0)
    first_GQ, second_GQ = rng.random((2, 4, 30))
    first_GQ[0, :5] = second_GQ[0, :5] = np.nan
    first_GQ[1:, 7] = second_GQ[1:, 7] = np.nan  # one group alone: not in FI
    found = bootstrap([(first_GQ, second_GQ)])
    one, other = alignment_scores(first_GQ), alignment_scores(second_GQ)
    assert found["Avg AS"].value == pytest.approx(one.avg_as - other.avg_as)
    assert found["Min AS"].value == pytest.approx(one.min_as - other.min_as)
    assert found["FI"].value == pytest.approx(one.fairness_index - other.fairness_index)


def test_a_constant_gain_is_certain_and_no_gain_is_none():
    base_GQ = np.random.default_rng(1).uniform(0, 0.8, (3, 40))
    certain = bootstrap([(base_GQ + 0.1, base_GQ)])
    for measure in ("Avg AS", "Min AS"):
        found = certain[measure]
        assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
        assert found.excludes_zero
    same = bootstrap([(base_GQ, base_GQ)])
    for measure in MEASURES:
        assert (same[measure].low, same[measure].high) == (0.0, 0.0)
        assert not same[measure].excludes_zero


def test_levels_are_those_of_the_tables_and_spread_as_a_mean_does():
    reward_GQ = np.tile([0.2, 0.6], 50)[None] + np.array([[0.0], [0.1]])  # mean .45, worst .4; sd .2 over 100 questions
    found = bootstrap([[reward_GQ]], resamples=20_000)
    assert found["Avg AS"].value == pytest.approx(0.45)
    assert found["Min AS"].value == pytest.approx(0.40)
    assert found["FI"].value == pytest.approx(alignment_scores(reward_GQ).fairness_index)
    assert (found["Min AS"].low, found["Min AS"].high) == pytest.approx((0.361, 0.439), abs=0.005)


def test_several_runs_are_drawn_too():
    # every question of a run gains the same, so all the spread is between runs: the mean of two draws of 0 and .2
    # is 0, .1 or .2
    runs = [(np.full((2, 10), 0.5 + gain), np.full((2, 10), 0.5)) for gain in (0.0, 0.2)]
    found = bootstrap(runs)["Min AS"]
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.0, 0.2))


def test_what_cannot_be_paired_is_an_error():
    for pair in ((np.ones((2, 3)), np.ones((2, 4))), (np.array([[1.0, np.nan]]), np.ones((1, 2)))):
        with pytest.raises(ValueError, match="same groups on the same questions"):
            bootstrap([pair])


def test_one_question_has_no_interval_that_would_look_certain():
    first_GQ, second_GQ = [[0.8], [0.6]], [[0.5], [0.4]]
    differences = bootstrap([(first_GQ, second_GQ)])
    assert (differences["Avg AS"].value, differences["Min AS"].value) == pytest.approx((0.25, 0.2))
    for difference in differences.values():
        assert np.isnan([difference.low, difference.high]).all()
        assert not difference.excludes_zero
    assert bootstrap([(first_GQ, second_GQ)] * 2)["Avg AS"].excludes_zero  # runs can be resampled
