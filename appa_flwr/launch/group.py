"""`appa group`: commands for a group's owner on their own machine; they need only a group's packages."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import combinations
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.core.files import replace_file, writing
from appa_flwr.launch.bundle import bundle_hash
from appa_flwr.launch.terminal import show
from appa_flwr.owner.ledger import MEMORY_SUFFIX, Ledger, Release
from appa_flwr.owner.owner_policy import owner_policy_file, read_owner_policy
from appa_flwr.secure.roster import ROSTER_FILE, Roster, own_key, public_key, read_file, read_roster, roster_file
from appa_flwr.survey import store

_PINNED = re.compile(r"""^([ \t]*roster[ \t]*=[ \t]*)("[^"\n]*"|'[^'\n]*')""", re.MULTILINE)

FEW = 5  # most questions that are named
OPENED = "query.open"
"""Kind of the message to which a group replies with the seed of its own mask."""

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
    policy = None if owner_policy is None else read_owner_policy(owner_policy)
    least = 1 if policy is None else policy.least_answers
    survey = store.read(file)
    asked = {question.question_id: question for question in store.read(questions).questions}
    own = {question.question_id: question for question in survey.questions}
    table = Table("group", "questions answered", "of the public questions", "text or options differ")
    for name, answers in survey.answers.items():
        known = [key for key in answers if key in asked]
        other = [key for key in known if not own[key].matches(asked[key])]
        same, some = len(known) - len(other), ", ".join(other[:FEW])
        if same < least:
            why = f"; the text or options of {some} differ" if other else ""
            wanted = f"least-answers of the owner's policy is {least}" if same else "is it the run's public file?"
            raise UserError(f"{questions}: {name} has answered {same} of its questions{why}; {wanted}")
        table.add_row(name, str(len(answers)), f"{same} of {len(asked)}", some + (", ..." if len(other) > FEW else ""))
    pinned = "pins a roster, so numbers leave in secure sums" if policy and policy.roster else "pins no roster"
    show(table, f"{owner_policy}: can be used; it {pinned}" if owner_policy else None)


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
def key(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Private key of your group for secure sums; created if it does not exist."),
    ],
    group: Annotated[str, typer.Option(help="Name of your group, as in --node-config.")],
) -> None:
    """Print your group's line for the roster, with its public key."""
    print(roster_file({group: public_key(own_key(file))}), end="")


@app.command()
def pin(
    file: Annotated[Path, typer.Argument(metavar="ROSTER", help="The roster, with one line for each group.")],
    owner_policy: Annotated[Path, typer.Option("--policy", help="Your owner's policy, beside your data file.")],
    group: Annotated[str, typer.Option(help="Name of your group; the roster must have it.")],
    key: Annotated[Path, typer.Option(help="Private key of your group; the roster must have its public key.")],
) -> None:
    """Pin a roster in your owner's policy: numbers then leave only in secure sums, or as own scores."""
    pinned = pin_roster(file, owner_policy, group=group, key=key)
    show(f"{owner_policy}: pins the roster {pinned.sha256} of {', '.join(pinned.names)}")


def pin_roster(file: Path, owner_policy: Path, *, group: str, key: Path) -> Roster:
    """Copy a roster beside an owner's policy, write its hash to the policy's key `roster`, and return the roster.

    Raises:
        UserError: the file is no roster, lacks the group, or has another key of it; or the policy cannot be used.
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
    """List what has left this node, the groups of each secure sum, and how often each question was used."""
    releases = Ledger(file).releases()
    show(_by_kind(releases), *_sums(releases), _used(Ledger(file)))


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


def _by_kind(releases: Sequence[Release]) -> Table:
    """Table of the releases by run and kind."""
    table = Table("run", "message", "answered", "refused", "numbers", "first", "last")
    for run, kind in dict.fromkeys((line.run, line.kind) for line in releases):
        own = [line for line in releases if (line.run, line.kind) == (run, kind)]
        refused = sum(bool(line.refused) for line in own)
        counts = (len(own) - refused, refused, sum(line.numbers for line in own))
        table.add_row(run, kind, *map(str, counts), _time(own[0]), _time(own[-1]))
    return table


def opened_sums(releases: Sequence[Release]) -> dict[tuple[str, str, str], int]:
    """Run, kind and cohort of masked numbers -> how many of these sums the server learned.

    A group opens only the last sum that it masked in a run, so each opening belongs to the release before it.
    """
    number: dict[tuple[str, str, str], int] = {}
    last: dict[str, tuple[str, str, str]] = {}
    for line in releases:
        if line.refused or not line.cohort:
            continue
        if line.kind != OPENED:
            last[line.run] = (line.run, line.kind, line.cohort)
            number.setdefault(last[line.run], 0)
        elif task := last.pop(line.run, None):
            number[task] += 1
    return number


def _sums(releases: Sequence[Release]) -> Iterator[Table]:
    """Tables of the secure sums, and of pairs of sums whose difference reveals a single group's numbers."""
    number = opened_sums(releases)
    table = Table("run", "numbers under masks", "summed over", "sums that the server learned")
    for task, learned in number.items():
        table.add_row(*task, str(learned))
    if number:
        yield table
    table = Table("two sums of", "over", "and over", "together tell, if the requests were alike, the numbers of")
    learned_over = dict.fromkeys((kind, cohort) for (_, kind, cohort), learned in number.items() if learned)
    for (kind, cohort), (other_kind, other) in combinations(learned_over, 2):
        differing = set(cohort.split("; ")) ^ set(other.split("; "))
        if kind == other_kind and len(differing) == 1:
            table.add_row(kind, cohort, other, *differing)
    if table.row_count:
        yield table


def _used(ledger: Ledger) -> Table:
    """Table of the recorded uses of questions, over all runs."""
    table = Table("what rests on questions, over all runs", "questions", "most on one", "mean")
    for kind in ledger.kinds():
        number = ledger.spent(kind).values()
        table.add_row(kind, str(len(number)), str(max(number)), f"{sum(number) / len(number):.1f}")
    return table


def _time(line: Release) -> str:
    return datetime.fromtimestamp(line.time).isoformat(" ", "seconds")
