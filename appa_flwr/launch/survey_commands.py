"""The commands that read a survey: `appa survey`, `diagnose` and `export`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from appa_flwr.config import HUB_SURVEY, Config
from appa_flwr.config.sources import assemble
from appa_flwr.launch.checks import read_survey
from appa_flwr.launch.options import Words
from appa_flwr.launch.shown import show
from appa_flwr.survey.types import Survey

export = typer.Typer(help="Write a survey for other programs.", no_args_is_help=True)

Source = Annotated[str, typer.Argument(metavar="SOURCE", help=f"A survey file or folder, {HUB_SURVEY}, or: generated.")]


def _surveyed(source: str, words: list[str] | None) -> tuple[Config, Survey]:
    config = assemble([*(words or []), f"survey={source}"], folder=Path.cwd())
    return config, read_survey(config, config.group_names)


def survey(
    source: Source,
    words: Words = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for split and picture; else NAME-split here.", show_default=False)
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the survey as one .csv or .jsonl instead.", show_default=False),
    ] = None,
) -> None:
    """Show what a survey holds, and split it into a file a group."""
    chosen, found = _surveyed(source, words)
    from appa_flwr.report import survey_picture as picture
    from appa_flwr.report import survey_summary as report
    from appa_flwr.survey import export

    # Written first: whoever cuts the tables short, as `| head` does, still has the split.
    told: list[RenderableType] = [
        *report.tables(found),
        *([f"read as {found.layout}"] if found.layout else []),
        f"{len(found.questions)} questions, {len(found.groups)} groups, {len(found.rejections)} answers left out",
    ]
    if write is not None:
        export.write_table(found, write)
        show(*told, f"all groups' answers, in our own columns: {write}")
        return
    folder = Path(f"{Path(chosen.survey).stem.replace(':', '-')}-split") if out is None else out
    written = export.export_split(found, folder)
    drawn = picture.draw(found, folder / picture.FILE)
    show(
        *told,
        *(f"private, for {name} alone: {path}" for name, path in written.groups.items()),
        f"public, for the server: {written.questions}",
        f"picture of all groups: {drawn}",
    )


def diagnose(source: Source, words: Words = None) -> None:
    """Say before training whether a survey can tell rules apart."""
    chosen, survey = _surveyed(source, words)
    from appa_flwr.analysis.destinations import rules
    from appa_flwr.analysis.diagnosis import diagnose as diagnosed
    from appa_flwr.report.diagnosis_tables import tables

    found = diagnosed(survey, metric=chosen.reward_metric, rules=rules(chosen), seed=chosen.seed)
    show(*tables(found), *found.sentences(threshold=chosen.appa.fairness_threshold))


@export.command("lm-eval")
def lm_eval(
    source: Source,
    words: Words = None,
    out: Annotated[Path, typer.Option(help="Folder of the task.")] = Path("lm-eval"),
) -> None:
    """Write a survey's held-out questions as a task for lm-evaluation-harness, with every group's answers in it."""
    chosen, found = _surveyed(source, words)
    from appa_flwr.launch.lm_eval import export_task

    path = export_task(found, chosen, out)
    typer.echo(f"task: lm_eval --model hf --model_args pretrained=MODEL --include_path {out} --tasks {path.stem}")


@export.command("prompts")
def prompts(
    source: Source,
    words: Words = None,
    out: Annotated[Path, typer.Option(help="Folder of the files.")] = Path("prompts"),
    plain: Annotated[bool, typer.Option("--plain", help="As texts to go on with, not as messages of a chat.")] = False,
) -> None:
    """Write a survey's prompts as TRL, OpenRLHF, verl, slime and NeMo Gym read them (docs/engines.md)."""
    chosen = assemble([*(words or []), f"survey={source}"], folder=Path.cwd())
    # By name: the server's code lies above this package, which a group has without it.
    written = importlib.import_module("server_app.serve.prompts").export(chosen, out, plain=plain)
    typer.echo(f"prompts: {out}: " + ", ".join(f"{count} {name}" for name, count in written.items()))
