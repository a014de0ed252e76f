"""The paper's grid file through real runs: its path with a tiny model, for one dataset, task and model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from surveys import row, write

from appa_flwr.config import preset, split_names

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "experiments.grid", str(ROOT / "experiments" / "paper.toml")]
SMALL = ["--scale", "small", "--only", "globalqa,dpa,gemma-2-2b,appa"]

# The launcher's own tests: tests/unit/experiments/test_experiment_grid.py; a real run: test_simulation.py. Here three
# real runs of one grid, for two minutes.
pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """Where both surveys of the grid file are found, in our own columns."""
    rng = np.random.default_rng(0)
    options = [[f"option {n}" for n in range(2 + question % 4)] for question in range(30)]
    rows = [
        row(f"q{question}", group, rng.dirichlet(np.ones(len(given))).round(3), options=given)
        for question, given in enumerate(options)
        for group in split_names(str(preset("paper")["groups"]))
    ]
    for name in ("globalqa", "opinionqa"):
        write(tmp_path / f"{name}.jsonl", rows)
    return {**os.environ, "APPA_SURVEYS": str(tmp_path), "PYTHONPATH": str(ROOT)}


def test_the_paper_s_grid_at_a_small_scale(environment, tmp_path):
    def call(*more):
        ended = subprocess.run([*COMMAND, *SMALL, *more], env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr[-2000:] + ended.stdout[-2000:]
        return ended.stdout

    assert "3 trials (1 predictor, 1 sft, 1 rule), 0 done" in call("--dry-run")
    call()
    folder = tmp_path / "runs" / "paper-small"
    found = pd.read_csv(folder / "results.csv")
    levels = found[found["less"].isna()]
    assert set(levels["method"]) >= {"base", "sft", "uniform", "ceiling-average", "appa"}
    for method, row_of, trial in (("appa", "ppo", "*-appa-s0-*"), ("sft", "sft", "*-sft-s0-*")):
        (path,) = (folder / "trials").glob(f"{trial}/summary.json")
        (scored,) = [r for r in json.loads(path.read_text()) if (r["method"], r["metric"]) == (row_of, "js")]
        lines = levels[(levels["method"] == method) & (levels["metric"] == "js")]
        of = lines.set_index(["against", "measure"])["value"]
        for against, scores in (("predictions", scored), ("survey", scored["survey"])):
            for measure, name in (("Avg AS", "avg_as"), ("Min AS", "min_as"), ("FI", "fi")):
                assert of[against, measure] == pytest.approx(scores[name])
    assert (folder / "plots" / "globalqa-dpa-gemma-2-2b-groups.png").stat().st_size > 0
    before = {path: path.stat().st_mtime_ns for path in (folder / "trials").rglob("*")}
    assert "3 of 3 trials are done" in call()
    assert {path: path.stat().st_mtime_ns for path in (folder / "trials").rglob("*")} == before
