"""A deployed node's record over all runs: what left, what rests on each question, and facts that it must not lose.

One SQLite file beside the group's data. What cannot be written down does not leave.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

from appa_flwr.core.errors import UserError
from appa_flwr.core.private_table import NamedBytes, transaction

SUFFIX, MEMORY_SUFFIX = ".ledger.sqlite", ".memory"  # the second: a folder of what the node remembers, a file a run
_COLUMNS = "time, run, kind, groups, numbers, sha256, refused, cohort"
_SCHEMA = """
create table if not exists release (
    time real not null, run text not null, kind text not null, groups text not null, numbers integer not null,
    sha256 text not null, refused text not null, cohort text not null);
create table if not exists used (kind text not null, question text not null, mark blob not null,
    primary key (kind, question, mark)) without rowid;
create table if not exists fact (name text primary key, value blob not null) without rowid;
"""


@dataclass(frozen=True)
class Release:
    """One reply of the node."""

    time: float  # seconds since 1970
    run: str  # Flower's id
    kind: str  # of the message, or "ask" and the kind of numbers
    groups: str  # as the node's config names them
    numbers: int  # that left
    sha256: str  # of the content, in hexadecimal digits; empty where nothing left
    refused: str  # why nothing left; empty where something did
    cohort: str = ""  # groups of the secure sum, joined by "; "; empty for plain replies


class Ledger:
    """The file, made when first written; every method raises a UserError where it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open = partial(transaction, path, _SCHEMA, what="ledger")

    def write(self, release: Release) -> None:
        """Append a release, before it leaves."""
        with self._open() as file:
            file.execute(f"insert into release ({_COLUMNS}) values (?, ?, ?, ?, ?, ?, ?, ?)", astuple(release))

    def releases(self) -> list[Release]:
        """All releases, oldest first; a UserError too where there is no ledger."""
        if not self.path.is_file():
            raise UserError(f"{self.path}: there is no ledger; a deployed node writes it beside its data file")
        with self._open() as file:
            return [Release(*row) for row in file.execute(f"select {_COLUMNS} from release order by rowid")]

    @contextmanager
    def facts(self) -> Iterator[MutableMapping[str, bytes]]:
        """Named bytes, in one transaction, which an exception takes back; the ledger serves nothing else meanwhile."""
        with self._open() as file:
            yield NamedBytes(lambda: nullcontext(file), "fact")

    def secret(self) -> bytes:
        """Random bytes of this node alone (32), the same over all runs."""
        with self.facts() as facts:
            return facts.setdefault("secret of this node", secrets.token_bytes(32))

    def spend(self, kind: str, marks: Sequence[tuple[str, bytes]], *, limit: int, whole: bool) -> list[bool]:
        """Write down what is about to rest on questions, by a question and a mark each; whether each may.

        The same mark again tells nothing new, and is free. `limit` is the most marks of this kind that a question may
        have over all runs, 0 = any number; with `whole` nothing is written down where one may not.
        """
        allowed: list[bool] = []
        number: dict[str, int] = {}
        with self._open() as file:
            for question, mark in marks:
                if limit and question not in number:
                    read = "select count(*) from used where kind = ? and question = ?"
                    (number[question],) = file.execute(read, (kind, question)).fetchone()
                row = (kind, question, mark)
                new = file.execute("insert or ignore into used values (?, ?, ?)", row).rowcount
                number[question] = number.get(question, 0) + new
                allowed.append(not (limit and new) or number[question] <= limit)
                if not allowed[-1]:
                    file.execute("delete from used where kind = ? and question = ? and mark = ?", row)
            if whole and not all(allowed):
                file.rollback()
        return allowed

    def kinds(self) -> list[str]:
        """Kinds of what rests on questions."""
        with self._open() as file:
            return [kind for (kind,) in file.execute("select distinct kind from used order by kind")]

    def spent(self, kind: str) -> dict[str, int]:
        """Question -> how many different marks of this kind rest on it, over all runs."""
        with self._open() as file:
            return dict(file.execute("select question, count(*) from used where kind = ? group by question", (kind,)))

    def enter(self, run: str, catalogue: str, group: str, parts: Mapping[str, Collection[str]], *, least: int) -> str:
        """Write down which questions of a run's catalogue, by its digest, a group has answered, if it may take part.

        Empty where it may; "other" where the run has had another catalogue; "near" where what it has answered of a
        part differs from that of an earlier catalogue, and by fewer than `least` questions: what two replies differ by
        would be the answers to these. `parts` are "training" and "held-out" with ids of questions.
        """
        kind, mark = f"catalogues: {group}", catalogue.encode()
        answered = {f"{part}: {question}" for part, questions in parts.items() for question in questions}
        earlier: dict[bytes, set[str]] = {}
        with self._open() as file:
            if NamedBytes(lambda: nullcontext(file), "fact").setdefault(f"catalogue of run {run}", mark) != mark:
                return "other"
            read = "select mark, question from used where kind = ? and mark != ?"
            for other, row in file.execute(read, (kind, mark)):
                earlier.setdefault(other, set()).add(row)
            for before in earlier.values():
                if min(Counter(row.partition(":")[0] for row in before ^ answered).values(), default=least) < least:
                    return "near"
            file.executemany("insert or ignore into used values (?, ?, ?)", [(kind, row, mark) for row in answered])
            return ""


def ledger_of(node_config: Mapping[str, object]) -> Ledger | None:
    """The ledger of a deployed node, beside its survey file; a simulation has none.

    A UserError where the node's config names no survey file.
    """
    if not node_config.get("group"):
        return None
    if not (data := str(node_config.get("data", ""))):
        raise UserError("node-config lacks `data`: name the group's own survey file, as `appa survey` writes it")
    return Ledger(Path(data).with_suffix(SUFFIX))


def digest(secret: bytes, *parts: bytes) -> bytes:
    """The mark of a score in the ledger (16 bytes); only the owner of the ledger can make it."""
    made = hashlib.blake2b(key=secret, digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()
