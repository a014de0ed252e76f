"""`appa group`: what a group's owner does at their own machine, before a run and after it.

It needs no more than a group's machine has installed.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.core.files import replace_file, writing
from appa_flwr.launch import audit as audits
from appa_flwr.launch.bundle import APP_NAME, bundle_hash, find_app_folder
from appa_flwr.launch.terminal import show
from appa_flwr.owner.ledger import MEMORY_SUFFIX, Ledger
from appa_flwr.owner.owner_policy import owner_policy_file, read_owner_policy
from appa_flwr.secure.roster import ROSTER_FILE, Roster, own_key, public_key, read_file, read_roster, roster_file
from appa_flwr.survey import store
from appa_flwr.survey.types import Survey

_PINNED = re.compile(r"""^([ \t]*roster[ \t]*=[ \t]*)("[^"\n]*"|'[^'\n]*')""", re.MULTILINE)

FEW = 5  # questions that are named

app = typer.Typer(help="For the owner of a group's data: check, decide, see what left.", no_args_is_help=True)

LedgerFile = Annotated[Path, typer.Argument(metavar="LEDGER", help="The node's ledger, beside its data file.")]


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
    least = 0 if owner_policy is None else read_owner_policy(owner_policy).least_answers
    survey = store.read(file, groups=[group] if group else None)
    if group and group not in survey.answers:
        raise UserError(f"{file}: {unknown_name('group', group, valid=store.read(file).groups)}")
    table = Table("group", "questions answered")
    for name, answers in survey.answers.items():
        table.add_row(name, str(len(answers)))
    show(table, *([] if questions is None else [_shared(survey, questions, least=least)]))
    if owner_policy is not None:
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
    """Print your group's line of the roster, with the public key; the private one never leaves this machine."""
    print(roster_file({group: public_key(own_key(file))}), end="")


@app.command()
def pin(
    file: Annotated[Path, typer.Argument(metavar="ROSTER", help="The roster, a line for each group.")],
    owner_policy: Annotated[Path, typer.Option("--policy", help="Your owner's policy, beside your data file.")],
    group: Annotated[str, typer.Option(help="Your group's name, which has to stand there.")],
    key: Annotated[Path, typer.Option(help="Your group's private key, whose public one has to stand there.")],
) -> None:
    """Pin a roster in your owner's policy: numbers leave in secure sums with its groups then, and in no other way."""
    pinned = pin_roster(file, owner_policy, group=group, key=key)
    show(f"{owner_policy}: pins the roster {pinned.sha256} of {', '.join(pinned.names)}")


def pin_roster(file: Path, owner_policy: Path, *, group: str, key: Path) -> Roster:
    """Copy a roster beside an owner's policy and write its hash into that, where all else stays; the roster.

    Raises:
        UserError: it is no roster, or lacks the group, or has another key of it; or the policy cannot be used.
    """
    data = read_file(file)
    pinned = read_roster(data, source=str(file))
    if group not in pinned.names:
        raise UserError(f"{file}: {unknown_name('group', group, valid=pinned.names)}")
    if not key.exists():
        raise UserError(f"{key}: is not there; `appa group key FILE --group NAME` makes a key")
    if public_key(own_key(key)) != pinned.key_of[group]:
        raise UserError(f"{file}: {group}: is not the public key of {key}; `appa group key` prints the right line")
    read_owner_policy(owner_policy)
    text = read_file(owner_policy).decode()
    line = f'roster = "{pinned.sha256}"'
    changed, number = _PINNED.subn(rf'\g<1>"{pinned.sha256}"', text)
    changed = changed if number else "\n".join([*text.splitlines(), line, ""])
    try:
        right = tomllib.loads(changed) == {**tomllib.loads(text), "roster": pinned.sha256}
    except tomllib.TOMLDecodeError:
        right = False
    if not right:
        raise UserError(f"{owner_policy}: write this line there yourself, in place of that of `roster`: {line}")
    replace_file(owner_policy.with_name(ROSTER_FILE), data)
    replace_file(owner_policy, changed.encode())
    return pinned


@app.command()
def audit(file: LedgerFile) -> None:
    """Show what has left this node, with whom it was summed, and how much rests on one question."""
    releases = Ledger(file).releases()
    show(audits.by_kind(releases), *audits.sums(releases), audits.used(Ledger(file)))


@app.command()
def forget(file: LedgerFile) -> None:
    """Remove what this node remembers of runs; the ledger stays."""
    folder = file.with_suffix(MEMORY_SUFFIX)
    if not (file.exists() or folder.exists()):
        raise UserError(f"{file}: no such ledger; it is beside the group's data file")
    gone = sorted(folder.glob("*.sqlite*"))
    for path in gone:
        with writing(path):
            path.unlink()
    runs = dict.fromkeys(path.name.partition(".")[0] for path in gone)
    show(f"forgotten: {', '.join(runs) or 'nothing was remembered'}")


def _shared(survey: Survey, questions: Path, *, least: int) -> Table:
    """How many public questions each group has answered; a UserError where one has fewer than `least`, or none."""
    public = {question.question_id: question for question in store.read(questions).questions}
    own = {question.question_id: question for question in survey.questions}
    table = Table("group", f"of {len(public)} public questions", "text or options differ", "only in the group's file")
    for name, answers in survey.answers.items():
        known = [key for key in answers if key in public]
        other = [key for key in known if not own[key].matches(public[key])]
        same = len(known) - len(other)
        if same < max(least, 1):
            why = f"; the text or options of {', '.join(other[:FEW])} differ" if other else ""
            wanted = f"least-answers of the owner's policy is {least}" if same else "is it the run's public file?"
            raise UserError(f"{questions}: {name} has answered {same} of its questions{why}; {wanted}")
        some = f": {', '.join(other[:FEW])}{', ...' if len(other) > FEW else ''}" if other else ""
        table.add_row(name, str(same), f"{len(other)}{some}", str(len(answers) - len(known)))
    return table
