"""What a node's ledger tells its owner: tables of what left, with whom it was summed, what rests on a question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import combinations

from rich.table import Table

from appa_flwr.owner.ledger import Ledger, Release

OPENED = "query.open"
"""Kind of the message for which a group gives what takes its own mask off a sum."""


def by_kind(releases: Sequence[Release]) -> Table:
    """Releases of each run and kind."""
    table = Table("run", "message", "answered", "refused", "numbers", "first", "last")
    for run, kind in dict.fromkeys((line.run, line.kind) for line in releases):
        own = [line for line in releases if (line.run, line.kind) == (run, kind)]
        refused = sum(bool(line.refused) for line in own)
        counts = (len(own) - refused, refused, sum(line.numbers for line in own))
        table.add_row(run, kind, *map(str, counts), _time(own[0]), _time(own[-1]))
    return table


def opened_sums(releases: Sequence[Release]) -> dict[tuple[str, str, str], int]:
    """Run, kind and cohort of masked numbers -> how many sums of them the server learned.

    A group opens only the last sum of a run that it masked, so that a release stands before each opening.
    """
    number: dict[tuple[str, str, str], int] = {}
    last: dict[str, tuple[str, str, str]] = {}
    for line in releases:
        if line.refused or not line.cohort:
            continue
        if line.kind != OPENED:
            last[line.run] = (line.run, line.kind, line.cohort)
            number.setdefault(last[line.run], 0)
        elif task := last.pop(line.run, None):
            number[task] += 1
    return number


def sums(releases: Sequence[Release]) -> Iterator[Table]:
    """Secure sums, and which two of them tell a single group's numbers."""
    number = opened_sums(releases)
    table = Table("run", "numbers under masks", "summed over", "sums that the server learned")
    for task, learned in number.items():
        table.add_row(*task, str(learned))
    if number:
        yield table
    table = Table("two sums of", "over", "and over", "together tell, if the requests were alike, the numbers of")
    learned_over = dict.fromkeys((kind, cohort) for (_, kind, cohort), learned in number.items() if learned)
    for (kind, cohort), (other_kind, other) in combinations(learned_over, 2):
        differing = set(cohort.split("; ")) ^ set(other.split("; "))
        if kind == other_kind and len(differing) == 1:
            table.add_row(kind, cohort, other, *differing)
    if table.row_count:
        yield table


def used(ledger: Ledger) -> Table:
    """How much rests on a question, over all runs."""
    table = Table("what rests on questions, over all runs", "questions", "most on one", "mean")
    for kind in ledger.kinds():
        number = ledger.spent(kind).values()
        table.add_row(kind, str(len(number)), str(max(number)), f"{sum(number) / len(number):.1f}")
    return table


def _time(line: Release) -> str:
    return datetime.fromtimestamp(line.time).isoformat(" ", "seconds")
