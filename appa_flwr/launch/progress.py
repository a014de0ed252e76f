"""Following a run by the lines that its server appends to `progress.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from appa_flwr.run.records import Progress


def plain_line(record: Progress) -> str:
    """The record as one plain line; the time left stands at its end where it is known and not over."""
    text = f"[{record.phase} {record.step}/{record.of}] {record.message}".rstrip()
    if not record.seconds_left:
        return text
    minutes, seconds = divmod(max(0, round(record.seconds_left)), 60)
    return f"{text} ({f'{minutes} min {seconds:02d} s' if minutes else f'{seconds} s'} left)"


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
