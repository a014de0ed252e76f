"""A run's folder: the files the launcher follows while it runs and the report is built from.

config.json            every key of the run
progress.jsonl         a line a step, for the launcher
run.log                the same for a person; its lock says that the run is being written
phases.json            seconds of each phase, added up over resumed sessions
pluralllm.json         the card of PluralLLM's weights: its training and its error
pluralllm.safetensors  PluralLLM's final weights
metrics.jsonl          a line a PPO iteration
summary.json           every policy's and baseline's scores
examples.json          some answers before and after PPO
sft-model/             the policy as PPO starts from it
checkpoint.pt          PPO's state after some iteration
policy/                the aligned policy, in Hugging Face's layout
error.txt              why the run ended early

A resumed run takes PluralLLM's weights, the SFT model and the checkpoint from here and does the rest again.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from appa_flwr.config import Config
from appa_flwr.errors import UserError
from appa_flwr.files import PARTIAL, hidden, keep_lines, lock, replace_file, sync, sync_folder, writing
from appa_flwr.run.resume import CONFIG_FILE, LOG_FILE, PROGRESS_FILE, WEIGHTS_FILE, check_resumable

MINUTE = 60
OLD = ".old"
METRICS_FILE = "metrics.jsonl"
PHASES_FILE = "phases.json"
CHECKPOINT_FILE, ERROR_FILE = "checkpoint.pt", "error.txt"
SFT_MODEL, POLICY = "sft-model", "policy"
LINE_FILES = (METRICS_FILE, PROGRESS_FILE, LOG_FILE)
WHOLE_FILES = (
    PHASES_FILE,
    "pluralllm.json",
    "summary.json",
    "examples.json",
    WEIGHTS_FILE,
    CHECKPOINT_FILE,
    ERROR_FILE,
)


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Give a new folder to write into, and put it in place of `folder` once the block has ended without an error.

    A folder cannot be renamed over another one. So the old one steps aside first; if the process ends right then,
    `recover` takes it back.

    Raises:
        UserError: it cannot be written; what was there before is intact.
    """
    beside, old = hidden(folder, PARTIAL), hidden(folder, OLD)
    with writing(folder):
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            yield beside
            for path in beside.rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        sync(file)
            sync_folder(beside)
            if folder.exists():
                os.rename(folder, old)
            os.rename(beside, folder)
            sync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Tidy up after a process that ended while it replaced something in this folder."""
    for old in folder.glob(f".*{OLD}"):
        target = folder / old.name[1 : -len(OLD)]
        if target.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, target)
    for beside in folder.glob(f".*{PARTIAL}"):
        if beside.is_dir():
            shutil.rmtree(beside)
        else:
            beside.unlink()


class RunFolder:
    """Writes a run's files; whole files are written beside and renamed, line files are flushed line by line.

    Opened with `resume`, it goes on with what is there; otherwise an earlier run's files are removed. It is locked
    until it is closed or the process ends.

    Attributes:
        path: of the folder, absolute.
        resumed: whether it holds the beginning of this run.

    Raises:
        UserError: it cannot be written, another process writes to it, or it does not hold the run to resume.
    """

    def __init__(self, config: Config) -> None:
        self.path = config.run_folder.absolute()
        self.resumed = config.run.resume
        self._started = time.monotonic()
        if self.resumed:
            check_resumable(config)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.path / LOG_FILE)
        with writing(self.path):
            recover(self.path)
            for name in LINE_FILES:
                keep_lines(self.path / name, None if self.resumed else 0)
            (self.path / ERROR_FILE).unlink(missing_ok=True)
            if not self.resumed:  # an earlier run's results are not this run's
                for name in WHOLE_FILES:
                    (self.path / name).unlink(missing_ok=True)
                for name in (SFT_MODEL, POLICY):
                    shutil.rmtree(self.path / name, ignore_errors=True)
        if not self.resumed:
            self.write_json(CONFIG_FILE, config.flat())
        self._seconds: dict[str, float] = {}
        if (self.path / PHASES_FILE).exists():
            rows = json.loads((self.path / PHASES_FILE).read_text())
            self._seconds = {row["phase"]: row["seconds"] for row in rows}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    def write_json(self, name: str, content: object) -> None:
        """Replace a file as a whole."""
        replace_file(self.path / name, (json.dumps(content, indent=1, allow_nan=True) + "\n").encode())

    def append_json(self, name: str, content: Mapping[str, object]) -> None:
        """Add one line to a line file."""
        self._append(name, json.dumps(content))

    def _append(self, name: str, line: str) -> None:
        with writing(self.path / name), (self.path / name).open("a") as file:
            file.write(line + "\n")
            sync(file)

    def keep_iterations(self, count: int) -> None:
        """Cut `metrics.jsonl` back to its first iterations.

        Raises:
            UserError: it has fewer than that.
        """
        left = keep_lines(self.path / METRICS_FILE, count)
        if left < count:
            raise UserError(
                f"{self.path / METRICS_FILE}: has {left} lines, but {CHECKPOINT_FILE} was written after {count}; "
                f"without {CHECKPOINT_FILE} the run resumes before PPO"
            )

    def fail(self, reason: str) -> None:
        """Leave the reason of an early end, on one line; on a full disk it stays in Flower's log alone."""
        with suppress(UserError):
            replace_file(self.path / ERROR_FILE, (" ".join(reason.split()) + "\n").encode())
            self._append(LOG_FILE, f"failed: {reason}")

    @contextmanager
    def phase(self, name: str, *, done: int = 0) -> Iterator[Phase]:
        """Time a phase and report its steps.

        Args:
            name: of the phase; seconds of earlier sessions are added to.
            done: its steps that an earlier session has done.
        """
        phase = Phase(self, name, done)
        phase.step(0, 1, "begins")
        yield phase
        phase.save_seconds()

    def save_seconds(self, phase: str, seconds: float) -> None:
        """Replace a phase's time in `phases.json`."""
        self._seconds[phase] = round(seconds, 3)
        self.write_json(PHASES_FILE, [{"phase": name, "seconds": spent} for name, spent in self._seconds.items()])

    def seconds(self, phase: str) -> float:
        """What a phase has taken in earlier sessions."""
        return self._seconds.get(phase, 0.0)

    def progress(self, phase: str, step: int, of: int, message: str, seconds_left: float | None) -> None:
        """One line for the launcher and one for the log."""
        self.append_json(
            PROGRESS_FILE,
            {"phase": phase, "step": step, "of": of, "message": message, "seconds_left": seconds_left},
        )
        left = "" if not seconds_left else f", {seconds_left / MINUTE:.1f} min left"
        elapsed = time.monotonic() - self._started
        line = f"[{elapsed:6.1f} s] {phase} {step}/{of}: {message}{left}"
        self._append(LOG_FILE, line)
        print(line, flush=True)


class Phase:
    """One phase of a run; see `RunFolder.phase`."""

    def __init__(self, folder: RunFolder, name: str, done: int) -> None:
        self._folder, self._name, self._done = folder, name, done
        self._earlier = folder.seconds(name)
        self.started = time.monotonic()

    def step(self, step: int, of: int, message: str) -> None:
        """Report a step done; the time left is the mean of this session's steps so far times those to come."""
        spent, here = time.monotonic() - self.started, step - self._done
        left = spent / here * (of - step) if here > 0 else None
        self._folder.progress(self._name, step, of, message, left)

    def save_seconds(self) -> None:
        """Keep the time spent so far, which a kill would lose."""
        self._folder.save_seconds(self._name, self._earlier + time.monotonic() - self.started)
