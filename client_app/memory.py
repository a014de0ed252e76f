"""A node's memory of a run between messages, each of which meets a fresh process where the node is deployed.

A deployed node keeps it in a file of its own, beside its ledger, that only its own account can read. Flower's
`Context.state` lies in the SuperNode, whose Runtime API gives it to whoever on the machine takes one of the node's
tasks: no answer, and nothing made from one, is there. A simulation, which has no owners, does keep it there.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import MutableMapping
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, Context

from appa_flwr.core.files import writing
from appa_flwr.core.private_table import NamedBytes, transaction
from appa_flwr.owner.ledger import MEMORY_SUFFIX, ledger_of

Memory = MutableMapping[str, bytes]

KEPT_SECONDS = 7 * 86400.0  # since a run's last message
FILE_SUFFIX, _TABLE = ".sqlite", "memory"
_SCHEMA = f"create table if not exists {_TABLE} (name text primary key, value blob not null) without rowid"


def memory_of(context: Context) -> Memory:
    """The memory of this node and run; what runs that have long been silent have left is removed.

    Raises:
        UserError: see `appa_flwr.owner.ledger.ledger_of`; or its folder cannot be made.
    """
    ledger = ledger_of(context.node_config)
    if ledger is None:
        return cast(Memory, context.state.config_records.setdefault(_TABLE, ConfigRecord()))
    folder = ledger.path.with_suffix(MEMORY_SUFFIX)
    with writing(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    own = folder / f"{context.run_id}{FILE_SUFFIX}"
    for path in folder.glob(f"*{FILE_SUFFIX}"):
        if path == own:
            os.utime(path)
        elif time.time() - path.stat().st_mtime > KEPT_SECONDS:
            path.unlink(missing_ok=True)
    return NamedBytes(partial(transaction, own, _SCHEMA, what="memory"), _TABLE)


def read_array(memory: Memory, name: str) -> npt.NDArray[Any]:
    """The array that `keep_array` has put there; a KeyError where it has not."""
    array: npt.NDArray[Any] = np.load(io.BytesIO(memory[name]), allow_pickle=False)
    return array


def keep_array(memory: Memory, name: str, array: npt.NDArray[Any]) -> None:
    """Put an array there."""
    data = io.BytesIO()
    np.save(data, array, allow_pickle=False)
    memory[name] = data.getvalue()
