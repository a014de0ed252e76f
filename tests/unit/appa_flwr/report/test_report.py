"""What is read of a run folder and shown: what is missing, times, rules, the predictor, the short form."""

from __future__ import annotations

import json
import re

import pytest
import report_runs as made

from appa_flwr.core.errors import UserError
from appa_flwr.report import build, frames, predictor
from appa_flwr.report.page import missing, provenance, short
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


@pytest.mark.parametrize(
    ("keys", "lost", "named"),
    [
        ({"eval.ceilings": False}, ("ceiling-average", "ceiling-min", "mean-prediction"), ""),
        ({}, ("ceiling-average", "ceiling-min"), "ceiling-average, ceiling-min"),
        ({}, ("majority",), "majority"),
        ({}, ("sft",), "sft"),
        ({"sft.checkpoint": "runs/other/sft-model"}, ("base",), ""),  # its scores stand in that model's run
    ],
)
def test_what_groups_refused_or_stands_elsewhere_is_told_apart(tmp_path, keys, lost, named):
    rest = {method: values for method, values in made.GOOD.items() if method not in lost}
    run = made.read(tmp_path, config={**made.CONFIG, **keys}, summary=made.summary(rest))
    said = dict(missing(run))
    assert said.get("Rows of summary.json", "") == named
    assert ("Why" in said) == (named not in ("", "sft"))  # owners may keep what the others take


@pytest.mark.parametrize(
    ("until", "files"), [("sft", ("summary", "phases", "pluralllm")), ("pluralllm", ("phases", "pluralllm"))]
)
def test_a_run_until_an_earlier_phase_lacks_nothing(tmp_path, until, files):
    whole = made.fake_run(tmp_path / "whole", groups=made.COUNTRIES, iterations=3)
    content = {name: json.loads((whole / f"{name}.json").read_text()) for name in files}
    if "summary" in content:
        content["summary"] = [row for row in content["summary"] if not row["method"].startswith("ppo")]
    assert made.read(tmp_path / "part", config={**made.CONFIG, "run.phases": until}, **content).examples == ()
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
    config = {"task": "opa", "ppo.num-iterations": 0, "run.min-groups": 2, "policy.compute-dtype": "auto"}
    auto = {"policy.compute-dtype": "bfloat16"}
    lines = [made.line(1, planned=107, fell_back=None)]
    page = made.page_of(made.write_run(tmp_path, config=config, metrics=lines, auto=auto))
    for key, shown in (
        ("metric", "auto (here borda)"),
        ("ppo.num-iterations", "0 (here 107)"),
        ("policy.compute-dtype", "auto (here bfloat16)"),
        ("policy.tuning", "full"),
    ):
        assert made.cells(page, key) == [key, shown]
    assert read_run(tmp_path).metric == "borda"


def test_the_short_report_has_headline_scores_and_how_to_have_it_again(tmp_path):
    folder = made.scored_run(tmp_path / "a_b|c", ppo=(0.8604, 0.8))
    line = {"phase": "machine", "step": 1, "of": 1, "message": "2 cores, no GPU", "seconds_left": None}
    (folder / "progress.jsonl").write_text(json.dumps(line) + "\n")
    run = read_run(folder)
    lines = short(run, frames.of_run(run)).splitlines()
    assert lines[0] == r"## a\_b\|c"
    assert "+0.030" in lines[2]  # .800 less SFT's .770
    (head,) = [line for line in lines if line.startswith("| Method")]
    (ppo,) = [line for line in lines if line.startswith("| PPO by appa |")]
    cells = dict(zip(head.split(" | "), ppo.split(" | "), strict=True))
    assert (cells["PluralLLM's predictions, Avg AS"], cells["survey answers, Min AS"]) == ("0.860", "0.700")
    assert "- Made by: 2 cores, no GPU" in lines
    assert "- Command: `appa run metric=js seed=7 appa.fairness-threshold=0.99`" in lines
    assert (build(folder).parent / "report.md").read_text().splitlines() == lines


def test_example_answers_stand_folded_at_the_end(tmp_path):
    example = {"question": "Is it?", "options": ["Yes", "<No>"], "sft": "0.5,0.5", "ppo": "0.6,0.4", "mean_reward": 0.9}
    page = made.page_of(made.write_run(tmp_path, config=made.CONFIG, examples=[example]))
    assert made.cells(page, "Is it?") == ["Is it?", "Yes; <No>", "0.5,0.5", "0.6,0.4", "0.900"]
    # as a browser counts: what is opened is closed
    assert page.count("<details>") == page.count("</details>") == 2  # and the keys
