"""The paper's equations and the rules: hand-worked numbers, identities, missing groups, late joiners, bad input."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from small import cases

from appa_flwr.analysis import equations, rule_choice
from appa_flwr.analysis.equations import fairness_index, training_reward
from appa_flwr.analysis.rule_choice import configured, find, make
from appa_flwr.analysis.rules import MAX_LOG_WEIGHT_GAP, RULES, State
from appa_flwr.config import Config
from appa_flwr.config.sections import kebab
from appa_flwr.core.errors import UserError

NEVER = 2.0  # a fairness threshold above 1
ALL_RULES = [
    make("average"),
    make("min"),
    make("alpha", alpha=-2.5),
    make("alpha", alpha=math.inf),
    make("appa"),
    make("appa", fairness_threshold=NEVER),
    make("mix"),
    make("mix", worst_share=1.0),
]
IDS = [f"{index}-{type(rule).__name__}" for index, rule in enumerate(ALL_RULES)]

rewards = hnp.arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=st.floats(0.0, 1.0))


def once(rule, reward_GJ, training_GJ=None, history_G=None):
    state = rule.init(len(reward_GJ))
    if history_G is not None:
        state = replace(state, history_G=history_G, answered_G=np.ones(len(history_G), bool))
    return rule.apply(state, reward_GJ, reward_GJ if training_GJ is None else training_GJ)


def test_min_by_hand():
    minimum = once(make("min"), [[0.2, 0.3, 0.9], [0.6, 0.3, 0.5], [0.7, 0.8, 0.5]])
    np.testing.assert_array_equal(minimum.aggregate_J, [0.2, 0.3, 0.5])
    # rollout 1 goes to group 0, 2 is shared by groups 0 and 1, 3 by groups 1 and 2: (1.5, 1, .5) / 3
    np.testing.assert_allclose(minimum.weight_G, [1 / 2, 1 / 3, 1 / 6])
    assert minimum.fell_back is None


def gradient_GJ(aggregate, reward_GJ, step=1e-6):
    reward_GJ = np.asarray(reward_GJ)
    bumps = step * np.eye(len(reward_GJ))[:, :, None]
    return np.array([(aggregate(reward_GJ + b) - aggregate(reward_GJ - b)) / (2 * step) for b in bumps])


@pytest.mark.parametrize("alpha", [-30.0, -1.0, -1e-7, 1e-7, 2.0, 30.0])
def test_alpha_weights_are_the_gradient(alpha):
    reward_GJ = np.random.default_rng(2).random((4, 6))
    found_GJ = gradient_GJ(lambda x_GJ: equations.alpha_aggregate(x_GJ, alpha=alpha), reward_GJ)
    np.testing.assert_allclose(found_GJ.mean(axis=1), equations.alpha_weights(reward_GJ, alpha=alpha), atol=1e-7)


@pytest.mark.parametrize(
    ("threshold", "rewards_G", "fell_back"),
    # FI = .9, as above, or 1
    [(0.89, (0.4, 0.8), True), (0.91, (0.4, 0.8), False), (1, (0.5, 0.5), True), (1.01, (0.5, 0.5), False)],
)
def test_appa_falls_back_to_the_mean_from_the_threshold_on(threshold, rewards_G, fell_back):
    found = once(make("appa", fairness_threshold=threshold), np.transpose([rewards_G]))
    assert found.fell_back is fell_back
    assert (found.aggregate_J == pytest.approx([np.mean(rewards_G)])) == fell_back


@given(hnp.arrays(np.float64, st.integers(1, 6), elements=st.floats(0.0, 1.0)), st.floats(1e-9, 10.0))
def test_the_lowest_history_has_the_largest_weight(history_G, temperature):
    # Equation 23; at a low temperature that group has all, and nothing overflows
    weight_G = equations.reversed_softmax(history_G, temperature=temperature)
    assert weight_G[np.argmin(history_G)] == weight_G.max()


@pytest.mark.parametrize("rule", ALL_RULES, ids=IDS)
@settings(max_examples=25)
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


@given(rewards)
def test_alpha_at_its_ends_is_min_mean_and_max(reward_GJ):
    for alpha, expected_J, slack in (
        (-math.inf, reward_GJ.min(axis=0), 0.0),
        (-1e300, reward_GJ.min(axis=0), 1e-12),
        (0.0, reward_GJ.mean(axis=0), 0.0),
        (1e-300, reward_GJ.mean(axis=0), 1e-15),
        (math.inf, reward_GJ.max(axis=0), 0.0),
    ):
        np.testing.assert_allclose(equations.alpha_aggregate(reward_GJ, alpha=alpha), expected_J, rtol=0.0, atol=slack)


@pytest.mark.parametrize(("reward", "training", "message"), cases("wrong_numbers")["aggregation"])
def test_rewards_that_do_not_fit_are_errors(reward, training, message):
    rule = make("average")
    with pytest.raises(ValueError, match=message):
        rule.apply(rule.init(2), reward, training)


def test_a_parameter_that_a_rule_does_not_have_is_named():
    with pytest.raises(UserError, match="rule 'appa': temprature: there is no such key"):
        make("appa", temprature=1)


# --- mix ------------------------------------------------------------------------------------------


def test_mix_by_hand():
    # means .2 and high are log(3) / 3 below and above their mean; times 3 the leads are log 3 and -log 3: weights 9 : 1
    high = 0.2 + 2 * math.log(3) / 3
    result = once(make("mix", worst_share=0.6), [[0.1, 0.3], [high, high]])
    np.testing.assert_allclose(result.state.memory_G, [math.log(3), -math.log(3)])
    np.testing.assert_allclose(result.weight_G, [0.74, 0.26])  # .4 / 2 + .6 * (.9, .1)
    np.testing.assert_allclose(result.aggregate_J, [0.74 * 0.1 + 0.26 * high, 0.74 * 0.3 + 0.26 * high])


def test_a_lead_is_bounded_so_that_a_group_finds_back():
    # an iteration adds 1.5 to the worst group's log-weight and takes as much from the other's
    rule, both = make("mix"), np.ones(2, bool)
    begun = State(history_G=np.zeros(2), answered_G=both, memory_G=np.array([5.0, -5.0]))
    result = rule.apply(begun, [[0.0], [1.0]], [[0.0], [1.0]])
    assert np.ptp(result.state.memory_G) == MAX_LOG_WEIGHT_GAP


def test_a_missing_group_keeps_its_lead_and_a_late_one_starts_at_the_others_mean():
    rule = make("mix", worst_share=1.0)
    state = rule.apply(rule.init(3), [[0.2], [0.6], [np.nan]], [[0.2], [0.6], [np.nan]]).state
    np.testing.assert_allclose(state.memory_G, [0.6, -0.6, 0.0])
    # group 1 is away: the others' mean is .5, and the newcomer begins at (.6 - .6) / 2 = 0
    later = rule.apply(state, [[0.4], [np.nan], [0.6]], [[0.4], [np.nan], [0.6]])
    np.testing.assert_allclose(later.state.memory_G, [0.9, -0.6, -0.3])
    np.testing.assert_allclose(later.weight_G[[0, 2]], [1 / (1 + math.exp(-1.2)), 1 / (1 + math.exp(1.2))])
    assert later.weight_G[1] == 0.0


# --- rules by name --------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_made_with_its_own_keys(rule):
    other = {"alpha": -2, "fairness_threshold": 1.5, "ema_decay": 0.5, "temperature": 1, "worst_share": 0.5}
    config = Config.load({"rule": rule, **{f"appa.{kebab(name)}": value for name, value in other.items()}})
    if rule == "appa-printed":  # the paper's appendix, which no key changes
        other |= {"temperature": 0.1, "fairness_threshold": 0.99}
    made = configured(config.rule, config.appa)
    assert made.model_dump() == {name: other[name] for name in type(made).model_fields}


GUIDE = Path(__file__).parents[4] / "docs" / "scores.md"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with modules of somebody's own, in which the run was started."""
    (tmp_path / "own_rules.py").write_text(GUIDE.read_text().split("```")[1].removeprefix("python") + MORE_RULES)
    (tmp_path / "own_script.py").write_text("import sys\nsys.exit('usage:\\nx')")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(rule_choice.CODE_FOLDER, str(tmp_path))


MORE_RULES = """

class Warm(Quantile):
    temperature: float = 0.1


slow = Warm(ema_decay=0.9)
wrong = Warm.model_construct(temperature="hot")
number = 5
"""


@pytest.mark.parametrize(
    ("name", "values", "expected_J"),
    [
        ("Quantile", {"ema_decay": 0.5, "share": 0.5}, [0.3, 0.5]),
        ("low", {"ema_decay": 0.5, "share": 0.25}, [0.25, 0.25]),  # half way from .2 to .3, and from 0 to .5
        # its own temperature, though [appa] has one too
        ("Warm", {"ema_decay": 0.5, "share": 0.5, "temperature": 0.1}, [0.3, 0.5]),
        ("slow", {"ema_decay": 0.9, "share": 0.5, "temperature": 0.1}, [0.3, 0.5]),
    ],
)
def test_a_rule_of_ones_own_takes_the_config_s_decay_and_its_own_values(name, values, expected_J, here):
    config = Config.load({"rule": f"own_rules:{name}", "appa.ema-decay": 0.5, "appa.temperature": 0.7})
    rule = configured(config.rule, config.appa)
    assert rule.model_dump() == values
    assert rule_choice.unread(config) == ["appa.temperature"]
    assert rule_choice.unread(Config.load({**config.flat(), "baseline-rules": "appa"})) == []
    np.testing.assert_allclose(once(rule, [[0.2, 1.0], [0.6, 0.0], [0.3, 0.5]]).aggregate_J, expected_J)


def test_parameters_of_an_instance_can_be_changed_and_are_checked(here):
    assert make("own_rules:low", share=0.4).model_dump() == {"ema_decay": 0.8, "share": 0.4}
    assert make("own_rules:low").share == 0.25
    for name, params in (("low", {"share": "much"}), ("low", {"width": 1.0}), ("wrong", {})):
        with pytest.raises(UserError, match=rf"rule 'own_rules:{name}': (share|width|temperature): "):
            make(f"own_rules:{name}", **params)
    with pytest.raises(UserError, match=r"own_rules has no class number"):
        find("own_rules:number")


def test_a_module_that_ends_the_process_is_one_line(here):
    with pytest.raises(UserError, match=r"own_script cannot be imported \(SystemExit: usage: x\)$"):
        find("own_script:Quantile")


# --- the Fairness Index ----------------------------------------------------------------------------------------------


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


def test_training_reward_by_hand():
    nan = np.nan
    reward = training_reward([[1.0, 0.2, 0.7], [0.0, 0.6, 0.7], [nan] * 3], [1.0, 0.5, 2 / 3], [True, True, False])
    # .85 * 1 + .15 * 1; .85 * .2 + .15 * .5 = .17 + .075; unparsed; .15; .85 * .6 + .075 = .585; a missing group
    np.testing.assert_allclose(reward, [[1.0, 0.245, 0.0], [0.15, 0.585, 0.0], [nan] * 3], atol=1e-15)
    # two letters of four: no alignment, .15 * .5
    assert training_reward([[0.0]], [0.5], [True]).item() == pytest.approx(0.075)
    with pytest.raises(ValueError, match="expected rewards"):
        training_reward(np.zeros((1, 2)), np.zeros(3), np.ones(3, bool))
