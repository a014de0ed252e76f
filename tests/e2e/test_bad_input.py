"""A user's mistakes on the command line, which must start nothing, and in a survey file, which cost one row or group.

The launcher's `test_cli.py` has the command's own messages; here the installed command runs as a process, and a survey
with a bad row goes through the groups' real ClientApp.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from in_process import InProcessGrid, SimulatedGrid, flower_task, simulated

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.survey.read import read_survey
from client_app import state
from server_app.federation.catalogue import build_catalogue
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Federation

APPA = Path(sys.executable).with_name("appa")
GROUPS = ("North", "South", "West")
NUM_QUESTIONS = 6
BAD_ROW = 8  # rows count from 1: the second question of South


def write_survey(path: Path, distribution: list[float]) -> Path:
    """Three groups with six questions each; one answer as given, in row BAD_ROW."""
    rows = [
        {
            "question_id": f"q{q}",
            "question": f"What about {'abcdef'[q]}?",
            "options": ["yes", "no", "perhaps"],
            "group": group,
            "distribution": [0.5, 0.25, 0.25],
        }
        for group in GROUPS
        for q in range(NUM_QUESTIONS)
    ]
    assert (rows[BAD_ROW - 1]["group"], rows[BAD_ROW - 1]["question_id"]) == ("South", "q1")
    rows[BAD_ROW - 1]["distribution"] = distribution
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["survey={survey}", "groups=North,Atlantis"], ['"Atlantis"', "North, South, West"]),
        (["survey={survey}", "federation.min-groups=4"], ["min-groups = 4", "which is 3"]),
        (["survey={folder}/notes.txt"], ["notes.txt", ".jsonl"]),
        (["groups=Koln"], ['groups names "Koln"', "Avaria"]),
        (["model={folder}"], ["cannot be loaded"]),
        (["rule=nothing:Rule"], ["nothing cannot be imported"]),
        (["rule=aveage"], ["one of appa, average,", "MODULE:CLASS"]),
        (["learning-rat=0.1"], ['"learning-rat"', '"sft.learning-rate"']),
    ],
    ids=lambda value: value[-1] if "=" in value[-1] else "",
)
def test_the_command_ends_with_one_line_and_starts_nothing(overrides, says, tmp_path):
    survey = write_survey(tmp_path / "survey.jsonl", [0.2, 0.3, 0.5])
    (tmp_path / "notes.txt").write_text("no survey")
    here = tmp_path / "here"
    here.mkdir()
    texts = [text.format(survey=survey, folder=tmp_path) for text in [*overrides, "run.output-dir={folder}/runs"]]
    flags = [part for text in texts for part in ("-c", text)]
    done = subprocess.run([str(APPA), "run", *flags], cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("appa: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    for part in says:
        assert part in done.stderr
    assert not (tmp_path / "runs").exists()
    assert list(here.iterdir()) == []


# --- a survey row ---------------------------------------------------------------------------------

BAD = {
    "a sum that is not one": [0.5, 0.25, 0.5],
    "a negative share": [1.25, -0.25, 0.0],
    "a missing share": [0.5, 0.5],
    "no number": [0.5, 0.5, float("nan")],
    "all zero": [0.0, 0.0, 0.0],
}


def join(path: Path, *, strict: bool, min_groups: int = 3) -> tuple[Federation, InProcessGrid, dict[str, int]]:
    """The first phase of a run: roll call and catalogue, by two nodes for three groups."""
    flat = {
        "survey": str(path),
        "federation.min-groups": min_groups,
        "data.strict": strict,
        "embedding.dim": 8,
        "data.test-fraction": 0.3,
    }
    config = Config.load(flat)
    grid = SimulatedGrid(simulated(config, 2))
    with flower_task():
        federation = Federation(OverlapGrid(grid), min_groups=config.federation.min_groups, timeout=5.0)
        federation.gather(GROUPS, patience=0.0)
        answered = federation.send_catalogue(build_catalogue(config))
    return federation, grid, answered


@pytest.mark.parametrize("distribution", BAD.values(), ids=BAD.keys())
def test_a_bad_row_is_left_out_by_number_and_reason_and_the_rest_is_used(distribution, tmp_path):
    path = write_survey(tmp_path / "survey.jsonl", distribution)
    (rejection,) = read_survey(path).rejections
    assert (rejection.row, rejection.group, rejection.question_id) == (BAD_ROW, "South", "q1")
    assert rejection.reason
    federation, grid, _ = join(path, strict=False)
    assert federation.groups == GROUPS
    catalogue = state.catalogue(state.memory_of(next(iter(grid.contexts.values()))))
    assert len(catalogue.questions) == NUM_QUESTIONS  # the other groups' answers keep the question
    row = [question.question_id for question in catalogue.questions].index("q1")
    for context in grid.contexts.values():
        for name in state.groups(state.memory_of(context)):
            missing_Q = np.isnan(state.truth(state.memory_of(context), name)).any(1)
            assert missing_Q.tolist() == [name == "South" and q == row for q in range(NUM_QUESTIONS)]


def test_strict_costs_the_group_with_the_bad_row_and_no_other(tmp_path, caplog):
    path = write_survey(tmp_path / "survey.jsonl", BAD["a sum that is not one"])
    with pytest.raises(UserError, match=r"only 2 of 3 groups \(North, West\) could take the catalogue"):
        join(path, strict=True)
    # The group's own log names the row.
    assert f"row {BAD_ROW}: question 'q1', group 'South'" in caplog.text
    with pytest.raises(UserError, match=f"row {BAD_ROW}: question 'q1', group 'South'"):
        read_survey(path, strict=True)


def test_a_group_without_a_usable_answer_does_not_take_its_neighbours_along(tmp_path):
    path = write_survey(tmp_path / "survey.jsonl", [1.0, 0.0, 0.0])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    spoilt = [row | {"distribution": [0.0]} if row["group"] == "North" else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in spoilt))
    federation, grid, answered = join(path, strict=False, min_groups=2)
    assert set(answered) == {"South", "West"}  # North and West share a node
    assert [state.groups(state.memory_of(context)) for context in grid.contexts.values()] == [("West",), ("South",)]
    assert federation.groups == GROUPS
