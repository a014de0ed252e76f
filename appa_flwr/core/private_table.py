"""Files of a node's own: SQLite, read and written in whole transactions, for its own account alone."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from appa_flwr.core.errors import UserError

_PATIENCE = 30.0  # seconds for another process of this node that is writing


@contextmanager
def transaction(path: Path, schema: str, *, what: str) -> Iterator[sqlite3.Connection]:
    """Open a file, made where there is none, for one transaction, which an exception takes back.

    Args:
        path: of the file.
        schema: SQL that makes its tables where they are missing.
        what: the file is, as an error calls it.

    Raises:
        UserError: the file cannot be used.
    """
    try:
        if not path.exists():  # nobody else may read it
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        with closing(sqlite3.connect(path, timeout=_PATIENCE)) as file:
            file.executescript(schema)
            with file:
                file.execute("begin immediate")
                yield file
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{path}: the {what} cannot be used ({error})") from None


class NamedBytes(MutableMapping[str, bytes]):
    """The rows of a table with columns `name` and `value`.

    `open_file` opens the file for one access; `lambda: nullcontext(file)` where all are within one transaction.
    """

    def __init__(self, open_file: Callable[[], AbstractContextManager[sqlite3.Connection]], table: str) -> None:
        self._open, self._table = open_file, table

    def __getitem__(self, name: str) -> bytes:
        with self._open() as file:
            row = file.execute(f"select value from {self._table} where name = ?", (name,)).fetchone()
        if row is None:
            raise KeyError(name)
        return bytes(row[0])

    def __setitem__(self, name: str, value: bytes) -> None:
        with self._open() as file:
            file.execute(f"insert or replace into {self._table} (name, value) values (?, ?)", (name, value))

    def __delitem__(self, name: str) -> None:
        with self._open() as file:
            if not file.execute(f"delete from {self._table} where name = ?", (name,)).rowcount:
                raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        with self._open() as file:
            return iter([name for (name,) in file.execute(f"select name from {self._table} order by name")])

    def __len__(self) -> int:
        return sum(1 for _ in self)
