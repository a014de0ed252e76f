"""A node's memory of a run between messages. On a deployed node each message starts a fresh process.

A deployed node keeps the memory in a file beside its ledger that only its own account can read. `Context.state` of
Flower lies in the SuperNode, whose Runtime API gives it to any local process that takes one of the node's tasks, so
answers, and numbers made from answers, are not stored there. A simulation has no owners and does use `Context.state`.
"""

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

KEPT_SECONDS = 7 * 86400.0  # after a run's last message
FILE_SUFFIX, _TABLE = ".sqlite", "memory"
_SCHEMA = f"create table if not exists {_TABLE} (name text primary key, value blob not null) without rowid"


def memory_of(context: Context) -> Memory:
    """Open the memory of this node and run; removes the memory of runs that were silent for `KEPT_SECONDS`.

    Raises:
        UserError: see `appa_flwr.owner.ledger.ledger_of`; or the folder cannot be created.
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
    """Read an array that `keep_array` has stored; raises a KeyError if there is none."""
    return np.asarray(np.load(io.BytesIO(memory[name]), allow_pickle=False))


def keep_array(memory: Memory, name: str, array: npt.NDArray[Any]) -> None:
    """Store an array in the memory."""
    data = io.BytesIO()
    np.save(data, array, allow_pickle=False)
    memory[name] = data.getvalue()
