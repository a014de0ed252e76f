"""The ledger of a deployed node: one row for each of its replies, over all runs.

One SQLite file beside the group's data. A row is written before the reply is sent; a reply that cannot be recorded is
not sent.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path

from appa_flwr.core.errors import UserError
from appa_flwr.core.private_table import transaction

SUFFIX, MEMORY_SUFFIX = ".ledger.sqlite", ".memory"  # the second: folder of the node's memory, one file per run
_SCHEMA = """
create table if not exists release (
    time real not null, run text not null, kind text not null, groups text not null, numbers integer not null,
    sha256 text not null, refused text not null);
"""


@dataclass(frozen=True)
class Release:
    """One reply of the node."""

    time: float  # seconds since 1970
    run: str  # Flower's id
    kind: str  # words of `may-leave` for the numbers; for a reply without numbers the kind of the message
    groups: str  # as named in the node's config
    numbers: int  # how many numbers left
    sha256: str  # of the content, in hexadecimal digits; empty for a refusal
    refused: str  # reason of a refusal; else empty


_COLUMNS = ", ".join(field.name for field in fields(Release))


class Ledger:
    """The ledger file, created on first use; every method raises UserError if the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open = partial(transaction, path, _SCHEMA, what="ledger")

    def write(self, release: Release) -> None:
        """Append a release, before the reply is sent."""
        with self._open() as file:
            file.execute(f"insert into release ({_COLUMNS}) values (?, ?, ?, ?, ?, ?, ?)", astuple(release))

    def releases(self) -> list[Release]:
        """Read all releases, oldest first; also raises UserError if there is no ledger."""
        if not self.path.is_file():
            raise UserError(f"{self.path}: there is no ledger; a deployed node writes it beside its data file")
        with self._open() as file:
            return [Release(*row) for row in file.execute(f"select {_COLUMNS} from release order by rowid")]


def ledger_of(node_config: Mapping[str, object]) -> Ledger | None:
    """Ledger of a deployed node, beside its survey file; None in a simulation.

    Raises UserError if the node's config names no survey file.
    """
    if not node_config.get("group"):
        return None
    if not (data := str(node_config.get("data", ""))):
        raise UserError("node-config lacks `data`: name the group's own survey file, as `appa survey` writes it")
    return Ledger(Path(data).with_suffix(SUFFIX))
