"""What a report says first: which of two rules serves the worst-served group better, or that it cannot be told."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from report_runs import PNG_START
from test_comparison import GROUPS, QUESTIONS, scored

from appa_flwr.report import build, second_rule
from appa_flwr.report.artifacts import read_run
from appa_flwr.run import pair_scores


def two_rules(folder, *, above, ended=True, best=None):
    """A run by `mix` with the baseline's policy, which scores .55 for the worst group; `mix` adds so much to each."""
    run = scored(folder / "r", above=above, rule="mix", **{"baseline-rule": "average"})
    baseline = scored(run / "average", rule="average", **{"baseline-rule": ""})
    if ended:
        last = {"phase": "report", "step": 1, "of": 1, "message": "", "seconds_left": None}
        (baseline / "progress.jsonl").write_text(json.dumps(last) + "\n")
    if best is not None:
        reward = np.full((len(GROUPS), len(QUESTIONS)), best)
        frames = [
            pair_scores.as_rows("ceiling-min", "js", against, reward, groups=GROUPS, questions=QUESTIONS)
            for against in ("predictions", "survey")
        ]
        pair_scores.put(run, pd.concat(frames))
    return read_run(run)


@pytest.mark.parametrize(
    ("above", "says"), [(0.05, "served better by"), (-0.05, "served worse by"), (0.0, "cannot be")]
)
def test_the_first_sentence_says_which_rule_is_better_or_that_it_cannot_be_told(above, says, tmp_path):
    survey, predictions = second_rule.second_rule(two_rules(tmp_path, above=above))
    assert (survey.ours.against, predictions.ours.against) == ("survey", "predictions")
    for measure, other in (("Min AS", 0.55), ("Avg AS", 0.65)):
        assert survey.baseline.scores[measure].value == pytest.approx(other)
        assert survey.ours.scores[measure].value == pytest.approx(other + above)
        assert survey.ours.less_first[measure].low == pytest.approx(above)
    assert says in second_rule.sentence(survey)


def test_the_best_shared_answer_stands_beside_both_and_the_page_begins_with_them(tmp_path):
    run = two_rules(tmp_path, above=0.05, best=0.75)
    (survey, _) = second_rule.second_rule(run)
    assert "the best answer that all groups could share gives it 0.750" in second_rule.sentence(survey)
    assert [(name, round(score.value, 3)) for name, score in survey.rows][:2] == [("average", 0.55), ("mix", 0.6)]
    text = build(run.folder).read_text()
    assert text.index("served better by mix") < text.index('title="worst_group"') < text.index('class="facts"')
    assert (run.folder / "plots" / "worst_group.png").read_bytes().startswith(PNG_START)


def test_a_second_policy_that_is_not_there_or_not_finished_is_not_spoken_of(tmp_path):
    assert second_rule.second_rule(two_rules(tmp_path / "begun", above=0.05, ended=False)) == []
    assert second_rule.second_rule(read_run(scored(tmp_path / "alone", rule="mix"))) == []


def test_a_run_that_has_lost_its_scores_still_has_a_report(tmp_path):
    run = two_rules(tmp_path, above=0.05)
    (run.folder / "summary.json").unlink()
    assert "summary.json: the run was not evaluated" in build(run.folder).read_text()
