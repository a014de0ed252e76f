"""Write a run's folder during the run; `appa_flwr.run.schema` lists the files in it."""

import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import keep_lines, read_file, recover, replace_file, sync, writing
from appa_flwr.owner.ledger import MEMORY_SUFFIX
from appa_flwr.run import records, schema
from appa_flwr.run.resume import claim
from appa_flwr.run.schema import CHECKPOINT_FILE, ERROR_FILE, LOG_FILE, SURVEY_FILE, TOKEN_FILE, JsonFile, LineFile
from server_app import log

MINUTE = 60
TOKEN_BYTES = 32

T = TypeVar("T")


class RunWriter:
    """Writes a run's files. Whole files are written beside and renamed; line files are flushed line by line.

    With `run.resume` the run in the folder goes on; otherwise the folder must not hold a run. The folder is locked
    until it is closed or the process ends. Progress goes also to `above`, the folder of a run that this run is part of.

    Raises:
        UserError: the folder cannot be written, another process writes to it, it does not hold the run to resume, or
            it holds a run and none is to be resumed. No file in it is touched then.
    """

    def __init__(self, config: Config, *, above: "RunWriter | None" = None) -> None:
        self.path = config.run_folder.absolute()
        self._above, self._config = above, config
        self._tracker: Any = None  # starts with the first iteration
        self._started = time.monotonic()
        self._lock = claim(config)
        self._forget_nodes()  # of a killed run
        with writing(self.path):
            recover(self.path)
            served = (schema.SERVED.name,) if config.run.phases == "serve" else ()
            for name in (schema.METRICS_FILE.name, schema.PROGRESS.name, LOG_FILE, *served):
                keep_lines(self.path / name)
        self._earlier = max((line.seconds for line in schema.PROGRESS.read(self.path)), default=0.0)

    def __enter__(self) -> Self:
        self._messages, self._level = _Messages(self), log.level
        log.addHandler(self._messages)
        log.setLevel(logging.INFO)
        return self

    def __exit__(self, *error: object) -> None:
        log.removeHandler(self._messages)
        log.setLevel(self._level)
        self._forget_nodes()
        self._lock.release()
        if self._tracker is not None:
            self._tracker.finish()

    def _forget_nodes(self) -> None:
        """Remove what simulated nodes have stored beside the run's survey."""
        shutil.rmtree((self.path / SURVEY_FILE).with_suffix(MEMORY_SUFFIX), ignore_errors=True)

    def write(self, file: JsonFile[T], content: T) -> None:
        """Replace a file as a whole."""
        schema.write(self.path / file.name, content)

    def append(self, file: LineFile[T], line: T) -> None:
        """Add one line to a line file; an iteration goes to the tracker too."""
        self._append(file.name, schema.dumps(line))
        if isinstance(line, records.Iteration) and self._config.run.tracker:
            from server_app import tracking  # imports torch

            self._tracker = self._tracker or tracking.start(self._config, self.path)
            self._tracker.log(tracking.numbers(line.model_dump()), step=line.iteration)

    def _append(self, name: str, line: str) -> None:
        try:
            with writing(self.path / name), (self.path / name).open("a") as file:
                file.write(line + "\n")
                sync(file)
        except UserError:
            with suppress(UserError):
                keep_lines(self.path / name)  # removes a partly written line
            raise

    def keep_iterations(self, count: int) -> int:
        """Cut `metrics.jsonl` back to its first `count` iterations, and return how many it had.

        Raises:
            UserError: the file has fewer iterations.
        """
        path = self.path / schema.METRICS_FILE.name
        before = keep_lines(path)
        if (left := keep_lines(path, count)) < count:
            raise UserError(
                f"{path}: has {left} lines, but {CHECKPOINT_FILE} was written after {count}; "
                f"without {CHECKPOINT_FILE} the run resumes before PPO"
            )
        return before

    def token(self) -> str:
        """The token of the service, from a file that only its owner can read, made on first use; UserError if empty."""
        path = self.path / TOKEN_FILE
        if not path.exists():
            replace_file(path, (secrets.token_urlsafe(TOKEN_BYTES) + "\n").encode(), mode=0o600)
        token = read_file(path).decode(errors="replace").strip()
        if not token:  # an empty token would let anyone in
            raise UserError(f"{path}: there is no token in it")
        return token

    def fail(self, reason: str) -> None:
        """Write the reason of an early end as one line to error.txt; on a full disk only Flower's log has it."""
        with suppress(UserError):
            replace_file(self.path / ERROR_FILE, (" ".join(reason.split()) + "\n").encode())
            self._append(LOG_FILE, f"failed: {reason}")

    def phase(self, name: str, *, done: int = 0) -> "OpenPhase":
        """Begin a phase, whose first `done` steps were done before the run was resumed."""
        phase = OpenPhase(self, name, done=done)
        phase.step(0, 1, "begins")
        return phase

    def progress(self, phase: str, step: int, of: int, message: str, seconds_left: float | None) -> None:
        """Write a line for the launcher and a line for the log."""
        seconds = round(self._earlier + time.monotonic() - self._started, 1)
        line = records.Progress(
            phase=phase, step=step, of=of, message=message, seconds_left=seconds_left, seconds=seconds
        )
        self.append(schema.PROGRESS, line)
        left = "" if not seconds_left else f", {seconds_left / MINUTE:.1f} min left"
        text = self.note(f"{phase} {step}/{of}: {message}{left}")
        if self._above is None:
            print(text, flush=True)
        else:
            self._above.progress(f"{phase} by {self._config.rule}", step, of, message, seconds_left)

    def timed(self, phase: str, message: str) -> Callable[[int, int], None]:
        """Function of (steps done, steps) that reports progress of work outside a phase, or before the phase begins."""
        return partial(OpenPhase(self, phase, done=0).step, message=message)

    def log_this_thread(self) -> None:
        """From here on, the log of a run inside another has this thread's messages only: others may train beside it."""
        if self._above is not None:
            self._messages.thread = threading.get_ident()

    def note(self, text: str) -> str:
        """Add a line with the time to the log, and return the line."""
        line = f"[{time.monotonic() - self._started:6.1f} s] {' '.join(text.split())}"
        self._append(LOG_FILE, line)
        return line


class _Messages(logging.Handler):
    """Copies the server's log messages into the run's log, such as which group is missing and why."""

    def __init__(self, folder: RunWriter) -> None:
        super().__init__()
        self._folder = folder
        self.thread: int | None = None  # None = messages of all threads

    def filter(self, record: logging.LogRecord) -> bool:
        return self.thread in (None, record.thread)

    def emit(self, record: logging.LogRecord) -> None:
        kind = "warning: " if record.levelno >= logging.WARNING else ""
        with suppress(UserError):  # a full disk ends the run elsewhere
            self._folder.note(f"{kind}{record.getMessage()}")


class OpenPhase:
    """One phase of a run; see `RunWriter.phase`."""

    def __init__(self, folder: RunWriter, name: str, *, done: int) -> None:
        self._folder, self._name, self._done = folder, name, done
        self._started = time.monotonic()

    def step(self, step: int, of: int, message: str) -> None:
        """Report a completed step; the time left is this process's mean time per step times the steps to come."""
        done, spent = step - self._done, time.monotonic() - self._started
        left = spent / done * (of - step) if done > 0 else None
        self._folder.progress(self._name, step, of, message, left)
