"""A node's memory between the messages of a run, each of which meets a fresh process where it is deployed.

A deployed node keeps it in files that only its own account can read. Flower's `Context.state` lies in the SuperNode,
whose Runtime API gives it to whoever on the machine takes one of the node's tasks: no answer, and nothing made from
one, is there. A simulation, which has no owners, does keep it there.

Axis letters: Q public questions, N questions a group answered, K options.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictBytes

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file, writing
from appa_flwr.owner.ledger import ledger_of
from appa_flwr.protocol import wire
from client_app.outgoing import Refused
from pluralllm.data import GroupData

FloatArray = npt.NDArray[np.float64]

KEPT_SECONDS = 7 * 86400.0  # of a run that nobody asks about any more
_CATALOGUE, _QUESTIONS, _GROUPS, _WEIGHTS, _SETUP = "catalogue", "questions", "groups", "weights", "setup"
_SURVEY = "survey"


@dataclass(frozen=True)
class Memory:
    """Records by name: files of `folder`, or where that is None entries of Flower's `state`."""

    state: RecordDict
    folder: Path | None

    def __contains__(self, key: str) -> bool:
        return key in self.state if self.folder is None else self._path(self.folder, key).exists()

    def keep(self, key: str, record: ArrayRecord | ConfigRecord) -> None:
        """Write a record, in place of one of that name.

        Raises:
            UserError: the file cannot be written.
        """
        if self.folder is None:
            self.state[key] = record
            return
        with writing(self.folder):
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
        data = recorddict_to_proto(RecordDict({key: record})).SerializeToString()
        replace_file(self._path(self.folder, key), data, mode=0o600)

    def read(self, *keys: str) -> RecordDict:
        """The records of these names, which are there."""
        if self.folder is None:
            return RecordDict({key: self.state[key] for key in keys})
        found = RecordDict()
        for key in keys:
            data = RecordDictBytes.FromString(self._path(self.folder, key).read_bytes())
            found[key] = recorddict_from_proto(data)[key]
        return found

    def forget_others(self) -> None:
        """Remove the files of runs that have long ended."""
        for other in self.folder.parent.glob("*") if self.folder else ():
            if other != self.folder and time.time() - other.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(other, ignore_errors=True)

    @staticmethod
    def _path(folder: Path, key: str) -> Path:
        # A key holds a group's name, which may hold anything.
        return folder / hashlib.sha256(key.encode()).hexdigest()[:32]


def memory_of(context: Context) -> Memory:
    """The memory of this node and run; a deployed node's lies beside its ledger.

    Raises:
        UserError: see `ledger_of`.
    """
    ledger = ledger_of(context.node_config)
    folder = None if ledger is None else ledger.path.with_suffix(".memory") / str(context.run_id)
    return Memory(context.state, folder)


def remember_survey(memory: Memory, path: str) -> None:
    """Keep where a simulation's survey lies."""
    memory.keep(_SURVEY, ConfigRecord({"path": path}))


def survey_file(memory: Memory) -> str:
    """The remembered path of a simulation's survey.

    Raises:
        Refused: the server has named none.
    """
    if _SURVEY not in memory:
        raise Refused(wire.FORGOTTEN)
    return str(memory.read(_SURVEY).config_records[_SURVEY]["path"])


def remember_catalogue(memory: Memory, content: RecordDict, groups: tuple[str, ...]) -> None:
    """Keep the server's catalogue as it came, and the names of the groups hosted here."""
    memory.forget_others()
    memory.keep(_CATALOGUE, content.array_records[_CATALOGUE])
    memory.keep(_QUESTIONS, content.config_records[_QUESTIONS])
    memory.keep(_GROUPS, ConfigRecord({"names": list(groups), "digest": wire.digest(content)}))


def catalogue_digest(memory: Memory) -> str:
    """Of the catalogue that this run has; empty before it has come."""
    return str(memory.read(_GROUPS).config_records[_GROUPS]["digest"]) if _GROUPS in memory else ""


def catalogue(memory: Memory) -> wire.Catalogue:
    """The remembered catalogue.

    Raises:
        Refused: the server has sent none, as after a loss of the node's files.
    """
    if _GROUPS not in memory:
        raise Refused(wire.FORGOTTEN)
    return wire.unpack_catalogue(memory.read(_CATALOGUE, _QUESTIONS))


def groups(memory: Memory) -> tuple[str, ...]:
    """The groups hosted here, in the order of all replies; see `catalogue` for what it raises."""
    if _GROUPS not in memory:
        raise Refused(wire.FORGOTTEN)
    names = memory.read(_GROUPS).config_records[_GROUPS]["names"]
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def remember_data(memory: Memory, data: GroupData, truth_QK: FloatArray) -> None:
    """Keep a group's training answers D_g, the one source of context, and apart from them all its answers.

    `truth_QK` holds every answer the group has, held-out ones too, and rows of NaN elsewhere; it is never context.
    """
    arrays: dict[str, npt.NDArray[Any]] = {"question": data.question_N, "answer": data.answer_NK, "truth": truth_QK}
    memory.keep(f"data {data.group}", wire.arrays_record(arrays))


def data(memory: Memory, group: str) -> GroupData:
    """The training answers D_g of a group."""
    arrays = _arrays(memory, f"data {group}")
    return GroupData(group, arrays["question"], arrays["answer"])


def truth(memory: Memory, group: str) -> FloatArray:
    """All of a group's own answers (Q, K), rows of NaN where it has none."""
    return _arrays(memory, f"data {group}")["truth"]


def remember_setup(memory: Memory, content: RecordDict) -> None:
    """Keep the hash of the message that target tables are made of."""
    memory.keep(_SETUP, ConfigRecord({"digest": wire.digest(content)}))


def setup_digest(memory: Memory) -> str:
    """Of that message; empty before it has come."""
    return str(memory.read(_SETUP).config_records[_SETUP]["digest"]) if _SETUP in memory else ""


def remember_targets(memory: Memory, group: str, target_QK: FloatArray) -> None:
    """Keep the group's target table."""
    memory.keep(f"targets {group}", wire.arrays_record({"target": target_QK}))


def has_targets(memory: Memory, group: str) -> bool:
    """True if the group's target table has been written in this run."""
    return f"targets {group}" in memory


def targets(memory: Memory, group: str) -> FloatArray:
    """The group's target table (Q, K); a UserError before it has been written."""
    if not has_targets(memory, group):
        raise UserError("the target table has not been written: PluralLLM's final weights have not arrived")
    return _arrays(memory, f"targets {group}")["target"]


def remember_predictor_scores(memory: Memory, group: str, score_2L: FloatArray) -> None:
    """Keep a group's scores of PluralLLM until their sum is asked for."""
    memory.keep(f"scores {group}", wire.arrays_record({"score": score_2L}))


def predictor_scores(memory: Memory, group: str) -> FloatArray:
    """A group's scores of PluralLLM."""
    return _arrays(memory, f"scores {group}")["score"]


def remember_weights(memory: Memory, weights: ArrayRecord) -> None:
    """Keep the frozen PluralLLM, for runs that draw fresh contexts."""
    memory.keep(_WEIGHTS, weights)


def weights(memory: Memory) -> ArrayRecord:
    """The frozen PluralLLM."""
    return memory.read(_WEIGHTS).array_records[_WEIGHTS]


def _arrays(memory: Memory, key: str) -> Mapping[str, npt.NDArray[Any]]:
    return wire.numpy_arrays(memory.read(key).array_records[key])
