"""Aggregation rules: hand-worked numbers, identities, missing groups, late joiners and bad input."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from appa_flwr.aggregation import RULES, Combination, State, Valid, make
from appa_flwr.errors import UserError

NEVER = 2.0  # a fairness threshold above 1
ALL_RULES = [
    make("average"),
    make("min"),
    make("alpha", alpha=-2.5),
    make("alpha", alpha=math.inf),
    make("appa"),
    make("appa", fairness_threshold=NEVER),
]
IDS = [f"{index}-{rule.name}" for index, rule in enumerate(ALL_RULES)]

rewards = hnp.arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=st.floats(0.0, 1.0))


def once(rule, reward_GJ, training_GJ=None, history_G=None):
    state = rule.init(len(reward_GJ))
    if history_G is not None:
        state = State(history_G=np.array(history_G), answered_G=np.ones(len(history_G), bool))
    return rule.apply(state, reward_GJ, reward_GJ if training_GJ is None else training_GJ)


def test_average_by_hand():
    result = once(make("average"), [[0.2, 1.0], [0.6, 0.0]])
    np.testing.assert_allclose(result.aggregate_J, [0.4, 0.5])
    np.testing.assert_array_equal(result.weight_G, [0.5, 0.5])
    assert result.fell_back is None


def test_min_by_hand():
    result = once(make("min"), [[0.2, 0.3, 0.9], [0.6, 0.3, 0.5], [0.7, 0.8, 0.5]])
    np.testing.assert_array_equal(result.aggregate_J, [0.2, 0.3, 0.5])
    # rollout 1 goes to group 0, 2 is shared by groups 0 and 1, 3 by groups 1 and 2: (1.5, 1, .5) / 3
    np.testing.assert_allclose(result.weight_G, [1 / 2, 1 / 3, 1 / 6])
    assert result.fell_back is None


def test_alpha_by_hand():
    log3 = math.log(3)
    # alpha = 1: log((1 + 3) / 2) = log 2, shares 1/4 and 3/4
    up = once(make("alpha", alpha=1), [[0.0], [log3]])
    assert up.aggregate_J == pytest.approx([math.log(2)], abs=1e-15)
    np.testing.assert_allclose(up.weight_G, [0.25, 0.75])
    # alpha = -1: -log((1 + 1/3) / 2) = log 1.5, shares 3/4 and 1/4
    down = once(make("alpha", alpha=-1), [[0.0], [log3]])
    assert down.aggregate_J == pytest.approx([math.log(1.5)], abs=1e-15)
    np.testing.assert_allclose(down.weight_G, [0.75, 0.25])


def test_appa_by_hand():
    # logits (1 - h) / .1 = 5 and 4, so alpha = e / (e + 1) = .7310586 and .2689414.
    # exp(.7310586 * .4) = 1.3396698, exp(.2689414 * .8) = 1.2400517, mean 1.2898607, log .2545343
    result = once(make("appa"), [[0.4], [0.8]], history_G=[0.5, 0.6])
    np.testing.assert_allclose(result.weight_G, [0.7310585786, 0.2689414214], rtol=1e-9)
    assert result.aggregate_J == pytest.approx([0.2545343], abs=2e-7)
    # FI: mean .6, deviation .2, 1 / (1 + 1/9) = .9 < .99
    assert result.fairness_index == pytest.approx(0.9)
    assert result.fell_back is False
    # h: .8 * .5 + .2 * .4 and .8 * .6 + .2 * .8
    np.testing.assert_allclose(result.state.history_G, [0.48, 0.64])


def test_appa_falls_back_to_the_mean_from_the_threshold_on_and_still_reports_its_weights():
    reward_GJ = [[0.4], [0.8]]  # FI = .9, as above
    history = [0.5, 0.6]
    at = once(make("appa", fairness_threshold=0.89), reward_GJ, history_G=history)
    assert at.fell_back is True
    assert at.aggregate_J == pytest.approx([0.6])
    np.testing.assert_allclose(at.weight_G, [0.7310585786, 0.2689414214], rtol=1e-9)
    equal = [[0.5], [0.5]]
    assert once(make("appa", fairness_threshold=1), equal).fell_back is True
    assert once(make("appa", fairness_threshold=1.01), equal).fell_back is False


def test_fairness_and_history_see_alignment_rewards_and_only_the_aggregate_sees_training_rewards():
    result = once(make("appa"), [[0.2, 0.4], [0.6, 1.0]], training_GJ=[[0.9, 0.1], [0.9, 0.3]])
    # CoV .5 and .3 / .7: FI = (.8 + 1 / (1 + 9/49)) / 2 = (.8 + 49/58) / 2
    assert result.fairness_index == pytest.approx((0.8 + 49 / 58) / 2)
    np.testing.assert_allclose(result.state.history_G, [0.2 * 0.3, 0.2 * 0.8])
    # h^0 = 0, so both alphas are 1/2; rollout 1: log exp(.45);
    # rollout 2: log((e^.05 + e^.15) / 2) = .1 + log cosh(.05) = .1 + .05^2/2 - .05^4/12 + .05^6/45 = .1012494795
    np.testing.assert_allclose(result.weight_G, [0.5, 0.5])
    np.testing.assert_allclose(result.aggregate_J, [0.45, 0.1012494795], atol=1e-10)


def test_history_lags_one_iteration_and_decays():
    rule = make("appa", ema_decay=0.5, fairness_threshold=NEVER)
    first = rule.apply(rule.init(2), [[0.2], [0.8]], [[0.2], [0.8]])
    np.testing.assert_array_equal(first.weight_G, [0.5, 0.5])
    np.testing.assert_allclose(first.state.history_G, [0.1, 0.4])
    second = rule.apply(first.state, [[0.2], [0.8]], [[0.2], [0.8]])
    # logits 9 and 6: e^3 to 1
    assert second.weight_G[0] / second.weight_G[1] == pytest.approx(math.exp(3))
    np.testing.assert_allclose(second.state.history_G, [0.15, 0.6])


def test_low_temperature_picks_the_worst_group_and_does_not_overflow():
    result = once(make("appa", temperature=1e-9), [[0.4], [0.8]], history_G=[0.5, 0.6])
    np.testing.assert_array_equal(result.weight_G, [1.0, 0.0])


@pytest.mark.parametrize("rule", ALL_RULES, ids=IDS)
def test_a_missing_group_is_left_out_and_keeps_its_history(rule):
    rng = np.random.default_rng(1)
    reward_GJ, training_GJ = rng.random((2, 4, 5))
    history_G = np.array([0.3, 0.5, 0.2, 0.4])
    reward_GJ[2] = training_GJ[2] = np.nan
    present = [0, 1, 3]
    result = once(rule, reward_GJ, training_GJ, history_G)
    alone = once(rule, reward_GJ[present], training_GJ[present], history_G[present])
    np.testing.assert_allclose(result.aggregate_J, alone.aggregate_J, rtol=1e-14)
    np.testing.assert_allclose(result.weight_G[present], alone.weight_G, rtol=1e-14)
    np.testing.assert_allclose(result.state.history_G[present], alone.state.history_G, rtol=1e-14)
    assert result.weight_G[2] == 0.0
    assert result.state.history_G[2] == 0.2
    assert result.fairness_index == pytest.approx(alone.fairness_index)


def test_late_joiners_start_at_the_mean_history_of_those_before():
    rule = make("appa", fairness_threshold=NEVER)
    nan = np.nan
    one = rule.apply(rule.init(4), [[0.5], [1.0], [nan], [nan]], [[0.5], [1.0], [nan], [nan]])
    np.testing.assert_allclose(one.state.history_G, [0.1, 0.2, 0.0, 0.0])
    np.testing.assert_array_equal(one.state.answered_G, [True, True, False, False])
    # Group 0 stays away, yet its .1 counts for the newcomers' start of .15, which neither sees of the other.
    reward_GJ = [[nan], [1.0], [0.5], [1.0]]
    two = rule.apply(one.state, reward_GJ, reward_GJ)
    # logits 8, 8.5, 8.5: shares e^-.5, 1, 1
    total = 2 + math.exp(-0.5)
    np.testing.assert_allclose(two.weight_G, [0.0, math.exp(-0.5) / total, 1 / total, 1 / total])
    # .8 * .2 + .2; .8 * .15 + .1; .8 * .15 + .2
    np.testing.assert_allclose(two.state.history_G, [0.1, 0.36, 0.22, 0.32])


def test_a_returning_group_finds_its_own_history():
    rule = make("average")
    nan = np.nan
    state = rule.init(2)
    for reward_GJ in ([[0.5], [0.1]], [[0.5], [nan]], [[0.5], [0.1]]):
        state = rule.apply(state, reward_GJ, reward_GJ).state
    # group 1: .02 after the first, kept over the second, .8 * .02 + .02 after the third
    assert state.history_G[1] == pytest.approx(0.036)


@pytest.mark.parametrize("rule", ALL_RULES, ids=IDS)
@given(rewards, st.randoms(use_true_random=False))
def test_weights_sum_to_one_and_follow_the_groups(rule, reward_GJ, random):
    order = list(range(len(reward_GJ)))
    random.shuffle(order)
    history_G = np.linspace(0.2, 0.8, len(reward_GJ))
    straight = once(rule, reward_GJ, history_G=history_G)
    shuffled = once(rule, reward_GJ[order], history_G=history_G[order])
    assert straight.weight_G.sum() == pytest.approx(1.0)
    assert (straight.weight_G >= 0.0).all()
    np.testing.assert_allclose(shuffled.aggregate_J, straight.aggregate_J, atol=1e-14)
    if straight.fairness_index < 0.98999 or straight.fairness_index > 0.99001:
        np.testing.assert_allclose(shuffled.weight_G, straight.weight_G[order], atol=1e-14)


@given(rewards, st.floats(-1e308, 1e308))
def test_alpha_lies_between_the_extremes_and_grows(reward_GJ, alpha):
    def aggregate(value):
        return once(make("alpha", alpha=value), reward_GJ).aggregate_J

    slack = 1e-12
    assert (aggregate(alpha) >= reward_GJ.min(axis=0) - slack).all()
    assert (aggregate(alpha) <= reward_GJ.max(axis=0) + slack).all()
    larger = alpha + abs(alpha) / 2 if abs(alpha) < 1e307 else math.inf
    assert (aggregate(larger) >= aggregate(alpha) - slack).all()


@given(rewards, st.floats(-50, 50), st.floats(-3, 3))
def test_alpha_follows_a_shift_of_all_rewards(reward_GJ, alpha, shift):
    rule = make("alpha", alpha=alpha)
    np.testing.assert_allclose(
        once(rule, reward_GJ + shift).aggregate_J, once(rule, reward_GJ).aggregate_J + shift, atol=1e-12
    )


@given(rewards)
def test_alpha_at_its_ends_is_min_mean_and_max(reward_GJ):
    def same(name, **params):
        return once(make(name, **params), reward_GJ)

    for alpha, rule in ((-math.inf, make("min")), (0.0, make("average")), (1e-300, make("average"))):
        left, right = same("alpha", alpha=alpha), once(rule, reward_GJ)
        np.testing.assert_allclose(left.aggregate_J, right.aggregate_J, rtol=1e-15)
        np.testing.assert_allclose(left.weight_G, right.weight_G, rtol=1e-15)
    np.testing.assert_array_equal(same("alpha", alpha=math.inf).aggregate_J, reward_GJ.max(axis=0))
    np.testing.assert_allclose(same("alpha", alpha=-1e300).aggregate_J, reward_GJ.min(axis=0), atol=1e-12)


@pytest.mark.parametrize("alpha", [-30.0, -1.0, -1e-7, 1e-7, 2.0, 30.0])
def test_alpha_weights_are_the_gradient(alpha):
    rule = make("alpha", alpha=alpha)
    reward_GJ = np.random.default_rng(2).random((4, 6))
    weight_G = once(rule, reward_GJ).weight_G
    step = 1e-6
    for group in range(4):
        bump_G = np.zeros((4, 1))
        bump_G[group] = step
        rise = once(rule, reward_GJ + bump_G).aggregate_J - once(rule, reward_GJ - bump_G).aggregate_J
        assert rise.mean() / (2 * step) == pytest.approx(weight_G[group], abs=1e-7)


def test_states_are_not_changed_and_cannot_be():
    rule = make("appa")
    state = rule.init(2)
    rule.apply(state, [[0.5], [0.1]], [[0.5], [0.1]])
    np.testing.assert_array_equal(state.history_G, [0.0, 0.0])
    with pytest.raises(ValueError, match="read-only"):
        state.history_G[0] = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.history_G = np.ones(2)


@pytest.mark.parametrize(
    ("reward", "training", "message"),
    [
        ([[0.1, 0.2], [0.1, 0.2]], [[0.1], [0.2]], "do not fit"),
        ([[0.1]], [[0.1]], "do not fit"),
        ([[0.1, np.nan], [0.1, 0.2]], [[0.1, 0.1], [0.1, 0.2]], "only in part"),
        ([[np.nan], [0.1]], [[0.1], [0.1]], "both"),
        ([[np.nan], [np.nan]], [[np.nan], [np.nan]], "no group"),
        ([[0.1], [0.1]], [[0.1], [np.inf]], "infinite"),
        ([[0.1], [0.1]], [[np.nan], [np.nan]], "no group"),
    ],
)
def test_rewards_that_do_not_fit_are_errors(reward, training, message):
    rule = make("average")
    with pytest.raises(ValueError, match=message):
        rule.apply(rule.init(2), reward, training)


def test_a_rule_needs_a_group():
    with pytest.raises(ValueError, match="num_groups"):
        make("average").init(0)
    with pytest.raises(ValueError, match="G >= 1"):
        State(history_G=np.zeros(2), answered_G=np.zeros(3, bool))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("apa", {}, r"unknown rule 'apa': did you mean 'appa'\? valid are average, min, alpha, appa"),
        ("appa", {"temprature": 1}, r"parameter of rule 'appa' 'temprature': did you mean 'temperature'"),
        ("average", {"temperature": 1}, "unknown parameter of rule 'average' 'temperature'"),
        ("appa", {"temperature": 0}, "'temperature' of rule 'appa' must be above 0, got 0"),
        ("appa", {"temperature": "0.1"}, "must be a number"),
        ("appa", {"temperature": True}, "must be a number"),
        ("appa", {"ema_decay": 1.0}, "at least 0 and under 1"),
        ("min", {"max_cov": 0.0}, "above 0"),
        ("appa", {"fairness_threshold": -0.1}, "at least 0"),
        ("alpha", {"alpha": math.nan}, "-inf and inf included"),
        ("alpha", {}, "rule 'alpha' needs parameter 'alpha'"),
    ],
)
def test_wrong_names_and_values_are_user_errors(name, params, message):
    with pytest.raises(UserError, match=message):
        make(name, **params)


def test_a_new_rule_is_a_function_and_a_line(monkeypatch):
    def first_group(now, *, scale: Annotated[float, Valid("above 0", lambda value: value > 0)] = 1.0):
        return Combination(scale * now.training_reward_GJ[0], np.eye(len(now.history_G))[0])

    monkeypatch.setitem(RULES, "first", first_group)
    result = once(make("first", scale=2.0), [[np.nan], [0.3], [0.1]])
    np.testing.assert_allclose(result.aggregate_J, [0.6])
    np.testing.assert_array_equal(result.weight_G, [0.0, 1.0, 0.0])
    with pytest.raises(UserError, match="above 0"):
        make("first", scale=-1.0)
