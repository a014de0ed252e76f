"""What a served run keeps: every run's rounds and answers, in one SQLite file of its folder.

A round, its answers and the rule's state are written in one transaction, so that a kill leaves all or nothing of them;
and since nothing but the file holds them, the memory of a service does not grow with its rounds.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appa_flwr.core.errors import UserError
from appa_flwr.run.records import ServedRound

SERVED_FILE = "served.db"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (
    number INTEGER PRIMARY KEY, run TEXT NOT NULL, attempt INTEGER NOT NULL, round INTEGER NOT NULL,
    given_up INTEGER NOT NULL DEFAULT 0, record TEXT NOT NULL, state TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS rounds_of_run ON rounds (run, given_up, number);
CREATE TABLE IF NOT EXISTS answers (
    run TEXT NOT NULL, attempt INTEGER NOT NULL, id TEXT NOT NULL, text BLOB NOT NULL, round INTEGER NOT NULL,
    answer TEXT NOT NULL, rewards TEXT, delivered INTEGER NOT NULL, PRIMARY KEY (run, attempt, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answers_undelivered ON answers (run, text) WHERE delivered = 0;
CREATE INDEX IF NOT EXISTS answers_open ON answers (run) WHERE rewards IS NOT NULL;
"""
_IN_ONE_QUERY = 500  # SQLite allows a limited number of parameters


@dataclass(frozen=True)
class Kept:
    """An answer that was scored.

    Attributes:
        id: the trainer's.
        text: digest of question and completion.
        round: that it is of.
        answer: what the trainer gets.
        rewards: of an open round of stream mode: group -> alignment reward, None for a missing group; with the answer's
            format score and whether it could be parsed.
        delivered: whether the trainer has had it for certain.
    """

    id: str
    text: bytes
    round: int
    answer: Mapping[str, Any]
    rewards: Mapping[str, Any] | None = None
    delivered: bool = True


class ServedRuns:
    """The file, opened; all methods may be called by several threads.

    Raises:
        UserError: it cannot be opened or is of something else.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        try:
            self._file = sqlite3.connect(folder / SERVED_FILE, check_same_thread=False, isolation_level=None)
            self._file.executescript(f"PRAGMA synchronous = FULL; {_SCHEMA}")
        except sqlite3.Error as error:
            raise UserError(f"{folder / SERVED_FILE}: cannot be opened ({error})") from None

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._file.execute(query, values).fetchall()

    def runs(self) -> tuple[str, ...]:
        """Names of all runs that have a closed round."""
        return tuple(name for (name,) in self._rows("SELECT run FROM rounds GROUP BY run ORDER BY MIN(number)"))

    def rounds(self, run: str) -> tuple[ServedRound, ...]:
        """A run's rounds in their order, without those that its trainer went back behind."""
        rows = self._rows("SELECT record FROM rounds WHERE run = ? AND NOT given_up ORDER BY number", run)
        return tuple(ServedRound.model_validate_json(record) for (record,) in rows)

    def last(self, run: str, *, before: int | None = None) -> tuple[ServedRound, dict[str, Any]] | None:
        """The last of a run's rounds with the rule's state after it; `before`: of those with a lower number."""
        limit, values = ("", ()) if before is None else (" AND round < ?", (before,))
        query = f"SELECT record, state FROM rounds WHERE run = ? AND NOT given_up{limit} ORDER BY number DESC LIMIT 1"
        rows = self._rows(query, run, *values)
        return (ServedRound.model_validate_json(rows[0][0]), json.loads(rows[0][1])) if rows else None

    def round(self, run: str, attempt: int, number: int) -> ServedRound | None:
        """One round by the trainer's number."""
        query = "SELECT record FROM rounds WHERE run = ? AND attempt = ? AND round = ? ORDER BY number DESC LIMIT 1"
        rows = self._rows(query, run, attempt, number)
        return ServedRound.model_validate_json(rows[0][0]) if rows else None

    def missed(self, run: str) -> dict[str, int]:
        """Group -> how many of a run's rounds it has missed, of those that have missed any."""
        query = (
            "SELECT value, COUNT(*) FROM rounds, json_each(rounds.record, '$.missing_groups') "
            "WHERE run = ? AND NOT given_up GROUP BY value"
        )
        return dict(self._rows(query, run))

    def answers(self, run: str, attempt: int, ids: Sequence[str]) -> dict[str, Kept]:
        """Those that were scored of these, by id."""
        found: list[tuple[Any, ...]] = []
        for start in range(0, len(ids), _IN_ONE_QUERY):
            some = ids[start : start + _IN_ONE_QUERY]
            marks = ",".join("?" * len(some))
            query = f"SELECT id, text, round, answer FROM answers WHERE run = ? AND attempt = ? AND id IN ({marks})"
            found += self._rows(query, run, attempt, *some)
        return {row[0]: Kept(row[0], row[1], row[2], json.loads(row[3])) for row in found}

    def undelivered(self, run: str, text: bytes) -> tuple[str, ...]:
        """Ids of the answers to this text that may not have reached the trainer."""
        query = "SELECT id FROM answers WHERE run = ? AND text = ? AND delivered = 0"
        return tuple(name for (name,) in self._rows(query, run, text))

    def open(self, run: str) -> tuple[Kept, ...]:
        """The answers of a run's open round, of stream mode."""
        query = "SELECT id, text, round, answer, rewards FROM answers WHERE run = ? AND rewards IS NOT NULL"
        rows = self._rows(query, run)
        return tuple(Kept(i, text, n, json.loads(answer), json.loads(rewards)) for i, text, n, answer, rewards in rows)

    def keep(
        self,
        run: str,
        attempt: int,
        answers: Iterable[Kept],
        *,
        closed: tuple[ServedRound, Mapping[str, Any]] | None = None,
        delivered: Iterable[str] = (),
    ) -> None:
        """Write answers, the round that they close if any, and which earlier ones have been delivered: all or nothing.

        A round of a higher attempt than the last's gives up those of the same and higher numbers.
        """
        with self._lock, self._file:
            put = self._file.execute
            put("BEGIN IMMEDIATE")
            for name in delivered:
                put("UPDATE answers SET delivered = 1 WHERE run = ? AND id = ?", (run, name))
            for one in answers:
                rewards = None if one.rewards is None else json.dumps(one.rewards)
                row = (run, attempt, one.id, one.text, one.round, json.dumps(one.answer), rewards, one.delivered)
                put("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            if closed is not None:
                record, state = closed
                put("UPDATE answers SET rewards = NULL WHERE run = ? AND rewards IS NOT NULL", (run,))
                put(
                    "UPDATE rounds SET given_up = 1 WHERE run = ? AND attempt < ? AND round >= ?",
                    (run, attempt, record.round),
                )
                values = (run, attempt, record.round, record.model_dump_json(), json.dumps(state))
                put("INSERT INTO rounds (run, attempt, round, record, state) VALUES (?, ?, ?, ?, ?)", values)


def read_rounds(folder: Path) -> dict[str, tuple[ServedRound, ...]]:
    """Run -> its rounds, of a run's folder; empty where it has served nobody.

    Raises:
        UserError: the file cannot be read.
    """
    if not (folder / SERVED_FILE).exists():
        return {}
    served = ServedRuns(folder)
    try:
        with suppress(sqlite3.Error):
            return {name: served.rounds(name) for name in served.runs()}
        raise UserError(f"{folder / SERVED_FILE}: cannot be read")
    finally:
        served.close()
