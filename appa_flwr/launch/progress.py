"""Following a run: by the lines that its server appends to `progress.jsonl`, shown as bars or as plain lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bars

from appa_flwr.run.records import Progress

Show = Callable[[Progress], None]


def time_left(record: Progress) -> str:
    """In words, empty where unknown or over."""
    if not record.seconds_left:
        return ""
    minutes, seconds = divmod(max(0, round(record.seconds_left)), 60)
    return f"{minutes} min {seconds:02d} s left" if minutes else f"{seconds} s left"


def plain_line(record: Progress) -> str:
    """The record as one plain line."""
    text = f"[{record.phase} {record.step}/{record.of}] {record.message}".rstrip()
    left = time_left(record)
    return f"{text} ({left})" if left else text


class Tail:
    """Reads what is appended to a file, which need not exist yet."""

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        self._path, self._offset = path, 0
        if skip:  # what is there already
            self.text()

    def text(self) -> str:
        """Text written since the last call, up to the last complete line."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return ""
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode("utf-8", errors="replace")


def read_progress(tail: Tail) -> Iterator[Progress]:
    """New records of a progress file."""
    for line in tail.text().splitlines():
        yield Progress.model_validate_json(line)


@contextmanager
def shown(console: Console) -> Iterator[Show]:
    """The display of records: one bar a phase on a terminal, one plain line a record in logs and pipes."""
    if not console.is_terminal:
        yield lambda record: print(plain_line(record), flush=True)
        return
    with Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.fields[message]}", markup=False),
        console=console,
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def show(record: Progress) -> None:
            for task in tasks.values():
                bars.update(task, left="")  # the time left stands next to the phase that runs
            if record.phase not in tasks:
                tasks[record.phase] = bars.add_task(record.phase, left="", message="")
            task = tasks[record.phase]
            bars.update(task, completed=record.step, total=record.of, left=time_left(record), message=record.message)

        yield show
