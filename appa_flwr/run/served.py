"""What a served run has scored: the lines of served.jsonl, a line for each round of the rule.

A line is written before any of its answers is given, so that a kill loses none. Read in their order, the lines tell
which rewards each trainer has had, and the rule's state after each round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from appa_flwr.run.records import ServedAnswer, ServedLine, ServedRound
from appa_flwr.run.run_files import SERVED

MOST_KEPT = 65_536


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
            self.kept = {}  # not emptied: replies may still be read from the old one
        while self.rounds and number <= self.number:
            self.rounds.pop()

    def add(self, line: ServedLine) -> None:
        """Take in the next line."""
        self.go_back(line.round.round)
        self.rounds.append(line.round)
        self.kept |= {answer.id: answer for answer in line.answers}
        for name in list(self.kept)[:-MOST_KEPT]:
            del self.kept[name]


def read_runs(folder: Path) -> dict[str, ServedRun]:
    """Trainer's run -> what was scored for it, in the order of their first lines.

    Raises:
        UserError: the file cannot be read, or a value in it is wrong; the one line names file, row and key.
    """
    runs: dict[str, ServedRun] = {}
    for line in SERVED.lines(folder):
        runs.setdefault(line.run, ServedRun()).add(line)
    return runs
