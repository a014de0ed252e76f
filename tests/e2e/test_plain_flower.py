"""`flwr run CHECKOUT --stream`, without the launcher and without any variable that the run needs."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from deployment import REPO, TINY_LOOP

from appa_flwr.config import to_toml_table
from appa_flwr.launch.flower import COMPLETED
from appa_flwr.launch.ports import free_port
from appa_flwr.launch.processes import end_processes, processes_of

# Some 60 CPU seconds: `appa run` starts the same command (test_simulation), and test_deployment submits by it too.
pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_flwr_run_needs_no_launcher(tmp_path: Path):
    home, keys = tmp_path / "f", tmp_path / "keys.toml"
    places = {"run-name": "r", "run.output-dir": str(tmp_path / "runs")}
    small = {"data.num-questions": 40, "data.num-groups": 3, "ppo.num-iterations": 1}
    keys.write_text(to_toml_table({**TINY_LOOP, **small, **places}))
    # The prepared environment's PATH; a home and a port of its own, so that other Flowers here are left alone.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("FLWR_", "RAY_"))}
    environment |= {"FLWR_HOME": str(home), "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port())}
    environment["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))

    def flwr(*arguments: str) -> str:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(["flwr", *arguments], cwd=tmp_path, env=environment, text=True, **streams)
        assert done.returncode == 0, done.stdout
        return done.stdout

    try:
        log = flwr("run", str(REPO), "--stream", "--run-config", str(keys))
        (run,) = json.loads(flwr("list", "--limit", "1", "--format", "json"))["runs"]
    finally:
        end_processes(home)  # Flower leaves its local SuperLink running
    assert processes_of(home) == []
    assert run["status"] == COMPLETED, log
    folder = tmp_path / "runs" / "r"
    assert {row["method"] for row in json.loads((folder / "summary.json").read_text())} > {"base", "sft", "ppo"}
    assert (folder / "report.html").exists()
