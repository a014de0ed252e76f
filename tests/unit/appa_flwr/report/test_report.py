"""The report of a run: the files give its numbers, the verdict follows from them, text cannot break the page.

Axis letters: G groups, I iterations.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from appa_flwr import report
from appa_flwr.errors import UserError
from appa_flwr.report import build, findings, plots, predictor
from appa_flwr.report import html as report_html
from appa_flwr.report.artifacts import PluralLLM, read_run

POLICIES = ("base", "sft", "ppo", "uniform", "majority", "ceiling-average", "ceiling-min")
COUNTRIES = ("Nigeria", "Argentina", "Egypt", "Australia", "United States", "Canada", "Germany", "India")
SIZES = ["1", "2", "4", "8", "16", "32", "64"]
PNG_START = b"\x89PNG\r\n\x1a\n"


def row(policy: str, avg_as: float, min_as: float, *, metric: str = "js", survey: bool = True) -> dict[str, Any]:
    """A summary row over two groups that really have this mean and minimum: a = min, b = 2 avg - min."""
    per_group = {"a": min_as, "b": 2 * avg_as - min_as}
    scores = {"fi": 0.9876, "avg_as": avg_as, "min_as": min_as, "per_group": per_group}
    truth = {**scores, "avg_as": avg_as - 0.1, "min_as": min_as - 0.1} if survey else None
    wrote = policy in ("base", "sft", "ppo")
    return {
        "policy": policy,
        "metric": metric,
        **scores,
        "format_score": 0.95 if wrote else None,
        "survey": truth,
    }


def predictor_scores(js: float, cells: float = 240.0) -> dict[str, float]:
    return {"js": js, "js_distance": js - 0.15, "wasserstein": js - 0.05, "cells": cells}


def predictor_card(groups: tuple[str, ...] = COUNTRIES, **changed: object) -> dict[str, Any]:
    """What a report reads of pluralllm.json: the mean of the others is known for all 240 answers of the seen groups,
    and for 180 of the unseen one's; of 30 rounds each fifth is validated, the 20th was kept."""
    card = {
        "rounds": [
            {
                "round": r,
                "loss": 0.6 * float(np.exp(-r / 8)) + 0.05,
                "validation": 0.25 + 0.0004 * (r - 20) ** 2 if r % 5 == 0 else None,
            }
            for r in range(1, 31)
        ],
        "chosen": 20,
        "population": {"prior": False, "min_groups": 3, "training": 0, "held_out": 36},
        "scores": {
            "seen/held-out": {
                "uniform": predictor_scores(0.79),
                "pluralllm": predictor_scores(0.93),
                "nearest-question": predictor_scores(0.88),
                "mean-of-others": predictor_scores(0.94),
                "pluralllm-shared": predictor_scores(0.93),
            },
            "unseen/held-out": {
                "pluralllm": predictor_scores(0.71),
                "uniform": predictor_scores(0.69),
                "mean-of-others": predictor_scores(0.76, 180),
                "pluralllm-shared": predictor_scores(0.72, 180),
            },
        },
        "groups": {
            group: {f"{'unseen' if g == 0 else 'seen'}/held-out": {"pluralllm": predictor_scores(0.9 - 0.01 * g)}}
            for g, group in enumerate(groups)
        },
        "calibration": {"seen/held-out": {"spread": 0.0421, "rank_correlation": 0.31}},
        "by_context": {
            "seen/held-out": {str(2**i): predictor_scores(0.80 + 0.02 * i) for i in range(7)},
            "unseen/held-out": {str(2**i): predictor_scores(0.70 + 0.01 * i, 240 - i) for i in (4, 0, 1, 3)},
        },
    }
    return card | changed


def write_run(folder: Path, **files: object) -> Path:
    """A run folder with the given files; keys are file names without suffix, metrics is a list of lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if name == "metrics":
            assert isinstance(content, list)
            text = "".join(json.dumps(line) + "\n" for line in content)
            (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
        else:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def line(
    iteration: int, *, planned: int, fell_back: bool | None, groups: tuple[str, ...] = ("a", "b")
) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "num_iterations": planned,
        "fairness_index": 0.98,
        "fell_back": fell_back,
        "weights": dict.fromkeys(groups, 1 / len(groups)),
        "history": dict.fromkeys(groups, 0.5),
        "rewards": dict.fromkeys(groups, 0.7),
        "reward": 0.7,
        "format_score": 0.9,
        "kl": 0.1,
        "policy_loss": 0.01,
        "value_loss": 0.2,
        "clip_fraction": 0.05,
        "entropy": 1.0,
        "response_length": 12.0,
        "missing_groups": [],
        "seconds": {"rollout": 1.0, "federation_wait": 0.5, "reference": 0.25, "update": 2.25},
    }


def fake_run(folder: Path, *, groups: tuple[str, ...], iterations: int, seed: int = 0) -> Path:
    """A whole run of made-up but plausible numbers, for the eye and for tests of size."""
    rng = np.random.default_rng(seed)
    level_G = rng.normal(0, 0.02, len(groups))
    history_G = np.zeros(len(groups))
    lines = []
    for number in range(1, iterations + 1):
        progress = 1 - np.exp(-3 * number / iterations)
        reward_G = 0.72 + 0.11 * progress + level_G + rng.normal(0, 0.008) + rng.normal(0, 0.003, len(groups))
        absent = {int(rng.integers(len(groups)))} if number % 17 == 0 else set()
        weights_G = np.exp(-history_G / 0.1)
        weights_G /= weights_G.sum()
        history_G = 0.8 * history_G + 0.2 * reward_G
        fairness = 0.975 + 0.018 * progress + rng.normal(0, 0.001)
        entry = line(number, planned=iterations, fell_back=bool(fairness >= 0.99), groups=groups)
        entry |= {
            "fairness_index": fairness,
            "weights": dict(zip(groups, weights_G.tolist(), strict=True)),
            "history": dict(zip(groups, history_G.tolist(), strict=True)),
            "rewards": {g: None if i in absent else float(reward_G[i]) for i, g in enumerate(groups)},
            "missing_groups": [groups[i] for i in absent],
            "reward": float(reward_G.mean()),
            "format_score": float(min(1.0, 0.85 + 0.13 * progress + rng.normal(0, 0.01))),
            "kl": float(0.8 * progress + abs(rng.normal(0, 0.03))),
            "policy_loss": float(rng.normal(-0.01, 0.01)),
            "value_loss": float(0.5 * np.exp(-number / 20) + 0.1 * rng.random()),
            "entropy": float(1.2 - 0.6 * progress),
            "clip_fraction": float(0.04 + 0.04 * rng.random()),
            "response_length": float(30 + rng.normal(0, 1)),
            "seconds": {
                "rollout": 0.6 + 0.1 * rng.random(),
                "federation_wait": 0.05 + 0.05 * rng.random(),
                "reference": 0.15,
                "update": 0.8 + 0.1 * rng.random(),
            },
        }
        lines.append(entry)

    middle = {
        "base": 0.738,
        "sft": 0.776,
        "ppo": 0.834,
        "uniform": 0.79,
        "majority": 0.71,
        "ceiling-average": 0.954,
        "ceiling-min": 0.943,
    }

    def scores(policy: str, shift: float) -> dict[str, Any]:
        flat = 0.3 if policy == "ceiling-min" else 1.0
        score_G = np.clip(middle[policy] - shift + flat * level_G + rng.normal(0, 0.006, len(groups)), 0, 1)
        return {
            "fi": 0.97 + 0.01 * rng.random(),
            "avg_as": float(score_G.mean()),
            "min_as": float(score_G.min()),
            "per_group": dict(zip(groups, score_G.tolist(), strict=True)),
        }

    summary = [
        {
            "policy": policy,
            "metric": metric,
            **scores(policy, shift),
            "survey": scores(policy, shift + 0.03),
            "format_score": 0.97 if policy in ("base", "sft", "ppo") else None,
        }
        for metric, shift in (("js", 0.0), ("js-distance", 0.25), ("wasserstein", -0.04), ("cosine", 0.05))
        for policy in POLICIES
    ]
    return write_run(
        folder,
        config={
            "task": "dpa",
            "metric": "js",
            "rule": "appa",
            "seed": seed,
            "model": "tiny",
            "survey": "generated",
            "appa.fairness-threshold": 0.99,
            "groups": "",
            "ppo.num-iterations": iterations,
            "lora": False,
        },
        metrics=lines,
        summary=summary,
        phases=[
            {"phase": "policy", "seconds": 80.2},
            {"phase": "pluralllm", "seconds": 22.0},
            {"phase": "sft", "seconds": 31.0},
            {"phase": "ppo", "seconds": 170.5},
            {"phase": "evaluation", "seconds": 6.4},
        ],
        pluralllm=predictor_card(groups),
        examples=[
            {
                "question": "How much do you trust the courts?",
                "options": ["A lot", "Somewhat", "Not at all"],
                "sft": "0.60, 0.30, 0.10",
                "ppo": "0.45, 0.35, 0.20",
                "mean_reward": 0.912,
            }
        ],
    )


CONFIG = {"task": "dpa", "metric": "js", "rule": "appa", "seed": 7, "appa.fairness-threshold": 0.99}
# Avg / Min: PPO .860/.800 is above base .700/.600, uniform .790/.750 and SFT .810/.770; ceilings .900, .840.
GOOD = {
    "base": (0.700, 0.600),
    "sft": (0.810, 0.770),
    "ppo": (0.860, 0.800),
    "uniform": (0.790, 0.750),
    "majority": (0.650, 0.550),
    "ceiling-average": (0.900, 0.820),
    "ceiling-min": (0.880, 0.840),
}


def scored_run(folder: Path, **changed: tuple[float, float]) -> Path:
    """A run of which only config and results are known; keywords replace a policy's Avg and Min AS."""
    summary = [row(policy, *values) for policy, values in (GOOD | changed).items()]
    return write_run(folder, config=CONFIG, summary=summary)


def page_of(folder: Path) -> str:
    """The page without its pictures, which take a second to draw and hold no text."""
    return report_html.page(read_run(folder), {})


def built_page(folder: Path) -> str:
    return build(folder).read_text(encoding="utf-8")


def cells(page: str, first: str) -> list[str]:
    """The texts of the cells of the first table row that starts with that text."""
    for found in re.findall(r"<tr[^>]*>(.*?)</tr>", page, flags=re.DOTALL):
        texts = [html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<t[hd][^>]*>.*?</t[hd]>", found)]
        if texts[0] == first:
            return texts
    raise AssertionError(f"no row starts with {first!r}")


def test_results_table_holds_the_numbers_of_the_summary(tmp_path: Path) -> None:
    page = page_of(scored_run(tmp_path))
    # policy, rule, targets' FI, Avg, Min, survey truth's FI, Avg, Min (each score 0.1 lower), format.
    assert cells(page, "PPO") == [
        "PPO",
        "appa",
        "0.9876",
        "0.860",
        "0.800",
        "0.9876",
        "0.760",
        "0.700",
        "0.950",
    ]
    # Base lies below the uniform answer everywhere: every score carries the dagger.
    assert cells(page, "Base")[3:5] == ["0.700†", "0.600†"]
    assert cells(page, "Uniform answer")[2:] == ["0.9876", "0.790", "0.750", "0.9876", "0.690", "0.650", "–"]
    assert cells(page, "Ceiling (worst group)")[3:5] == ["0.880", "0.840"]


def test_bold_marks_the_best_of_base_sft_and_ppo_but_no_reference(tmp_path: Path) -> None:
    page = page_of(scored_run(tmp_path))
    assert "<b>0.860</b>" in page
    assert "<b>0.810</b>" not in page
    assert "<b>0.900</b>" not in page  # the ceiling's, higher than PPO's


def test_all_metrics_table_has_a_column_per_metric_in_the_paper_order(tmp_path: Path) -> None:
    summary = [
        row(policy, avg, low, metric=metric)
        for metric, avg, low in (("cosine", 0.66, 0.55), ("js", 0.86, 0.75), ("wasserstein", 0.76, 0.65))
        for policy in ("base", "ppo")
    ]
    page = page_of(write_run(tmp_path, config=CONFIG, summary=summary))
    found = cells(page, "PluralLLM targets")
    # targets, method, rule, FI of 3 metrics, Avg AS by js, wasserstein, cosine, Min AS by the same, format
    assert found[1:3] == ["Base", "–"]
    assert found[6:12] == ["0.860", "0.760", "0.660", "0.750", "0.650", "0.550"]
    second = cells(page, "survey truth")
    assert second[6:12] == ["0.760", "0.660", "0.560", "0.650", "0.550", "0.450"]


def test_per_group_table_puts_the_worst_served_first(tmp_path: Path) -> None:
    page = page_of(scored_run(tmp_path))
    # GOOD's Avg .860 with Min .800 is a = .800 and b = .920.
    assert cells(page, "a")[1:5] == ["0.600", "0.770", "0.800", "0.750"]
    assert cells(page, "b")[3] == "0.920"
    table = page[page.index("<h2>Per group") :]
    assert table.index(">a<") < table.index(">b<")


def test_verdict_gives_the_three_gains(tmp_path: Path) -> None:
    page = page_of(scored_run(tmp_path))
    # .860 - .700, .860 - .790, .860 - .810; and .800 - .600, .800 - .750, .800 - .770
    assert "Avg AS 0.860: +0.160 over base, +0.070 over the uniform answer, +0.050 over SFT: a gain." in page
    assert "Min AS 0.800: +0.200 over base, +0.050 over the uniform answer, +0.030 over SFT: a gain." in page
    assert "PPO gained on Avg AS and Min AS." in page
    assert "no gain" not in page


def test_a_gain_over_base_that_does_not_beat_uniform_is_none(tmp_path: Path) -> None:
    page = page_of(scored_run(tmp_path, ppo=(0.780, 0.740), sft=(0.760, 0.720)))
    assert "+0.080 over base, -0.010 over the uniform answer, +0.020 over SFT: no gain" in page
    assert "hedging" in page
    assert "PPO did not gain." in page
    assert ": a gain." not in page


@pytest.mark.parametrize(
    ("ppo", "expected"),
    [
        ((0.860, 0.740), "PPO gained on Avg AS only."),
        ((0.800, 0.760), "PPO did not gain over SFT."),
        ((0.690, 0.590), "not even over base"),
        # 0.7904 is shown as 0.790, the uniform answer's score: no gain.
        ((0.7904, 0.7504), "PPO did not gain."),
    ],
)
def test_verdict_follows_the_numbers(tmp_path: Path, ppo: tuple[float, float], expected: str) -> None:
    assert expected in page_of(scored_run(tmp_path, ppo=ppo))


def test_verdict_against_the_survey_truth_is_its_own(tmp_path: Path) -> None:
    summary = [row(policy, *values) for policy, values in GOOD.items()]
    for entry in summary:
        if entry["policy"] == "uniform":
            entry["survey"] = {**entry["survey"], "avg_as": 0.77, "min_as": 0.71}  # PPO's are .76 and .70
    run = read_run(write_run(tmp_path, config=CONFIG, summary=summary))
    assert [gain.verdict for gain in findings.gains(run, survey=False)] == ["gain", "gain"]
    assert [gain.verdict for gain in findings.gains(run, survey=True)] == ["none", "none"]


def test_way_from_base_to_ceiling(tmp_path: Path) -> None:
    run = read_run(scored_run(tmp_path))
    average, minimum = findings.ways(run, survey=False)
    # Avg by ceiling-average: (.860 - .700) / (.900 - .700) = .16 / .20 = .8
    # Min by ceiling-min: (.800 - .600) / (.840 - .600) = .20 / .24 = 5/6
    assert average.covered == pytest.approx(0.8)
    assert minimum.covered == pytest.approx(5 / 6)
    assert minimum.positions["ceiling-min"] == 0.840
    assert "Avg AS 80%, Min AS 83%" in page_of(tmp_path)


def test_no_way_where_base_is_at_the_ceiling(tmp_path: Path) -> None:
    run = read_run(scored_run(tmp_path, base=(0.900, 0.850)))
    assert [way.covered for way in findings.ways(run, survey=False)] == [None, None]
    assert "base is at the ceiling already" in page_of(tmp_path)


@pytest.mark.parametrize(
    ("branches", "text", "warned"),
    [
        # 3 of 4 fell back: one in four weighted.
        (
            [True, True, False, True],
            "in 3 of 4 iterations (75.0%); it weighted the groups in 1 (25.0%)",
            False,
        ),
        # 10 of 11: 1/11 = 9.1 % weighted, under a tenth.
        ([True] * 10 + [False], "in 10 of 11 iterations (90.9%); it weighted the groups in 1 (9.1%)", True),
        # 9 of 10: exactly a tenth is not under it.
        ([True] * 9 + [False], "in 9 of 10 iterations (90.0%)", False),
        ([None, None], "has no threshold", False),
    ],
)
def test_fall_back_share_and_warning(tmp_path: Path, branches: list[bool | None], text: str, warned: bool) -> None:
    lines = [line(i + 1, planned=len(branches), fell_back=branch) for i, branch in enumerate(branches)]
    page = page_of(write_run(tmp_path, config=CONFIG, metrics=lines))
    assert text in page
    assert ("Warning: the adaptive branch" in page) == warned


def test_share_of_time_waiting_for_groups(tmp_path: Path) -> None:
    lines = [line(i, planned=2, fell_back=None) for i in (1, 2)]
    # One iteration takes 1 + .5 + .25 + 2.25 = 4 s, .5 of it waiting: 12.5 %; both together 8 s.
    page = page_of(write_run(tmp_path, config=CONFIG, metrics=lines))
    assert "12.5% of the iterations&#x27; time" in page or "12.5% of the iterations' time" in page
    assert "8.0 s" in page


def test_total_time_is_that_of_the_phases(tmp_path: Path) -> None:
    phases = [{"phase": "policy", "seconds": 80.4}, {"phase": "ppo", "seconds": 284.6}]
    # 365 s = 6 min 5 s
    assert "6 min 5 s" in page_of(write_run(tmp_path, config=CONFIG, phases=phases))


def test_all_text_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>&\"q\""
    run = {"a": 0.5, evil: 0.6, "c": 0.7}
    scores = {"fi": 0.9, "avg_as": 0.6, "min_as": 0.5, "per_group": run}
    write_run(
        tmp_path,
        config=CONFIG | {"model": evil, "rule": evil, evil: evil},
        summary=[
            {"policy": policy, "metric": evil, **scores, "format_score": 0.9, "survey": scores} for policy in POLICIES
        ],
        metrics=[line(1, planned=9, fell_back=None, groups=tuple(run)) | {"missing_groups": [evil]}],
        phases=[{"phase": evil, "seconds": 1.0}],
        pluralllm={
            "rounds": [{"round": 1, "loss": 0.5, "validation": None}],
            "chosen": 1,
            "population": None,
            "by_context": {f"{evil}/held-out": {"1": predictor_scores(0.5)}},
            "scores": {f"{evil}/held-out": {evil: predictor_scores(0.5), "pluralllm": predictor_scores(0.5)}},
            "groups": {evil: {f"seen{evil}/held-out": {evil: predictor_scores(0.5)}}},
            "calibration": {evil: {"spread": 0.5, "rank_correlation": 0.1}},
        },
        examples=[{"question": evil, "options": [evil], "sft": evil, "ppo": evil, "mean_reward": 0.5}],
    )
    page = built_page(tmp_path)
    assert "<script" not in page
    assert html.escape(evil) in page
    assert page.count(html.escape("alert('x')")) >= 12


def test_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    page = built_page(fake_run(tmp_path, groups=COUNTRIES, iterations=3))
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert len(sources) == len(list((tmp_path / "plots").glob("*.png"))) == 12
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in re.sub(r'src="[^"]*"', "", page)
    assert all(path.read_bytes().startswith(PNG_START) for path in (tmp_path / "plots").glob("*.png"))
    assert (
        page.count('alt="score of the preference predictor by number of context answers" title="pluralllm_context"')
        == 1
    )
    assert page.count('alt="loss and validation error of the preference predictor over its rounds"') == 1
    assert "incomplete" not in page
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".part")]


@pytest.mark.parametrize(
    "groups", [COUNTRIES[:3], tuple(f"$group {i} of many with a very long name$" for i in range(64))]
)
def test_few_and_many_groups(tmp_path: Path, groups: tuple[str, ...]) -> None:
    page = built_page(fake_run(tmp_path, groups=groups, iterations=35))
    assert all(html.escape(group) in page for group in groups)
    assert (tmp_path / "plots" / "spider.png").exists()


def test_two_groups_have_no_spider_plot(tmp_path: Path) -> None:
    build(fake_run(tmp_path, groups=("a", "b"), iterations=1))
    assert not (tmp_path / "plots" / "spider.png").exists()
    assert (tmp_path / "plots" / "weights.png").exists()


def test_config_alone_makes_a_report_that_says_what_is_missing(tmp_path: Path) -> None:
    page = built_page(write_run(tmp_path, config=CONFIG))
    assert "This report is incomplete" in page
    for name in ("metrics.jsonl", "summary.json", "phases.json", "pluralllm.json", "examples.json"):
        assert name in page
    assert cells(page, "appa.fairness-threshold") == ["appa.fairness-threshold", "0.99"]


def test_the_targets_own_error_stands_beside_the_alignment_scores(tmp_path: Path) -> None:
    page = built_page(fake_run(tmp_path, groups=COUNTRIES, iterations=3))
    results, rest = page.split("<h2>Results</h2>")[1].split("<h2>", 1)
    assert (
        "The PluralLLM targets themselves agree with the survey answers of seen groups by JS 0.930 on held-out "
        "questions (own nearest question 0.880, uniform answer 0.790, mean of the other groups 0.940)." in results
    )
    # what is known for fewer answers is compared on these, and PluralLLM is no baseline of itself
    assert (
        "of unseen groups by JS 0.710 on held-out questions (uniform answer 0.690, mean of the other groups 0.760 on "
        "180 of 240 answers, where PluralLLM has 0.720)." in results
    )
    # the table: PluralLLM first in each part, its natural JS distance and its Wasserstein score beside it
    assert cells(rest, "seen / held-out") == ["seen / held-out", "PluralLLM", "0.930", "0.780", "0.880", "240"]
    assert "spread over context draws 0.042, its rank correlation with the error 0.31" in rest
    assert (tmp_path / "plots" / "pluralllm_groups.png").read_bytes().startswith(PNG_START)


def test_a_run_of_the_predictor_alone_lacks_nothing(tmp_path: Path) -> None:
    whole = fake_run(tmp_path / "whole", groups=COUNTRIES, iterations=3)
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("phases.json", "pluralllm.json"):
        (alone / name).write_bytes((whole / name).read_bytes())
    write_run(alone, config={**CONFIG, "run.phases": "pluralllm"})
    page = built_page(alone)
    assert "incomplete" not in page
    assert "seen / held-out" in page
    write_run(alone, config={**CONFIG, "run.phases": "all"})
    assert "incomplete" in built_page(alone)


def test_unseen_groups_are_marked_beside_their_alignment_scores(tmp_path: Path) -> None:
    fake_run(tmp_path, groups=("a", "b", "c"), iterations=1)
    page = built_page(tmp_path)
    assert "(unseen)" not in page
    config = json.loads((tmp_path / "config.json").read_text())
    write_run(tmp_path, config={**config, "pluralllm.unseen-groups": "b"})
    marked = built_page(tmp_path)
    assert "<th>b (unseen)</th>" in marked
    assert marked.count("(unseen)") == 1


def test_groups_stand_worst_predicted_first_and_unseen_ones_last(tmp_path: Path) -> None:
    found = read_run(fake_run(tmp_path, groups=("a", "b", "c"), iterations=1)).pluralllm
    assert found is not None
    assert [(group.name, group.unseen, group.js) for group in predictor.by_group(found)] == [
        ("c", False, {"PluralLLM": 0.88}),
        ("b", False, {"PluralLLM": 0.89}),
        ("a", True, {"PluralLLM": 0.9}),
    ]


def found_predictor(folder: Path, **changed: object) -> PluralLLM:
    found = read_run(write_run(folder, config=CONFIG, pluralllm=predictor_card(**changed))).pluralllm
    assert found is not None
    return found


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures come as matplotlib's figures, so that what is drawn can be asked for."""
    monkeypatch.setattr(plots, "_png", lambda draw: draw())


def curve_of(axes: Any) -> dict[float, float]:
    """x -> y of the points of the only line of a panel that has a marker."""
    (line,) = [line for line in axes.lines if line.get_marker() not in ("None", None)]
    return {float(x): float(y) for x, y in line.get_xydata()}


def levels_of(axes: Any) -> list[float]:
    return [float(line.get_ydata()[0]) for line in axes.lines if line.get_marker() in ("None", None)]


def test_the_mean_of_the_others_stands_beside_pluralllm_on_the_same_answers(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, config=CONFIG, pluralllm=predictor_card()))
    shown = [(row.part, row.predictor, row.scores[0], row.cells) for row in predictor.rows(found_predictor(tmp_path))]
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
    assert page.count('<td class="text">Mean of the other groups</td><td>0.760</td>') == 1
    assert page.count('<td class="text">PluralLLM, same answers</td><td>0.720</td>') == 1
    assert "so it is a hard baseline. Sums over groups, each of at least 3, were made for 0 training and 36" in page


def test_the_note_says_when_the_predictor_was_given_the_sums(tmp_path: Path) -> None:
    sums = {"prior": True, "min_groups": 4, "training": 90, "held_out": 36}
    note = predictor.note(found_predictor(tmp_path, population=sums))
    assert "each of at least 4, were made for 90 training and 36 held-out questions, and PluralLLM was given" in note
    assert "was given" not in predictor.note(found_predictor(tmp_path))


def test_without_sums_the_note_says_why_the_mean_of_the_others_is_absent(tmp_path: Path) -> None:
    scores = {"seen/held-out": {"pluralllm": predictor_scores(0.9), "uniform": predictor_scores(0.8)}}
    found = found_predictor(tmp_path, scores=scores, population=None)
    assert predictor.note(found).endswith(
        "The mean of the other groups is not shown: it was not asked for (key sums.mean-of-others), or too few groups "
        "answered the same questions (key sums.min-groups)."
    )
    assert "hard baseline" not in page_of(tmp_path)
    assert "mean of the other" not in predictor.trust(found)[0]


def test_scores_by_context_size_stand_in_the_page_and_the_terminal(tmp_path: Path) -> None:
    found = found_predictor(tmp_path)
    page = page_of(tmp_path)
    table = page[page.index(predictor.CONTEXT_TITLE) :].split("</table>")[0]
    assert cells(table, "Groups / questions") == ["Groups / questions", *SIZES, "Answers"]
    # 0.80 and 0.02 more a doubling
    seen = ["0.800", "0.820", "0.840", "0.860", "0.880", "0.900", "0.920", "240"]
    assert cells(table, "seen / held-out")[1:] == seen
    # not measured at 4, 32 and 64; 240 answers scored at size 1 and 236 at 16
    unseen = ["0.700", "0.710", "–", "0.730", "0.740", "–", "–", "236 to 240"]
    assert cells(table, "unseen / held-out")[1:] == unseen
    shown = predictor.by_context(found)
    assert shown is not None
    assert [list(column.cells) for column in shown.columns[1:]] == [
        list(pair) for pair in zip(seen, unseen, strict=True)
    ]
    assert [column.header for column in shown.columns[1:]] == [*SIZES, "Answers"]


@pytest.mark.parametrize("nothing", [{}, {"seen/held-out": {}}])
def test_without_scores_by_context_size_there_is_neither_table_nor_picture(tmp_path: Path, nothing: object) -> None:
    assert predictor.by_context(found_predictor(tmp_path, by_context=nothing)) is None
    assert predictor.CONTEXT_TITLE not in built_page(tmp_path)
    assert not (tmp_path / "plots" / "pluralllm_context.png").exists()
    assert (tmp_path / "plots" / "pluralllm.png").exists()


@pytest.mark.usefixtures("figures")
def test_the_context_picture_has_a_curve_and_the_baselines_of_each_part(tmp_path: Path) -> None:
    figure: Any = plots.predictor_by_context(predictor.context_curves(found_predictor(tmp_path)))
    seen, unseen = figure.axes
    assert curve_of(seen) == pytest.approx({2**i: 0.80 + 0.02 * i for i in range(7)})
    assert list(curve_of(unseen)) == [1, 2, 8, 16]  # whatever the order in the file
    assert curve_of(unseen) == pytest.approx({1: 0.70, 2: 0.71, 8: 0.73, 16: 0.74})
    assert sorted(levels_of(seen)) == [0.79, 0.88, 0.94]  # uniform, nearest question, mean of the others
    assert sorted(levels_of(unseen)) == [0.69, 0.76]
    assert [label.get_text() for label in seen.get_xticklabels()] == SIZES
    assert seen.get_xscale() == "log"
    assert seen.get_ylim() == unseen.get_ylim()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(predictor.PREDICTORS.values())[:4]
    assert seen.get_title() == "seen groups, held-out questions, 240 answers"
    assert unseen.get_title().endswith("236 to 240 answers\nmean of the others: 180 of 240 answers")


@pytest.mark.usefixtures("figures")
def test_seen_groups_alone_have_one_panel(tmp_path: Path) -> None:
    only = {"seen/held-out": {"8": predictor_scores(0.9)}}
    figure: Any = plots.predictor_by_context(predictor.context_curves(found_predictor(tmp_path, by_context=only)))
    (axes,) = figure.axes
    assert curve_of(axes) == {8: 0.9}


@pytest.mark.usefixtures("figures")
def test_panels_of_several_parts_stand_below_each_other(tmp_path: Path) -> None:
    parts = ("seen/held-out", "seen/training", "unseen/held-out")
    several = {part: {"8": predictor_scores(0.9)} for part in parts}
    figure: Any = plots.predictor_by_context(predictor.context_curves(found_predictor(tmp_path, by_context=several)))
    boxes = [axes.get_position() for axes in figure.axes]
    assert len(boxes) == 3
    assert boxes[0].y0 == boxes[1].y0 > boxes[2].y1
    assert boxes[0].x1 < boxes[1].x0


@pytest.mark.usefixtures("figures")
def test_the_kept_round_is_marked_on_loss_and_validation_error(tmp_path: Path) -> None:
    found = found_predictor(tmp_path)
    figure: Any = report._predictor_pictures(found)["pluralllm"][0]
    loss, validation = figure.axes
    assert len(curve_of(loss)) == 30
    assert curve_of(validation) == pytest.approx({r: 0.25 + 0.0004 * (r - 20) ** 2 for r in range(5, 31, 5)})
    for axes in (loss, validation):
        (mark,) = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert set(mark.get_xdata()) == {20}
    assert loss.get_title() == "PluralLLM pretraining; lower is better; dotted: round 20, the one kept"
    assert (
        "Weights of round 20 of 30 were kept: its error on the training groups&#x27; held-out questions is the lowest, "
        "a JS distance (natural) of 0.250; this flatters them a little, and unseen groups had no say."
        in page_of(tmp_path)
    )


@pytest.mark.usefixtures("figures")
def test_without_validation_there_is_one_panel_and_the_last_round_is_kept(tmp_path: Path) -> None:
    rounds = [{"round": r, "loss": 1 / r, "validation": None} for r in (1, 2, 3)]
    found = found_predictor(tmp_path, rounds=rounds, chosen=3)
    figure: Any = plots.loss_curve(found.rounds, chosen=found.chosen)
    (axes,) = figure.axes
    assert curve_of(axes) == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3})
    assert "Weights of round 3 of 3 were kept: none was validated." in page_of(tmp_path)


def test_a_predictor_that_did_not_train_has_no_curve_and_no_kept_round(tmp_path: Path) -> None:
    assert predictor.kept(found_predictor(tmp_path, rounds=[], chosen=0)) is None
    assert "were kept" not in built_page(tmp_path)
    assert not (tmp_path / "plots" / "pluralllm.png").exists()
    assert (tmp_path / "plots" / "pluralllm_context.png").exists()


def test_a_run_that_stopped_midway_says_where(tmp_path: Path) -> None:
    write_run(tmp_path, config=CONFIG, metrics=[line(i, planned=10, fell_back=None) for i in (1, 2, 3)])
    assert "stopped after iteration 3 of 10" in page_of(tmp_path)


def test_missing_policies_are_named_and_leave_the_verdict_open(tmp_path: Path) -> None:
    summary = [row(policy, *GOOD[policy], survey=False) for policy in ("base", "ppo")]
    page = built_page(write_run(tmp_path, config=CONFIG, summary=summary))
    assert "no row for sft, uniform, majority, ceiling-average, ceiling-min" in page
    assert "No verdict: base or the uniform answer was not evaluated." in page
    assert "survey truth" not in page


def test_a_group_that_never_answered_and_unmeasured_numbers_leave_gaps(tmp_path: Path) -> None:
    lines = [line(i, planned=2, fell_back=False) for i in (1, 2)]
    for entry in lines:
        entry["rewards"]["b"] = None
        entry["missing_groups"] = ["b"]
        entry["kl"] = float("nan")
    page = built_page(write_run(tmp_path, config=CONFIG, metrics=lines))
    assert cells(page, "b")[-1] == "2"  # iterations missed
    assert cells(page, "a")[-1] == "0"


def test_a_repeated_iteration_of_a_resumed_run_counts_once(tmp_path: Path) -> None:
    lines = [
        line(1, planned=3, fell_back=True),
        line(2, planned=3, fell_back=True),
        line(2, planned=3, fell_back=False),
    ]
    run = read_run(write_run(tmp_path, config=CONFIG, metrics=lines))
    found = findings.fall_back(run.iterations)
    assert found is not None
    assert (found.fell_back, found.total) == (1, 2)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run folder, it has no config\.json"):
        build(tmp_path)


def test_broken_line_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, config=CONFIG, metrics=[line(1, planned=3, fell_back=None)])
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('\n{"iteration": 2, "num_it')
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 3 is not JSON"):
        build(tmp_path)


def test_broken_json_file_is_named_with_its_line(tmp_path: Path) -> None:
    write_run(tmp_path, config=CONFIG)
    (tmp_path / "phases.json").write_text('[\n {"phase": "sft",\n  "seconds": }\n]', encoding="utf-8")
    with pytest.raises(UserError, match=r"phases\.json: line 3 is not JSON"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "summary",
            [row("ppo", 0.8, 0.7), row("gpt", 0.8, 0.7)],
            r"summary\.json, row 2, key 'policy': 'gpt' is not",
        ),
        (
            "summary",
            [row("ppo", 0.8, 0.7), row("ppo", 0.8, 0.7)],
            r"summary\.json: rows 1 and 2 are both policy 'ppo'",
        ),
        (
            "summary",
            [row("ppo", 0.8, 0.7) | {"fi": "high"}],
            r"row 1, key 'fi': must be a number, found \"high\"",
        ),
        ("summary", {}, r"summary\.json: must be a list, found \{\}"),
        (
            "metrics",
            [line(1, planned=3, fell_back=None) | {"kl": None}],
            r"line 1, key 'kl': must be a number, found null",
        ),
        ("metrics", [{"iteration": 1}], r"metrics\.jsonl: line 1: key 'num_iterations' is missing"),
        ("phases", [{"phase": "sft"}], r"phases\.json, row 1: key 'seconds' is missing"),
        ("config", {"task": ["dpa"]}, r"config\.json, 'task': must be a single value"),
        (
            "pluralllm",
            {"rounds": [{"round": 1.5, "loss": 1.0}], "scores": {}},
            r"key 'round': must be a whole number",
        ),
        # the layout of format 1
        (
            "pluralllm",
            {"format": 1, "rounds": [{"round": 1, "loss": 1.0}], "scores": {}, "groups": {}, "calibration": {}},
            r"pluralllm\.json, key 'rounds', item 1: key 'validation' is missing",
        ),
        ("pluralllm", {"format": 1, "rounds": []}, r"pluralllm\.json: key 'chosen' is missing"),
        (
            "pluralllm",
            predictor_card(population={"prior": False, "min_groups": 3, "training": 1}),
            r"pluralllm\.json, key 'population': key 'held_out' is missing",
        ),
        (
            "pluralllm",
            predictor_card(by_context={"seen/held-out": {"0": predictor_scores(0.5)}}),
            r"key 'by_context', 'seen/held-out': a number of context answers must be 1 or more, found \"0\"",
        ),
    ],
)
def test_wrong_value_is_named(tmp_path: Path, name: str, content: object, message: str) -> None:
    write_run(tmp_path, **({"config": CONFIG} | {name: content}))
    with pytest.raises(UserError, match=message):
        build(tmp_path)


def test_broken_file_leaves_the_old_report_alone(tmp_path: Path) -> None:
    before = built_page(scored_run(tmp_path))
    (tmp_path / "summary.json").write_text("[", encoding="utf-8")
    with pytest.raises(UserError):
        build(tmp_path)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == before


def test_labels_are_moved_apart_in_order() -> None:
    placed = plots._spread([0.50, 0.10, 0.51, 0.52], gap=0.1, low=0.0, high=1.0)
    # .50, .51, .52 want 0.1 between them around their middle .51: .41, .51, .61; .10 is free and stays.
    assert placed == pytest.approx([0.41, 0.10, 0.51, 0.61])
    crowded = plots._spread([0.98, 0.99, 1.0], gap=0.1, low=0.0, high=1.0)
    assert crowded == pytest.approx([0.8, 0.9, 1.0])
    # Five labels of 0.5 cannot fit into 1: they share it evenly.
    assert plots._spread([0.5] * 5, gap=0.5, low=0.0, high=1.0) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


def test_smoothing_skips_gaps() -> None:
    values_I = np.array([1.0, 2.0, np.nan, 4.0, 8.0])
    # Windows of 3: mean(1,2), mean(1,2), a gap stays one, mean(4,8), mean(4,8).
    np.testing.assert_allclose(plots._smoothed(values_I, 3), [1.5, 1.5, np.nan, 6.0, 6.0])


def test_trade_off_writes_a_png(tmp_path: Path) -> None:
    points = [
        plots.TradeOffPoint("appa", (0.83, 0.84, 0.82), (0.78, 0.79, 0.77)),
        plots.TradeOffPoint("alpha", (0.82,), (0.76,)),
        plots.TradeOffPoint("uniform", (0.79,), (0.75,), reference=True),
    ]
    path = plots.trade_off(points, tmp_path / "deep" / "trade_off.png", metric="js")
    assert path.read_bytes().startswith(PNG_START)


@pytest.mark.parametrize("points", [[], [plots.TradeOffPoint("appa", (0.8, 0.9), (0.7,))]])
def test_trade_off_refuses_unpaired_points(tmp_path: Path, points: list[plots.TradeOffPoint]) -> None:
    with pytest.raises(ValueError, match="needs one"):
        plots.trade_off(points, tmp_path / "x.png")
