"""What a group's machine installs is enough to take part, and no more than it uses."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from group_life import installed
from nodes import InProcessGrid, at_home, deployed
from packaging.requirements import Requirement
from real_run import SHORT_WAITS
from runs import looped
from small import SMALLEST

from appa_flwr.config import Config
from appa_flwr.launch.sites import prepare
from appa_flwr.protocol import messages, queries
from appa_flwr.survey.generate import generate
from appa_flwr.survey.types import Noise
from server_app.questions import run_survey

REPO = Path(__file__).resolve().parents[2]
LIST = REPO / "requirements-group.txt"
MODEL_LIBRARIES = {"trl", "transformers", "peft", "accelerate", "bitsandbytes", "datasets"}
HEAVY = MODEL_LIBRARIES | {"matplotlib", "sklearn", "pandas", "scipy", "ray", "opendp"}


def requirements() -> list[str]:
    return [line for line in LIST.read_text().splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Path:
    """A run's messages and replies, with everything installed."""
    folder = tmp_path_factory.mktemp("talk")
    config = Config.load(SMALLEST)
    survey = run_survey(config)
    noise = Noise(2.0, 1e-6, 8.02, len(survey.questions), 1, total=4.0)
    config, files = at_home(replace(survey, about=replace(survey.about, noise=noise)), folder, config)
    config = Config.load({**config.flat(), "run.output-dir": str(folder / "runs"), "run-name": "r"})
    grid = looped(config, InProcessGrid(deployed(config, files)))
    assert "epsilon 4 a respondent" in (config.run_folder / "progress.jsonl").read_text()  # of all releases
    for memory in folder.rglob("*.memory"):  # the same messages meet nodes that have not had them
        shutil.rmtree(memory)
    crossed = [(asked.data, reply.data) for asked, reply in zip(grid.requests, grid.replies, strict=True)]
    path = folder / "talk.pickle"
    path.write_bytes(pickle.dumps({"config": config.flat(), "files": dict(files), "messages": crossed}))
    return path


def python(*command: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (REPO, REPO / "tests", SHORT_WAITS)))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, check=False
    )


def test_a_group_takes_part_with_no_more_than_its_list(record):
    done = python(REPO / "tests" / "group_life.py", LIST, record)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    setup = (messages.HELLO, messages.CATALOGUE, messages.TARGETS)
    numbers = {
        queries.VOTES,
        queries.UPDATE,
        queries.VALIDATION,
        queries.SCORES,
        queries.REWARDS,
    }  # what owners allow by themselves
    assert {line["kind"] for line in found["answered"]} == {*setup, *numbers}
    assert [line for line in found["answered"] if not line["same"]] == []
    assert HEAVY.isdisjoint(found["imported"])
    # and the list holds nothing that is not imported
    assert {Requirement(line).name for line in requirements()} <= set(found["imported"])


COMMANDS = """
import json, sys
from group_life import forget_all_but
forget_all_but(json.loads(sys.argv[1]))
from appa_flwr.launch.cli import main
for command in json.loads(sys.argv[2]):
    sys.argv = ["appa", *command.split()]
    try:
        main()
    except SystemExit as ended:
        print("EXIT", ended.code or 0)
"""


def test_its_owner_can_check_decide_and_audit_with_no_more_than_that_list(record, tmp_path):
    data = next(iter(pickle.loads(record.read_bytes())["files"].values()))
    survey = generate(num_questions=20, num_groups=2, seed=0)
    sites = prepare(survey, tmp_path, host="127.0.0.1", port=1, keys={}, bundle="")  # where nobody listens
    questions = record.with_name("questions.jsonl")
    parts = {
        f"group check {data} --questions {questions}": r"of 24.*epsilon 4 a respondent \(noise of 8 people\).* EXIT 0",
        "group policy": "may-leave = .* EXIT 0",
        f"group audit {data.with_suffix('.ledger.sqlite')}": "rewards.* EXIT 0",
        f"doctor {sites.group(survey.groups[0])}": "has start.sh been run at the server.* EXIT 1",
        "doctor": "GPU.* EXIT 0",
        "run": "EXIT 2",
    }
    done = python("-c", COMMANDS, json.dumps(requirements()), json.dumps([*parts]))
    assert re.search(".*".join(parts.values()), " ".join(done.stdout.split())), done
    assert "is not installed; appa doctor" in done.stderr  # of a run, which is none of its commands


def test_a_groups_list_is_a_part_of_the_requirements():
    listed = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
    project = {requirement.name: str(requirement.specifier) for requirement in map(Requirement, listed)}
    assert requirements()
    for requirement in map(Requirement, requirements()):
        assert str(requirement.specifier) == project[requirement.name]
        assert not requirement.extras  # of flwr: its simulation, and so ray, is the server's
    assert not HEAVY & installed(requirements())
