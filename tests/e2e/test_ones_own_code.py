"""A simulation of an institute's file whose rule is the guide's example, in a file beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyreadstat
import pytest
from real_run import RealRuns

from appa_flwr.survey import store

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"


def institute_file(path: Path) -> None:
    """Four regions of 60 respondents each, 60 questions of three options, a weight and an undeclared 99."""
    rng = np.random.default_rng(0)
    questions = [f"q{number}" for number in range(60)]
    table = pd.DataFrame(rng.choice([1, 2, 3, 99], p=[0.4, 0.3, 0.25, 0.05], size=(240, 60)), columns=questions)
    table["region"], table["wght"] = np.arange(240) % 4 + 1, rng.uniform(0.5, 2, size=240)
    labels = {name: {1: "Yes", 2: "No", 3: "Maybe", 99: "Not asked"} for name in questions}
    labels["region"] = dict(enumerate(("North", "South", "East", "West"), start=1))
    texts = {name: f"Is thing number {name} good?" for name in questions}
    pyreadstat.write_sav(table, str(path), variable_value_labels=labels, column_labels=texts)


def test_a_rule_of_ones_own_runs_on_an_institute_s_file(appa_run: RealRuns):
    here = appa_run.folder / "own-here"
    here.mkdir()
    section = (DOCS / "scores.md").read_text().split("## A rule of your own")[1]
    (here / "my_rules.py").write_text(section.split("```")[1].removeprefix("python"))
    institute_file(here / "poll.sav")
    run = appa_run("own", survey="poll.sav", data__group_by="region", rule="my_rules:Median")
    assert run.code == 0, run.out + run.err
    rows = {(row["method"], row["metric"]): row for row in run.json("summary.json")}
    for method in ("sft", "ppo", "uniform", "majority", "option-list"):
        assert set(rows[method, "js"]["per_group"]) == {"North", "South", "East", "West"}
    for line in run.lines("metrics.jsonl"):
        assert line["rewards"].keys() == {"North", "South", "East", "West"}
        assert set(line["weights"].values()) == {0.25}
    assert str(here / "poll.sav") in run.json("config.json")["survey"]
    kept = store.read(run.folder / "survey.jsonl")
    assert (kept.about.source, kept.about.weight, kept.about.group_by) == ("poll.sav", "wght", "region")
    assert {question.options for question in kept.questions} == {("Yes", "No", "Maybe")}
    assert "poll.sav (sha256" in (run.folder / "report.html").read_text()
