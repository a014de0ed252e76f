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


def said(survey):
    found = diagnose(survey, metric="js", rules=RULES)
    return found, " ".join(found.sentences(threshold=0.99))


def test_groups_that_agree_leave_no_rule_anything_to_win():
    alike = [[0.3, 0.7], [0.6, 0.4]] * 10
    found, text = said(survey_of(alike, alike, alike))
    assert found.differences.gap == pytest.approx(0, abs=1e-6)
    assert all(end.min_as > 0.99 for end in found.ends.values())
    assert "WARNING: no rule can gain more than 0.01" in text
    assert "WARNING: as configured, appa takes the plain mean in 100% of the iterations" in text
    assert "one group alone" not in text
    assert [gap for _, gap in found.without.values()] == pytest.approx([0, 0, 0], abs=1e-6)


def test_a_minority_that_wants_the_opposite_is_worth_a_rule_and_is_named():
    many, few = [[0.9, 0.1]] * 20, [[0.1, 0.9]] * 20
    found, text = said(survey_of(many, many, many, few))
    # the mean of the groups serves the majority, the fairest answer lies in the middle
    assert found.differences.gap > 0.1
    assert "WARNING: no rule" not in text
    for rule in ("min", "mix", "appa-open"):
        assert found.ends[rule].over_average.low > 0.05
    over = found.ends["average"].over_average
    assert (over.value, over.low, over.high) == (0, 0, 0)
    # without the minority nobody disagrees; without one of the majority the gap stays
    answers, gap = found.without["group 3"]
    assert (answers, gap) == (20, pytest.approx(0, abs=1e-6))
    assert all(found.without[f"group {g}"][1] > 0.05 for g in range(3))


def test_sparse_surveys_are_counted_and_groups_without_an_answer_tell_nothing_apart():
    one, other = [[0.9, 0.1]] * 10, [[0.2, 0.8]] * 10
    found, text = said(survey_of([*one, *[None] * 20], [*other, *one, *other]))
    assert (found.questions, found.compared, found.common) == (30, 10, 10)
    assert "Of 30 questions, 10 were answered by two groups or more and 10 by all." in text
    assert "most questions were answered by one group alone" in text
    assert found.without == {}
    whole, _ = said(survey_of(one, other))
    assert found.differences == whole.differences
    third, _ = said(survey_of(one, other, [*one[:5], *[None] * 5]))
    assert third.common == 5
    assert third.without["group 2"][0] == 5


def test_a_group_that_shares_no_question_with_two_others_leaves_them_nothing_to_compare():
    shares = [[0.9, 0.1]] * 4
    found, _ = said(survey_of([*shares, *[None] * 4], [*[None] * 4, *shares], shares + shares))
    assert math.isnan(found.without["group 2"][1])
    assert found.without["group 0"][1] == pytest.approx(0, abs=1e-6)


def test_one_group_has_nobody_to_be_compared_with():
    with pytest.raises(UserError, match="answered by two groups"):
        said(survey_of([[0.3, 0.7]] * 4))
    with pytest.raises(UserError, match="answered by two groups"):
        said(survey_of([[0.3, 0.7], None], [None, [0.4, 0.6]]))


def test_of_very_many_groups_none_is_left_out_in_turn():
    found, _ = said(survey_of(*[[[0.5, 0.5]] * 3] * 30))
    assert found.without == {}
    assert found.compared == 3


def test_of_many_pairs_some_questions_are_drawn_for_the_rules():
    shares = [[0.3, 0.7], [0.6, 0.4]] * 60
    few = {name: RULES[name] for name in ("average", "appa")}
    found = diagnose(survey_of(*[shares] * 20), metric="js", rules=few)
    assert (found.tried, found.compared) == (80, 120)
    assert "Rules were tried on 80." in " ".join(found.sentences(threshold=0.99))
