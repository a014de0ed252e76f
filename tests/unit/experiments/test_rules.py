"""The rules side by side: what a free policy can and cannot reach, and that the table says it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from experiments import rules, study

FAR = 2.0
ALL = "mix, worst-share 1"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "DISAGREEMENT", (FAR,))
        patch.setattr(study, "RULES", {name: study.RULES[name] for name in ("average", ALL, "appa")})
        rules.main(seeds=2, visits=600, questions=16, groups=4, output=folder)
    return pd.read_csv(folder / "rules.csv"), (folder / "rules.md").read_text(), (folder / "rules.png").read_bytes()


def test_no_rule_passes_the_best_answers_and_the_worst_group_s_rule_is_nearest(found):
    frame, *_ = found
    lowest = frame.pivot_table(index="seed", columns="rule", values="min_as")
    assert (lowest.drop(columns=rules.BEST).max(axis=1) <= lowest[rules.BEST] + 0.01).all()
    assert (lowest[ALL] > lowest["average"] + 0.005).all()
    averages = frame.pivot_table(index="seed", columns="rule", values="avg_as")
    assert (averages["average"] > averages[ALL]).all()
    assert frame.loc[frame["rule"] != rules.BEST, "fi"].between(0.5, 1).all()


def test_the_table_has_the_study_s_numbers_and_the_picture_is_one(found):
    frame, text, png = found
    row = next(line for line in text.splitlines() if line.startswith(f"| {FAR:g} | {ALL} |"))
    texts = [text.strip() for text in row.strip("|").split("|")]
    means = frame[frame["rule"] == ALL][["fi", "avg_as", "min_as"]].mean()
    assert texts[2:5] == [f"{value:.3f}" for value in means]
    lowest = frame.pivot_table(index="seed", columns="rule", values="min_as")
    assert texts[6] == study.difference(lowest[ALL] - lowest["average"])
    assert png.startswith(b"\x89PNG")


def test_half_the_reward_pays_where_weights_follow_it(tmp_path):
    rules.main(seeds=1, visits=600, questions=16, groups=4, liars=True, output=tmp_path)
    frame = pd.read_csv(tmp_path / "liars.csv").set_index(["rule", "lie"])["liar"]
    gain = {name: frame[name, "half"] - frame[name, rules.HONEST] for name in ("average", ALL, *rules.CAPPED)}
    assert gain["average"] < 0.0  # half the reward is half the weight
    assert gain[ALL] > 0.02 > gain[f"{ALL}, cap 2"]
    reward_J = np.array([0.5, 0.6, 0.7])
    lies = {"half": [0.25, 0.3, 0.35], "zero": [0, 0, 0], "stretched": [0.3, 0.6, 0.9]}
    assert {name: lie(reward_J).tolist() for name, lie in rules.LIES.items()} == {
        name: pytest.approx(sent) for name, sent in lies.items()
    }
