"""Entry point of every `python -m experiments...`."""

import sys
from collections.abc import Callable

import typer

from appa_flwr.launch.terminal import exit_codes


def run(main: Callable[..., None]) -> None:
    """Run a command with the exit codes of `exit_codes`."""
    spec = sys.modules["__main__"].__spec__
    with exit_codes(spec.name.removesuffix(".__main__") if spec else main.__name__):
        typer.run(main)
