"""What a served run keeps: `served.jsonl` in its folder, a line for each round of the rule.

A line is written before any of its answers is given, so that a kill loses none. Read in their order, the lines tell
which rewards each trainer has had, and the rule's state after each round.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import keep_lines, sync, writing
from appa_flwr.run import run_files
from appa_flwr.run.records import Record, ServedRound

SERVED_FILE = "served.jsonl"
MOST_KEPT = 65_536


class ServedAnswer(Record):
    """A scored answer.

    Attributes:
        id: the trainer's, or the service's where an engine gives none.
        digest: of question and completion.
        reward: in [0, 1].
        components: "alignment", the mean reward over the groups that answered, and "format", the format score.
    """

    id: str
    digest: str
    reward: float
    components: dict[str, float]


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
        kept: the last `MOST_KEPT` answers by id, which get the same reward when they are sent again.
    """

    rounds: list[ServedRound] = field(default_factory=list)
    kept: dict[str, ServedAnswer] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The last round's, 0 before the first."""
        return self.rounds[-1].round if self.rounds else 0

    def go_back(self, number: int) -> None:
        """Give up the rounds from `number` on, after which a trainer gives ids anew."""
        if number <= self.number:
            self.kept.clear()
        while self.rounds and number <= self.number:
            self.rounds.pop()

    def add(self, line: ServedLine) -> None:
        """Take in the next line."""
        self.go_back(line.round.round)
        self.rounds.append(line.round)
        self.kept |= {answer.id: answer for answer in line.answers}
        for name in list(self.kept)[:-MOST_KEPT]:
            del self.kept[name]


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


def read_runs(folder: Path) -> dict[str, ServedRun]:
    """Trainer's run -> what was scored for it; a last line that a kill cut short is left out.

    Raises:
        UserError: the file cannot be read, or a value in it is wrong; the one line names file, row and key.
    """
    path, adapter, runs = folder / SERVED_FILE, TypeAdapter(ServedLine), dict[str, ServedRun]()
    if not path.exists():
        return {}
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if text.endswith(b"\n"):
                    line = run_files.parse(text, adapter, f"{path}: line {number}")
                    runs.setdefault(line.run, ServedRun()).add(line)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return runs


def read_rounds(folder: Path) -> dict[str, tuple[ServedRound, ...]]:
    """Trainer's run -> its rounds, in the order of their first lines; UserError as of `read_runs`."""
    return {name: tuple(run.rounds) for name, run in read_runs(folder).items()}
