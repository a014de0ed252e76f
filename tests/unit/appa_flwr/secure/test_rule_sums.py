"""Rules by sums against the plain rules, iteration by iteration, and a server that asks for histories."""

import math
from contextlib import nullcontext

import numpy as np
import pytest

from appa_flwr.analysis import rules as agg
from appa_flwr.analysis.equations import fairness_index
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol.refusals import OTHER_REFERENCE, PAST, Refused
from appa_flwr.secure import rule_sums
from appa_flwr.secure.masks import FRACTION_BITS

ALPHAS = (1e-12, -1e-7, 0.3, -2.5, 14.0, -14.0)
RULES = {
    "average": {},
    **{f"alpha {alpha}": {"alpha": alpha} for alpha in ALPHAS},
    "appa": {"fairness-threshold": 2.0},
    "appa printed": {"fairness-threshold": 0.97, "temperature": 0.1},
    "appa without memory": {"fairness-threshold": 2.0, "temperature": 0.1, "ema-decay": 0.0},
}


def config_of(name):
    return Config.load({"rule": name.split()[0], **{f"appa.{key}": value for key, value in RULES[name].items()}})


class Groups:
    """All groups of a run, with facts of their own, and the plain rule beside them."""

    def __init__(self, name, number, *, begin=None):
        config = config_of(name)
        self.rule, self.appa = config.rule, config.appa
        self.plain = agg.configured(config.rule, config.appa)
        self.plain_state, self.facts = self.plain.init(number), [{} for _ in range(number)]
        self.state = rule_sums.first(self.rule, self.appa, begin or number)

    def before(self, group, state, **changed):
        request = {"reference": state.reference, "completed": state.completed}
        return rule_sums.before(self.facts[group], run="run", rule=self.rule, **{**request, **changed})

    def sums(self, present, reward_GJ, training_GJ, task):
        """The groups' numbers added up as words, and their histories written down."""
        now, words = self.state, {}
        for group in present:
            numbers, after = rule_sums.terms(
                self.rule,
                self.appa,
                reference=now.reference,
                iteration=len(now.completed) + 1,
                history=self.before(group, now),
                reward_J=reward_GJ[group],
                training_J=training_GJ[group],
            )
            rule_sums.remember(
                self.facts[group], run="run", rule=self.rule, completed=now.completed, task=task, history=after
            )
            for name, values in numbers.items():
                assert ((values >= 0) & (values <= 1)).all()
                words[name] = words.get(name, 0) + np.rint(np.ldexp(values, FRACTION_BITS))
        return {name: np.ldexp(word, -FRACTION_BITS) for name, word in words.items()}

    def step(self, reward_GJ, present=None):
        """By sums and plainly; how far apart rewards and index are."""
        present = range(len(self.facts)) if present is None else sorted(present)
        training_GJ = np.where(reward_GJ == 0, 0.0, 0.85 * reward_GJ + 0.15)
        missing = np.setdiff1d(np.arange(len(reward_GJ)), present)
        plain = [array.copy() for array in (reward_GJ, training_GJ)]
        for array in plain:
            array[missing] = np.nan
        expected = self.plain.apply(self.plain_state, *plain)
        task = f"task {len(self.state.completed) + 1}"
        sums = self.sums(present, reward_GJ, training_GJ, task)
        result = rule_sums.combine(self.rule, self.appa, self.state, sums, groups=len(present), task=task)
        self.plain_state, self.state = expected.state, result.state
        self.fell_back = result.fell_back, expected.fell_back
        return (
            np.abs(result.aggregate_J - expected.aggregate_J).max(),
            abs(result.fairness_index - expected.fairness_index),
        )


def normal(mean_G, deviation, answers, *, rng):
    mean_G = np.asarray(mean_G)
    return np.clip(rng.normal(mean_G[:, None], deviation, (len(mean_G), answers)), 0, 1)


REWARDS = {
    "uniform": lambda rng: (
        rng.uniform(0, 1, (6, 7)) * (rng.uniform(size=7) < 0.9)
    ),  # an answer that nobody can read is 0
    "near 1": lambda rng: normal([0.98] * 6, 0.02, 12, rng=rng),
    "far apart": lambda rng: normal([0.4, 0.5, 0.9, 0.95, 0.97, 0.99], 0.05, 12, rng=rng),
    "all lost at times": lambda rng: rng.uniform(0.7, 1, (6, 7)) * (rng.uniform() < 0.9),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("rewards", REWARDS)
def test_rewards_are_the_plain_rule_s_while_the_cohort_stands(name, rewards):
    rng, groups = np.random.default_rng(1), Groups(name, 6)
    for _ in range(200 if name == "appa" else 30):
        aggregate, index = groups.step(REWARDS[rewards](rng))
        assert aggregate < 1e-9
        assert index < 1e-9
        assert groups.fell_back[0] == groups.fell_back[1]


@pytest.mark.parametrize(("gone", "most"), [(0, 0.075), (2, 0.015), (5, 2e-4)])
def test_a_group_that_goes_and_returns_costs_digits_in_these_iterations_alone(gone, most):
    # Group 0 is the worst off, and has most weight. docs/privacy.md has the largest bound.
    changed, largest = [6, 8, 19, 20], 0.0
    for seed in range(5):
        rng, groups = np.random.default_rng(seed), Groups("appa", 6)
        apart = []
        for iteration in range(1, 31):
            present = set(range(6)) - ({gone} if iteration in (7, 8, 20) else set())
            apart.append(groups.step(normal(0.6 + 0.05 * np.arange(6), 0.15, 40, rng=rng), present)[0])
        largest = max(largest, *np.take(apart, changed))
        assert min(np.take(apart, changed)) > 1e-7
        assert max(np.delete(apart, changed)) < 1e-9
    assert 0.75 * most < largest < most


def test_weights_find_back_where_the_group_that_had_all_weight_is_gone_and_comes_again():
    # histories .2 and .9: at T = .02 the first has exp(35) times the weight of the others
    rng, groups = np.random.default_rng(0), Groups("appa", 4)
    apart, fell_back = [], []
    for present in [{0, 1, 2, 3}] * 20 + [{1, 2, 3}] * 20 + [{0, 1, 2, 3}] * 20:
        apart.append(groups.step(normal([0.2, 0.9, 0.9, 0.9], 0.02, 8, rng=rng), present)[0])
        fell_back.append(groups.fell_back[0])
    assert np.flatnonzero(fell_back).tolist() == [20, 21]
    np.testing.assert_allclose(apart[20:22], 0.62, atol=0.01)  # the mean of all stands for the worst-off group's reward
    assert max(apart[40:44]) < 0.073
    assert max(np.delete(apart, np.r_[20:24, 40:44])) < 1e-9


def test_a_latecomer_begins_with_its_own_mean():
    groups = Groups("appa", 4, begin=3)
    groups.step(np.full((4, 2), 0.5), {0, 1, 2})
    late = {"reference": 50.0, "history": groups.before(3, groups.state), "iteration": 2}
    reward_J = np.array([0.4, 0.6])
    numbers, after = rule_sums.terms("appa", groups.appa, **late, reward_J=reward_J, training_J=reward_J)
    # (1 - .5) / .02 = 25; nothing moves, so the next exponent is 25 less its largest rise, .2 * .2 / .02 = 2
    assert after == pytest.approx(0.5)
    np.testing.assert_allclose(np.log([numbers["weight"][0], numbers["next"][0]]), [25 - 50, 25 - 50 - 2])
    # one that was there has .2 * .5 of the first iteration
    assert groups.before(0, groups.state) == pytest.approx(0.1)


THREE = ("task 1", "task 2", "task 3")


def attacked():
    """Groups after three iterations, of which the first was asked for the fourth."""
    groups = Groups("appa", 3)
    for _ in range(3):
        groups.step(np.random.default_rng(0).uniform(size=(3, 5)))
    assert groups.before(0, groups.state) == groups.before(0, groups.state)  # a repeated request
    return groups


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"reference": 49.0}, OTHER_REFERENCE),  # bends of the weights over several would tell all histories
        ({"reference": math.nan, "completed": (*THREE, "task 4")}, OTHER_REFERENCE),
        ({"completed": (*THREE[:2], "unknown")}, OTHER_REFERENCE),
        ({"completed": THREE[:2]}, PAST),
        ({"completed": ()}, PAST),
        ({"completed": (*THREE[:2], "unknown", "unknown")}, PAST),  # the history of iteration 2
    ],
)
def test_an_iteration_that_would_tell_more_of_histories_is_refused(changed, reason):
    groups = attacked()
    with pytest.raises(Refused) as caught:
        groups.before(0, groups.state, **changed)
    assert caught.value.code == reason


def test_a_history_is_that_of_the_last_completed_task():
    groups = attacked()
    latest = groups.before(0, groups.state)
    memory = {"run": "run", "rule": "appa", "completed": THREE}
    for task, history in (("task 4", 0.25), ("task 4 again", 0.75)):  # two sums, of which one was completed
        rule_sums.remember(groups.facts[0], **memory, task=task, history=history)
    assert groups.before(0, groups.state, completed=(*THREE, "task 4")) == 0.25
    assert groups.before(0, groups.state, completed=(*THREE, "task 4", "without it"), reference=1.0) == 0.25
    # a task of the past brings no history back: it counts as one without the group
    assert attacked().before(0, groups.state, completed=(*THREE, "task 2")) == latest


@pytest.mark.parametrize(("run", "rule", "task"), [("x", "appa", "task"), ("x appa y", "average", "task"),
                                                   ("x", "appa", "y appa task")])  # fmt: skip
def test_a_run_and_a_rule_have_histories_of_their_own(run, rule, task):
    # Attack: each run would bring the reference of its own for the same history.
    facts, request = {}, {"reference": 1.0, "rule": "appa", "run": "x appa y"}
    rule_sums.before(facts, **request, completed=())
    rule_sums.remember(facts, run="x appa y", rule="appa", completed=(), task="task", history=0.5)
    assert rule_sums.before(facts, **{**request, "run": run, "rule": rule}, completed=(task,)) is None


def test_no_term_is_above_1_by_rounding():
    appa, ones_J = Config.load({}).appa, np.ones(64)
    numbers, _ = rule_sums.terms(
        "appa", appa, reference=0.0, iteration=2, history=0.0, reward_J=ones_J, training_J=ones_J
    )
    assert numbers["weight"][0] == 1
    assert numbers["term"].max() <= 1


@pytest.mark.parametrize(
    ("keys", "groups", "says"),
    [
        ({"rule": "min"}, None, "rule=min .*appa.alpha=-14"),
        ({"baseline-rules": "mix"}, None, "rule=mix .*average, appa and alpha"),
        ({"rule": "my_rules:Median"}, None, "rule=my_rules:Median .*average, appa and alpha"),
        ({"rule": "alpha", "appa.alpha": -math.inf}, None, "appa.alpha in size is inf"),
        ({"rule": "alpha", "appa.alpha": 14.5}, None, "is 14.5; .* at most 14"),
        ({"appa.temperature": 0.01}, None, "temperature is 20; .* at most 14"),
        ({"sft.target": "mean"}, None, "predicted-mean"),
        ({"task": "opa", "sft.target": "majority"}, None, "votes"),
        ({"run.phases": "serve"}, None, r"run\.phases=serve"),
        ({}, 2, "2 groups: .* 3 to 64"),
        ({}, 65, "65 groups: .* 3 to 64"),
        *(({}, groups, None) for groups in (3, 64, None)),
    ],
)
def test_what_no_sum_holds_is_refused_in_one_line(keys, groups, says):
    with nullcontext() if says is None else pytest.raises(UserError, match=f"^(?!.*\n).*{says}"):
        rule_sums.check_config(Config.load({"run.sums": "secure", **keys}), groups=groups)
    rule_sums.check_config(Config.load({"run.sums": "plain", **keys}), groups=groups)


# all are lost, alike, nearly lost; one of many is served
@pytest.mark.parametrize(("one", "others"), [(0.0, 0.0), (0.25, 0.25), (1e-5, 0.0), (0.4, 0.0), (0.4, 0.3)])
def test_fairness_is_that_of_single_rewards(one, others):
    reward_GJ = np.full((200, 2), others)
    reward_GJ[0] = one
    reward_GJ[:, 1] = np.linspace(0.1, 0.9, 200)
    found = rule_sums.fairness_of_sums(reward_GJ.sum(axis=0), (reward_GJ**2).sum(axis=0), groups=200)
    assert found == pytest.approx(fairness_index(reward_GJ))
