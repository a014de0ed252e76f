"""Where each rule ends: at the ceilings, from any metric, with holes and with lies; and what a diagnosis says of it.

Axis letters: G groups, Q questions, K options, J answers.
"""

import numpy as np
import pytest

from appa_flwr.analysis.free_answers import destination, diagnose, rules, verdict
from appa_flwr.analysis.rule_choice import make
from appa_flwr.config import Config
from appa_flwr.survey.types import Question, Survey

OPTIONS = np.arange(4) < np.array([2, 3, 4, 4, 2, 3, 4, 3])[:, None]
RULES = {"average": make("average"), "mix": make("mix", worst_share=1.0)}
OVER, TAKEN = "Min AS minus average's", "Plain mean taken"


def targets() -> np.ndarray:
    """Four groups of one mind but for the last."""
    rng = np.random.default_rng(0)
    share_GQK = rng.gamma(1.0, size=(1, *OPTIONS.shape)) * np.ones((4, 1, 1)) + 0.05
    share_GQK[-1] = rng.gamma(0.5, size=OPTIONS.shape) + 0.05
    share_GQK *= OPTIONS
    return share_GQK / share_GQK.sum(2, keepdims=True)


def survey_of(answers_GQK) -> Survey:
    """A survey with these shares, whose zeros at the end are no options; None or NaN where a group has no answer."""
    answers = {
        f"group {g}": {
            f"q{q}": np.trim_zeros(np.array(shares), "b")
            for q, shares in enumerate(mine)
            if shares is not None and not np.isnan(shares).any()
        }
        for g, mine in enumerate(answers_GQK)
    }
    sizes = {name: len(shares) for mine in answers.values() for name, shares in mine.items()}
    names = [f"q{q}" for q in range(len(answers_GQK[0]))]
    return Survey(tuple(Question(name, f"{name}?", tuple("abcd"[: sizes[name]])) for name in names), answers)


def diagnosed(answers_GQK, metric="js", rules=RULES):
    counts, by_rule = diagnose(survey_of(answers_GQK), metric=metric, rules=rules)
    return counts.iloc[0].tolist(), by_rule.set_index("Rule")


@pytest.mark.parametrize("metric", ["js", "wasserstein", "cosine"])
def test_the_mean_ends_at_its_ceiling_and_the_worst_group_s_rule_near_the_other(metric):
    _, found = diagnosed(targets(), metric)
    best, fairest = found.loc["ceiling-average", "Avg AS"], found.loc["ceiling-min", "Min AS"]
    assert best - 0.02 < found.loc["average", "Avg AS"] <= best + 1e-6
    assert fairest - 0.03 < found.loc["mix", "Min AS"] <= fairest + 1e-6
    over = found.loc["mix", OVER]
    assert over.value == pytest.approx(found.loc["mix", "Min AS"] - found.loc["average", "Min AS"])
    assert over.low > 0
    assert (found.loc["average", OVER].low, found.loc["average", OVER].high) == (0, 0)


def test_the_threshold_is_counted_only_where_there_is_one_and_falling_back_ends_where_the_mean_does():
    tried = [make("average"), *(make("appa", fairness_threshold=tau) for tau in (0.5, 1.1))]
    average, always, never = (destination(rule, targets(), OPTIONS, metric="js", seed=0, visits=50) for rule in tried)
    assert (average.fell_back, always.fell_back, never.fell_back) == (None, 1.0, 0.0)
    np.testing.assert_array_equal(average.answer_QK, always.answer_QK)


def test_opposed_clusters_of_unequal_size_have_the_gap_worked_by_hand():
    # By Wasserstein the average is best at the majority's .9: the minority scores .2; halfway all have .6.
    answers_GQK = [[[0.9, 0.1]] * 20] * 3 + [[[0.1, 0.9]] * 20]
    _, found = diagnosed(answers_GQK, "wasserstein", {**RULES, "appa": make("appa", fairness_threshold=0.1)})
    assert found.loc[["ceiling-average", "ceiling-min"], "Min AS"].tolist() == pytest.approx([0.2, 0.6], abs=1e-4)
    assert found.loc["mix", OVER].low > 0.3
    says = f"up to {0.6 - found.loc['average', 'Min AS']:+.3f} over average, of which appa reaches +0.000"
    assert says in verdict(found.reset_index(), rule="appa")
    alike = diagnosed([[[0.9, 0.1]] * 20] * 4, "wasserstein")[1].reset_index()
    assert "cannot differ here: at most +0.000" in verdict(alike, rule="mix")
    assert found.loc["appa", TAKEN] == 1.0


def test_answers_that_are_not_there_neither_pull_nor_score_and_questions_of_one_group_are_left_out():
    one, other = [[0.9, 0.1]] * 10, [[0.2, 0.8]] * 10
    counts, found = diagnosed([[*one, *[None] * 20], [*other, *one, *other]])
    assert counts == [30, 10, 10]
    assert found.equals(diagnosed([one, other])[1])
    holed_GQK = targets()
    holed_GQK[-1, :4] = np.nan
    # the others' mean is all there is to meet there
    filled_GQK = np.where(np.isnan(holed_GQK), np.nanmean(holed_GQK, axis=0), holed_GQK)
    ends = [destination(make("average"), each, OPTIONS, metric="js", seed=0) for each in (holed_GQK, filled_GQK)]
    np.testing.assert_array_equal(ends[0].answer_QK, ends[1].answer_QK)


def test_of_many_questions_some_are_drawn_and_rankings_have_no_ceilings():
    counts, found = diagnosed([[[0.3, 0.7], [0.6, 0.4]] * 30] * 40, "borda", rules={"average": make("average")})
    assert counts == [60, 60, 40]  # 1,600 pairs
    assert [*found.index] == ["average"]


def test_every_rule_but_alpha_is_tried_with_the_config_s_parameters():
    made = rules(Config.load({"appa.temperature": 0.5, "appa.worst-share": 1.0, "baseline-rules": "min"}))
    assert [*made] == ["average", "min", "appa", "appa-printed", "mix"]
    assert (made["appa"].temperature, made["mix"].worst_share) == (0.5, 1.0)
    asked = rules(Config.load({"rule": "alpha", "appa.alpha": -2.0}))
    assert asked["alpha"].alpha == -2.0
