"""The commands that read a survey: `appa survey` and `export`."""

import importlib
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from appa_flwr.config import Config
from appa_flwr.config.sources import assemble
from appa_flwr.launch.terminal import Words, show
from appa_flwr.survey import store
from appa_flwr.survey.sources import read_run
from appa_flwr.survey.types import Survey

export = typer.Typer(help="Write a survey in the formats of other programs.", no_args_is_help=True)

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="A survey file or folder, or generated.")]


def _config(source: str, words: list[str] | None) -> Config:
    return assemble([*(words or []), f"survey={source}"], folder=Path.cwd())


def survey(
    source: Source,
    words: Words = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Write all answers in this package's format.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write one private file per group, and the public questions.", show_default=False
        ),
    ] = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose", help="Show how far the rules can differ on this survey.")
    ] = False,
) -> None:
    """Read a survey, show what was read and left out, and convert it to this package's format."""
    config = _config(source, words)
    survey = read_run(config)
    # Files are written before tables are printed, so that they exist even if `| head` cuts the output.
    written: list[str] = []
    if write is not None:
        store.write(survey, write)
        written.append(f"all groups' answers: {write}")
    if out is not None:
        split = store.write_split(survey, out)
        written += [f"private, for {name} alone: {path}" for name, path in split.groups.items()]
        written.append(f"public, for the server: {split.questions}")
    diagnosis: list[Table | str] = []
    if diagnose:
        from appa_flwr.analysis import destinations
        from appa_flwr.report import tables

        rules = destinations.rules(config)
        frames = destinations.diagnose(survey, metric=config.reward_metric, rules=rules, seed=config.seed)
        rule = "appa" if config.rule == "average" else config.rule
        diagnosis = [*(tables.show(frame, sign=True) for frame in frames), destinations.verdict(frames[1], rule=rule)]
    show(
        _table(survey),
        *survey.about.notes,
        f"{len(survey.questions)} questions, {len(survey.groups)} groups",
        *written,
        *diagnosis,
    )


def _table(survey: Survey) -> Table:
    """Table of the groups, those with most questions first."""
    shown = Table("group", "questions", "respondents (median)")
    for name in sorted(survey.groups, key=lambda name: -len(survey.answers[name])):
        people = list(survey.respondents.get(name, {}).values())
        shown.add_row(name, str(len(survey.answers[name])), f"{np.median(people):.0f}" if people else "")
    return shown


@export.command("prompts")
def prompts(
    source: Source,
    words: Words = None,
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("prompts"),
    plain: Annotated[bool, typer.Option("--plain", help="Write prompts as plain text, not as a chat.")] = False,
) -> None:
    """Write the prompts of a survey for TRL, OpenRLHF, verl and slime (docs/engines.md)."""
    # Imported by name, since a group has this package without the server's code.
    export_prompts = importlib.import_module("server_app.serve.prompts").export
    written = export_prompts(_config(source, words), out, plain=plain)
    typer.echo(f"prompts: {out}: " + ", ".join(f"{count} {name}" for name, count in written.items()))
