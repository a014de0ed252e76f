"""The one exception class for a user's mistake: bad config, bad data, a missing folder, a mistyped name.

The launcher and the apps print its message on one line without a traceback; every other exception is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(Exception):
    """Something the user gave is wrong; the message names the file, row or key and what would be right."""


def unknown_name(kind: str, name: object, *, valid: Iterable[str]) -> UserError:
    """The error to raise for a name that is not known: one line with the nearest valid name, if any is near, and all.

    `kind` is what the name names, as the user calls it ("rule", "metric").
    """
    names = tuple(valid)
    near = difflib.get_close_matches(str(name).lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {name!r}: {hint}valid are {', '.join(names) or 'none'}")


def first_problem(error: Any) -> str:
    """Place and reason of the first error in a `ValidationError` of Pydantic, on one line."""
    problem = error.errors()[0]
    place = ".".join(map(str, problem["loc"]))
    return (place and f"{place}: ") + str(problem["msg"]).removeprefix("Value error, ")
