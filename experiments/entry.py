"""Entry of every `python -m experiments...`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from appa_flwr.core.errors import UserError
from appa_flwr.launch.endings import RunFailed

RUN_FAILED, USER_ERROR = 1, 2


def run(main: Callable[..., None], *, call: Callable[[Callable[..., None]], object] = typer.run) -> None:
    """Run a command; a mistake of its user is one line on stderr and exit code 2, a run that failed exit code 1.

    `call` reads the command's options and calls it.
    """
    try:
        call(main)
    except (UserError, RunFailed) as error:
        spec = sys.modules["__main__"].__spec__
        name = spec.name.removesuffix(".__main__") if spec else main.__name__
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(USER_ERROR if isinstance(error, UserError) else RUN_FAILED)
