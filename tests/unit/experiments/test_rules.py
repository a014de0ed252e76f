"""The rules side by side: differences of pairs with their interval, and what a free policy can and cannot reach."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from appa_flwr.aggregation import make
from experiments import rules

FAR = 2.0


def test_a_difference_has_the_interval_of_its_pairs():
    # .03 and .05: mean .04, standard error .01, Student's t with one degree of freedom 12.706
    assert rules.difference(pd.Series([0.03, 0.05])) == "+0.040 (-0.087 to +0.167)"
    # .04, .05, .06: standard error .00577, t with two degrees of freedom 4.303
    assert rules.difference(pd.Series([0.04, 0.05, 0.06])) == "**+0.050 (+0.025 to +0.075)**"
    assert rules.difference(pd.Series([0.04])) == rules.difference(pd.Series([0.04, np.nan])) == ""


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "DISAGREEMENT", (FAR,))
        patch.setattr(rules, "RULES", {name: make(name) for name in ("average", "group-dro", "appa")})
        frame = rules.study(range(2), iterations=300, num_questions=4, num_groups=4)
        yield frame, rules.table(frame), rules.picture(frame)


def test_no_rule_passes_the_best_answers_and_the_worst_group_s_rule_is_nearest(found):
    frame, *_ = found
    lowest = frame.pivot_table(index="seed", columns="rule", values="min_as")
    assert (lowest.drop(columns=rules.BEST).max(axis=1) <= lowest[rules.BEST] + 0.01).all()
    assert (lowest["group-dro"] > lowest["average"] + 0.005).all()
    averages = frame.pivot_table(index="seed", columns="rule", values="avg_as")
    assert (averages["average"] > averages["group-dro"]).all()
    assert frame.loc[frame["rule"] != rules.BEST, "fi"].between(0.5, 1).all()


def test_the_table_has_the_study_s_numbers_and_the_picture_is_one(found):
    frame, text, png = found
    row = next(line for line in text.splitlines() if line.startswith("| 2 | group-dro |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    means = frame[frame["rule"] == "group-dro"][["fi", "avg_as", "min_as"]].mean()
    assert cells[2:5] == [f"{value:.3f}" for value in means]
    lowest = frame.pivot_table(index="seed", columns="rule", values="min_as")
    assert cells[6] == rules.difference(lowest["group-dro"] - lowest["average"])
    assert png.startswith(b"\x89PNG")
