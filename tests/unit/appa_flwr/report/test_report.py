"""What is read of a run folder and shown: what is missing, times, rules, the predictor."""

from __future__ import annotations

import json
import re

import pytest
import report_runs as made

from appa_flwr.core.errors import UserError
from appa_flwr.report import build, predictor
from appa_flwr.report.page import missing, provenance
from appa_flwr.run.read import read_run


def test_times_and_iterations_that_took_the_plain_mean_are_counted(tmp_path):
    # One iteration takes 1 + .5 + .25 + 2.25 = 4 s, .5 of it waiting.
    lines = [made.line(i, planned=4, fell_back=fell_back) for i, fell_back in enumerate((True, True, False, True), 1)]
    phases = [{"phase": "policy", "seconds": 80.4}, {"phase": "ppo", "seconds": 284.6}]
    facts = dict(provenance(made.read(tmp_path, metrics=lines, phases=phases)))
    assert re.findall(r"[\d.]+", facts["Plain mean taken"]) == ["3", "4"]
    assert facts["Waiting for groups"].startswith("12.5%")
    assert facts["Time"] == "6 min 5 s"
    without = [made.line(1, planned=1, fell_back=None)]
    assert "Plain mean taken" not in dict(provenance(made.read(tmp_path, metrics=without)))


def test_a_run_until_pluralllm_lacks_nothing(tmp_path):
    whole = made.fake_run(tmp_path / "whole", groups=made.COUNTRIES, iterations=3)
    content = {name: json.loads((whole / f"{name}.json").read_text()) for name in ("phases", "pluralllm")}
    assert made.read(tmp_path / "part", config={**made.CONFIG, "run.phases": "pluralllm"}, **content).examples == ()
    assert [*missing(read_run(tmp_path / "part"))] == []
    assert "seen / held-out" in made.page_of(tmp_path / "part")
    assert [*missing(made.read(tmp_path / "part", config={**made.CONFIG, "run.phases": "all"}))]


def test_groups_stand_worst_predicted_first_and_unseen_ones_last(tmp_path):
    scores = predictor.by_group(made.read_card(tmp_path, ("a", "b", "c"))).set_index("Group")["PluralLLM"]
    assert scores.to_dict() == {"c": 0.88, "b": 0.89, "a (unseen)": 0.9}
    assert [*scores.index] == ["c", "b", "a (unseen)"]


def test_the_mean_of_the_others_stands_beside_pluralllm_on_the_same_answers(tmp_path):
    scores = predictor.scores(made.read_card(tmp_path))
    assert scores[["Groups / questions", "Predictor", "JS", "Answers"]].to_numpy().tolist() == [
        ["seen / held-out", "PluralLLM", 0.93, "240"],
        ["seen / held-out", "Own nearest question", 0.88, "240"],
        ["seen / held-out", "Uniform answer", 0.79, "240"],
        ["seen / held-out", "Mean of the other groups", 0.94, "240"],
        ["unseen / held-out", "PluralLLM", 0.71, "240"],
        ["unseen / held-out", "Uniform answer", 0.69, "240"],
        ["unseen / held-out", "Mean of the other groups", 0.76, "180"],
        ["unseen / held-out", "PluralLLM, same answers", 0.72, "180"],
    ]


def test_a_run_that_stopped_midway_says_where_and_a_repeated_iteration_counts_once(tmp_path):
    lines = [made.line(i, planned=10, fell_back=branch) for i, branch in ((1, True), (2, True), (2, False))]
    run = made.read(tmp_path, metrics=lines)
    assert dict(missing(run))["Iterations"].startswith("2 of 10")
    assert run.iterations["fell_back"].tolist() == [True, False]


def test_pictures_are_not_written_through_a_link(tmp_path):
    folder = made.write_run(tmp_path / "run", config=made.CONFIG, pluralllm=made.predictor_card())
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (folder / "plots").symlink_to(theirs)
    with pytest.raises(UserError, match=f"^{folder / 'plots'}: is a link"):
        build(folder)
    assert list(theirs.iterdir()) == []
    (folder / "plots").unlink()
    build(folder)
    assert [path.name for path in (folder / "plots").iterdir()] == ["pluralllm.png"]


def test_a_broken_file_leaves_the_old_report_alone(tmp_path):
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(UserError, match=r"not a run folder, it has no config\.json"):
        build(tmp_path)
    made.write_run(tmp_path, config=made.CONFIG, summary=[made.row("ppo", 0.8, 0.7), made.row("ppo", 0.8, 0.7)])
    with pytest.raises(UserError, match=r"summary\.json: rows 1 and 2 .*'ppo'.*'js'"):
        build(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"


def test_what_was_left_to_the_run_is_shown_with_what_it_came_to(tmp_path):
    config = {"task": "opa", "policy.compute-dtype": "auto"}
    page = made.page_of(made.write_run(tmp_path, config=config, auto={"policy.compute-dtype": "bfloat16"}))
    for key, shown in (
        ("policy.compute-dtype", "auto (here bfloat16)"),
        ("policy.tuning", "full"),
    ):
        assert made.cells(page, key) == [key, shown]
    assert "<dt>Metric</dt><dd>borda</dd>" in page
