"""`flwr run . --stream` from a checkout, without the launcher and without any variable that the run needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from appa_flwr.launch.flower import COMPLETED
from appa_flwr.launch.ports import free_port
from appa_flwr.launch.processes import end_processes, processes_of

# Some 60 CPU seconds: `appa run` starts the same command (test_simulation), and test_deployment submits by it too.
pytestmark = [pytest.mark.slow, pytest.mark.long]

REPO = Path(__file__).parents[2]
PARTS = ("appa_flwr", "pluralllm", "server_app", "client_app", "pyproject.toml", "LICENSE", "README.md")
TINY_LOOP = (
    "eval.ceilings=false policy.base-steps=20 sft.steps=2 ppo.num-iterations=1 pluralllm.rounds=1 baseline-rule='' "
    "data.num-questions=40 data.num-groups=3 "
    "rollout.batch-size=16 ppo.num-mini-batches=2 ppo.epochs=1 embedding.dim=16 run.output-dir='runs'"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    for part in PARTS:
        if (REPO / part).is_dir():
            shutil.copytree(REPO / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPO / part, folder)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The prepared environment's PATH; a home and a port of its own, so that other Flowers here are left alone."""
    home = tmp_path / "f"
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
    foreign = {key: value for key, value in os.environ.items() if not key.startswith(("FLWR_", "RAY_"))}
    own = {"FLWR_HOME": str(home), "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()), "PATH": path}
    yield foreign | own
    end_processes(home)  # Flower leaves its local SuperLink running
    assert processes_of(home) == []


def flwr(folder: Path, environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        ["flwr", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def newest_status(folder: Path, environment: dict[str, str]) -> str:
    (run,) = json.loads(flwr(folder, environment, "list", "--limit", "1", "--format", "json"))["runs"]
    return str(run["status"])


def test_flwr_run_needs_no_launcher(checkout, environment, tmp_path):
    keys = f"{TINY_LOOP} run-name='r'"
    log = flwr(checkout, environment, "run", ".", "--stream", "--run-config", keys)
    assert newest_status(checkout, environment) == COMPLETED, log
    run = checkout / "runs" / "r"
    assert {row["method"] for row in json.loads((run / "summary.json").read_text())} > {"base", "sft", "ppo"}
    assert (run / "report.html").exists()
