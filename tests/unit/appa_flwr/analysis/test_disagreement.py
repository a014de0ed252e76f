"""What is at stake between aggregation rules, by hand.

By Wasserstein the best answer for the average is the median group's, and a group's score on a question of two options
is 1 less the difference of shares.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.analysis.disagreement import disagreement

TOLERANCE = 1e-4  # ceilings are searched for


def two_options(*first_GQ: tuple[float, ...]) -> np.ndarray:
    share_GQ = np.array(first_GQ)
    return np.stack([share_GQ, 1.0 - share_GQ], axis=2)


def found(target_GQK, metric="wasserstein"):
    return disagreement(target_GQK, np.ones(target_GQK.shape[1:], dtype=bool), metric=metric)


@pytest.mark.parametrize("metric", ["js", "wasserstein", "cosine"])
def test_among_groups_that_agree_no_rule_can_win_anything(metric):
    same = found(two_options(*[(0.9, 0.3, 0.55)] * 4), metric)
    assert same.gap == pytest.approx(0.0, abs=TOLERANCE)
    assert (same.min_of_average, same.fairness) == pytest.approx((1.0, 1.0), abs=TOLERANCE)
    assert same.size == pytest.approx(0.0, abs=1e-12)
    said = same.sentence(threshold=0.99)
    assert "no rule can do better than the mean here" in said
    assert "over the threshold 0.99" in said


def test_two_opposed_clusters_of_unequal_size_in_numbers():
    # The average is best at the majority's .9: scores 1, 1, 1 and .2, mean .8, deviation sqrt(.12), index
    # 1 / (1 + .12 / .64). The worst group is best off halfway, where all have .6.
    opposed = found(two_options((0.9,), (0.9,), (0.9,), (0.1,)))
    assert opposed.min_of_average == pytest.approx(0.2, abs=TOLERANCE)
    assert opposed.min_of_fairest == pytest.approx(0.6, abs=TOLERANCE)
    assert opposed.gap == pytest.approx(0.4, abs=TOLERANCE)
    assert opposed.fairness == pytest.approx(0.64 / 0.76, abs=TOLERANCE)
    assert opposed.size == pytest.approx(0.12**0.5)  # .2, .2, .2 and -.6 from the mean .7
    said = opposed.sentence(threshold=0.99)
    for part in ("differ by 0.346", "worst group at 0.200", "best for it at 0.600: rules can differ", "0.8421, under"):
        assert part in said
    assert "0.8421, over the threshold 0.8" in opposed.sentence(threshold=0.8)


@pytest.mark.parametrize("metric", ["js", "wasserstein", "cosine"])
def test_opposed_clusters_leave_something_to_win_by_every_metric(metric):
    opposed = found(two_options(*[(0.9, 0.2)] * 3, (0.1, 0.7)), metric)
    assert opposed.min_of_fairest > opposed.min_of_average + 0.05
    assert opposed.fairness < 0.995


def test_a_group_counts_where_it_has_answered():
    nothing = np.nan
    # The minority was asked the first question only. The others have the score 1 on the second, so that at p on the
    # first they have (.1 + p + 1) / 2 and the minority 1.1 - p: both are 11 / 15 at p = 11 / 30.
    asked = found(two_options(*[(0.9, 0.4)] * 3, (0.1, nothing), (nothing, nothing)))
    assert asked.min_of_average == pytest.approx(0.2, abs=TOLERANCE)
    assert asked.min_of_fairest == pytest.approx(11 / 15, abs=TOLERANCE)
    # in the cells of the first question .12 on average, in the three of the second nothing
    assert asked.size == pytest.approx((0.12 * 4 / 7) ** 0.5)
    # one index a question: .64 / .76 and 1, weighted alike
    assert asked.fairness == pytest.approx((0.64 / 0.76 + 1.0) / 2, abs=TOLERANCE)
