"""Starts `appa run` as a user would, and watches which processes belong to the run."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from small import READABLE, keys_of

SHORT_WAITS = Path(__file__).parent / "short_waits"
LIMIT_SECONDS = 540.0
POLL_SECONDS = 0.5
APPA = [sys.executable, "-c", "from appa_flwr.launch.cli import main; main()"]

# Makes a folder of a short path: Ray's sockets lie below it and their names have little room.
temporary_folder = partial(tempfile.TemporaryDirectory, prefix="e2e", ignore_cleanup_errors=True)


def small_environment() -> dict[str, str]:
    """Environment of a process whose waits are short, and what it builds is small."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(SHORT_WAITS), os.environ.get("PYTHONPATH"))))}


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    folder: Path  # where it wrote
    code: int  # exit code of the launcher
    out: str
    err: str
    seen: dict[int, str]  # processes that belonged to the run while it went on, by id
    left: list[str]  # of which these were alive after the launcher had ended
    around: list[Path]  # what the launcher left beside the run folder: in its working folder, and of its Flower homes

    def json(self, name: str) -> Any:
        """A whole JSON file of the run."""
        return json.loads((self.folder / name).read_text())

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A file of the run with a JSON object a line."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


def belonging_to(temporary: Path | str) -> dict[int, str]:
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


def kill_all(temporary: Path | str) -> None:
    """Kill (SIGKILL) every process of a run, as where its machine stops."""
    while left := belonging_to(temporary):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


@dataclass(frozen=True)
class RealRuns:
    """Runs in one folder, which share their tiny models."""

    folder: Path

    def __call__(self, name: str, **changes: object) -> Finished:
        """Run `appa run` with `READABLE` and these changes, two underscores for a dot, and wait for its end."""
        given = READABLE | keys_of(changes)
        given |= {"run-name": name, "run.output-dir": self.folder / "runs"}
        command = [*APPA, "run", *(f"{key}={value}" for key, value in given.items())]
        here = self.folder / f"{name}-here"
        here.mkdir(exist_ok=True)
        out, err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        seen: dict[int, str] = {}
        with temporary_folder() as temporary:
            with out.open("wb") as stdout, err.open("wb") as stderr:
                process = subprocess.Popen(
                    command,
                    cwd=here,
                    env=small_environment() | {"TMPDIR": temporary, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                )
            try:
                deadline = time.monotonic() + LIMIT_SECONDS
                while process.poll() is None and time.monotonic() < deadline:
                    seen |= belonging_to(temporary)
                    time.sleep(POLL_SECONDS)
            finally:
                if process.poll() is None:
                    process.terminate()  # the launcher ends what it started
                process.wait()
            left = [f"{pid} {name}" for pid, name in belonging_to(temporary).items()]
            around = [*here.iterdir(), *Path(temporary).glob("appa-*")]  # torch keeps a compiler's cache there too
        folder = self.folder / "runs" / name
        return Finished(folder, process.returncode, out.read_text(), err.read_text(), seen, left, around)
