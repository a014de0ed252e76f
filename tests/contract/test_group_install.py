"""What a group's machine installs is enough to take part, and no more than it uses."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from group_life import installed
from in_process import InProcessGrid, deployed
from packaging.requirements import Requirement
from talk import KINDS, TINY, talk

from appa_flwr.config import Config
from appa_flwr.launch.sites import prepare
from appa_flwr.survey.export import export_split
from appa_flwr.survey.generate import generate

REPO = Path(__file__).resolve().parents[2]
LIST = REPO / "requirements-group.txt"
MODEL_LIBRARIES = {"trl", "transformers", "peft", "accelerate", "bitsandbytes", "datasets"}
HEAVY = MODEL_LIBRARIES | {"matplotlib", "sklearn", "pandas", "scipy", "ray"}


def requirements() -> list[str]:
    return [line for line in LIST.read_text().splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Path:
    """A run's messages and replies, with everything installed."""
    folder = tmp_path_factory.mktemp("talk")
    written = export_split(generate(num_questions=32, num_groups=3, seed=0), folder)
    config = Config.load({**TINY, "survey": str(written.questions)})
    grid = InProcessGrid(deployed(config, written.groups))
    talk(grid, config)
    for memory in folder.rglob("*.memory"):  # the same messages meet nodes that have not had them
        shutil.rmtree(memory)
    messages = [(asked.data, reply.data) for asked, reply in zip(grid.requests, grid.replies, strict=True)]
    path = folder / "talk.pickle"
    path.write_bytes(pickle.dumps({"config": config.flat(), "files": dict(written.groups), "messages": messages}))
    return path


def life(record: Path, lines: list[str]) -> subprocess.CompletedProcess[str]:
    listed = record.with_name("requirements.txt")
    listed.write_text("\n".join(lines))
    return subprocess.run(
        [sys.executable, str(REPO / "tests" / "group_life.py"), str(listed), str(record)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_group_takes_part_with_no_more_than_its_list(record):
    done = life(record, requirements())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {line["kind"] for line in found["answered"]} == set(KINDS)
    assert [line for line in found["answered"] if not line["same"]] == []
    assert HEAVY.isdisjoint(found["imported"])
    # and the list holds nothing that is not imported
    assert {Requirement(line).name for line in requirements()} <= set(found["imported"])


def test_its_owner_can_check_decide_and_audit_with_no_more_than_that_list(record, tmp_path):
    listed = record.with_name("requirements.txt")
    listed.write_text("\n".join(requirements()))
    data = next(iter(pickle.loads(record.read_bytes())["files"].values()))
    code = f"""
        import sys
        from pathlib import Path
        from group_life import forget_all_but
        forget_all_but(Path({str(listed)!r}).read_text().splitlines())
        from appa_flwr.launch.cli import main
        main()
    """
    ledger = data.with_suffix(".ledger.sqlite")
    questions = str(record.with_name("questions.jsonl"))
    survey = generate(num_questions=20, num_groups=2, seed=0)
    sites = prepare(survey, tmp_path, host="127.0.0.1", port=1, keys={}, bundle="")  # where nobody listens
    for arguments, part, status in (
        (["group", "check", str(data), "--questions", questions], "of 32 public questions", 0),
        (["group", "policy"], "truth = false", 0),
        (["group", "audit", str(ledger)], "query.score", 0),
        (["doctor", str(sites.group(survey.groups[0]))], "has start.sh been run at the server?", 1),
    ):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *arguments],
            env={**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stderr
        assert part in " ".join(done.stdout.split())
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), "run"],
        env={**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "appa: scipy is not installed; `make group` brings what `appa group` needs\n"


def test_without_one_of_them_it_could_not(record):
    done = life(record, [line for line in requirements() if not line.startswith("torch")])
    assert "No module named" in done.stderr


def test_a_groups_list_is_a_part_of_the_requirements():
    listed = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
    project = {requirement.name: str(requirement.specifier) for requirement in map(Requirement, listed)}
    assert requirements()
    for requirement in map(Requirement, requirements()):
        assert str(requirement.specifier) == project[requirement.name]
        assert not requirement.extras  # of flwr: its simulation, and so ray, is the server's
    assert not HEAVY & installed(requirements())
