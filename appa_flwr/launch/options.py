"""Options that several commands of `appa` share."""

from __future__ import annotations

from typing import Annotated

import typer

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE]... [KEY=VALUE]...",
        help="TOML files of config keys, then keys; preset=NAME sets many. The last wins; appa config lists them.",
        show_default=False,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show Flower's log too.")]
