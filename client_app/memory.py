"""A node's memory of a run between messages. On a deployed node each message starts a fresh process.

A deployed node keeps the memory in a file beside its ledger that only its own account can read. `Context.state` of
Flower lies in the SuperNode, whose Runtime API gives it to any local process that takes one of the node's tasks, so
answers, and numbers made from answers, are not stored there. A simulated node keeps it in a file beside the run's
survey, until the run ends: Flower would send `Context.state`, with all groups' tables, along with each message. Only
the path of the survey is there.
"""

import io
import os
import time
from collections.abc import MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, Context

from appa_flwr.core.files import writing
from appa_flwr.core.private_table import NamedBytes, transaction
from appa_flwr.owner.ledger import MEMORY_SUFFIX, ledger_of

Memory = MutableMapping[str, bytes]

KEPT_SECONDS = 7 * 86400.0  # after a run's last message
FILE_SUFFIX, _TABLE, _SURVEY = ".sqlite", "memory", "survey"
_SCHEMA = f"create table if not exists {_TABLE} (name text primary key, value blob not null) without rowid"
_OF_A_RUN = f"pragma synchronous = off; {_SCHEMA}"  # a simulation does not survive its machine


def memory_of(context: Context) -> Memory:
    """Open the memory of this node and run; removes the memory of runs that were silent for `KEPT_SECONDS`.

    A simulated node that has not been greeted has none, and gets an empty mapping.

    Raises:
        UserError: see `appa_flwr.owner.ledger.ledger_of`; or the folder cannot be created.
    """
    ledger, survey = ledger_of(context.node_config), survey_path(context)
    if ledger is None and not survey:
        return {}
    beside, name, schema = Path(survey), f"{context.run_id}-{context.node_id}", _OF_A_RUN
    if ledger is not None:
        beside, name, schema = ledger.path, str(context.run_id), _SCHEMA
    folder = beside.with_suffix(MEMORY_SUFFIX)
    with writing(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    own = folder / f"{name}{FILE_SUFFIX}"
    for path in folder.glob(f"*{FILE_SUFFIX}"):
        if path == own:
            os.utime(path)
        elif time.time() - path.stat().st_mtime > KEPT_SECONDS:
            path.unlink(missing_ok=True)
    return NamedBytes(partial(transaction, own, schema, what="memory"), _TABLE)


def keep_survey_path(context: Context, path: str) -> None:
    """Note for a simulated node where the run's survey lies."""
    context.state.config_records[_TABLE] = ConfigRecord({_SURVEY: path})


def survey_path(context: Context) -> str:
    """The path of `keep_survey_path`, empty if there is none."""
    record = context.state.config_records.get(_TABLE)
    return "" if record is None else str(record[_SURVEY])


def read_array(data: bytes) -> npt.NDArray[Any]:
    """Read an array that `keep_array` has stored."""
    return np.asarray(np.load(io.BytesIO(data), allow_pickle=False))


def keep_array(memory: Memory, name: str, array: npt.NDArray[Any]) -> None:
    """Store an array in the memory."""
    data = io.BytesIO()
    np.save(data, array, allow_pickle=False)
    memory[name] = data.getvalue()
