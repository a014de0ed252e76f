"""Rules from sums against the rules themselves, iteration by iteration: groups drop out, return and join late."""

from __future__ import annotations

import math

import numpy as np
import pytest

from appa_flwr.analysis import aggregation as agg
from appa_flwr.analysis.aggregation import sums
from appa_flwr.analysis.fairness import fairness_index
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.secure import terms

ALPHAS = (1e-12, -1e-7, 0.3, -2.5, 14.0, -14.0)
RULES = {
    "average": {},
    **{f"alpha {alpha}": {"alpha": alpha} for alpha in ALPHAS},
    "appa": {"fairness-threshold": 2.0},
    "appa printed": {"fairness-threshold": 0.97, "temperature": 0.1},
    "appa cold": {"fairness-threshold": 2.0, "temperature": 0.005},
    "mix": {"worst-share": 0.4},
    "mix alone": {"worst-share": 1.0},
}


def config_of(name, keys=None):
    return Config.load({"rule": name.split()[0], **{f"appa.{key}": v for key, v in (keys or RULES[name]).items()}})


def plain_sum(found):
    return {name: sum(terms.unpack(terms.pack(of), {k: v.shape for k, v in of.items()}, groups=1)[name]
                      for of in found) for name in found[0]}  # fmt: skip


class Groups:
    """All groups of a run, each with its own standing."""

    def __init__(self, config, number):
        self.rule, self.appa, self.number = config.rule, config.appa, number
        self.standings = [terms.Standing()] * number
        self.public = sums.first(self.rule, self.appa, number)
        self.before = set(range(number))

    def settle(self, present):
        found = plain_sum([terms.weight_terms(self.appa, self.public, self.standings[g]) for g in present])
        self.public = sums.settled(self.appa, self.public, found, len(present))

    def terms(self, present, reward_GJ, training_GJ):
        return [terms.terms(self.rule, self.appa, self.public, self.standings[g], reward_GJ[g], training_GJ[g])[0]
                for g in sorted(present)]  # fmt: skip

    def step(self, present, reward_GJ, training_GJ):
        present = sorted(present)
        if self.rule == "appa" and set(present) != self.before:
            self.settle(present)
        try:
            return self._step(present, reward_GJ, training_GJ)
        except sums.Unsettled:
            self.settle(present)
            return self._step(present, reward_GJ, training_GJ)

    def _step(self, present, reward_GJ, training_GJ):
        found, after = zip(*(terms.terms(self.rule, self.appa, self.public, self.standings[g], reward_GJ[g],
                                         training_GJ[g]) for g in present), strict=True)  # fmt: skip
        summed = plain_sum(found)
        assert {key: array.shape for key, array in summed.items()} == sums.shapes(
            self.rule, self.appa, reward_GJ.shape[1]
        )
        result = sums.combine(self.rule, self.appa, self.public, summed, groups=len(present))
        self.public, self.before = result.public, set(present)
        for g, standing in zip(present, after, strict=True):
            self.standings[g] = standing
        return result


def compared(name, presence, *, seed=0, answers=7, low=0.0):
    """Largest differences of aggregate and index over iterations in which these groups are there."""
    config = config_of(name)
    rng, number = np.random.default_rng(seed), max(map(max, presence)) + 1
    rule, groups = agg.configured(config.rule, config.appa), Groups(config, number)
    groups.public = sums.first(config.rule, config.appa, len(presence[0]))
    groups.before = set(presence[0])
    state = rule.init(number)
    off = []
    for present in presence:
        reward_GJ = rng.uniform(low, 1, size=(number, answers))
        reward_GJ[:, 0] = 0.0  # an answer nobody can read
        training_GJ = np.where(reward_GJ == 0, 0.0, 0.85 * reward_GJ + 0.15)
        missing = np.setdiff1d(np.arange(number), sorted(present))
        plain = [array.copy() for array in (reward_GJ, training_GJ)]
        for array in plain:
            array[missing] = np.nan
        expected = rule.apply(state, *plain)
        state = expected.state
        result = groups.step(present, reward_GJ, training_GJ)
        assert result.fell_back == expected.fell_back
        off.append((np.abs(result.aggregate_J - expected.aggregate_J).max(),
                    abs(result.fairness_index - expected.fairness_index)))  # fmt: skip
    return np.max(off, axis=0)


EVERYBODY = [set(range(6))] * 12
DROPS = [{0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4}, {1, 2, 3, 5}, {0, 1, 2, 3, 4, 5}, {0, 2, 4, 5}, {0, 1, 2, 3, 4, 5}] * 2
LATE = [{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5}, {1, 2, 3, 4, 5}]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("presence", [EVERYBODY, DROPS, LATE], ids=["everybody", "drop-outs", "late"])
def test_aggregates_are_the_rule_s_to_2e_9(name, presence):
    aggregate, index = compared(name, presence)
    assert aggregate < 2e-9
    assert index < 1e-9


def test_appa_s_weights_are_right_without_the_heaviest_group():
    # histories .2 and .9, .9: with T = .1 the first has exp(7) = 1097 times the others' weight, and drops out
    config = config_of("appa", {"fairness-threshold": 2.0, "temperature": 0.1, "ema-decay": 0.0})
    groups, rule = Groups(config, 3), agg.configured(config.rule, config.appa)
    first = np.array([[0.2, 0.2], [0.9, 0.9], [0.9, 0.9]])
    state = rule.apply(rule.init(3), first, first).state
    groups.step({0, 1, 2}, first, first)
    second = np.array([[np.nan, np.nan], [0.4, 0.8], [0.6, 0.1]])
    expected = rule.apply(state, second, second)
    # weights of a half each: log((exp(.2) + exp(.3)) / 2) and so on
    np.testing.assert_allclose(expected.aggregate_J[0], math.log((math.exp(0.2) + math.exp(0.3)) / 2))
    first_try = groups.terms({1, 2}, second, second)
    with pytest.raises(sums.Unsettled):
        sums.combine("appa", config.appa, groups.public, plain_sum(first_try), groups=2)
    groups.settle([1, 2])
    np.testing.assert_allclose(groups.step({1, 2}, second, second).aggregate_J, expected.aggregate_J, atol=2e-9)


def test_a_returning_group_that_the_weights_do_not_know_of_is_not_used():
    config = config_of("appa", {"fairness-threshold": 2.0, "ema-decay": 0.0})
    groups, reward_GJ = Groups(config, 3), np.array([[0.2], [0.9], [0.9]])
    groups.step({0, 1, 2}, reward_GJ, reward_GJ)
    groups.settle([1, 2])
    groups.step({1, 2}, reward_GJ, reward_GJ)
    with pytest.raises(sums.Unsettled):
        sums.combine(
            "appa", config.appa, groups.public, plain_sum(groups.terms({0, 1, 2}, reward_GJ, reward_GJ)), groups=3
        )


def test_no_number_of_a_group_makes_its_part_an_error():
    # an error would tell whose number it is that is beyond a bound of the server's choice
    found = {"a": np.array([0.5, np.nan, np.inf, -np.inf, 1.5])}
    summed = terms.unpack(terms.pack(found), {"a": (5,)}, groups=1)["a"]
    np.testing.assert_array_equal(summed, [0.5, 0.0, 1.0, -1.0, 1.0])


def test_a_group_without_a_lead_of_twelve_is_never_moved_by_the_floor():
    # after 40 iterations a gap of .1 times the step of 3 adds up to 12
    config = config_of("mix alone")
    groups, rule = Groups(config, 3), agg.configured("mix", config.appa)
    state, reward_GJ = rule.init(3), np.array([[0.4], [0.5], [0.5]])
    differences = []
    for _ in range(60):
        expected = rule.apply(state, reward_GJ, reward_GJ)
        state = expected.state
        found = groups.step({0, 1, 2}, reward_GJ, reward_GJ)
        differences.append(abs(found.aggregate_J[0] - expected.aggregate_J[0]))
    assert max(differences[:39]) < 2e-9
    assert max(differences) < 1e-5
    assert max(s.lead for s in groups.standings) - min(s.lead for s in groups.standings) < 14


@pytest.mark.parametrize(
    ("rule", "appa", "says"),
    [
        ("min", {}, "takes single groups' rewards"),
        ("alpha", {"alpha": -math.inf}, "takes single groups' rewards"),
        ("alpha", {"alpha": 14.5}, "takes single groups' rewards"),
        ("my_rules:Median", {}, "not known as sums"),
    ],
)
def test_rules_that_no_sum_gives_are_refused(rule, appa, says):
    section = Config.load({}).appa.model_copy(update=appa)
    with pytest.raises(UserError, match=says):
        terms.check_rule(rule, section)


def test_fairness_by_hand_and_as_from_single_rewards():
    # rewards .2 and .6: mean .4, deviation .2, CoV .5, 1 / 1.25
    found = sums.fairness_of_sums(np.array([0.8]), np.array([0.4]), groups=2)
    assert found == pytest.approx(0.8)
    reward_GJ = np.random.default_rng(1).uniform(0, 0.5, (4, 20))
    reward_GJ[:, 3], reward_GJ[:, 4] = 0.0, 0.25
    total = (reward_GJ.sum(axis=0), (reward_GJ**2).sum(axis=0))
    assert sums.fairness_of_sums(*total, groups=4) == pytest.approx(fairness_index(reward_GJ))
    assert sums.fairness_of_sums(np.array([1e-9]), np.array([0.0]), groups=2) == 1.0
