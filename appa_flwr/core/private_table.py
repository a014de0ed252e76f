"""Private SQLite files of a node, read and written in transactions, and accessible only to the node's account."""

import os
import sqlite3
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

from appa_flwr.core.errors import UserError

_PATIENCE = 30.0  # seconds to wait for another process of this node that is writing


@contextmanager
def transaction(path: Path, schema: str, *, what: str) -> Iterator[sqlite3.Connection]:
    """Open a file, created if missing, for one transaction, which an exception rolls back.

    `schema` is SQL that creates missing tables; `what` names the file in error messages.

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
        raise UserError(f"{path}: the {what} cannot be used ({error}); move the file away to begin a new one") from None


class NamedBytes(MutableMapping[str, bytes]):
    """A mapping of the rows of a table with columns `name` and `value`.

    `open_file` opens the file for one access.
    """

    def __init__(self, open_file: Callable[[], AbstractContextManager[sqlite3.Connection]], table: str) -> None:
        self._open, self._table = open_file, table

    def __getitem__(self, name: str) -> bytes:
        with self._open() as file:
            row = file.execute(f"select value from {self._table} where name = ?", (name,)).fetchone()
        if row is None:
            raise KeyError(name)
        return bytes(row[0])

    def setdefault(self, name: str, default: bytes = b"") -> bytes:
        """Store a value unless the name has one, and return the stored value; of two processes the first one stores."""
        with self._open() as file:
            file.execute(f"insert or ignore into {self._table} (name, value) values (?, ?)", (name, default))
            row = file.execute(f"select value from {self._table} where name = ?", (name,)).fetchone()
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
