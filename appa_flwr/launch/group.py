"""`appa group`: commands for a group's owner on their own machine; they need only a group's packages."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import writing
from appa_flwr.launch.bundle import bundle_hash
from appa_flwr.launch.terminal import show
from appa_flwr.owner.ledger import MEMORY_SUFFIX, Ledger, Release
from appa_flwr.owner.owner_policy import owner_policy_file, read_owner_policy
from appa_flwr.survey import store
from appa_flwr.survey.split import too_few

FEW = 5  # most questions that are named

app = typer.Typer(
    help="For the owner of a group's data: check the data, set limits, list what has left.", no_args_is_help=True
)

LedgerFile = Annotated[Path, typer.Argument(metavar="LEDGER", help="Ledger of the node, beside its data file.")]


@app.command()
def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Private data file of the group, written by `appa survey`.")
    ],
    questions: Annotated[Path, typer.Option(help="Public questions of the run.")],
    owner_policy: Annotated[
        Path | None, typer.Option("--policy", help="Your owner's policy, to be checked too.", show_default=False)
    ] = None,
) -> None:
    """Show which answers of a data file a run could use."""
    if owner_policy is not None:
        read_owner_policy(owner_policy)
    survey = store.read(file)
    asked = {question.question_id: question for question in store.read(questions).questions}
    own = {question.question_id: question for question in survey.questions}
    table = Table("group", "questions answered", "of the public questions", "text or options differ")
    for name, answers in survey.answers.items():
        known = [key for key in answers if key in asked]
        other = [key for key in known if not own[key].matches(asked[key])]
        same, some = len(known) - len(other), ", ".join(other[:FEW])
        if not same:
            why = f"the text or options of {some} differ" if other else "is it the run's public file?"
            raise UserError(f"{questions}: {name} has answered none of its questions; {why}")
        table.add_row(name, str(len(answers)), f"{same} of {len(asked)}", some + (", ..." if len(other) > FEW else ""))
    shared = replace(survey, questions=tuple(question for key, question in own.items() if key in asked))
    usable = f"{owner_policy}: can be used" if owner_policy else None
    show(table, f"{file}: {survey.about.precision}", too_few(shared) or None, usable)


@app.command("policy")
def print_owner_policy() -> None:
    """Print an owner's policy with all keys at their defaults. Edit it, and name the file in --node-config."""
    print(owner_policy_file(), end="")


@app.command()
def bundle(
    checkout: Annotated[Path, typer.Argument(metavar="CHECKOUT", help="Checkout of this repository that you trust.")],
) -> None:
    """Print the hash of a checkout's app bundle, for the key `bundle` of an owner's policy."""
    print(bundle_hash(checkout.resolve()))


@app.command()
def audit(file: LedgerFile) -> None:
    """List what has left this node, by run and kind."""
    releases = Ledger(file).releases()
    table = Table("run", "what left", "replies", "refused", "numbers", "first", "last")
    for run, kind in dict.fromkeys((line.run, line.kind) for line in releases):
        own = [line for line in releases if (line.run, line.kind) == (run, kind)]
        refused = sum(bool(line.refused) for line in own)
        counts = (len(own) - refused, refused, sum(line.numbers for line in own))
        table.add_row(run, kind, *map(str, counts), _time(own[0]), _time(own[-1]))
    show(table)


@app.command()
def forget(file: LedgerFile) -> None:
    """Delete what this node remembers of runs; the ledger stays."""
    folder = file.with_suffix(MEMORY_SUFFIX)
    if not (file.exists() or folder.exists()):
        raise UserError(f"{file}: no such ledger; it is beside the group's data file")
    gone = sorted(folder.glob("*.sqlite*"))
    for path in gone:
        with writing(path):
            path.unlink()
    runs = dict.fromkeys(path.name.partition(".")[0] for path in gone)
    show(f"forgotten: {', '.join(runs) or 'nothing was remembered'}")


def _time(line: Release) -> str:
    return datetime.fromtimestamp(line.time).isoformat(" ", "seconds")
