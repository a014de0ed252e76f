"""The command `appa`: run the loop or its predictor alone, rebuild a report, list the config keys.

Exit codes: 0 done, 1 the run failed, 2 a user's mistake, 128 + n stopped by signal n.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from appa_flwr import config as settings
from appa_flwr.errors import UserError
from appa_flwr.launch.launcher import REPORT_FILE, RunFailed, Stopped, find_app_folder, launch
from appa_flwr.run.files import WEIGHTS_FILE
from appa_flwr.run.resume import resumable

RUN_FAILED = 1
USER_ERROR = 2
SIGNAL_BASE = 128
_PIPE_WIDTH = 160  # a table in a pipe has no terminal to take its width from

app = typer.Typer(
    help="Fair federated RLHF on Flower: one policy, many groups, their data stays home.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_File = Annotated[Path | None, typer.Argument(help="TOML file of config keys.", show_default=False)]
_Overrides = Annotated[
    list[str] | None,
    typer.Option("-c", "--config", metavar="KEY=VALUE", help="Set a key, or preset=NAME; repeatable."),
]


@app.command()
def run(
    file: _File = None,
    overrides: _Overrides = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped, from its folder.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Flower's log too.")] = False,
) -> None:
    """Align a policy: the whole loop, in a local Flower simulation."""
    here = Path.cwd()
    if resume is None:
        config = settings.assemble(file, overrides or [], folder=here)
    elif file or overrides:
        raise UserError(f"--resume {resume} goes on with the keys the run began with; it takes no FILE and no -c")
    else:
        config = resumable(resume)
    folder = launch(config, app_folder=find_app_folder(here), verbose=verbose)
    written = folder / REPORT_FILE
    typer.echo(f"report: {written}" if written.exists() else f"no report yet: appa report {folder} builds it")


@app.command()
def pluralllm(
    file: _File = None,
    overrides: _Overrides = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show Flower's log too.")] = False,
) -> None:
    """Pretrain the preference predictor alone, and show how far it can be trusted."""
    here = Path.cwd()
    config = settings.assemble(file, [*(overrides or []), "run.phases=pluralllm"], folder=here)
    folder = launch(config, app_folder=find_app_folder(here), verbose=verbose)
    from appa_flwr.report import predictor
    from appa_flwr.report.artifacts import read_run

    found = read_run(folder).pluralllm
    if found is not None:
        _console().print(predictor.table(found), markup=False)
        if (by_size := predictor.by_context(found)) is not None:
            _console().print(by_size, markup=False)
        if (kept := predictor.kept(found)) is not None:
            typer.echo(kept)
        typer.echo(predictor.note(found))
        for sentence in predictor.uncertainty(found):
            typer.echo(sentence)
    typer.echo(f"report: {folder / REPORT_FILE}")
    typer.echo(f"checkpoint: -c pluralllm.checkpoint={folder / WEIGHTS_FILE}")


@app.command()
def report(run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]) -> None:
    """Rebuild the report of a run from what it wrote."""
    if not run_folder.is_dir():
        raise UserError(f"{run_folder} is not a run folder; it does not exist")
    from appa_flwr.report import build

    typer.echo(f"report: {build(run_folder)}")


@app.command()
def config(
    file: _File = None,
    overrides: _Overrides = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print a TOML file instead of a table.")] = False,
) -> None:
    """List every config key: its value after FILE and -c, what it may be, what it does."""
    values = settings.assemble(file, overrides or [], folder=None).flat()
    if toml:
        typer.echo(settings.to_toml_table(values), nl=False)
        return
    table = Table("key", "value", "valid", "what it does")
    for key in settings.KEYS.values():
        table.add_row(key.name, settings.to_toml(values[key.name]), key.valid, key.doc)
    _console().print(table, markup=False)


@app.command()
def survey(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help=f"A survey file or folder, {settings.HUB_SURVEY}, or: generated."),
    ],
    overrides: _Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for split and picture; else NAME-split here.", show_default=False)
    ] = None,
) -> None:
    """Show what a survey holds, and split it into files to be carried to the groups' machines."""
    chosen = settings.assemble(None, [*(overrides or []), f"survey={source}"], folder=Path.cwd())
    from appa_flwr.survey import export, generate, picture, read, report

    if chosen.survey == settings.GENERATED_SURVEY:
        found = generate.generate(
            num_questions=chosen.data.num_questions, num_groups=chosen.data.num_groups, seed=chosen.seed
        )
    else:
        found = read.read_survey(
            chosen.survey,
            groups=chosen.group_names or None,
            refusals=chosen.data.refusals,
            strict=chosen.data.strict,
            min_respondents=chosen.data.min_respondents,
            min_questions=chosen.data.min_questions,
        )
    # Written first: whoever cuts the tables short, as `| head` does, still has the split.
    folder = Path(f"{Path(chosen.survey).stem}-split") if out is None else out
    written = export.export_split(found, folder)
    drawn = picture.draw(found, folder / picture.FILE)
    console = _console()
    for part in report.tables(found):
        console.print(part, markup=False)
    typer.echo(f"{len(found.questions)} questions, {len(found.groups)} groups, {len(found.rejections)} cells left out")
    for name, path in written.groups.items():
        typer.echo(f"private, for {name} alone: {path}")
    typer.echo(f"public, for the server: {written.questions}")
    typer.echo(f"picture of all groups: {drawn}")


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)


def main() -> None:
    """Entry point of `appa`; every expected failure becomes a message on stderr and an exit code."""
    try:
        app()
    except UserError as error:
        print(f"appa: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except RunFailed as error:
        print(f"appa: {error}", file=sys.stderr)
        sys.exit(RUN_FAILED)
    except Stopped as stopped:
        print(f"appa: stopped by {stopped}; all processes of the run have ended", file=sys.stderr)
        sys.exit(SIGNAL_BASE + stopped.signum)
