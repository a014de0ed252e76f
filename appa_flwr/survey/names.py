"""Names of groups and options, their spellings, and notes that list names."""

from collections.abc import Collection, Iterable
from itertools import chain, count
from typing import Final

from appa_flwr.core.text import clean

NUM_SHOWN: Final = 4  # names in a message
# Pew and the World Values Survey spell these differently, and Pew changed some over the years.
_ALIASES = {"Britain": "Great Britain", "S. Korea": "South Korea", "Czech Rep.": "Czechia", "Taiwan ROC": "Taiwan"}


def group_name(group: str, attribute: str = "") -> str:
    """Full name of a group, "attribute/group" if the attribute is given."""
    return f"{clean(attribute)}/{clean(group)}" if attribute else clean(group)


def usual_name(group: str) -> str:
    """Replace another name of a country, in the full name of a group, by the usual one."""
    attribute, slash, name = group.rpartition("/")
    return attribute + slash + _ALIASES.get(name, name)


def same(name: str) -> str:
    """Normalise a name for comparison, without case, repeated blanks and a final full stop."""
    return " ".join(clean(name).casefold().split()).removesuffix(".").rstrip()


def numbered(name: str, taken: Collection[str], mark: str) -> str:
    """The name itself, or with the first number from 2 by which it is not taken, such as Other.2."""
    candidates = chain([name], (f"{name}{mark}{number}" for number in count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)


class Notes:
    """Notes on how a source was read and what was left out: sentences, each with the names it concerns."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, sentence: str, *names: str) -> None:
        """Add names to a sentence, which is listed once."""
        self._names.setdefault(sentence, []).extend(names)

    def add_spelling(self, name: str, first: str) -> None:
        """Note that a name counts as its first spelling, unless it has that spelling."""
        if name != first:
            self.add("options and groups that are one", f"{name!r} is {first!r}")

    def lines(self, start: str = "") -> tuple[str, ...]:
        """List the sentences that begin with `start`, each with its first few names."""
        lines = (f"{sentence}: {some(names)}" if names else sentence for sentence, names in self._names.items())
        return tuple(line for line in lines if line.startswith(start))


def some(names: Iterable[str]) -> str:
    """List the first few distinct names, and the number of the others."""
    listed = [*dict.fromkeys(names)]
    return ", ".join(listed[:NUM_SHOWN]) + (f" and {rest} more" if (rest := len(listed) - NUM_SHOWN) > 0 else "")
