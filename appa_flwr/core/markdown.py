"""Tables in Markdown, for result files and model cards."""

from collections.abc import Iterable


def line(texts: Iterable[str]) -> str:
    """Write one row; a "|" in a text is escaped, and a line break becomes a space."""
    return "| " + " | ".join(" ".join(text.splitlines()).replace("|", r"\|") for text in texts) + " |"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Write a table without a line break at its end; without rows it has only the head."""
    names = list(head)
    return "\n".join([line(names), line(["---"] * len(names)), *map(line, rows)])
