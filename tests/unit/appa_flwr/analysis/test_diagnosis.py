"""Diagnosis of a survey: what it counts, which rules end elsewhere than the mean, which group makes the gap."""

from __future__ import annotations

import math

import numpy as np
import pytest

from appa_flwr.analysis.destinations import rules
from appa_flwr.analysis.diagnosis import diagnose
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.survey.types import Question, Survey

EVERY_RULE = rules(Config.load({"appa.fairness-threshold": 0.99, "appa.temperature": 0.02}))
RULES = {name: EVERY_RULE[name] for name in ("average", "min", "appa", "mix", "appa-open")}


def survey_of(*answers, options=2):
    """A survey with these answers, a list of distributions (or None) for each group."""
    count = len(answers[0])
    names = tuple("abc"[:options])
    questions = tuple(Question(f"q{n}", f"What of {n}?", names) for n in range(count))
    given = {
        f"group {g}": {f"q{n}": np.array(shares) for n, shares in enumerate(mine) if shares is not None}
        for g, mine in enumerate(answers)
    }
    return Survey(questions, given)


def diagnosed(survey, rules=RULES):
    """Counts, differences, and rows by rule and by the group that is left out."""
    counts, differences, by_rule, without = diagnose(survey, metric="js", rules=rules)
    return counts.iloc[0].tolist(), differences.iloc[0], by_rule.set_index("Rule"), without.set_index("Without group")


GAP, TAKEN = "Most a rule can win", "Plain mean taken"


def test_groups_that_agree_leave_no_rule_anything_to_win():
    alike = [[0.3, 0.7], [0.6, 0.4]] * 10
    _, differences, rules, without = diagnosed(survey_of(alike, alike, alike))
    assert differences[GAP] == pytest.approx(0, abs=1e-6)
    assert differences["Rules can differ"] == "no"
    assert (rules["Min AS"] > 0.99).all()
    assert rules.loc["appa", TAKEN] == 1.0
    assert without[GAP].tolist() == pytest.approx([0, 0, 0], abs=1e-6)


def test_a_minority_that_wants_the_opposite_is_worth_a_rule_and_is_named():
    many, few = [[0.9, 0.1]] * 20, [[0.1, 0.9]] * 20
    _, differences, rules, without = diagnosed(survey_of(many, many, many, few))
    # the mean of the groups serves the majority, the fairest answer lies in the middle
    assert differences[GAP] > 0.1
    assert differences["Rules can differ"] == "yes"
    over = rules["Min AS minus average's"]
    assert all(over[rule].low > 0.05 for rule in ("min", "mix", "appa-open"))
    assert (over["average"].value, over["average"].low, over["average"].high) == (0, 0, 0)
    # without the minority nobody disagrees; without one of the majority the gap stays
    assert without.loc["group 3"].tolist() == [20, pytest.approx(0, abs=1e-6)]
    assert without.index[0] == "group 3"
    assert all(without.loc[f"group {g}", GAP] > 0.05 for g in range(3))


def test_sparse_surveys_are_counted_and_groups_without_an_answer_tell_nothing_apart():
    one, other = [[0.9, 0.1]] * 10, [[0.2, 0.8]] * 10
    counts, differences, _, without = diagnosed(survey_of([*one, *[None] * 20], [*other, *one, *other]))
    assert counts == [30, 10, 10, 10]
    assert without.empty
    assert differences.equals(diagnosed(survey_of(one, other))[1])
    counts, _, _, without = diagnosed(survey_of(one, other, [*one[:5], *[None] * 5]))
    assert counts[2] == without.loc["group 2", "Its answers"] == 5


def test_a_group_that_shares_no_question_with_two_others_leaves_them_nothing_to_compare():
    shares = [[0.9, 0.1]] * 4
    survey = survey_of([*shares, *[None] * 4], [*[None] * 4, *shares], shares + shares)
    gaps = diagnosed(survey)[3][GAP]
    assert math.isnan(gaps["group 2"])
    assert gaps["group 0"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("answers", [[[[0.3, 0.7]] * 4], [[[0.3, 0.7], None], [None, [0.4, 0.6]]]])
def test_one_group_has_nobody_to_be_compared_with(answers):
    with pytest.raises(UserError, match="answered by two groups"):
        diagnosed(survey_of(*answers))


def test_of_many_groups_none_is_left_out_in_turn_and_some_questions_are_drawn_for_the_rules():
    few = {name: RULES[name] for name in ("average", "appa")}
    counts, _, _, without = diagnosed(survey_of(*[[[0.3, 0.7], [0.6, 0.4]] * 30] * 40), few)
    assert counts == [60, 60, 60, 40]
    assert without.empty
