"""The command `appa` and its subcommands, except those for surveys and for a group's owner."""

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from appa_flwr import __version__
from appa_flwr import config as settings
from appa_flwr.config.keys import to_toml, valid
from appa_flwr.config.sources import PRESETS, assemble, preset, read_words
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import check_place, escape_output, replace_file
from appa_flwr.core.ports import LOOPBACK
from appa_flwr.launch.group import app as group
from appa_flwr.launch.sites import OWNER_POLICY_FILE, PORT
from appa_flwr.launch.survey_commands import export, survey
from appa_flwr.launch.terminal import RUN_FAILED, USER_ERROR, Overrides, exit_codes, show
from appa_flwr.run.resume import resumable
from appa_flwr.run.schema import CARD, REPORT_FILE, WEIGHTS_FILE
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS

OWN_PACKAGES = ("appa_flwr", "pluralllm", "server_app", "client_app")

app = typer.Typer(
    help="Fair federated RLHF on Flower: one policy, many groups, their data stays home. --version prints the version.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


app.command()(survey)
app.add_typer(export, name="export")
app.add_typer(group, name="group")


Resume = Annotated[Path | None, typer.Option(metavar="RUN", help="Folder of a stopped run, to continue it.")]


@app.command()
def run(overrides: Overrides = None, resume: Resume = None) -> None:
    """Align a policy with the groups of a survey, in a Flower simulation on this machine."""
    written = (folder := _launched(overrides, resume)) / REPORT_FILE
    typer.echo(f"report: {written}" if written.exists() else f"no report yet: appa report {folder} builds it")


def _launched(overrides: list[str] | None, resume: Path | None, *more: str) -> Path:
    """Start or resume a run, wait for its end, and return its folder."""
    if resume is None:
        config = assemble([*(overrides or []), *more], folder=Path.cwd())
    else:
        config = resumable(resume, read_words(overrides or []))
        if more and config.run.phases != "serve":
            raise UserError(f"{resume}: the run trains and has not served; appa run --resume {resume} goes on with it")
    from appa_flwr.launch.flower import launch

    return launch(config)


@app.command()
def serve(overrides: Overrides = None, resume: Resume = None) -> None:
    """Score the answers of other trainers over HTTP, until Ctrl-C."""
    folder = _launched(overrides, resume, "run.phases=serve")
    typer.echo(f"report: {folder / REPORT_FILE}\nserve again: appa serve --resume {folder}")


@app.command("eval")
def evaluate(
    model: Annotated[
        str, typer.Option(help="Folder or hub id of a Qwen3, Llama or Gemma-2; with --endpoint, the model's name.")
    ],
    name: Annotated[str, typer.Option(help="Name of the model in the tables.")],
    endpoint: Annotated[
        str, typer.Option(help="URL of an OpenAI-compatible server, ending in /v1; its key is in APPA_EVAL_KEY.")
    ] = "",
    plain: Annotated[bool, typer.Option("--plain", help="Send prompts as plain text, not as a chat.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the scores.")] = Path("eval"),
) -> None:
    """Score a model's answers to the held-out questions by the groups of `appa serve` (at APPA_URL, by APPA_TOKEN)."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):  # checked before a model is asked
        raise UserError(f'--name "{name}" must be up to 64 letters, digits, ".", "_" and "-", a letter or digit first')
    import pandas as pd

    from appa_flwr.launch import evaluate as evaluation
    from appa_flwr.report import frames, tables
    from appa_flwr.reward_client.client import Served

    served = Served(patience=600.0)
    check_place(out)
    result = evaluation.evaluate(served, name, model=model, endpoint=endpoint, plain=plain)
    replace_file(out / "scores.json", (json.dumps(result, indent=1) + "\n").encode(), parents=True)
    intervals, summary = pd.DataFrame(result["intervals"]), pd.DataFrame(result["rows"])
    show(tables.show(frames.methods(intervals, summary), title="95 % intervals, over questions"))
    typer.echo(f"scores: {out}/scores.json; appa report RUN shows them and differences on the served run's page")


@app.command()
def pluralllm(overrides: Overrides = None) -> None:
    """Pretrain only the preference predictor, and show its scores."""
    folder = _launched(overrides, None, "run.phases=pluralllm")
    from appa_flwr.report import predictor, tables

    if (card := CARD.read(folder)) is not None:
        show(tables.show(predictor.scores(card)))
    typer.echo(f"report: {folder / REPORT_FILE}")
    typer.echo(f"checkpoint: pluralllm.checkpoint={folder / WEIGHTS_FILE}")


@app.command()
def deploy(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder for the parties' folders.")],
    overrides: Overrides = None,
    local: Annotated[bool, typer.Option("--local", help="Start all parties on this machine, and run once.")] = False,
    host: Annotated[str, typer.Option(help="Host name or IP address of the server, as groups reach it.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65000, help="Port of the server.")] = PORT,
) -> None:
    """Make a folder for the server and for each group, to be copied to their machines."""
    if local and (host, port) != (LOOPBACK, PORT):
        raise UserError(f"--local takes {LOOPBACK} and a free port: leave out --host and --port, or --local")
    from appa_flwr.launch import deploy as deployment

    # PluralLLM trains in few rounds of many steps, since messages take seconds.
    config = assemble(overrides or [], folder=Path.cwd(), beneath=preset("deployed"))
    if local:
        typer.echo(f"report: {deployment.deploy_local(config, folder) / REPORT_FILE}")
    else:
        deployment.make_sites(config, folder, host=host, port=port)


@app.command()
def doctor(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="Folder of a party, made by `appa deploy`.", show_default=False),
    ] = None,
) -> None:
    """Check this machine, and a party's folder if it is named, for problems."""
    from appa_flwr.launch import doctor as looks

    of_party = [] if folder is None else [*looks.party(folder)]  # first, since it rejects a wrong folder at once
    findings = [*looks.machine(group=folder is not None and (folder / OWNER_POLICY_FILE).exists()), *of_party]
    table = Table("", "what", "found")
    for what, text, good in findings:
        table.add_row("ok" if good else "WRONG", what, text)
    wrong = sum(not finding.good for finding in findings)
    show(table, f"{wrong} of {len(findings)} are wrong" if wrong else "nothing is wrong")
    if wrong:
        raise typer.Exit(RUN_FAILED)


@app.command()
def report(
    run_folders: Annotated[list[Path], typer.Argument(metavar="RUN [RUN]...", help="Folders of runs.")],
) -> None:
    """Rebuild the report of a run, or compare several runs of one survey with the first."""
    if len(run_folders) == 1:
        from appa_flwr.report import build

        typer.echo(f"report: {build(run_folders[0])}")
        return
    from appa_flwr.report import frames, tables

    levels, minus = frames.compare(run_folders)
    show(
        tables.show(levels, title="After PPO"),
        tables.show(minus, sign=True),
        "Intervals: 95 %, over questions; how far runs with other seeds differ is not in them.",
    )


@app.command()
def ask(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    question: Annotated[
        str, typer.Argument(metavar="[QUESTION]", help="The question's text.", show_default=False)
    ] = "",
    options: Annotated[str, typer.Option(help="The answer options, separated by semicolons or commas.")] = "",
) -> None:
    """Ask the policy of a run a question; without one, print the examples of the run's report."""
    from appa_flwr.public import load_run
    from appa_flwr.report import examples

    opened = load_run(run_folder)
    if not question:
        if not (known := [*examples.shown(opened)]):
            raise UserError(f"{run_folder}: has no answers of a policy after PPO; ask it a question")
        show(*(examples.terminal(one) for one in known))
        return
    choices = settings.split_names(options)
    if not MIN_OPTIONS <= len(choices) <= MAX_OPTIONS:  # checked before a model is loaded
        raise UserError(f"options: {len(choices)} given; a question needs {MIN_OPTIONS} to {MAX_OPTIONS}")
    from server_app import quiet

    quiet()
    answer = opened.policy().ask(question, choices)
    if answer.prediction is not None:
        name = f"PPO by {opened.config.rule}"
        rows = examples.rows(choices, {name: answer.prediction}, {}, ranks=opened.config.task == "opa")
        show(examples.terminal(examples.Shown("", question, rows, (), {})))
    unread = f", which cannot be read: {len(choices)} numbers are expected" if answer.prediction is None else ""
    typer.echo(f"it wrote {answer.text!r}{unread}")


@app.command()
def config(overrides: Overrides = None) -> None:
    """Print all config keys, as a TOML file: value, meaning and possible values."""
    values = assemble(overrides or [], folder=None).flat()
    typer.echo(f"# set SECTION.KEY=VALUE, or preset=NAME: {', '.join(PRESETS)}")
    for section in ("", *settings.SECTIONS):
        if section:
            typer.echo(f"\n# {settings.SECTIONS[section].__doc__}")
        for key in settings.keys_in(section):
            field = settings.KEYS[key]
            typer.echo(f"{key} = {to_toml(values[key])}  # {field.description} ({valid(field)})")


def main() -> None:
    """Entry point of `appa`."""
    escape_output()
    if sys.argv[1:] == ["--version"]:
        print(f"appa-flwr {__version__}")
        sys.exit()
    try:
        with exit_codes("appa"):
            sys.exit(app(standalone_mode=False) or 0)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] in OWN_PACKAGES:
            raise
        print(f"appa: {missing.name} is not installed; appa doctor names what appa-flwr needs", file=sys.stderr)
        sys.exit(USER_ERROR)
