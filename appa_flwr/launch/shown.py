"""Output of commands: tables as wide as the terminal, or as a reader of a pipe needs them."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType

_PIPE_WIDTH = 160  # a table in a pipe has no terminal to take its width from


def show(*parts: RenderableType | None) -> None:
    """Print texts and tables, without reading brackets in them as markup; None is left out."""
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    for part in parts:
        if isinstance(part, str):
            print(part)
        elif part is not None:
            console.print(part, markup=False)
