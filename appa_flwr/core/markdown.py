"""Tables in Markdown, for result files, model cards and the terminal."""

from __future__ import annotations

from collections.abc import Iterable


def line(cells: Iterable[str]) -> str:
    """One row; a "|" in a cell is escaped and a line break becomes a space."""
    return "| " + " | ".join(" ".join(cell.splitlines()).replace("|", r"\|") for cell in cells) + " |"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A whole table without a line break at its end; without rows it is the head alone."""
    names = list(head)
    return "\n".join([line(names), line(["---"] * len(names)), *map(line, rows)])
