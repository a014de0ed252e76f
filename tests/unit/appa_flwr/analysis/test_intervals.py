"""Paired intervals: hand-worked numbers, coverage on drawn data, identities, bad input."""

import numpy as np
import pytest

from appa_flwr.analysis.alignment import alignment_scores
from appa_flwr.analysis.intervals import MEASURES, Interval, _shrunk, bootstrap


def test_differences_are_those_of_the_tables():
    rng = np.random.default_rng(0)
    first_GQ, second_GQ = rng.random((2, 4, 30))
    first_GQ[0, :5] = second_GQ[0, :5] = np.nan
    first_GQ[1:, 7] = second_GQ[1:, 7] = np.nan  # one group alone: not in FI
    found = bootstrap([(first_GQ, second_GQ)])
    one, other = alignment_scores(first_GQ), alignment_scores(second_GQ)
    assert found["Avg AS"].value == found["Avg AS"].sample == pytest.approx(one.avg_as - other.avg_as)
    assert found["Min AS"].sample == pytest.approx(one.min_as - other.min_as)
    assert [*vars(Interval(0.5, 0.4, 0.7, 0.45).uncorrected()).values()][:4] == pytest.approx([0.45, 0.35, 0.65, 0.45])
    assert found["FI"].value == pytest.approx(one.fairness_index - other.fairness_index)


def test_a_constant_gain_is_certain_and_no_gain_is_none():
    base_GQ = np.random.default_rng(1).uniform(0, 0.8, (3, 40))
    for measure in ("Avg AS", "Min AS"):
        found = bootstrap([(base_GQ + 0.1, base_GQ)])[measure]
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


def test_the_least_of_noisy_means_is_estimated_without_its_bias():
    # The least of eight means of 40 answers (sd .0158) is 1.424 sd = .0225 too low; the other's least group is alone.
    first, noise = 0.1 * np.random.default_rng(0).standard_normal((2, 150, 8, 40)) + 0.8
    other = 0.9 * first + 0.19**0.5 * (noise - 0.8) + np.array([0.08, *[0.18] * 7])[:, None]
    pairs = [*zip(first, other, strict=True)]
    for true, runs in ((0.8, [[pair[:1]] for pair in pairs]), (0.0, [pairs[n : n + 3] for n in range(0, 150, 3)])):
        found = [bootstrap(run, resamples=300)["Min AS"] for run in runs]
        assert np.mean([one.value for one in found]) == pytest.approx(true, abs=0.006)
        assert np.mean([one.low <= true <= one.high for one in found]) >= 0.84


def test_of_few_questions_the_least_mean_stays_in_its_range():
    found = bootstrap([[1 - np.diag([0.03] * 3)]])["Min AS"]
    assert found.low <= found.value <= found.high == 1.0


def test_means_are_shrunk_by_the_noise_in_them_worked_by_hand():
    # Draws .05 from the centre: .0025 x 2 / 1 = .005 each; of 2 and 4 answers s = (2 + 4) .005 / (1/2 + 3/4) = .024, so
    # v = .012 and .006; t = .02 - .009 = .011; c = (.1/.023 + .3/.017) / (1/.023 + 1/.017) = .0086 / .04 = .215; then
    # .215 - .011/.023 x .115 = .16 and .215 + .011/.017 x .085 = .27
    found_G = _shrunk(np.array([0.1, 0.3]), np.array([[0.35, 0.25], [-0.35, -0.25]]), np.array([2, 4]))
    assert found_G == pytest.approx([0.16, 0.27])


def test_several_runs_are_drawn_too():
    # every question of a run gains the same, so all the spread is between runs: the mean of two draws of 0 and .2
    # is 0, .1 or .2
    runs = [(np.full((2, 10), 0.5 + gain), np.full((2, 10), 0.5)) for gain in (0.0, 0.2)]
    found = bootstrap(runs)["Min AS"]
    assert [*vars(found).values()] == pytest.approx([0.1, 0.0, 0.2, 0.1, 0.02**0.5])  # sd of 0 and .2, ddof 1


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
