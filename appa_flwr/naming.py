"""One wording for every name a user may mistype: the nearest valid one, then all valid ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from appa_flwr.errors import UserError


def unknown_name(kind: str, name: object, *, valid: Iterable[str]) -> UserError:
    """The error to raise for a name that is not known.

    Args:
        kind: what the name names, as the user calls it ("rule", "metric").
        name: what the user gave.
        valid: the names that would have been right, in the order to list them.

    Returns:
        A `UserError` of one line that repeats the name, suggests the nearest valid one if any is near and
        lists all.
    """
    names = tuple(valid)
    near = difflib.get_close_matches(str(name).lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {name!r}: {hint}valid are {', '.join(names)}")
