"""The audit of lies: honest runs end where they should, a lie pays where weights follow it, and the table says so."""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.aggregation import make
from appa_flwr.rewards import js
from experiments import liars, stand_in


@pytest.fixture(scope="module")
def people() -> stand_in.Population:
    """Two options and one question: three groups want the one, the fourth the other; the fourth lies."""
    target_GQK = np.array([[[0.9, 0.1]]] * 3 + [[[0.2, 0.8]]])
    return stand_in.Population(target_GQK, np.ones((1, 2), dtype=bool), liar=3)


def ends(rule, people, lie=None):
    return stand_in.trained(rule, people, iterations=1500, seed=0, lie=lie, step=5e-4).mean(axis=1)


def best(people, worth):
    """The scores at the best of many answers, by what they are worth."""
    share = np.linspace(0.001, 0.999, 999)
    answer_JK = np.stack([share, 1 - share], axis=1)
    score_GJ = js(answer_JK, people.target_GQK, people.option_QK)
    return score_GJ[:, np.argmax(worth(score_GJ))]


def test_honest_runs_end_where_the_rule_is_best(people):
    assert people.liar == 3
    np.testing.assert_allclose(ends(make("average"), people), best(people, lambda s_GJ: s_GJ.mean(0)), atol=0.02)
    np.testing.assert_allclose(ends(make("min"), people), best(people, lambda s_GJ: s_GJ.min(0)), atol=0.02)


def test_half_the_reward_pays_where_weights_follow_it(people):
    half = liars.LIES["half"]
    gain = {
        name: ends(liars.RULES[name], people, half)[3] - ends(liars.RULES[name], people)[3]
        for name in ("average", "group-dro", "group-dro, cap 2")
    }
    assert gain["average"] < 0.01  # half the reward is half the weight
    assert gain["group-dro"] > 0.05
    assert gain["group-dro, cap 2"] < gain["group-dro"]


def test_lies_are_what_they_say():
    reward_J = np.array([0.5, 0.6, 0.7])
    np.testing.assert_allclose(liars.LIES["half"](reward_J), [0.25, 0.3, 0.35])
    np.testing.assert_allclose(liars.LIES["zero"](reward_J), [0, 0, 0])
    np.testing.assert_allclose(liars.LIES["stretched"](reward_J), [0.3, 0.6, 0.9])


def test_the_liar_is_whom_the_mean_serves_worst():
    people = stand_in.population(0, num_questions=20, num_groups=4)
    score_GQ = js(people.target_GQK.mean(0), people.target_GQK, people.option_QK)
    assert people.liar == int(np.argmin(score_GQ.mean(1)))
    np.testing.assert_allclose(people.target_GQK.sum(-1), 1.0)


def test_the_table_has_the_means_over_populations(monkeypatch):
    monkeypatch.setattr(liars, "RULES", {"average": make("average")})
    records = [
        {"rule": "average", "lie": lie, "avg_as": 0.9, "min_as": 0.8 + 0.02 * seed, "liar": 0.1 * seed, "others": -0.01}
        for lie in liars.LIES
        for seed in (0, 1)
    ]
    row = liars.table(records).splitlines()[-1]
    # .80 and .82, for each of three lies; 0 and .1 have the standard deviation .0707
    assert row.startswith("| average | 0.900 ± 0.000 | 0.810 ± 0.011 | +0.050 ± 0.071 | -0.010 ± 0.000 |")
