"""Rule mix: hand-worked numbers, bounds, monotony, and where weights settle."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from appa_flwr.analysis.aggregation import make
from appa_flwr.analysis.aggregation.rules import MAX_LOG_WEIGHT_GAP

HIGH = 0.2 + 2 * math.log(3) / 3
LINEAR = [make("mix"), make("mix", worst_share=1.0)]
rewards = hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 4)), elements=st.floats(0.0, 1.0))


def apply(rule, reward_GJ, **state):
    begun = replace(rule.init(len(reward_GJ)), answered_G=np.ones(len(reward_GJ), bool), **state)
    return rule.apply(begun, reward_GJ, reward_GJ)


def test_all_weight_on_groups_that_fell_behind_by_hand():
    # means .2 and HIGH are log(3) / 3 below and above their mean; times 3 the leads are log 3 and -log 3: weights 9 : 1
    result = apply(make("mix", worst_share=1.0), [[0.1, 0.3], [HIGH, HIGH]])
    np.testing.assert_allclose(result.state.log_weight_G, [math.log(3), -math.log(3)])
    np.testing.assert_allclose(result.weight_G, [0.9, 0.1])
    np.testing.assert_allclose(result.aggregate_J, [0.09 + 0.1 * HIGH, 0.27 + 0.1 * HIGH])


def test_mix_by_hand():
    # as above: .4 / 2 + .6 * (.9, .1)
    result = apply(make("mix", worst_share=0.6), [[0.1, 0.3], [HIGH, HIGH]])
    np.testing.assert_allclose(result.weight_G, [0.74, 0.26])
    np.testing.assert_allclose(result.aggregate_J, [0.74 * 0.1 + 0.26 * HIGH, 0.74 * 0.3 + 0.26 * HIGH])


@pytest.mark.parametrize("rule", LINEAR)
@settings(max_examples=25)
@given(rewards, st.data())
def test_an_aggregate_lies_between_the_groups_and_grows_with_each(rule, training_GJ, data):
    groups = len(training_GJ)
    per_group = hnp.arrays(np.float64, groups, elements=st.floats(0.0, 1.0))
    state = {"history_G": data.draw(per_group), "log_weight_G": 5 * data.draw(per_group)}
    begun = replace(rule.init(groups), answered_G=np.ones(groups, bool), **state)
    reward_GJ = np.broadcast_to(data.draw(per_group)[:, None], training_GJ.shape)
    found_J = rule.apply(begun, reward_GJ, training_GJ).aggregate_J
    assert (found_J >= training_GJ.min(0) - 1e-12).all()
    assert (found_J <= training_GJ.max(0) + 1e-12).all()
    group = data.draw(st.integers(0, groups - 1))
    more_GJ = training_GJ + 0.1 * (np.arange(groups) == group)[:, None]
    assert (rule.apply(begun, reward_GJ, more_GJ).aggregate_J >= found_J - 1e-12).all()


def test_a_lead_is_bounded_so_that_a_group_finds_back():
    # an iteration adds 1.5 to the worst group's log-weight and takes as much from the other's
    result = apply(make("mix", worst_share=1.0), [[0.0], [1.0]], log_weight_G=np.array([5.0, -5.0]))
    assert np.ptp(result.state.log_weight_G) == MAX_LOG_WEIGHT_GAP


def test_a_missing_group_keeps_its_lead_and_a_late_one_starts_at_the_others_mean():
    rule = make("mix", worst_share=1.0)
    state = rule.apply(rule.init(3), [[0.2], [0.6], [np.nan]], [[0.2], [0.6], [np.nan]]).state
    np.testing.assert_allclose(state.log_weight_G, [0.6, -0.6, 0.0])
    # group 1 is away: the others' mean is .5, and the newcomer begins at (.6 - .6) / 2 = 0
    later = rule.apply(state, [[0.4], [np.nan], [0.6]], [[0.4], [np.nan], [0.6]])
    np.testing.assert_allclose(later.state.log_weight_G, [0.9, -0.6, -0.3])
    np.testing.assert_allclose(later.weight_G[[0, 2]], [1 / (1 + math.exp(-1.2)), 1 / (1 + math.exp(1.2))])
    assert later.weight_G[1] == 0.0
