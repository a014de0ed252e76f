"""What a run folder says: read, checked, and judged; the verdict follows from the numbers."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import report_runs as made

from appa_flwr.core.errors import UserError
from appa_flwr.report import accuracy, build, findings
from appa_flwr.report.artifacts import RunArtifacts, read_run
from appa_flwr.report.page import short
from appa_flwr.run import pair_scores, predictions
from appa_flwr.run.pair_scores import replace_rows
from appa_flwr.survey.types import Question


def verdicts(run: RunArtifacts, *, survey: bool = False) -> list[str]:
    return [gain.verdict for gain in findings.gains(run, survey=survey)]


def test_verdict_against_the_survey_truth_is_its_own(tmp_path):
    summary = made.summary()
    for entry in summary:
        if entry["method"] == "uniform":
            entry["survey"] |= {"avg_as": 0.77, "min_as": 0.71}  # PPO's are .76 and .70
    run = made.read(tmp_path, summary=summary)
    assert verdicts(run) == ["gain", "gain"]
    assert verdicts(run, survey=True) == ["none", "none"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        # .860 less .700, .790, .820 (the better look-up), .810; and .800 less .600, .750, .775, .770
        ({}, ["gain", "gain"]),
        # above base, but not above the uniform answer
        ({"ppo": (0.780, 0.740), "sft": (0.760, 0.720)}, ["none", "none"]),
        ({"ppo": (0.860, 0.740)}, ["gain", "none"]),
        ({"ppo": (0.825, 0.780), "sft": (0.830, 0.790)}, ["not over sft", "not over sft"]),
        ({"ppo": (0.815, 0.770)}, ["not over look-up", "not over look-up"]),
        # Avg AS above the look-up's .820 but not SFT's .830, Min AS not above the look-up's .775
        ({"ppo": (0.825, 0.772), "sft": (0.830, 0.765)}, ["not over sft", "not over look-up"]),
        ({"ppo": (0.690, 0.590)}, ["none", "none"]),
        # 0.7904 is shown as 0.790, the uniform answer's score: no gain.
        ({"ppo": (0.7904, 0.7504)}, ["none", "none"]),
    ],
)
def test_the_verdict_follows_the_numbers(tmp_path, changed, expected):
    run = read_run(made.scored_run(tmp_path, **changed))
    assert verdicts(run) == expected
    assert ('class="verdict none"' in made.page_of(tmp_path)) == (expected != ["gain", "gain"])


@pytest.mark.parametrize(
    ("branches", "fell_back", "total", "hardly"),
    [
        ([True, True, False, True], 3, 4, False),
        ([True] * 10 + [False], 10, 11, True),  # 1/11 = 9.1 % weighted, under a tenth
        ([True] * 9 + [False], 9, 10, False),  # exactly a tenth is not under it
    ],
)
def test_iterations_that_fell_back_are_counted(tmp_path, branches, fell_back, total, hardly):
    lines = [made.line(i + 1, planned=len(branches), fell_back=branch) for i, branch in enumerate(branches)]
    found = findings.fall_back(made.read(tmp_path, metrics=lines).iterations)
    assert found is not None
    assert (*found, found.hardly_adaptive) == (fell_back, total, hardly)
    assert (": the adaptive branch" in made.page_of(tmp_path)) == hardly


def test_times(tmp_path):
    # One iteration takes 1 + .5 + .25 + 2.25 = 4 s, .5 of it waiting; its rule has no threshold.
    run = made.read(tmp_path, metrics=[made.line(i, planned=2, fell_back=None) for i in (1, 2)])
    assert (findings.federation_share(run.iterations), findings.total_seconds(run)) == (0.125, 8.0)
    assert findings.fall_back(run.iterations) is None
    # Where the phases are known the total is theirs.
    phases = [{"phase": "policy", "seconds": 80.4}, {"phase": "ppo", "seconds": 284.6}]
    assert findings.duration(findings.total_seconds(made.read(tmp_path, phases=phases))) == "6 min 5 s"


@pytest.mark.parametrize(
    ("gain_Q", "verdict", "said"),
    [
        ([0.02, 0.02], "gain", r"\+0\.020 \(\+0\.020 to \+0\.020\) over SFT: a gain\.$"),
        ([0.14, -0.10], "not over sft", r"\+0\.020 \(-0\.0\d\d to \+0\.0\d\d\) over SFT: above base and the uniform"),
    ],
)
def test_a_gain_is_one_if_its_whole_interval_is(tmp_path, gain_Q, verdict, said):
    level = {"ppo": 0.7, "sft": 0.7, "base": 0.5, "uniform": 0.5}
    for method, base in level.items():
        reward_GQ = np.full((2, 40), base) + (np.tile(gain_Q, 20) if method == "ppo" else 0.0)
        questions = [f"q{n}" for n in range(40)]
        rows = pair_scores.as_rows(method, "js", "predictions", reward_GQ, groups=("a", "b"), questions=questions)
        pair_scores.put(tmp_path, rows)
    run = made.read(tmp_path, summary=made.summary({**level, "ppo": 0.72}))
    assert verdicts(run) == [verdict, verdict]
    assert re.search(said, findings.sentence(findings.gains(run, survey=False)[0]))
    assert ("PPO gained on" in findings.verdict_word(findings.gains(run, survey=False))) == (verdict == "gain")
    # against the survey no single scores are known: the difference alone decides, and is called no gain
    assert verdicts(run, survey=True) == ["gain", "gain"]
    assert "how surely is not known" in findings.verdict_word(findings.gains(run, survey=True))


@pytest.mark.parametrize(
    ("keys", "lost", "said"),
    [
        ({"eval.ceilings": False}, ("ceiling-average", "ceiling-min"), None),
        ({}, ("ceiling-average", "ceiling-min"), "There are no ceilings: some owners keep"),
        ({}, ("ceiling-min",), "summary.json has no row for ceiling-min."),
        ({}, ("option-list", "nearest-questions"), "There are no look-ups: some groups let nobody know"),
        ({}, ("majority",), "There is no majority's answer: too few groups voted"),
        ({"sft.checkpoint": "runs/other/sft-model"}, ("base",), None),  # its scores stand in that model's run
    ],
)
def test_what_groups_refused_or_stands_elsewhere_is_not_called_lost(tmp_path, keys, lost, said):
    rest = {method: values for method, values in made.GOOD.items() if method not in lost}
    run = made.read(tmp_path, config={**made.CONFIG, **keys}, summary=made.summary(rest))
    found = [sentence for sentence in run.missing if "summary.json" in sentence or "There" in sentence]
    assert len(found) == (said is not None)
    assert all(sentence.startswith(said or "") for sentence in found)
    assert verdicts(run) == ["gain", "gain"]


@pytest.mark.parametrize(
    ("until", "files"), [("sft", ("summary", "phases", "pluralllm")), ("pluralllm", ("phases", "pluralllm"))]
)
def test_a_run_until_an_earlier_phase_lacks_nothing(tmp_path, until, files):
    whole = made.fake_run(tmp_path / "whole", groups=made.COUNTRIES, iterations=3)
    content = {name: json.loads((whole / f"{name}.json").read_text()) for name in files}
    if "summary" in content:
        content["summary"] = [row for row in content["summary"] if not row["method"].startswith("ppo")]
    assert made.read(tmp_path / "part", config={**made.CONFIG, "run.phases": until}, **content).missing == ()
    assert "seen / held-out" in made.page_of(tmp_path / "part")
    assert made.read(tmp_path / "part", config={**made.CONFIG, "run.phases": "all"}).missing


def ends(over: float, low: float, high: float) -> dict[str, object]:
    return {"avg_as": 0.9, "min_as": 0.85 + over, "over_average": [over, low, high]}


@pytest.mark.parametrize(
    ("survey", "says"),
    [
        ((0.04, 0.01, 0.07), "mix, +0.040 (+0.010 to +0.070) over average; surely higher than under average: min, mix"),
        ((0.04, -0.01, 0.09), "mix, +0.040 (-0.010 to +0.090) over average; surely higher than under average: min"),
        ((0.004, 0.001, 0.007), "min, +0.020 (+0.012 to +0.030) over average; surely higher than under average: min"),
    ],
)
def test_the_rule_that_would_end_highest_for_the_worst_group_is_named(tmp_path, survey, says):
    rules = {
        "average": {"fell_back": None, "predicted": ends(0, 0, 0), "survey": ends(0, 0, 0)},
        "appa-printed": {"fell_back": 0.98, "predicted": ends(0.07, 0.06, 0.08), "survey": None},
        "min": {"fell_back": None, "predicted": ends(0.01, 0, 0.02), "survey": ends(0.02, 0.012, 0.03)},
        "mix": {"fell_back": None, "predicted": ends(0.05, 0.04, 0.06), "survey": ends(*survey)},
    }
    run = made.read(tmp_path, summary=made.summary(), differences={"predicted": SMALL_DIFFERENCES, "rules": rules})
    *_, predicted, against_survey = findings.differences(run)
    assert "against the predictions: the worst group ends highest under appa-printed, +0.070 (+0.060 to" in predicted
    assert f"{says}." in against_survey
    page = made.page_of(tmp_path)
    assert made.cells(page, "appa-printed")[-1] == "98%"
    assert made.cells(page, "mix")[3] == "+0.050 (+0.040 to +0.060)"


def test_groups_stand_worst_predicted_first_and_unseen_ones_last(tmp_path):
    groups = accuracy.by_group(made.found_predictor(tmp_path, ("a", "b", "c")))
    shown = [(group.name, group.unseen, group.js["PluralLLM"]) for group in groups]
    assert shown == [("c", False, 0.88), ("b", False, 0.89), ("a", True, 0.9)]


def test_the_mean_of_the_others_stands_beside_pluralllm_on_the_same_answers(tmp_path):
    found = made.found_predictor(tmp_path)
    shown = {part: [(row[0], row[1], row[-1]) for row in rows] for part, rows in accuracy.blocks(found).items()}
    assert shown == {
        "seen / held-out": [
            ("PluralLLM", "0.930", "240"),
            ("Own nearest question", "0.880", "240"),
            ("Uniform answer", "0.790", "240"),
            ("Mean of the other groups", "0.940", "240"),
        ],
        "unseen / held-out": [
            ("PluralLLM", "0.710", "240"),
            ("Uniform answer", "0.690", "240"),
            ("Mean of the other groups", "0.760", "180"),
            ("PluralLLM, same answers", "0.720", "180"),
        ],
    }
    page = made.page_of(tmp_path)
    assert made.cells(page, "PluralLLM, same answers") == ["PluralLLM, same answers", "0.720", "0.570", "0.670", "180"]
    assert "Sums over groups, each of at least 3, were made for 36 held-out questions." in page


def test_the_worst_group_is_named_before_and_after_ppo(tmp_path):
    summary = made.summary()
    for entry in summary:  # the targets of "a" and the answers of "b" end up served worst; "c" gave no held-out answers
        answers = {"a": 0.81, "b": 0.75} if entry["method"] == "ppo" else {"a": 0.77, "b": 0.9}
        entry["survey"]["per_group"] = {"c": math.nan, **answers}
    run = made.read(tmp_path, config=made.CONFIG | {"rule": "alpha", "appa.alpha": -2.0}, summary=summary)
    said = [findings.worst_group(run, survey=survey) for survey in (False, True)]
    assert said == [
        "The worst-served group was a with 0.770 after SFT and is a with 0.800 after PPO (+0.030), by rule alpha.",
        "The worst-served group was a with 0.770 after SFT and is b with 0.750 after PPO (-0.020), by rule alpha.",
    ]
    for missing in ("sft", "ppo"):
        rest = [row for row in summary if row["method"] != missing]
        assert findings.worst_group(made.read(tmp_path, summary=rest), survey=False) is None


DIFFERENCES = {"size": 0.174, "min_of_average": 0.801, "min_of_fairest": 0.862, "fairness": 0.9812}
SMALL_DIFFERENCES = {"size": 0.061, "min_of_average": 0.921, "min_of_fairest": 0.926, "fairness": 0.9971}
CAPTURED = {"r": 0.62, "r2": 0.38, "order": 0.74, "spread": 0.55, "size": 0.174}


def test_differences_between_groups_are_told_by_their_numbers(tmp_path):
    found = {"predicted": SMALL_DIFFERENCES, "survey": DIFFERENCES, "captured": CAPTURED}
    told = findings.differences(made.read(tmp_path / "whole", differences=found))
    numbers = [
        *(["0.62", "0.38", "74%", "0.55"], ["0.174", "0.801", "0.862", "0.9812", "0.99"]),
        ["0.061", "0.921", "0.926", "0.9971", "0.99"],
    ]
    assert [re.findall(r"\d\.\d+|74%", text) for text in told] == numbers
    (deployed,) = findings.differences(made.read(tmp_path / "deployed", differences={"predicted": DIFFERENCES}))
    assert "0.174" in deployed
    assert findings.differences(made.read(tmp_path / "without")) == []


def test_a_run_that_stopped_midway_says_where_and_a_repeated_iteration_counts_once(tmp_path):
    lines = [made.line(i, planned=10, fell_back=branch) for i, branch in ((1, True), (2, True), (2, False))]
    run = made.read(tmp_path, metrics=lines)
    assert "The run stopped after iteration 2 of 10." in run.missing
    found = findings.fall_back(run.iterations)
    assert found is not None
    assert (found.fell_back, found.total) == (1, 2)


def test_pictures_are_not_written_through_a_link(tmp_path):
    folder = made.write_run(tmp_path / "run", config=made.CONFIG, pluralllm=made.predictor_card(losses=[]))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (folder / "plots").symlink_to(theirs)
    with pytest.raises(UserError, match=f"^{folder / 'plots'}: is a link"):
        build(folder)
    assert list(theirs.iterdir()) == []
    (folder / "plots").unlink()
    build(folder)
    assert [path.name for path in (folder / "plots").iterdir()] == ["pluralllm_groups.png"]


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
    assert read_run(tmp_path).training_metric == "borda"


def test_the_short_report_has_verdict_scores_and_how_to_have_it_again(tmp_path):
    folder = made.scored_run(tmp_path / "a_b|c", ppo=(0.8604, 0.8))
    line = {"phase": "machine", "step": 1, "of": 1, "message": "2 cores, no GPU", "seconds_left": None}
    (folder / "progress.jsonl").write_text(json.dumps(line) + "\n")
    found = short(read_run(folder)).splitlines()
    assert found[0] == r"## a\_b\|c"
    assert found[2] == "Against the predictions (JS): PPO is ahead on Avg AS and Min AS, how surely is not known."
    (head,) = [line for line in found if line.startswith("| method")]
    (ppo,) = [line for line in found if line.startswith("| PPO |")]
    cells = dict(zip(head.split(" | "), ppo.split(" | "), strict=True))
    assert (cells["Avg AS, predictions"], cells["Min AS, survey answers |"]) == ("0.860", "0.700 |")
    assert "- Made by: 2 cores, no GPU" in found
    assert found[-1] == "- Again by: `appa run metric=js seed=7 appa.fairness-threshold=0.99`"
    assert (build(folder).parent / "report.md").read_text().splitlines() == found


def test_each_group_s_prediction_stands_folded_under_the_example_answers(tmp_path):
    example = {"question": "Is it?", "options": ["Yes", "<No>"], "sft": "0.5,0.5", "ppo": "0.6,0.4", "mean_reward": 0.9}
    folder = made.write_run(tmp_path, config=made.CONFIG, examples=[example, example | {"question": "Another?"}])
    assert "Predictions by group" not in made.page_of(folder)
    question = Question("q1", "Is it?", ("Yes", "<No>"))
    target_GJK = np.array([[[0.75, 0.25]], [[0.1, 0.9]]])
    kept = predictions.as_rows(target_GJK, groups=("North", "South"), questions=[question])
    replace_rows(folder / "predictions.parquet", kept)
    page = made.page_of(folder)
    assert page.count("Predictions by group, which rewards follow") == 1
    assert made.cells(page, "North") == ["North", "0.75", "0.25"]
    assert made.cells(page, "Group") == ["Group", "Yes", "<No>"]
    # as a browser counts: what is opened is closed
    assert page.count("<details>") == page.count("</details>") == 2  # and the keys
