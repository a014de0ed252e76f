"""A deployed node's record over all runs: every release, which questions each catalogue had, which scores were given.

One SQLite file beside the group's data. What cannot be written down does not leave.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from appa_flwr.core.errors import UserError

SUFFIX = ".ledger.sqlite"
_PATIENCE = 30.0  # seconds for another process of this node that is writing
_SCHEMA = """
create table if not exists secret (value blob not null);
create table if not exists release (
    time real not null, run text not null, message text not null, kind text not null, groups text not null,
    numbers integer not null, sha256 text not null, refused text not null);
create table if not exists score (question text not null, side text not null, digest blob not null,
    primary key (question, side, digest)) without rowid;
create table if not exists member (catalogue text not null, people text not null, part text not null,
    question text not null, primary key (catalogue, people, part, question)) without rowid;
create index if not exists member_of on member (people, question);
create table if not exists reply (catalogue text not null, kind text not null, given integer not null,
    primary key (catalogue, kind)) without rowid;
create table if not exists run_catalogue (run text primary key, catalogue text not null) without rowid;
create table if not exists secure_round (step text primary key, digest blob not null) without rowid;
create table if not exists secure_sum (session text not null, round integer not null, time real not null,
    what text not null, answered text not null, primary key (session, round));
"""


@dataclass(frozen=True)
class Release:
    """One reply of the node.

    Attributes:
        time: seconds since 1970.
        run: Flower's id of the run.
        message: Flower's id of the message that was answered.
        kind: the action asked for.
        groups: as the node's config names them.
        numbers: how many numbers left.
        sha256: of the reply's content, as hexadecimal digits; empty where nothing left.
        refused: why nothing left; empty where something did.
    """

    time: float
    run: str
    message: str
    kind: str
    groups: str
    numbers: int
    sha256: str
    refused: str


@dataclass(frozen=True)
class SecureSum:
    """A secure sum that the node has added to.

    Attributes:
        session, round: which one.
        time: seconds since 1970, when its own numbers left under masks.
        what: has been summed.
        answered: the groups whose numbers are in the sum, as the request to unmask says; none before.
    """

    session: str
    round: int
    time: float
    what: str
    answered: tuple[str, ...]


class Ledger:
    """The file, made when first written; every method raises a UserError where it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, release: Release) -> None:
        """Append a release, before it leaves."""
        with self._open() as file:
            file.execute("insert into release values (?, ?, ?, ?, ?, ?, ?, ?)", tuple(vars(release).values()))

    def releases(self) -> list[Release]:
        """All releases, oldest first.

        Raises:
            UserError: there is no ledger, or it cannot be read.
        """
        if not self.path.is_file():
            raise UserError(f"{self.path}: there is no ledger; a deployed node writes it beside its data file")
        with self._open() as file:
            return [Release(*row) for row in file.execute("select * from release order by rowid")]

    def secret(self) -> bytes:
        """Random bytes of this node alone, the same over all runs."""
        with self._open() as file:
            found = file.execute("select value from secret").fetchone()
            if found is None:
                found = (secrets.token_bytes(32),)
                file.execute("insert into secret values (?)", found)
            return bytes(found[0])

    def spend(
        self, questions: Sequence[str], side: str, digests: Sequence[bytes], *, limit: int, whole: bool = False
    ) -> list[bool]:
        """Write down that scores are about to be given; whether each may be.

        Args:
            questions: of each score, in any order.
            side: what is compared with.
            digests: of each score: which answer, by which metric, against what. The same one again tells nothing new.
            limit: most different ones of a question, over all runs; 0 = any number.
            whole: all or none: where one may not be given, nothing is written down.
        """
        counted = "select count(*), count(*) filter (where digest = ?) from score where question = ? and side = ?"
        allowed: list[bool] = []
        with self._open() as file:
            for question, mark in zip(questions, digests, strict=True):
                given, known = file.execute(counted, (mark, question, side)).fetchone() if limit else (0, 1)
                allowed.append(bool(known) or given < limit)
                if allowed[-1]:
                    file.execute("insert or ignore into score values (?, ?, ?)", (question, side, mark))
            if whole and not all(allowed):
                file.rollback()
        return allowed

    def enter(self, catalogue: str, people: str, parts: Mapping[str, Collection[str]], *, least: int) -> bool:
        """Write down which questions a group has answered of a catalogue; whether it may take part in it.

        It may not where a part differs from that of an earlier catalogue, and by fewer than `least` questions: what two
        replies differ by would be the answers to these.

        Args:
            catalogue: its digest.
            people: the group.
            parts: "training" and "held-out" -> ids of the questions that the group has answered.
            least: fewest questions.
        """
        with self._open() as file:
            read = "select catalogue, part, question from member where people = ? and catalogue != ?"
            earlier: dict[tuple[str, str], set[str]] = {}
            for other, part, question in file.execute(read, (people, catalogue)):
                earlier.setdefault((other, part), set()).add(question)
            for other in {name for name, _ in earlier}:
                for part, questions in parts.items():
                    if 0 < len(earlier.get((other, part), set()) ^ set(questions)) < least:
                        return False
            rows = [(catalogue, people, part, question) for part, asked in parts.items() for question in asked]
            file.executemany("insert or ignore into member values (?, ?, ?, ?)", rows)
            return True

    def first_of(self, run: str, catalogue: str) -> bool:
        """Write down a run's catalogue, by its digest; whether the run has had no other one.

        Messages of one run may be answered at the same time, in processes that know nothing of each other.
        """
        with self._open() as file:
            file.execute("insert or ignore into run_catalogue values (?, ?)", (run, catalogue))
            (had,) = file.execute("select catalogue from run_catalogue where run = ?", (run,)).fetchone()
            return bool(had == catalogue)

    def remember(self, step: str, digest: bytes) -> bytes | None:
        """Write down a step of a secure sum's round, unless it is there; what stood there before.

        Raises:
            UserError: the file cannot be written.
        """
        with self._open() as file:
            before = file.execute("select digest from secure_round where step = ?", (step,)).fetchone()
            file.execute("insert or ignore into secure_round values (?, ?)", (step, digest))
            return None if before is None else bytes(before[0])

    def write_masked(self, session: str, number: int, what: str) -> None:
        """Append a sum to which the node's numbers go under masks."""
        with self._open() as file:
            row = (session, number, time.time(), what, "[]")
            file.execute("insert or ignore into secure_sum values (?, ?, ?, ?, ?)", row)

    def write_answered(self, session: str, number: int, answered: Collection[str]) -> None:
        """Write down over whom a sum is."""
        with self._open() as file:
            update = "update secure_sum set answered = ? where session = ? and round = ?"
            file.execute(update, (json.dumps(sorted(answered)), session, number))

    def sums(self) -> list[SecureSum]:
        """All secure sums, oldest first."""
        with self._open() as file:
            rows = file.execute("select * from secure_sum order by rowid")
            return [
                SecureSum(session, number, when, what, tuple(json.loads(answered)))
                for session, number, when, what, answered in rows
            ]

    def count_reply(self, catalogue: str, kind: str, *, limit: int) -> bool:
        """Write down that a reply of a kind is about to rest on all answers to a catalogue; whether it may.

        `limit` is the most replies of that kind that may rest on the answer to one question, over all catalogues that
        have it; 0 = any number.
        """
        with self._open() as file:
            counted = (
                "select max(total) from (select sum(reply.given) as total from member"
                " join member as other on other.people = member.people and other.question = member.question"
                " join reply on reply.catalogue = other.catalogue and reply.kind = ?"
                " where member.catalogue = ? group by member.people, member.question)"
            )
            (given,) = file.execute(counted, (kind, catalogue)).fetchone()
            if limit and (given or 0) >= limit:
                return False
            more = "insert into reply values (?, ?, 1) on conflict do update set given = given + 1"
            file.execute(more, (catalogue, kind))
            return True

    def replies(self) -> dict[str, int]:
        """Kind of reply -> how many rest on the answer to one question, at the most."""
        with self._open() as file:
            read = (
                "select kind, max(total) from (select reply.kind as kind, sum(reply.given) as total from reply"
                " join member on member.catalogue = reply.catalogue group by kind, people, question) group by kind"
            )
            return dict(file.execute(read))

    def sides(self) -> list[str]:
        """Targets that scores have been given against."""
        with self._open() as file:
            return [side for (side,) in file.execute("select distinct side from score order by side")]

    def spent(self, side: str) -> dict[str, int]:
        """Question -> how many different scores of it have been given, over all runs."""
        with self._open() as file:
            return dict(file.execute("select question, count(*) from score where side = ? group by question", (side,)))

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """One transaction."""
        try:
            if not self.path.exists():  # it holds a secret: nobody else may read it
                os.close(os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o600))
            with closing(sqlite3.connect(self.path, timeout=_PATIENCE)) as file:
                file.executescript(_SCHEMA)
                with file:
                    file.execute("begin immediate")
                    yield file
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"{self.path}: the ledger cannot be used ({error})") from None


def ledger_of(node_config: Mapping[str, object]) -> Ledger | None:
    """The ledger of a deployed node: `ledger` in its config, else beside its data file; a simulation has none.

    Raises:
        UserError: the node has neither.
    """
    if not node_config.get("group"):
        return None
    if path := str(node_config.get("ledger", "")):
        return Ledger(Path(path))
    if data := str(node_config.get("data", "")):
        return Ledger(Path(data).with_suffix(SUFFIX))
    raise UserError('node-config lacks `ledger`, the file where what leaves is written down: ledger="group.sqlite"')


def digest(secret: bytes, *parts: bytes) -> bytes:
    """The mark of a score in the ledger, which also seeds its noise; only the owner of the ledger can make it."""
    made = hashlib.blake2b(key=secret, digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()
