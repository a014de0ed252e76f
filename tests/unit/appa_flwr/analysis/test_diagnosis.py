"""What a survey says of rules before any training, on populations whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from appa_flwr.analysis import diagnosis
from appa_flwr.config import Config
from appa_flwr.survey.types import Question, Survey

RULES = diagnosis.rules(Config.load({}).appa)


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


def said(survey, **changes):
    found = diagnosis.diagnose(survey, metric="js", rules=RULES | changes)
    return found, " ".join(found.sentences(threshold=0.99))


def test_groups_that_agree_leave_no_rule_anything_to_win():
    alike = [[0.3, 0.7], [0.6, 0.4]] * 10
    found, text = said(survey_of(alike, alike, alike))
    assert found.stakes.gap == pytest.approx(0, abs=1e-6)
    assert found.agreement == pytest.approx(dict.fromkeys(found.agreement, 1.0))
    assert "WARNING: no rule can gain more than 0.01" in text
    assert "over the threshold 0.99, so rule appa as printed takes the plain mean" in text
    assert "in effect the plain mean on these groups: min, appa, mix, group-dro, nash, worst, appa-open." in text
    assert "one group alone" not in text


def test_a_minority_that_wants_the_opposite_is_worth_a_rule():
    many, few = [[0.9, 0.1]] * 20, [[0.1, 0.9]] * 20
    found, text = said(survey_of(many, many, many, few))
    # the mean of the groups serves the majority, the fairest answer lies in the middle
    assert found.stakes.gap > 0.1
    assert "WARNING: no rule" not in text
    assert "under the threshold" in text
    assert found.agreement["average"] == pytest.approx(1.0)
    assert found.agreement["worst"] < 0  # what pleases the minority displeases the others
    assert found.agreement["group-dro"] < 0.5
    assert found.agreement["appa"] < 0.5


def test_sparse_surveys_are_counted_and_groups_without_an_answer_tell_nothing_apart():
    one, other = [[0.9, 0.1]] * 10, [[0.2, 0.8]] * 10
    found, text = said(survey_of([*one, *[None] * 20], [*other, *one, *other]))
    assert (found.questions, found.compared, found.common) == (30, 10, 10)
    assert "Of 30 questions, 10 were answered by two groups or more and 10 by all." in text
    assert "most questions were answered by one group alone" in text
    whole, _ = said(survey_of(one, other))
    assert found.stakes == whole.stakes
    third, _ = said(survey_of(one, other, [*one[:5], *[None] * 5]))
    assert third.common == 5


def test_rules_are_tried_with_the_config_s_parameters():
    made = diagnosis.rules(Config.load({"appa.temperature": 0.5, "appa.worst-share": 1.0}).appa)
    assert made["appa"].temperature == made["appa-open"].temperature == 0.5
    assert (made["appa"].fairness_threshold, made["appa-open"].fairness_threshold) == (0.99, 1.1)
    assert made["mix"].worst_share == 1.0


def test_one_batch_of_rollouts_tells_which_rules_would_make_a_difference():
    # Three groups of one mind, one that wants the opposite, one that is missing.
    like_J = np.linspace(0.2, 0.9, 8)
    reward_GJ = np.stack([like_J, like_J, like_J, 1.0 - like_J, np.full(8, np.nan)])
    found = diagnosis.rollout_agreement(Config.load({}).appa, reward_GJ)
    assert set(found) == set(RULES)
    assert found["average"] == pytest.approx(1.0)
    assert found["worst"] == pytest.approx(-1.0)  # the worst-served group alone
    assert diagnosis.plain_means({"average": 1.0, "appa": 0.995, "min": 0.9, "nash": float("nan")}) == ["appa"]
