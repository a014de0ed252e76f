"""What a run folder says: read, checked, and judged; the verdict follows from the numbers.

Axis letters: G groups, I iterations.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import report_runs as made

from appa_flwr.core.errors import UserError
from appa_flwr.report import accuracy, build, findings
from appa_flwr.report.artifacts import read_run
from appa_flwr.run import pair_scores


def test_verdict_against_the_survey_truth_is_its_own(tmp_path: Path) -> None:
    summary = [made.row(method, *values) for method, values in made.GOOD.items()]
    for entry in summary:
        if entry["method"] == "uniform":
            entry["survey"] = {**entry["survey"], "avg_as": 0.77, "min_as": 0.71}  # PPO's are .76 and .70
    run = read_run(made.write_run(tmp_path, config=made.CONFIG, summary=summary))
    assert [gain.verdict for gain in findings.gains(run, survey=False)] == ["gain", "gain"]
    assert [gain.verdict for gain in findings.gains(run, survey=True)] == ["none", "none"]


@pytest.mark.parametrize(
    ("gain_Q", "verdict", "said"),
    [
        ([0.02, 0.02], "gain", r"\+0\.020 \(\+0\.020 to \+0\.020\) over SFT"),
        ([0.14, -0.10], "not over sft", r"\+0\.020 \(-0\.0\d\d to \+0\.0\d\d\) over SFT: above base and the uniform"),
    ],
)
def test_a_gain_is_one_if_its_whole_interval_is(tmp_path: Path, gain_Q: list[float], verdict: str, said: str) -> None:
    folder = made.scored_run(tmp_path)
    groups, questions = ("a", "b"), [f"q{n}" for n in range(40)]
    level = {"ppo": 0.7, "sft": 0.7, "base": 0.5, "uniform": 0.5}
    for method, base in level.items():
        reward_GQ = np.full((2, 40), base)
        reward_GQ[:, :] += np.tile(gain_Q, 20) if method == "ppo" else 0.0
        pair_scores.put(
            folder,
            pair_scores.as_rows(method, "js", pair_scores.PREDICTIONS, reward_GQ, groups=groups, questions=questions),
        )
    summary = [made.row(method, base + 0.02 * (method == "ppo"), base + 0.02 * (method == "ppo"))
               for method, base in level.items()]  # fmt: skip
    run = read_run(made.write_run(folder, summary=summary))
    found = findings.gains(run, survey=False)
    assert [gain.verdict for gain in found] == [verdict, verdict]
    assert re.search(said, findings.sentence(found[0]))
    # against the survey no single scores are known, so the difference alone decides
    assert [gain.verdict for gain in findings.gains(run, survey=True)] == ["gain", "gain"]


@pytest.mark.parametrize(
    ("asked", "lost", "said"),
    [
        (False, ("ceiling-average", "ceiling-min"), []),
        (True, ("ceiling-average", "ceiling-min"), ["There are no ceilings: some groups let nobody probe for them"]),
        (True, ("ceiling-min",), ["summary.json has no row for ceiling-min."]),
        (True, ("option-list", "nearest-questions"), ["There are no look-ups: some groups let nobody know"]),
        (True, ("majority",), ["There is no majority's answer: too few groups voted"]),
    ],
)
def test_what_groups_refused_is_not_called_lost(
    tmp_path: Path, asked: bool, lost: tuple[str, ...], said: list[str]
) -> None:
    summary = [made.row(method, *values) for method, values in made.GOOD.items() if method not in lost]
    run = read_run(made.write_run(tmp_path, config={**made.CONFIG, "eval.ceilings": asked}, summary=summary))
    found = [sentence for sentence in run.missing if "summary.json" in sentence or "There" in sentence]
    assert len(found) == len(said)
    assert all(sentence.startswith(start) for sentence, start in zip(found, said, strict=True))


def ends(over: float, low: float, high: float) -> dict[str, object]:
    return {"avg_as": 0.9, "min_as": 0.85 + over, "over_average": [over, low, high]}


@pytest.mark.parametrize(
    ("survey", "says"),
    [
        (
            (0.04, 0.01, 0.07),
            "mix, +0.040 (+0.010 to +0.070) over average; surely higher than under average: min, mix",
        ),
        ((0.04, -0.01, 0.09), "mix, +0.040 (-0.010 to +0.090) over average; surely higher than under average: min"),
        ((0.004, 0.001, 0.007), "min, +0.020 (+0.012 to +0.030) over average; surely higher than under average: min"),
    ],
)
def test_the_rule_that_would_end_highest_for_the_worst_group_is_named(
    tmp_path: Path, survey: tuple[float, float, float], says: str
) -> None:
    differences = {
        "predicted": {"size": 0.1, "min_of_average": 0.8, "min_of_fairest": 0.9, "fairness": 0.99},
        "rules": {
            "average": {"fell_back": None, "predicted": ends(0, 0, 0), "survey": ends(0, 0, 0)},
            "appa-printed": {"fell_back": 0.98, "predicted": ends(0.07, 0.06, 0.08), "survey": None},
            "min": {"fell_back": None, "predicted": ends(0.01, 0, 0.02), "survey": ends(0.02, 0.012, 0.03)},
            "mix": {"fell_back": None, "predicted": ends(0.05, 0.04, 0.06), "survey": ends(*survey)},
        },
    }
    folder = made.fake_run(tmp_path, groups=made.COUNTRIES, iterations=3)
    made.write_run(folder, differences=differences)
    *_, predicted, against_survey = findings.differences(read_run(folder))
    assert "against the predictions: the worst group ends highest under appa-printed, +0.070 (+0.060 to" in predicted
    assert f"{says}." in against_survey
    page = made.page_of(folder)
    assert "98%" in page
    assert "+0.050 (+0.040 to +0.060)" in page


def test_a_run_without_probes_says_nothing_of_other_rules(tmp_path: Path) -> None:
    folder = made.write_run(tmp_path, config=made.CONFIG)
    assert findings.differences(read_run(folder)) == []


def test_a_run_until_sft_lacks_nothing(tmp_path: Path) -> None:
    whole = made.fake_run(tmp_path, groups=made.COUNTRIES, iterations=3)
    summary = [row for row in json.loads((whole / "summary.json").read_text()) if not row["method"].startswith("ppo")]
    for name in ("metrics.jsonl", "examples.json"):
        (whole / name).unlink()
    made.write_run(whole, config={**made.CONFIG, "run.phases": "sft"}, summary=summary)
    assert "incomplete" not in made.built_page(whole)


def test_a_run_from_anothers_sft_model_needs_no_base(tmp_path: Path) -> None:
    summary = [made.row(method, *values) for method, values in made.GOOD.items() if method != "base"]
    config = {**made.CONFIG, "sft.checkpoint": "runs/other/sft-model"}
    run = read_run(made.write_run(tmp_path, config=config, summary=summary))
    assert not any("base" in sentence for sentence in run.missing)
    assert [gain.verdict for gain in findings.gains(run, survey=False)] == ["gain", "gain"]


@pytest.mark.parametrize(
    ("changed", "covered", "says"),
    [
        # Avg by ceiling-average: (.860 - .700) / (.900 - .700) = .16 / .20 = .8
        # Min by ceiling-min: (.800 - .600) / (.840 - .600) = .20 / .24 = 5/6
        ({}, [0.8, 5 / 6], "Avg AS 80%, Min AS 83%"),
        ({"base": (0.900, 0.850)}, [None, None], "base is at the ceiling already"),
    ],
)
def test_way_from_base_to_ceiling(
    tmp_path: Path, changed: dict[str, tuple[float, float]], covered: list[float | None], says: str
) -> None:
    found = findings.ways(read_run(made.scored_run(tmp_path, **changed)), survey=False)
    assert [way.covered for way in found] == pytest.approx(covered)
    assert found[1].positions["ceiling-min"] == 0.840
    assert [way.positions.keys() & {"option-list", "nearest-questions"} for way in found] == [
        {"option-list"},
        {"nearest-questions"},
    ]
    assert says in made.page_of(tmp_path)


def test_a_run_of_the_predictor_alone_lacks_nothing(tmp_path: Path) -> None:
    whole = made.fake_run(tmp_path / "whole", groups=made.COUNTRIES, iterations=3)
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("phases.json", "pluralllm.json"):
        (alone / name).write_bytes((whole / name).read_bytes())
    made.write_run(alone, config={**made.CONFIG, "run.phases": "pluralllm"})
    page = made.built_page(alone)
    assert "incomplete" not in page
    assert "seen / held-out" in page
    made.write_run(alone, config={**made.CONFIG, "run.phases": "all"})
    assert "incomplete" in made.built_page(alone)


def test_groups_stand_worst_predicted_first_and_unseen_ones_last(tmp_path: Path) -> None:
    found = read_run(made.fake_run(tmp_path, groups=("a", "b", "c"), iterations=1)).pluralllm
    assert found is not None
    assert [(group.name, group.unseen, group.js) for group in accuracy.by_group(found)] == [
        ("c", False, {"PluralLLM": 0.88}),
        ("b", False, {"PluralLLM": 0.89}),
        ("a", True, {"PluralLLM": 0.9}),
    ]


def test_the_mean_of_the_others_stands_beside_pluralllm_on_the_same_answers(tmp_path: Path) -> None:
    page = made.page_of(made.write_run(tmp_path, config=made.CONFIG, pluralllm=made.predictor_card()))
    shown = [
        (entry.part, entry.predictor, entry.scores[0], entry.num_answers)
        for entry in accuracy.rows(made.found_predictor(tmp_path))
    ]
    assert shown == [
        ("seen / held-out", "PluralLLM", 0.93, 240),
        ("seen / held-out", "Own nearest question", 0.88, 240),
        ("seen / held-out", "Uniform answer", 0.79, 240),
        ("seen / held-out", "Mean of the other groups", 0.94, 240),
        ("unseen / held-out", "PluralLLM", 0.71, 240),
        ("unseen / held-out", "Uniform answer", 0.69, 240),
        ("unseen / held-out", "Mean of the other groups", 0.76, 180),
        ("unseen / held-out", "PluralLLM, same answers", 0.72, 180),
    ]
    for predictor_and_js in ("Mean of the other groups</td><td>0.760", "PluralLLM, same answers</td><td>0.720"):
        assert page.count(f'<td class="text">{predictor_and_js}</td>') == 1
    assert (
        "so it is a hard baseline. Sums over groups, each of at least 3, were made for 36 held-out questions." in page
    )


def test_the_note_says_what_came_of_the_sums(tmp_path: Path) -> None:
    note = accuracy.note(made.found_predictor(tmp_path, group_sums={"min_groups": 4, "held_out": 35}))
    assert "each of at least 4, were made for 35 held-out questions." in note
    scores = {"seen/held-out": {"pluralllm": made.predictor_scores(0.9), "uniform": made.predictor_scores(0.8)}}
    found = made.found_predictor(tmp_path, scores=scores, group_sums=None)
    assert accuracy.note(found).endswith(
        "The mean of the other groups is not shown: too few groups answered the same questions, or they are deployed "
        "and send no answers."
    )
    assert "mean of the other" not in accuracy.trust(found)[0]


def test_the_worst_group_is_named_before_and_after_ppo(tmp_path: Path) -> None:
    summary = [made.row(method, *values) for method, values in made.GOOD.items()]
    for entry in summary:  # the targets of "a" and the answers of "b" end up served worst; "c" gave no held-out answers
        answers = {"a": 0.81, "b": 0.75} if entry["method"] == "ppo" else {"a": 0.77, "b": 0.9}
        entry["survey"]["per_group"] = {"c": math.nan, **answers}
    run = read_run(made.write_run(tmp_path, config=made.CONFIG | {"rule": "alpha"}, summary=summary))
    assert findings.worst_group(run, survey=False) == (
        "The worst-served group was a with 0.770 after SFT and is a with 0.800 after PPO (+0.030), by rule alpha."
    )
    assert findings.worst_group(run, survey=True) == (
        "The worst-served group was a with 0.770 after SFT and is b with 0.750 after PPO (-0.020), by rule alpha."
    )
    page = made.page_of(tmp_path)
    assert "is a with 0.800 after PPO (+0.030)" in page
    assert "is b with 0.750 after PPO (-0.020)" in page


@pytest.mark.parametrize("missing", ["sft", "ppo"])
def test_without_scores_before_and_after_ppo_there_is_no_worst_group_to_name(tmp_path: Path, missing: str) -> None:
    summary = [made.row(method, *values) for method, values in made.GOOD.items() if method != missing]
    run = read_run(made.write_run(tmp_path, config=made.CONFIG, summary=summary))
    assert findings.worst_group(run, survey=False) is None
    assert "worst-served" not in made.page_of(tmp_path)


DIFFERENCES = {"size": 0.174, "min_of_average": 0.801, "min_of_fairest": 0.862, "fairness": 0.9812}
SMALL_DIFFERENCES = {"size": 0.061, "min_of_average": 0.921, "min_of_fairest": 0.926, "fairness": 0.9971}
CAPTURED = {"r": 0.62, "r2": 0.38, "order": 0.74, "spread": 0.55, "size": 0.174}


def test_the_report_says_what_of_the_groups_differences_is_captured_and_whether_rules_can_differ(
    tmp_path: Path,
) -> None:
    found = {"predicted": SMALL_DIFFERENCES, "survey": DIFFERENCES, "captured": CAPTURED}
    made.write_run(tmp_path, config=made.CONFIG, differences=found)
    captured, survey, predicted = findings.differences(read_run(tmp_path))
    for part in ("correlate 0.62", "(R2 0.38;", "74% of the clear cases", "0.55 times as large"):
        assert part in captured
    assert survey.startswith("By the survey answers: groups differ by 0.174")
    assert "worst group at 0.801, the best for it at 0.862: rules can differ" in survey
    assert "is 0.9812, under the threshold 0.99" in survey
    assert predicted.startswith("By the predictions, which rewards follow: groups differ by 0.061")
    # half a hundredth is nothing that a rule could be told by
    assert "0.921, the best for it at 0.926: no rule can do better than the mean here" in predicted
    assert "is 0.9971, over the threshold 0.99" in predicted
    page = made.page_of(tmp_path)
    assert "Can this run tell rules apart?" in page
    assert "rules can differ" in page


def test_the_threshold_of_the_sentences_is_the_run_s_own(tmp_path: Path) -> None:
    made.write_run(
        tmp_path, config=made.CONFIG | {"appa.fairness-threshold": 0.9}, differences={"predicted": DIFFERENCES}
    )
    (only,) = findings.differences(read_run(tmp_path))
    assert "is 0.9812, over the threshold 0.9" in only


def test_deployed_only_the_predictions_are_compared_and_without_ceilings_nothing_is(tmp_path: Path) -> None:
    deployed = made.write_run(tmp_path / "deployed", config=made.CONFIG, differences={"predicted": DIFFERENCES})
    (only,) = findings.differences(read_run(deployed))
    assert only.startswith("By the predictions")
    without = made.write_run(tmp_path / "without", config=made.CONFIG)
    assert findings.differences(read_run(without)) == []
    assert "Can this run tell rules apart?" not in made.page_of(without)


def test_a_run_that_stopped_midway_says_where(tmp_path: Path) -> None:
    made.write_run(tmp_path, config=made.CONFIG, metrics=[made.line(i, planned=10, fell_back=None) for i in (1, 2, 3)])
    assert "stopped after iteration 3 of 10" in made.page_of(tmp_path)


def test_a_repeated_iteration_of_a_resumed_run_counts_once(tmp_path: Path) -> None:
    lines = [made.line(i, planned=3, fell_back=branch) for i, branch in ((1, True), (2, True), (2, False))]
    run = read_run(made.write_run(tmp_path, config=made.CONFIG, metrics=lines))
    found = findings.fall_back(run.iterations)
    assert found is not None
    assert (found.fell_back, found.total) == (1, 2)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run folder, it has no config\.json"):
        build(tmp_path)


def test_pictures_are_not_written_through_a_link(tmp_path: Path) -> None:
    folder = made.write_run(tmp_path / "run", config=made.CONFIG, phases=[{"phase": "ppo", "seconds": 1.0}])
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (folder / "plots").symlink_to(theirs)
    with pytest.raises(UserError, match=f"^{folder / 'plots'}: is a link"):
        build(folder)
    assert list(theirs.iterdir()) == []
    (folder / "plots").unlink()
    build(folder)
    assert [path.name for path in (folder / "plots").iterdir()] == ["seconds_per_phase.png"]


def test_two_rows_of_one_method_and_metric_are_refused(tmp_path: Path) -> None:
    made.write_run(tmp_path, config=made.CONFIG, summary=[made.row("ppo", 0.8, 0.7), made.row("ppo", 0.8, 0.7)])
    with pytest.raises(UserError, match=r"summary\.json: rows 1 and 2 are both method 'ppo', metric 'js'"):
        build(tmp_path)


def test_what_was_left_to_the_run_is_shown_with_what_it_came_to(tmp_path: Path) -> None:
    config = {"task": "opa", "ppo.num-iterations": 0, "federation.min-groups": 2}
    page = made.page_of(made.write_run(tmp_path, config=config, metrics=[made.line(1, planned=107, fell_back=None)]))
    for key, shown in (("metric", "auto (here borda)"), ("ppo.num-iterations", "0 (here 107)")):
        assert made.cells(page, key) == [key, shown]
    assert read_run(tmp_path).training_metric == "borda"
