"""Names of groups: attribute and group joined to one, other spellings, what a user asked for.

Axis letters: G groups.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from appa_flwr.core.errors import UserError

SEPARATOR: Final = "/"
# Pew and the World Values Survey spell these differently, and Pew changed some over the years.
ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {"Britain": "Great Britain", "S. Korea": "South Korea", "Czech Rep.": "Czechia", "Taiwan ROC": "Taiwan"}
)
_NUM_NEAREST: Final = 3
_NEAREST_CUTOFF: Final = 0.5


@dataclass(frozen=True)
class GroupName:
    """A group's name in a file.

    Attributes:
        attribute: what the group is defined by ("POLPARTY"), or None where the file does not say.
        spelled: the group as the file spells it.
        bare: the same under its one name.
    """

    attribute: str | None
    spelled: str
    bare: str

    @property
    def full(self) -> str:
        """The name a survey uses: "attribute/group", or the group alone."""
        return self.bare if self.attribute is None else f"{self.attribute}{SEPARATOR}{self.bare}"


def nearest(name: str, known: Sequence[str]) -> str:
    """The part of an error that names the `known` names closest to a mistyped one, in words."""
    folded: dict[str, str] = {}
    for candidate in known:
        folded.setdefault(candidate.casefold(), candidate)
        # "Democrat" should find "POLPARTY/Democrat".
        folded.setdefault(candidate.partition(SEPARATOR)[2].casefold(), candidate)
    close = difflib.get_close_matches(name.casefold(), folded, n=_NUM_NEAREST, cutoff=_NEAREST_CUTOFF)
    if close:
        return "nearest: " + ", ".join(dict.fromkeys(repr(folded[match]) for match in close))
    begin = "the groups there are" if len(known) <= _NUM_NEAREST else f"the {len(known)} groups there begin with"
    return f"{begin} {', '.join(map(repr, known[:_NUM_NEAREST]))}"


def resolve(wanted: Sequence[str], names: Iterable[GroupName], *, source: str) -> tuple[str, ...]:
    """The full names of the groups a user asked for, in that order.

    A full name matches itself. A bare name, another spelling of a group and the left side of an alias match
    where only one group is meant.

    Raises:
        UserError: no name, an unknown one (with the nearest), one that fits several groups, or a group twice.
    """
    if not wanted:
        raise UserError(f"{source}: no group was asked for; name at least one, or leave groups out for all")
    meant: dict[str, dict[str, None]] = {}
    full_names: dict[str, None] = {}
    for name in names:
        full_names[name.full] = None
        spelled = name.spelled if name.attribute is None else f"{name.attribute}{SEPARATOR}{name.spelled}"
        for key in {name.bare, name.spelled, spelled}:
            meant.setdefault(key, {})[name.full] = None
    found: list[str] = []
    for asked in (name.strip() for name in wanted):
        fits = {asked: None} if asked in full_names else meant.get(asked) or meant.get(ALIASES.get(asked, ""), {})
        if not fits:
            raise UserError(f"{source}: unknown group {asked!r}; {nearest(asked, tuple(full_names))}")
        if len(fits) > 1:
            several = ", ".join(map(repr, fits))
            raise UserError(f"{source}: group {asked!r} fits several, say which: {several}")
        (full,) = fits
        if full in found:
            raise UserError(f"{source}: group {full!r} is asked for twice")
        found.append(full)
    return tuple(found)
