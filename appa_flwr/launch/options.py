"""Options that several commands of `appa` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path | None, typer.Argument(help="TOML file of config keys.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-c", "--config", metavar="KEY=VALUE", help="Set a key, or preset=NAME (appa config lists them); repeatable."
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show Flower's log too.")]
