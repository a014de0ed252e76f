"""The frames of a report: one row for each interval, whatever is known; and what is picked of them."""

import json

import numpy as np
import pandas as pd
import pytest
import report_runs as made
from test_comparison import scored

from appa_flwr.analysis.intervals import bootstrap
from appa_flwr.report import build, frames, opening, plots
from appa_flwr.run import pair_scores
from appa_flwr.run.read import read_run


def two_rules(folder, *, above, ended=True):
    """A run by `mix` with the baseline's policy, which scores .55 for the worst group; `mix` adds so much to each."""
    run = scored(folder / "r", above=above, rule="mix", **{"baseline-rules": "average"})
    baseline = scored(run / "average", rule="average", **{"baseline-rules": ""})
    if ended:
        made.progressed(baseline, "report")
    return run


def bounds(intervals, method, less, against, measure):
    at = intervals.set_index(["method", "less", "against", "measure"])[["value", "low", "high"]]
    return at.loc[(method, less, against, measure)].tolist()


@pytest.mark.parametrize("above", [0.05, -0.05, 0.0])
def test_the_differences_of_two_rules_are_those_of_their_answers_to_the_same_questions(above, tmp_path):
    found = frames.of_run(read_run(two_rules(tmp_path, above=above)))
    for against in ("survey", "predictions"):
        for measure, other in (("Min AS", 0.55), ("Avg AS", 0.65)):
            assert bounds(found, "ppo by average", "", against, measure)[0] == pytest.approx(other)
            assert bounds(found, "ppo", "", against, measure)[0] == pytest.approx(other + above)
            # the same question has so much more, whichever are drawn
            assert bounds(found, "ppo", "ppo by average", against, measure) == pytest.approx([above] * 3)


def test_two_rules_and_their_difference_are_on_the_page(tmp_path):
    page = build(run := two_rules(tmp_path, above=0.05)).read_text().replace("\xa0", " ")
    assert made.cells(made.page_of(run / "average"), "PPO by average")[2].startswith("0.550 (0.5")
    assert made.cells(page, "PPO by average")[2].startswith("0.550 (0.5")
    assert "<b>+0.050 (+0.050 to +0.050)</b>" in page
    assert page.index("better than PPO by average (+0.050,") < page.index('title="methods"')


def test_many_level_groups_have_the_sample_s_minimum_as_level_and_the_estimate_in_differences(tmp_path):
    rng, groups, questions = np.random.default_rng(3), [f"g{g}" for g in range(121)], [f"q{q:02}" for q in range(80)]
    hole_GQ = rng.permuted(np.arange(80) >= rng.integers(5, 41, 121)[:, None], axis=1)  # 5 to 40 answers each
    rewards, summary = {}, [made.row(name, 0.8, 0.7, groups=groups) for name in ("sft", "ppo")]
    run = made.write_run(tmp_path / "r", config=made.CONFIG, summary=summary)
    for name in ("sft", "ppo"):
        rewards[name] = np.where(hole_GQ, np.nan, np.clip(0.8 + 0.1 * rng.standard_normal((121, 80)), 0, 1))
        rows = pair_scores.as_rows(name, "js", "predictions", rewards[name], groups=groups, questions=questions)
        pair_scores.put(run, rows)
    page = build(run).read_text().replace("\xa0", " ")
    axes, _ = plots.methods.__wrapped__(frames.of_run(read_run(run)), rule="appa").axes
    bars, points = axes.lines[::2], axes.lines[1::2]
    for bar, point, text, reward_GQ in zip(bars, points, axes.texts, rewards.values(), strict=True):
        one, lowest = bootstrap([(reward_GQ,)])["Min AS"], np.nanmean(reward_GQ, axis=1).min()
        assert [*bar.get_xdata(), *point.get_xdata()] == pytest.approx([one.low, one.high, one.value])
        assert text.get_text() == f"{one.value:.3f}"
        assert one.sample == lowest < one.low < 0.8 < one.high
    assert made.cells(page, "PPO by appa")[2] == f"{lowest:.3f} ({one.low:.3f} to {one.high:.3f})"
    gain = bootstrap([(rewards["ppo"], rewards["sft"])])["Min AS"]
    cell = made.cells(page.partition("<summary>Differences")[2], "SFT")[2]
    assert cell == f"{gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"


def test_a_ceiling_of_a_sample_is_named_so_and_compared_on_its_questions(tmp_path):
    run = scored(tmp_path / "r")  # group a has .6 from even questions, .5 from others
    reward_G3 = np.array([[0.9, 0.8, 0.9], [0.9, 0.9, 0.9]])
    ceiling = made.row("ceiling-min", float(reward_G3.mean()), float(reward_G3.mean(1).min())) | {"sampled": 3}
    (run / "summary.json").write_text(json.dumps([*json.loads((run / "summary.json").read_text()), ceiling]))
    rows = pair_scores.as_rows(
        "ceiling-min", "js", "predictions", reward_G3, groups=("a", "b"), questions=("q0", "q1", "q2")
    )
    pair_scores.put(run, rows)
    found = frames.of_run(read_run(run))
    value, low, high = bounds(found, "ppo", "ceiling-min", "predictions", "Avg AS")
    assert value == pytest.approx((0.6 + 0.5 + 0.6 + 0.8 + 0.7 + 0.8) / 6 - reward_G3.mean())
    assert low < value < high
    page = build(run).read_text().replace("\xa0", " ")
    for part in page.partition("<summary>Differences")[::2]:
        assert made.cells(part, "Ceiling (worst group), 3 questions")
    assert made.cells(page, "PPO by appa")


def test_a_second_policy_that_is_not_finished_is_left_out_and_sft_stands_in(tmp_path):
    run = read_run(two_rules(tmp_path, above=0.05, ended=False))
    assert set(run.summary["method"]) == {"ppo"}
    assert "is not known" in opening.verdict(frames.of_run(run), run.summary, "mix")


def test_where_single_scores_are_not_known_there_are_values_without_bounds(tmp_path):
    run = made.read(tmp_path, summary=made.summary())
    found = frames.of_run(run)
    # GOOD: PPO .860 / .800 and SFT .810 / .770, .1 less by the survey
    assert bounds(found, "ppo", "", "survey", "Min AS")[0] == pytest.approx(0.700)
    value, low, high = bounds(found, "ppo", "sft", "predictions", "Avg AS")
    assert (value, low, high) == pytest.approx((0.05, np.nan, np.nan), nan_ok=True)
    text = opening.verdict(found, run.summary, "appa")
    assert "not clearly different from SFT (+0.030, no interval)" in text


def test_the_verdict_leaves_out_targets_by_which_the_worst_group_is_unknown(tmp_path):
    rows = made.summary()
    for row in rows:
        row["min_as"] = float("nan") if row["against"] == "survey" else row["min_as"]
    run = made.read(tmp_path, summary=rows)
    said = opening.verdict(frames.of_run(run), run.summary, "appa")
    assert "Min AS against predictions" in said
    assert "SFT (+0.030" in said
    assert "nan" not in said


def test_the_mean_reward_of_served_rounds_is_that_of_the_groups():
    rounds = pd.DataFrame(
        {"size": [4, 4], "reward": [0.09, 0.75], "group_reward": [0.72, 0.74], "fairness_index": [0.9, 0.99]}
    )
    assert dict(frames.served_facts(rounds))["Mean reward"] == "0.730, in the last round 0.740"


def test_the_curve_of_held_out_questions_has_the_scored_iterations_alone():
    points = {2: 0.5, 4: 0.625}
    rounds = [made.line(number, planned=4, fell_back=False) for number in range(1, 5)]
    for number, min_as in points.items():
        rounds[number - 1]["held_out"] = {"survey": {"fi": 0.9, "avg_as": 0.75, "min_as": min_as}}
    figure = plots.more_of_training.__wrapped__(pd.json_normalize(rounds, sep="/"), ["a", "b"])
    (axes,) = [axes for axes in figure.axes if axes.get_title() == "Min AS on held-out questions"]
    assert [tuple(line.get_xydata().ravel()) for line in axes.lines] == [(2, 0.5, 4, 0.625)]
