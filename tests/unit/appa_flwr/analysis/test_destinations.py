"""Where each rule ends: at the ceilings that are known otherwise, from any metric, with holes and with lies.

Axis letters: G groups, Q questions, K options, J answers.
"""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.analysis.aggregation import Rule, make
from appa_flwr.analysis.ceilings import shared_answer
from appa_flwr.analysis.destinations import destination, ends, rules
from appa_flwr.config import Config
from appa_flwr.protocol.rewards import METRICS, js

OPTIONS = np.arange(4) < np.array([2, 3, 4, 4, 2, 3, 4, 3])[:, None]


def targets(seed: int = 0, groups: int = 4) -> np.ndarray:
    """Groups of one mind but for the last."""
    rng = np.random.default_rng(seed)
    share_GQK = rng.gamma(1.0, size=(1, *OPTIONS.shape)) * np.ones((groups, 1, 1)) + 0.05
    share_GQK[-1] = rng.gamma(0.5, size=OPTIONS.shape) + 0.05
    share_GQK *= OPTIONS
    return share_GQK / share_GQK.sum(2, keepdims=True)


def reached(rule: Rule, target_GQK: np.ndarray, *, metric: str, against: np.ndarray | None = None):
    found = {one.name: destination(one, target_GQK, OPTIONS, metric=metric, seed=0) for one in (make("average"), rule)}
    rows = ends(found, target_GQK if against is None else against, OPTIONS, metric=metric)
    return rows.set_index("Rule").loc[rule.name, ["Avg AS", "Min AS", "Min AS minus average's"]]


@pytest.mark.parametrize("metric", ["js", "wasserstein", "cosine"])
def test_the_mean_ends_at_its_ceiling_and_the_worst_group_s_rule_near_the_other(metric):
    target_GQK = targets()
    best_GQ, fairest_GQ = (
        METRICS[metric](shared_answer(target_GQK, OPTIONS, metric=metric, objective=name), target_GQK, OPTIONS)
        for name in ("average", "min")
    )
    best, fairest = best_GQ.mean(), fairest_GQ.mean(axis=1).min()
    average = reached(make("average"), target_GQK, metric=metric)
    assert best - 0.02 < average["Avg AS"] <= best + 1e-6
    lifted = reached(make("mix", worst_share=1.0), target_GQK, metric=metric)
    assert fairest - 0.03 < lifted["Min AS"] <= fairest + 1e-6
    assert lifted["Min AS minus average's"].value == pytest.approx(lifted["Min AS"] - average["Min AS"])
    assert lifted["Min AS minus average's"].low > 0


def test_answers_are_shares_of_the_options_that_are_there():
    answer_QK = destination(make("mix"), targets(), OPTIONS, metric="js", seed=1, visits=20).answer_QK
    np.testing.assert_allclose(answer_QK.sum(1), 1.0)
    assert (answer_QK[~OPTIONS] == 0).all()
    assert (answer_QK[OPTIONS] > 0).all()


def test_the_threshold_is_counted_only_where_there_is_one_and_falling_back_ends_where_the_mean_does():
    rules_ = [make("average"), *(make("appa", fairness_threshold=tau) for tau in (0.5, 1.1))]
    average, always, never = (destination(rule, targets(), OPTIONS, metric="js", seed=0, visits=50) for rule in rules_)
    assert (average.fell_back, always.fell_back, never.fell_back) == (None, 1.0, 0.0)
    np.testing.assert_array_equal(average.answer_QK, always.answer_QK)


def test_what_the_groups_send_is_what_the_answers_follow():
    """The last group alone is heard where the others send nothing but the same."""

    def last_alone(reward_GJ):
        heard_GJ = np.full_like(reward_GJ, 0.5)
        heard_GJ[-1] = reward_GJ[-1]
        return heard_GJ

    target_GQK = targets()
    answer_QK = destination(make("average"), target_GQK, OPTIONS, metric="js", seed=0, sent=last_alone).answer_QK
    assert np.abs(answer_QK - target_GQK[-1]).max() < 0.1 < np.abs(answer_QK - target_GQK[0]).max()


def test_a_group_without_an_answer_neither_pulls_nor_scores():
    target_GQK = targets()
    holed_GQK = target_GQK.copy()
    holed_GQK[-1, :4] = np.nan
    end = reached(make("average"), target_GQK, metric="js", against=holed_GQK)
    answer_QK = destination(make("average"), target_GQK, OPTIONS, metric="js", seed=0).answer_QK
    known_Q = js(answer_QK[4:], target_GQK[-1, 4:], OPTIONS[4:])  # of the last group, the worst served
    assert end["Min AS"] == pytest.approx(known_Q.mean())
    filled = reached(make("average"), holed_GQK, metric="js")
    assert filled["Avg AS"] > end["Avg AS"]  # without those answers, the mean of the others is all there is to meet
    nobody_GQK = np.concatenate([holed_GQK, np.full((1, *OPTIONS.shape), np.nan)])
    assert reached(make("average"), target_GQK, metric="js", against=nobody_GQK).equals(end)


def test_rules_have_the_config_s_parameters_and_appa_s_other_forms_where_they_differ():
    made = rules(Config.load({"appa.temperature": 0.5, "appa.fairness-threshold": 0.9, "appa.worst-share": 1.0}))
    assert made["appa"].temperature == made["appa-open"].temperature == 0.5
    assert (made["appa"].fairness_threshold, made["appa-open"].fairness_threshold) == (0.9, 1.1)
    assert (made["appa-printed"].fairness_threshold, made["appa-printed"].temperature) == (0.99, 0.1)
    assert made["mix"].worst_share == 1.0
    assert "alpha" not in made
    assert "appa-open" not in rules(Config.load({"appa.fairness-threshold": 1.1}))
