"""Tables in Markdown, for result files, model cards and the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable


def text(content: str) -> str:
    """A plain text on one line, in which nothing is markup."""
    return re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", " ".join(content.split()))


def line(texts: Iterable[str]) -> str:
    """One row; a "|" in a text is escaped and a line break becomes a space."""
    return "| " + " | ".join(" ".join(text.splitlines()).replace("|", r"\|") for text in texts) + " |"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A whole table without a line break at its end; without rows it is the head alone."""
    names = list(head)
    return "\n".join([line(names), line(["---"] * len(names)), *map(line, rows)])
