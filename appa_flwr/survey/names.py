"""Spellings: one name for a group, an option or a question, however a file or a key writes it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from appa_flwr.core.text import clean

SEPARATOR: Final = "/"
# Pew and the World Values Survey spell these differently, and Pew changed some over the years.
ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {"Britain": "Great Britain", "S. Korea": "South Korea", "Czech Rep.": "Czechia", "Taiwan ROC": "Taiwan"}
)


def group_name(group: str, attribute: str = "") -> str:
    """The name of a group: "attribute/group" where the source says what the group is defined by, or the group alone."""
    name = clean(group)
    name = ALIASES.get(name, name)
    return f"{clean(attribute)}{SEPARATOR}{name}" if attribute else name


def same(name: str) -> str:
    """What two spellings of one name share: case, blanks and a final full stop do not count."""
    return " ".join(clean(name).casefold().split()).removesuffix(".").rstrip()
