"""Starts `appa run` as a user would, and watches which processes belong to the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

LIMIT_SECONDS = 300.0
POLL_SECONDS = 0.5
APPA = [sys.executable, "-c", "from appa_flwr.launch.cli import main; main()"]

# As small as a run can be that still writes answers which can be read, and whose groups differ.
TINY_RUN: dict[str, object] = {
    "data.num-questions": 60,
    "data.num-groups": 4,
    "federation.min-groups": 4,
    "embedding.dim": 16,
    "pluralllm.rounds": 4,
    "policy.base-steps": 20,
    "sft.steps": 60,
    "ppo.num-iterations": 3,
    "rollout.batch-size": 32,
    "ppo.num-mini-batches": 4,
    "rollout.response-length": 48,
}


@dataclass(frozen=True)
class Finished:
    """A run that has ended.

    Attributes:
        folder: where it wrote.
        code: exit code of the launcher.
        out: its standard output.
        err: its standard error.
        seen: processes that belonged to the run while it went on, by id.
        left: of which these were alive after the launcher had ended.
        around: what the launcher left beside the run folder: in its working folder, and of its Flower homes.
    """

    folder: Path
    code: int
    out: str
    err: str
    seen: dict[int, str]
    left: list[str]
    around: list[Path]

    def json(self, name: str) -> Any:
        """A whole JSON file of the run."""
        return json.loads((self.folder / name).read_text())

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A file of the run with a JSON object a line."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


Runner = Callable[..., Finished]
"""Takes the run's name and config keys."""


def _belonging_to(temporary: Path) -> dict[int, str]:
    """Living processes whose environment, working folder or command names the run's own temporary folder.

    Ray's workers hide their environment, but work in a folder below it.
    """
    found = {}
    for process in psutil.process_iter():
        try:
            with process.oneshot():
                named = " ".join([*process.environ().values(), *process.cmdline()])
                ours = str(temporary) in named or str(temporary) in process.cwd()
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process.name()
        except (psutil.Error, OSError):
            continue
    return found


def run_appa(name: str, changes: Mapping[str, object], *, folder: Path) -> Finished:
    """Run `appa run` with the tiny run's keys and these changes, and wait for its end.

    Args:
        name: of the run.
        changes: config keys, with underscores.
        folder: runs of one folder share their tiny models.
    """
    given = TINY_RUN | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    given |= {"run-name": name, "run.output-dir": folder / "runs", "run.cache-dir": folder / "cache"}
    flags = [part for key, value in given.items() for part in ("-c", f"{key}={value}")]
    here = folder / f"{name}-here"
    here.mkdir()
    # A short path: Ray's sockets lie below it and their names have little room.
    temporary = Path(tempfile.mkdtemp(prefix="e2e"))
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    seen: dict[int, str] = {}
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [*APPA, "run", *flags],
            cwd=here,
            env=os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            seen |= _belonging_to(temporary)
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.terminate()  # the launcher ends what it started
        process.wait()
    left = [f"{pid} {name}" for pid, name in _belonging_to(temporary).items()]
    around = [*here.iterdir(), *temporary.glob("appa-*")]  # torch keeps a compiler's cache beside
    shutil.rmtree(temporary, ignore_errors=True)
    return Finished(folder / "runs" / name, process.returncode, out.read_text(), err.read_text(), seen, left, around)
