"""A deployment as `appa deploy` makes it, started by a test: each party's process, folder and key, TLS between them."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from real_run import small_environment
from small import SMALLEST, keys_of

from appa_flwr.core.ports import LOOPBACK, free_port
from appa_flwr.launch import deploy
from appa_flwr.launch.bundle import bundle_hash
from appa_flwr.launch.deploy import SERVER, Started, start
from appa_flwr.launch.processes import all_ended, descendants
from appa_flwr.launch.sites import CONNECTION, GROUP_KEYS_FILE, Sites, prepare
from appa_flwr.survey.types import Survey

REPO = Path(__file__).parents[1]
PLACES = {
    "survey": "questions.jsonl",
    "run-name": "r",
    "run.output-dir": "runs",
    "run.group-keys": GROUP_KEYS_FILE,
}


@dataclass
class Deployment:
    """What one test started, and where."""

    sites: Sites
    started: Started
    home: Path

    def flwr(self, *arguments: str) -> str:
        """A command of whoever submits the run."""
        return self.started.parties[SERVER].call(["flwr", *arguments])

    def submit(self, **changed: object) -> None:
        """Submit the smallest run, with these keys changed: `ppo__epochs` for `ppo.epochs`."""
        values = SMALLEST | PLACES | keys_of(changed)
        keys = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
        self.flwr("run", str(REPO), CONNECTION, "--run-config", keys)

    def status(self) -> str:
        return self.started.parties[SERVER].status()

    @property
    def run(self) -> Path:
        return self.sites.server / "runs" / "r"

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What a run has written so far into one of its files with an object a line."""
        try:
            complete = (self.run / name).read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in complete]

    @property
    def iterations(self) -> list[dict[str, Any]]:
        return self.lines("metrics.jsonl")

    def phases(self) -> set[str]:
        return {line["phase"] for line in self.lines("progress.jsonl")}

    def wait(self, happened: Callable[[], bool], *, seconds: float = 1200.0) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            log = (self.sites.server / "superlink.log").read_text(errors="replace")
            assert self.started.superlink.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.2)

    def processes(self, program: str) -> list[Any]:
        """Processes of this deployment whose command names that program of Flower's."""
        return [process for process in descendants() if any(program in part for part in process.cmdline())]


@contextmanager
def deployed(
    survey: Survey,
    folder: Path,
    *,
    nodes: bool = True,
    host: str = LOOPBACK,
    everywhere: bool = False,
) -> Iterator[Deployment]:
    """A started server with a node a group (without `nodes`: none yet); nothing of it is left at the end.

    Nodes find it at `host`; it listens at the loopback alone, or `everywhere`, as start.sh has it.
    """
    sites = prepare(survey, folder / "parties", host=host, port=free_port(), keys={}, bundle=bundle_hash(REPO))
    (home := folder / "homes").mkdir()
    before = descendants()
    with pytest.MonkeyPatch.context() as patched, all_ended():
        if everywhere:
            patched.setattr(deploy, "LOOPBACK", "0.0.0.0")
        patched.setenv("XDG_CACHE_HOME", str(sites.server / "cache"))  # where a test can see what the server keeps
        patched.setenv("PYTHONPATH", small_environment()["PYTHONPATH"])
        yield Deployment(sites, start(sites, home, nodes=sites.groups if nodes else ()), home)
    assert descendants(besides=before) == set()
