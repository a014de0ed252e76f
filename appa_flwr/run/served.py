"""Scored rounds of a served run: the lines of served.jsonl, one for each round of the rule.

A line is written before its rewards are sent, so that a kill loses none. The lines, read in their order, give the
rewards of each trainer and the rule's state after each round.
"""

from dataclasses import dataclass, field
from pathlib import Path

from appa_flwr.run.records import ServedAnswer, ServedLine, ServedRound
from appa_flwr.run.schema import SERVED

MOST_KEPT = 65_536


@dataclass
class ServedRun:
    """State of a trainer's run after its lines: rounds in the order of their numbers, and the last answers by id.

    If a trainer goes back to a round, this and later rounds are dropped. An answer that is sent again gets the same
    reward, while it is among the last `MOST_KEPT`.
    """

    rounds: list[ServedRound] = field(default_factory=list)
    kept: dict[str, ServedAnswer] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Number of the last round, 0 before the first."""
        return self.rounds[-1].round if self.rounds else 0

    def go_back(self, number: int) -> None:
        """Drop the rounds from `number` on and the kept answers, since the trainer then assigns new ids."""
        if number <= self.number:
            self.kept = {}  # a new dict, since replies may still be read from the old one
        while self.rounds and number <= self.number:
            self.rounds.pop()

    def add(self, line: ServedLine) -> None:
        """Add the next line."""
        self.go_back(line.round.round)
        self.rounds.append(line.round)
        self.kept |= {answer.id: answer for answer in line.answers}
        for name in list(self.kept)[:-MOST_KEPT]:
            del self.kept[name]


def read_runs(folder: Path) -> dict[str, ServedRun]:
    """Read the state of each trainer's run, in the order of their first lines; raises as `schema.read`."""
    runs: dict[str, ServedRun] = {}
    for _, line in SERVED.lines(folder):
        runs.setdefault(line.run, ServedRun()).add(line)
    return runs
