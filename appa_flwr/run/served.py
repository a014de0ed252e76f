"""What a served run keeps: `served.jsonl` in its folder, a line for each round of the rule.

A line is written before any of its answers is given, so that a kill loses none. Read in their order, the lines tell
which rewards each trainer has had, and the rule's state after each round.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import keep_lines, sync, writing
from appa_flwr.run import run_files
from appa_flwr.run.records import Record, ServedRound

SERVED_FILE = "served.jsonl"


class ServedAnswer(Record):
    """A scored answer.

    Attributes:
        id: the trainer's, or the service's where an engine gives none.
        digest: of question and completion.
        reward: in [0, 1].
        alignment: mean alignment reward over the groups that answered.
        format: format score.
    """

    id: str
    digest: str
    reward: float
    alignment: float
    format: float


class ServedLine(Record):
    """A line of served.jsonl: a round of a trainer's run, and its answers."""

    run: str
    round: ServedRound
    answers: tuple[ServedAnswer, ...]


@dataclass
class ServedRun:
    """What the lines of a trainer's run come to.

    Attributes:
        rounds: their numbers rise; a trainer that goes back to a round has given up those from it on.
    """

    rounds: list[ServedRound] = field(default_factory=list)

    def last(self, *, before: float = math.inf) -> ServedRound | None:
        """The last of the rounds with a number below `before`."""
        count = bisect_left(self.rounds, before, key=lambda found: found.round)
        return self.rounds[count - 1] if count else None

    @property
    def number(self) -> int:
        """The last round's, 0 before the first."""
        return self.rounds[-1].round if self.rounds else 0

    def add(self, line: ServedLine) -> None:
        """Take in the next line."""
        while self.number >= line.round.round:
            self.rounds.pop()
        self.rounds.append(line.round)


def append(folder: Path, line: ServedLine) -> None:
    """Add a line; it is stored once this returns.

    Raises:
        UserError: it cannot be written; what was there before is intact.
    """
    path = folder / SERVED_FILE
    try:
        with writing(path), path.open("ab") as file:
            file.write(line.model_dump_json().encode() + b"\n")
            sync(file)
    except UserError:
        with suppress(UserError):
            keep_lines(path)
        raise


def read_lines(folder: Path) -> Iterator[ServedLine]:
    """The lines of a run's folder, none where it has served nobody; a last line that a kill cut short is left out.

    Raises:
        UserError: the file cannot be read, or a value in it is wrong; the one line names file, row and key.
    """
    path, adapter = folder / SERVED_FILE, TypeAdapter(ServedLine)
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield run_files.parse(line, adapter, f"{path}: line {number}")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def read_rounds(folder: Path) -> dict[str, tuple[ServedRound, ...]]:
    """Trainer's run -> its rounds, in the order of their first lines; UserError as of `read_lines`."""
    runs: dict[str, ServedRun] = {}
    for line in read_lines(folder):
        runs.setdefault(line.run, ServedRun()).add(line)
    return {name: tuple(run.rounds) for name, run in runs.items()}
