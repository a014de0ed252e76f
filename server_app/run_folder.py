"""A run's folder: the files the launcher follows while it runs and the report is built from.

config.json     every key of the run
progress.jsonl  a line a step, for the launcher
run.log         the same for a person
phases.json     seconds of each phase
pluralllm.json  PluralLLM's training and its error
metrics.jsonl   a line a PPO iteration
summary.json    every policy's and baseline's scores
examples.json   some answers before and after PPO
sft-model/      the policy as PPO starts from it
policy/         the aligned policy, in Hugging Face's layout
error.txt       why the run ended early
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appa_flwr.config import Config
from appa_flwr.errors import UserError

MINUTE = 60
LINE_FILES = ("metrics.jsonl", "progress.jsonl", "run.log")
WHOLE_FILES = ("phases.json", "pluralllm.json", "summary.json", "examples.json", "error.txt")


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Give a new folder to write into, and put it in place of `folder` once the block has ended without an error."""
    beside = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    yield beside
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)


class RunFolder:
    """Writes a run's files; whole files are written beside and renamed, line files are flushed line by line."""

    def __init__(self, config: Config) -> None:
        self.path = config.run_folder.absolute()
        self._phases: list[dict[str, Any]] = []
        self._started = time.monotonic()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name in LINE_FILES:
                (self.path / name).write_text("")
            for name in WHOLE_FILES:  # an earlier run's results, or its error, are not this run's
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"output-dir = {self.path}: cannot be written ({error.strerror})") from error
        self.write_json("config.json", config.flat())

    def write_json(self, name: str, content: object) -> None:
        """Replace a file as a whole."""
        beside = self.path / f".{name}.partial"
        beside.write_text(json.dumps(content, indent=1, allow_nan=True) + "\n")
        os.replace(beside, self.path / name)

    def append_json(self, name: str, content: Mapping[str, object]) -> None:
        """Add one line to a line file."""
        self._append(name, json.dumps(content))

    def _append(self, name: str, line: str) -> None:
        with (self.path / name).open("a") as file:
            file.write(line + "\n")

    def fail(self, reason: str) -> None:
        """Leave the reason of an early end, on one line."""
        (self.path / "error.txt").write_text(" ".join(reason.split()) + "\n")
        self._append("run.log", f"failed: {reason}")

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Time a phase and report its steps."""
        phase = Phase(self, name)
        phase.step(0, 1, "begins")
        yield phase
        seconds = time.monotonic() - phase.started
        self._phases.append({"phase": name, "seconds": round(seconds, 3)})
        self.write_json("phases.json", self._phases)

    def progress(self, phase: str, step: int, of: int, message: str, seconds_left: float | None) -> None:
        """One line for the launcher and one for the log."""
        self.append_json(
            "progress.jsonl",
            {"phase": phase, "step": step, "of": of, "message": message, "seconds_left": seconds_left},
        )
        left = "" if not seconds_left else f", {seconds_left / MINUTE:.1f} min left"
        elapsed = time.monotonic() - self._started
        line = f"[{elapsed:6.1f} s] {phase} {step}/{of}: {message}{left}"
        self._append("run.log", line)
        print(line, flush=True)


class Phase:
    """One phase of a run; see `RunFolder.phase`."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self.started = time.monotonic()

    def step(self, step: int, of: int, message: str) -> None:
        """Report a step done; the time left is the mean of the steps so far times those to come."""
        spent = time.monotonic() - self.started
        left = spent / step * (of - step) if step else None
        self._folder.progress(self._name, step, of, message, left)
