"""A user's mistake on the command line, which must start nothing, and in a group's file, which costs that group.

The launcher's `test_cli.py` has the command's own messages; here the installed command runs as a process, and a file
without a group's answers goes through the groups' real ClientApp.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from in_process import InProcessGrid, deployed, flower_task
from small import AS_OWNERS_ASK, VOTES
from surveys import row, write

from appa_flwr.config import Config
from client_app.memory import memory_of
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Groups
from server_app.questions import build_catalogue

APPA = Path(sys.executable).with_name("appa")
GROUPS = ("North", "South", "West")


def write_survey(path: Path) -> Path:
    """Two of the three groups with six questions each."""
    rows = [row(f"q{q}", group, question=f"What about {'abcdef'[q]}?") for group in GROUPS[1:] for q in range(6)]
    return write(path, rows)


def test_the_command_ends_with_one_line_and_starts_nothing(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    flags = [f"model={tmp_path}", "sft.learning-rate=0.001", f"run.output-dir={tmp_path}/runs"]
    done = subprocess.run([str(APPA), "run", *flags], cwd=here, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("appa: ")
    assert "cannot be loaded" in line  # which a process of the server finds out
    assert not (tmp_path / "runs").exists()
    assert list(here.iterdir()) == []


def test_a_group_without_answers_does_not_take_its_neighbours_along(tmp_path):
    files = {"North; West": write_survey(tmp_path / "two.jsonl"), "South": write_survey(tmp_path / "one.jsonl")}
    config = Config.load(
        {"survey": str(files["South"]), "data.test-fraction": 0.3, "run.min-groups": 2, **AS_OWNERS_ASK, **VOTES}
    )
    grid = InProcessGrid(deployed(config, files))
    with flower_task():
        groups = Groups(OverlapGrid(grid), config)
        groups.gather(GROUPS, patience=0.0)
        answered = groups.send_catalogue(build_catalogue(config))
    assert set(answered) == {"South", "West"}
    assert [memory_of(context)["groups"] for context in grid.contexts.values()] == [b"West", b"South"]
    assert groups.names == GROUPS
