"""A simulation whose metric, survey reader and rule are the guides' examples, in files beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from real_run import RealRuns

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
METRIC = "my_metrics:overlap"


def example(page: str, first: str) -> str:
    (found,) = re.findall(rf"```python\n({re.escape(first)}.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return found


def test_a_metric_a_reader_and_a_rule_of_ones_own_run_where_they_belong(appa_run: RealRuns):
    here = appa_run.folder / "own-here"
    here.mkdir()
    for name, heading in (("my_rules.py", "A rule"), ("my_metrics.py", "A metric")):
        section = (DOCS / "rules.md").read_text().split(f"## {heading} of your own")[1]
        (here / name).write_text(section.split("```")[1].removeprefix("python"))
    (here / "my_readers.py").write_text(example("surveys.md", "import json\n\n\ndef read"))
    rng = np.random.default_rng(0)
    polls = [
        {
            "text": f"Is thing number {number} good?",
            "choices": ["Yes", "No", "Maybe"],
            "answers": {place: rng.integers(1, 50, 3).tolist() for place in ("North", "South", "East", "West")},
        }
        for number in range(60)
    ]
    (here / "polls.json").write_text("\n".join(map(json.dumps, polls)))
    run = appa_run("own", survey="my_readers:read:polls.json", metric=METRIC, rule="my_rules:Median")
    assert run.code == 0, run.out + run.err
    rows = {(row["method"], row["metric"]): row for row in run.json("summary.json")}
    for method in ("sft", "ppo", "uniform", "majority", "option-list"):
        assert set(rows[method, METRIC]["per_group"]) == {"North", "South", "East", "West"}
    assert rows["own-prediction", METRIC]["avg_as"] == pytest.approx(1)
    # Mass moves K - 1 steps at most, so that no total variation is less than the scaled Wasserstein distance.
    for method in ("uniform", "option-list"):
        assert rows[method, METRIC]["survey"]["avg_as"] < rows[method, "wasserstein"]["survey"]["avg_as"]
    assert not [method for method, metric in rows if metric == METRIC and method.startswith("ceiling")]
    for line in run.lines("metrics.jsonl"):
        assert line["rewards"].keys() == {"North", "South", "East", "West"}
        assert set(line["weights"].values()) == {0.25}
    assert str(here / "polls.json") in run.json("config.json")["survey"]
