"""The audit of lies: honest runs end where they should, a lie pays where weights follow it, and the table says so."""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.analysis.aggregation import make
from appa_flwr.protocol.rewards import js
from experiments import liars, study


@pytest.fixture(scope="module")
def people() -> study.TrueTargets:
    """Two options and one question: three groups want the one, the fourth the other; the fourth lies."""
    target_GQK = np.array([[[0.9, 0.1]]] * 3 + [[[0.2, 0.8]]])
    return study.TrueTargets(target_GQK, np.ones((1, 2), dtype=bool), liar=3)


def ends(rule, people, lie="nobody"):
    scores_GQ = study.end_scores(rule, people, seed=0, visits=40_000, step=1e-3, sent=liars.lying(people, lie))
    return scores_GQ.mean(axis=1)


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
    gain = {
        name: ends(liars.RULES[name], people, "half")[3] - ends(liars.RULES[name], people)[3]
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
    people = study.true_targets(0, num_questions=20, num_groups=4)
    score_GQ = js(people.target_GQK.mean(0), people.target_GQK, people.option_QK)
    assert people.liar == int(np.argmin(score_GQ.mean(1)))
    np.testing.assert_allclose(people.target_GQK.sum(-1), 1.0)


def test_the_liar_s_gain_is_its_own_and_the_others_the_mean_of_theirs(monkeypatch, tmp_path):
    """Honest groups end with .8, .6 and .7; the lie adds .1, .03 and .01 of which the second group's is the liar's."""

    def ends(rule, people, *, sent, **_):
        return np.array([[0.8], [0.6], [0.7]]) + (0.0 if sent is None else np.array([[0.1], [0.03], [0.01]]))

    monkeypatch.setattr(liars, "RULES", {"average": make("average")})
    monkeypatch.setattr(study, "end_scores", ends)
    monkeypatch.setattr(study, "true_targets", lambda *_, **__: study.TrueTargets(np.empty(0), np.empty(0), liar=1))
    liars.main(seeds=2, output=tmp_path)
    row = (tmp_path / "liars.md").read_text().strip().splitlines()[-1]
    gains = "| +0.030 ± 0.000 | +0.055 ± 0.000 " * len(liars.LIES)
    assert row == f"| average | 0.700 ± 0.000 | 0.600 ± 0.000 {gains}|"
