"""A command's options, output and exit codes: 0 success, 1 failed run, 2 user error, 128 + n stopped by signal n."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import click
import typer
from rich.console import Console, RenderableType

from appa_flwr.core.errors import UserError

RUN_FAILED, USER_ERROR, SIGNAL_BASE = 1, 2, 128
_PIPE_WIDTH = 160  # width of tables if the output is no terminal

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE]... [KEY=VALUE]...",
        help="TOML files of config keys, and keys; preset=NAME sets many. The last wins; appa config lists them.",
        show_default=False,
    ),
]


class RunFailed(Exception):
    """The run started and did not complete; the message gives the reason and the path of the log."""


class Stopped(BaseException):
    """A signal asked the launcher to stop; this exception lets the launcher end all started processes first.

    `resume` is the command that continues the run, if one is known.
    """

    resume = ""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def exit_codes(program: str) -> Iterator[None]:
    """Turn every expected failure of a command into a message on stderr and an exit code.

    Raises:
        SystemExit: the block ended by `UserError`, `RunFailed` or `Stopped`, or a command's options are wrong.
    """
    try:
        yield
    except (UserError, RunFailed) as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(USER_ERROR if isinstance(error, UserError) else RUN_FAILED)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(USER_ERROR)
    except click.ClickException as error:
        print(f"{program}: {error.format_message()} (--help says more)", file=sys.stderr)
        sys.exit(USER_ERROR)
    except Stopped as stopped:
        then = f"; {stopped.resume} continues" if stopped.resume else ""
        print(f"{program}: stopped by {stopped}; all processes have ended{then}", file=sys.stderr)
        sys.exit(SIGNAL_BASE + stopped.signum)


def show(*parts: RenderableType | None) -> None:
    """Print texts and tables, without interpreting brackets in them as markup; None is left out.

    Tables are as wide as the terminal, or `_PIPE_WIDTH` characters without one.
    """
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    for part in parts:
        if isinstance(part, str):
            print(part)
        elif part is not None:
            console.print(part, markup=False)
