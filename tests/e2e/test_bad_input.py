"""A user's mistake on the command line, which must start nothing, and in a survey file, which costs a group.

The launcher's `test_cli.py` has the command's own messages; here the installed command runs as a process, and a survey
with a bad row goes through the groups' real ClientApp.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from in_process import InProcessGrid, SimulatedGrid, flower_task, simulated

from appa_flwr.config import Config
from client_app import state
from server_app.federation.catalogue import build_catalogue
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Federation

APPA = Path(sys.executable).with_name("appa")
GROUPS = ("North", "South", "West")
NUM_QUESTIONS = 6


def write_survey(path: Path, *, spoilt: str) -> Path:
    """Three groups with six questions each; one group's answers are none."""
    rows = [
        {
            "question_id": f"q{q}",
            "question": f"What about {'abcdef'[q]}?",
            "options": ["yes", "no", "perhaps"],
            "group": group,
            "distribution": [0.0] if group == spoilt else [0.5, 0.25, 0.25],
        }
        for group in GROUPS
        for q in range(NUM_QUESTIONS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_ends_with_one_line_and_starts_nothing(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    flags = [f"model={tmp_path}", "sft.learning-rate=0.001", f"run.output-dir={tmp_path}/runs"]
    done = subprocess.run([str(APPA), "run", *flags], cwd=here, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    *warnings, line = done.stderr.splitlines()
    assert all(text.startswith("WARNING: this machine is busy") for text in warnings)  # where other tests run beside it
    assert line.startswith("appa: ")
    assert "cannot be loaded" in line  # which a process of the server finds out
    assert not (tmp_path / "runs").exists()
    assert list(here.iterdir()) == []


def join(path: Path) -> tuple[Federation, InProcessGrid, dict[str, int]]:
    """The first phase of a run: roll call and catalogue, by two nodes for three groups."""
    flat = {
        "survey": str(path),
        "run.min-groups": 2,
        "data.test-fraction": 0.3,
    }
    config = Config.load(flat)
    grid = SimulatedGrid(simulated(config, 2))
    with flower_task():
        federation = Federation(OverlapGrid(grid), min_groups=config.run.min_groups, timeout=5.0)
        federation.gather(GROUPS, patience=0.0)
        answered = federation.send_catalogue(build_catalogue(config))
    return federation, grid, answered


def test_a_group_without_a_usable_answer_does_not_take_its_neighbours_along(tmp_path):
    federation, grid, answered = join(write_survey(tmp_path / "survey.jsonl", spoilt="North"))
    assert set(answered) == {"South", "West"}  # North and West share a node
    assert [state.groups(state.memory_of(context)) for context in grid.contexts.values()] == [("West",), ("South",)]
    assert federation.groups == GROUPS
