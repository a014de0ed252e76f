"""The ledger of a deployed node over all runs: its replies, their use of each question, and persistent facts.

One SQLite file beside the group's data. A reply that cannot be recorded is not sent.
"""

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

SUFFIX, MEMORY_SUFFIX = ".ledger.sqlite", ".memory"  # the second: folder of the node's memory, one file per run
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
    groups: str  # as named in the node's config
    numbers: int  # how many numbers left
    sha256: str  # of the content, in hexadecimal digits; empty for a refusal
    refused: str  # reason of a refusal; else empty
    cohort: str = ""  # groups of the secure sum, joined by "; "; empty for plain replies


class Ledger:
    """The ledger file, created on first use; every method raises UserError if the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open = partial(transaction, path, _SCHEMA, what="ledger")

    def write(self, release: Release) -> None:
        """Append a release, before the reply is sent."""
        with self._open() as file:
            file.execute(f"insert into release ({_COLUMNS}) values (?, ?, ?, ?, ?, ?, ?, ?)", astuple(release))

    def releases(self) -> list[Release]:
        """Read all releases, oldest first; also raises UserError if there is no ledger."""
        if not self.path.is_file():
            raise UserError(f"{self.path}: there is no ledger; a deployed node writes it beside its data file")
        with self._open() as file:
            return [Release(*row) for row in file.execute(f"select {_COLUMNS} from release order by rowid")]

    @contextmanager
    def facts(self) -> Iterator[MutableMapping[str, bytes]]:
        """Open the named bytes in one transaction, which an exception rolls back; the ledger is locked meanwhile."""
        with self._open() as file:
            yield NamedBytes(lambda: nullcontext(file), "fact")

    def secret(self) -> bytes:
        """Secret of this node: 32 random bytes, the same in all runs."""
        with self.facts() as facts:
            return facts.setdefault("secret of this node", secrets.token_bytes(32))

    def spend(self, kind: str, marks: Sequence[tuple[str, bytes]], *, limit: int, whole: bool) -> list[bool]:
        """Record the use of questions in a reply, as pairs of question and mark; returns whether each is allowed.

        A mark that is already recorded reveals nothing new and is free. `limit` is the most marks of this kind per
        question over all runs, 0 = any number. With `whole`, nothing is recorded unless every mark is allowed.
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
        """Kinds of the recorded marks."""
        with self._open() as file:
            return [kind for (kind,) in file.execute("select distinct kind from used order by kind")]

    def spent(self, kind: str) -> dict[str, int]:
        """Question -> number of its different marks of this kind, over all runs."""
        with self._open() as file:
            return dict(file.execute("select question, count(*) from used where kind = ? group by question", (kind,)))

    def enter(self, run: str, catalogue: str, group: str, parts: Mapping[str, Collection[str]], *, least: int) -> str:
        """Record which questions of a run's catalogue (given by its digest) a group has answered, if it may take part.

        Returns "" if it may, "other" if the run has had another catalogue, and "near" if the answered questions of a
        part differ from those of an earlier catalogue by 1 to `least` - 1 questions, since the difference of two
        replies would reveal these answers. `parts` maps "training" and "held-out" to question ids.
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
    """Ledger of a deployed node, beside its survey file; None in a simulation.

    Raises UserError if the node's config names no survey file.
    """
    if not node_config.get("group"):
        return None
    if not (data := str(node_config.get("data", ""))):
        raise UserError("node-config lacks `data`: name the group's own survey file, as `appa survey` writes it")
    return Ledger(Path(data).with_suffix(SUFFIX))


def digest(secret: bytes, *parts: bytes) -> bytes:
    """Keyed hash that marks a score in the ledger (16 bytes); only the holder of the secret can compute it."""
    made = hashlib.blake2b(key=secret, digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()
