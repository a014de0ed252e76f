"""The exception class for user errors: wrong config, wrong data, a missing folder, a mistyped name.

The launcher and the apps print its message on one line without a traceback; other exceptions are bugs.
"""

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(Exception):
    """A user's input is wrong; the message names the file, row or key and what would be right."""


def unknown_name(kind: str, name: object, *, valid: Iterable[str]) -> UserError:
    """Make the error for an unknown name: one line with the nearest valid name, if one is near, and all valid names.

    `kind` says what the name refers to, in the user's words ("rule", "metric").
    """
    names = tuple(valid)
    near = difflib.get_close_matches(str(name).lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {name!r}: {hint}valid are {', '.join(names) or 'none'}")


def first_line(error: BaseException) -> str:
    """Class of a library's error, and the first line of its message."""
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next(filter(None, lines), 'no reason given')}"


def first_problem(error: Any) -> str:
    """Place and reason of the first error in a `ValidationError` of Pydantic, on one line."""
    problem = error.errors()[0]
    place = ".".join(map(str, problem["loc"]))
    reason = "there is no such key" if problem["type"] == "extra_forbidden" else str(problem["msg"])
    return (place and f"{place}: ") + reason.removeprefix("Value error, ")


def in_words(error: BaseException) -> str:
    """Describe an exception of foreign code in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
