"""Runs beside each other: only what is scored alike is compared, pair by pair."""

import json

import numpy as np
import pandas as pd
import pytest
from report_runs import CONFIG, row, write_run
from small import cases

from appa_flwr.core.errors import UserError
from appa_flwr.report import frames
from appa_flwr.run import pair_scores

GROUPS, QUESTIONS = ("a", "b"), [f"q{number}" for number in range(40)]


def scored(folder, *, above=0.0, against=("survey", "predictions"), sha256="", **keys):
    """A run whose policy gives group a .6 and b .8, and `above` more to each; half the questions have .1 less."""
    reward_GQ = np.array([[0.6], [0.8]]) + above - np.where(np.arange(len(QUESTIONS)) % 2, 0.1, 0.0)
    avg, low = float(reward_GQ.mean()), float(reward_GQ.mean(1).min())
    summary = [row("ppo", avg, low, groups=GROUPS, against=kind) for kind in against]
    write_run(folder, config={**CONFIG, "survey": "s.jsonl", **keys}, summary=summary)
    rows = [pair_scores.as_rows("ppo", "js", kind, reward_GQ, groups=GROUPS, questions=QUESTIONS) for kind in against]
    pair_scores.put(folder, pd.concat(rows, ignore_index=True))
    if sha256:
        (folder / "survey.jsonl").write_text(json.dumps({"sha256": sha256}))
    return folder


def test_a_run_that_is_better_on_every_question_is_surely_better(tmp_path, appa):
    folders = [scored(tmp_path / "old"), scored(tmp_path / "new", above=0.05, rule="mix")]
    levels, minus = frames.compare(folders)
    assert levels["", "Rule"].tolist() == ["appa", "mix"]
    assert {*minus.columns.get_level_values(0)[1:]} == {"survey"}
    (found,) = minus.itertuples(index=False, name=None)
    # the same question has .05 more, so whichever are drawn the difference is the same
    for avg_or_min in (1, 2):
        assert [*vars(found[avg_or_min]).values()][:4] == pytest.approx([0.05] * 4)
    said = appa("report", *folders)
    assert said.count("+0.050 (+0.050") == 2
    assert "Minus old" in said


@pytest.mark.parametrize(("first", "second", "says"), cases("wrong_inputs")["comparison"]["rows"])
def test_runs_of_another_survey_are_refused(tmp_path, first, second, says):
    folders = [scored(tmp_path / "old", **first), scored(tmp_path / "new", **second)]
    with pytest.raises(UserError, match=says):
        frames.compare(folders)


def test_one_survey_in_two_places_is_one(tmp_path):
    places = (tmp_path / "old", tmp_path / "new", tmp_path / "new" / "average")  # the last by another rule
    folders = [scored(place, survey=f"{n}.jsonl", sha256="ab" * (n < 2)) for n, place in enumerate(places)]
    assert len(frames.compare(folders)[0]) == 3


def test_what_one_run_lacks_counts_in_none(tmp_path):
    folders = [scored(tmp_path / "x" / "run"), scored(tmp_path / "y" / "run", above=0.05)]
    kept = pair_scores.read(folders[1])
    pair_scores.put(folders[1], kept[(kept["group"] == "a") & kept["question"].isin(QUESTIONS[::2])])
    levels, _ = frames.compare(folders)
    # group a alone, on the questions without the .1 less; two runs of one name
    assert levels["Run"].tolist() == [*map(str, folders)]
    assert [span.value for span in levels["survey", "Avg AS"]] == pytest.approx([0.6, 0.65])
    assert [levels["", column].tolist() for column in ("Groups", "Questions")] == [[1, 1], [20, 20]]
    pair_scores.put(folders[1], kept.assign(question="another " + kept["question"]))
    with pytest.raises(UserError, match="no group and held-out question in common"):
        frames.compare(folders)


def test_a_run_without_scores_of_a_policy_by_survey_answers_is_refused(tmp_path):
    done = scored(tmp_path / "old")
    with pytest.raises(UserError, match="new: holds no scores of a policy after PPO against survey answers"):
        frames.compare([done, scored(tmp_path / "new", against=("predictions",))])
    policy = scored(tmp_path / "other")
    (policy / "summary.json").write_text("[]")  # the scores of another rule's policy would be this one's
    with pytest.raises(UserError, match="other: holds no scores of a policy after PPO"):
        frames.compare([done, policy])
    with pytest.raises(UserError, match="each run can be compared once"):
        frames.compare([done, done])
