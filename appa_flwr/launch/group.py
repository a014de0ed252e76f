"""`appa group`: what a group's owner does at their own machine, before a run and after it.

It needs no more than a group's machine has installed.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.launch.bundle import bundle_hash
from appa_flwr.launch.checks import APP_NAME, find_app_folder
from appa_flwr.launch.shown import show
from appa_flwr.owner.ledger import Ledger, Release
from appa_flwr.owner.owner_policy import owner_policy_file, read_owner_policy
from appa_flwr.secure.primitives import public_key
from appa_flwr.secure.roster import own_key, read_file, read_roster, roster_file
from appa_flwr.survey import store
from appa_flwr.survey.types import Survey

app = typer.Typer(help="For the owner of a group's data: check, decide, see what left.", no_args_is_help=True)


@app.command()
def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The group's private data file, as `appa survey` writes it.")
    ],
    group: Annotated[str, typer.Option(help="Its name, as --node-config will say; empty = all in the file.")] = "",
    questions: Annotated[
        Path | None, typer.Option(help="The run's public questions, to see how many are shared.", show_default=False)
    ] = None,
    owner_policy: Annotated[
        Path | None, typer.Option("--policy", help="Your owner's policy, checked too.", show_default=False)
    ] = None,
) -> None:
    """Say what a run could use of a data file, before anything runs."""
    found = store.read(file, groups=[group] if group else None)
    if group and group not in found.answers:
        raise UserError(f"{file}: {unknown_name('group', group, valid=store.read(file).groups)}")
    show(_answers(found), *([] if questions is None else [_shared(found, questions)]))
    if owner_policy is not None:
        read_owner_policy(owner_policy)
        show(f"{owner_policy}: can be used")


@app.command("policy")
def print_owner_policy() -> None:
    """Print an owner's policy, every key at its default: change it, and name it in --node-config as policy="FILE"."""
    print(owner_policy_file(), end="")


@app.command()
def bundle(
    checkout: Annotated[Path, typer.Argument(metavar="CHECKOUT", help="A clone that you have read, or trust.")],
) -> None:
    """Print the hash of a checkout's app bundle, for `bundle` in the owner's policy: no other one runs there then."""
    folder = find_app_folder(checkout.resolve())
    if folder != checkout.resolve():  # not a folder above it, and not what is installed here
        raise UserError(f"{checkout}: is no checkout of {APP_NAME}")
    print(bundle_hash(folder))


@app.command()
def key(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Your group's private key for secure sums; made if none.")
    ],
    group: Annotated[str, typer.Option(help="Your group's name, as --node-config will say.")],
) -> None:
    """Print your group's line of the roster of secure sums; agree on the whole file with the other owners."""
    print(roster_file({group: public_key(own_key(file))}), end="")


@app.command()
def roster(file: Annotated[Path, typer.Argument(metavar="FILE", help="The roster, a line for each group.")]) -> None:
    """Print a roster's hash, for `roster` in the owner's policy: compare it with the other owners' first."""
    print(read_roster(read_file(file), source=str(file)).sha256)


@app.command()
def audit(
    file: Annotated[Path, typer.Argument(metavar="LEDGER", help="The node's ledger, beside its data file.")],
    every: Annotated[bool, typer.Option("--all", help="Show every release, not their sums by run and kind.")] = False,
) -> None:
    """Show what has left this node, with whom it was summed, and how many replies and scores rest on one question."""
    ledger = Ledger(file)
    releases = ledger.releases()
    show(_each(releases) if every else _by_kind(releases), *_sums(ledger), _replies(ledger), _scores(ledger))


def _answers(found: Survey) -> Table:
    table = Table("group", "questions answered")
    for name, answers in found.answers.items():
        table.add_row(name, str(len(answers)))
    return table


def _shared(found: Survey, questions: Path) -> Table:
    public = {question.question_id: question.options for question in store.read(questions).questions}
    options = {question.question_id: question.options for question in found.questions}
    table = Table("group", f"of {len(public)} public questions", "options differ", "only in the group's file")
    for name, answers in found.answers.items():
        known = [key for key in answers if key in public]
        same = sum(options[key] == public[key] for key in known)
        table.add_row(name, str(same), str(len(known) - same), str(len(answers) - len(known)))
    if not any(key in public for answers in found.answers.values() for key in answers):
        raise UserError(f"{questions}: has none of the questions answered here; is it the run's public file?")
    return table


def _sums(ledger: Ledger) -> list[Table]:
    """Secure sums by what was summed and over whom; two over different groups tell what they differ by."""
    rounds: dict[tuple[str, str, str], list[int]] = {}
    for one in ledger.sums():
        groups = ", ".join(one.answered) or "(nobody: it was not unmasked here)"
        rounds.setdefault((one.session, one.what, groups), []).append(one.round)
    table = Table("session", "sum of", "sums", "rounds", "over the groups")
    for (session, what, groups), numbers in rounds.items():
        table.add_row(session[:12], what, str(len(numbers)), f"{min(numbers)} to {max(numbers)}", groups)
    return [table] if rounds else []


def _each(releases: list[Release]) -> Table:
    table = Table("when", "run", "message kind", "numbers", "sha256", "refused")
    for line in releases:
        when = datetime.fromtimestamp(line.time).isoformat(" ", "seconds")
        table.add_row(when, line.run, line.kind, str(line.numbers), line.sha256[:12], line.refused)
    return table


def _by_kind(releases: list[Release]) -> Table:
    table = Table("run", "message kind", "messages", "refused", "numbers", "first", "last")
    for run, kind in dict.fromkeys((line.run, line.kind) for line in releases):
        mine = [line for line in releases if (line.run, line.kind) == (run, kind)]
        when = [datetime.fromtimestamp(line.time).isoformat(" ", "seconds") for line in (mine[0], mine[-1])]
        refused = sum(bool(line.refused) for line in mine)
        table.add_row(run, kind, str(len(mine)), str(refused), str(sum(line.numbers for line in mine)), *when)
    return table


def _replies(ledger: Ledger) -> Table:
    table = Table("replies about PluralLLM, over all runs", "most that rest on one answer")
    for kind, most in ledger.replies().items():
        table.add_row(kind, str(most))
    return table


def _scores(ledger: Ledger) -> Table:
    table = Table("scores of a question, over all runs", "questions", "most", "mean")
    for side in ledger.sides():
        given = ledger.spent(side).values()
        table.add_row(side, str(len(given)), str(max(given)), f"{sum(given) / len(given):.1f}")
    return table
