"""Following a run: by the lines that its server appends to `progress.jsonl`, shown as bars or as plain lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn


@dataclass(frozen=True)
class ProgressRecord:
    """One line of `progress.jsonl`: `step` of the phase's `of` steps are done.

    `seconds_left` is for the whole run, None where unknown.
    """

    phase: str
    step: int
    of: int
    message: str
    seconds_left: float | None

    @property
    def left(self) -> str:
        """Time left in words, empty where unknown."""
        if self.seconds_left is None:
            return ""
        minutes, seconds = divmod(max(0, round(self.seconds_left)), 60)
        return f"{minutes} min {seconds:02d} s left" if minutes else f"{seconds} s left"

    @property
    def line(self) -> str:
        """The record as one plain line."""
        text = f"[{self.phase} {self.step}/{self.of}] {self.message}".rstrip()
        return f"{text} ({self.left})" if self.left else text


Show = Callable[[ProgressRecord], None]


class Tail:
    """Reads what is appended to a file, which need not exist yet."""

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        self._path, self._offset = path, 0
        if skip:  # what is there already
            self.text()

    def text(self) -> str:
        """What was written since the last call, up to the last complete line."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return ""
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode("utf-8", errors="replace")


def read_progress(tail: Tail) -> Iterator[ProgressRecord]:
    """New records of a progress file."""
    for line in tail.text().splitlines():
        yield ProgressRecord(**json.loads(line))


@contextmanager
def shown(console: Console) -> Iterator[Show]:
    """What shows a record: one bar a phase on a terminal, one plain line a record in logs and pipes."""
    if not console.is_terminal:
        yield lambda record: print(record.line, flush=True)
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.fields[message]}", markup=False),
        console=console,
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def show(record: ProgressRecord) -> None:
            for task in tasks.values():
                bars.update(task, left="")  # the time left stands next to the phase that runs
            if record.phase not in tasks:
                tasks[record.phase] = bars.add_task(record.phase, left="", message="")
            task = tasks[record.phase]
            bars.update(task, completed=record.step, total=record.of, left=record.left, message=record.message)

        yield show
