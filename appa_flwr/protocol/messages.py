"""Messages between server and groups: every message's fields, to and from Flower records.

The server greets the nodes (`HELLO`), hands out the public questions (`CATALOGUE`) and PluralLLM's final weights
(`TARGETS`). Every number that a group gives is its reply to an `ASK`. In a run with secure sums the numbers leave under
masks, and `OPEN` asks for what takes a group's own mask off the total. The only module below the apps that knows
Flower's records. Replies:

- to `HELLO`: fields `roster` (SHA-256 of the roster that the owner has pinned) and `round` (the last one that was
  masked in this run)
- to `CATALOGUE`: fields `answered` (number of training answers of each group) and `may` (`may-leave` of the owner)
- to `TARGETS`: nothing beside the groups
- to `ASK`: rows (G, N) of float64, or words (N,) of uint64
- to `OPEN`: field `seed` (bytes)

Each `unpack_...` raises a ValueError, which quotes nothing, where `pack_...` cannot have made the content.

Axis letters: G groups of a node, N numbers, P weights.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictBytes

from appa_flwr.protocol.asks import KINDS, Ask, Catalogue, Task, typed
from appa_flwr.survey.types import Question

HELLO, CATALOGUE, TARGETS, ASK, OPEN = (f"query.{name}" for name in ("hello", "catalogue", "targets", "ask", "open"))
MESSAGES = (HELLO, CATALOGUE, TARGETS, ASK, OPEN)

LONGEST_ID = 1000
"""Characters of a question's id, which a group writes down."""

_HEAD, _SETTINGS, _ARRAYS, _NUMBERS, _WEIGHTS = "head", "settings", "arrays", "numbers", "weights"


def to_bytes(content: RecordDict) -> bytes:
    """A message's content, always in the same order."""
    data: bytes = recorddict_to_proto(content).SerializeToString(deterministic=True)
    return data


def from_bytes(data: bytes) -> RecordDict:
    """The inverse of `to_bytes`."""
    return recorddict_from_proto(RecordDictBytes.FromString(data))


def digest(content: RecordDict) -> str:
    """SHA-256 of a message's content, in hexadecimal digits."""
    return hashlib.sha256(to_bytes(content)).hexdigest()


def pack_hello(run: str, survey: str) -> RecordDict:
    """The greeting: the run's name, and for simulated nodes the path of the run's survey."""
    return RecordDict({_HEAD: ConfigRecord({"run": run, "survey": survey})})


def unpack_hello(content: RecordDict) -> tuple[str, str]:
    """The run's name and the path of its survey."""
    with _following_the_protocol("a greeting"):
        head = content.config_records[_HEAD]
        return typed(head["run"], str), typed(head["survey"], str)


def pack_catalogue(catalogue: Catalogue) -> RecordDict:
    """Catalogue -> records."""
    questions = [[q.question_id, q.text, list(q.options), q.ordinal] for q in catalogue.questions]
    arrays = {
        "train": np.asarray(catalogue.train_Q, dtype=np.bool_),
        "embedding": np.asarray(catalogue.embedding_QKE, dtype=np.float32),
        "unanswered": np.asarray(catalogue.unanswered_Q, dtype=np.bool_),
    }
    return RecordDict({_ARRAYS: arrays_record(arrays), _HEAD: ConfigRecord({"questions": json.dumps(questions)})})


def unpack_catalogue(content: RecordDict) -> Catalogue:
    """Records -> catalogue."""
    with _following_the_protocol("a catalogue"):
        arrays = _arrays(content)
        train_Q, unanswered_Q = (arrays.array(name, np.bool_, axes=1) for name in ("train", "unanswered"))
        embedding_QKE = arrays.array("embedding", np.float32, axes=3)
        questions = tuple(
            Question(str(key), str(text), tuple(options), None if ordinal is None else tuple(ordinal))
            for key, text, options, ordinal in json.loads(str(content.config_records[_HEAD]["questions"]))
        )
        if {train_Q.shape, unanswered_Q.shape, embedding_QKE.shape[:1]} != {(len(questions),)}:
            raise ValueError("questions and arrays of different length")
        # A sum over many answers could else be that of one: to one question under many positions, or to the only one
        # of several options. So which options count is not taken from the message.
        if len({question.question_id for question in questions}) < len(questions):
            raise ValueError("a question twice")
        size_Q = np.array([len(question.options) for question in questions])
        if size_Q.max() > embedding_QKE.shape[1]:
            raise ValueError("more options than features of options")
        option_QK = np.arange(embedding_QKE.shape[1]) < size_Q[:, None]
        if (train_Q & unanswered_Q).any():
            raise ValueError("a training question that nobody answered")
        if not all(q.question_id.isprintable() and len(q.question_id) <= LONGEST_ID for q in questions):
            raise ValueError("an id with control characters, or too long an id")
        return Catalogue(questions, train_Q, embedding_QKE, option_QK, unanswered_Q)


def pack_weights(weights: ArrayRecord) -> RecordDict:
    """PluralLLM's final weights -> records."""
    return RecordDict({_ARRAYS: arrays_record({_WEIGHTS: join_weights(weights)})})


def unpack_weights(content: RecordDict) -> npt.NDArray[np.float32]:
    """The weights of `pack_weights`, joined (P,)."""
    with _following_the_protocol("a message with weights"):
        return _arrays(content).array(_WEIGHTS, np.float32, axes=1)


def pack_ask(ask: Ask, task: Task) -> RecordDict:
    """Request -> records; `task` is where its numbers go."""
    head = ConfigRecord({"kind": ask.kind, **_fields(task)})
    return RecordDict({_HEAD: head, _SETTINGS: ConfigRecord({**ask.settings}), _ARRAYS: arrays_record(ask.arrays)})


def unpack_ask(content: RecordDict) -> tuple[Ask, Task]:
    """Records -> request."""
    with _following_the_protocol("a request for numbers"):
        settings: Mapping[str, Any] = dict(content.config_records[_SETTINGS])
        kind = typed(content.config_records[_HEAD]["kind"], str)
        if kind not in KINDS:
            raise ValueError("an unknown kind")
        return Ask(kind, _arrays(content).arrays, settings), _task(content)


def pack_open(task: Task) -> RecordDict:
    """A task -> the request for each group's own mask of it."""
    return RecordDict({_HEAD: ConfigRecord(_fields(task))})


def unpack_open(content: RecordDict) -> Task:
    """The inverse."""
    with _following_the_protocol("a request to open a sum"):
        return _task(content)


def _fields(task: Task) -> dict[str, Any]:
    return {**asdict(task), "cohort": list(task.cohort)}


def _task(content: RecordDict) -> Task:
    head = content.config_records[_HEAD]
    run, request, roster = (typed(head[name], str) for name in ("run", "request", "roster"))
    return Task(run, typed(head["round"], int), tuple(typed(head["cohort"], (str,))), request, roster)


@dataclass(frozen=True, eq=False)
class Reply:
    """A node's reply.

    Attributes:
        groups: the groups of the node that it speaks for.
        fields: what stands beside, by name.
        numbers: a row for each group (G, N), or masked words (N,); None where the reply has none.
    """

    groups: tuple[str, ...]
    fields: Mapping[str, Any]
    numbers: npt.NDArray[Any] | None = None


def pack_reply(groups: Sequence[str], numbers: npt.NDArray[Any] | None = None, **fields: Any) -> RecordDict:
    """Reply -> records; `fields` are texts, whole numbers, bytes, or lists of one of them."""
    content = RecordDict({_HEAD: ConfigRecord({"groups": list(groups), **fields})})
    if numbers is not None:
        content[_ARRAYS] = arrays_record({_NUMBERS: numbers})
    return content


def unpack_reply(
    content: RecordDict, *, numbers: tuple[type[Any], int] | None = None, **fields: type[Any] | tuple[type[Any]]
) -> Reply:
    """Records -> reply.

    Args:
        content: of another party.
        numbers: type and number of axes of the numbers; none are read where this is None.
        fields: the type of each field; a tuple of a type stands for a list of it.
    """
    with _following_the_protocol("a reply"):
        head = content.config_records[_HEAD]
        groups = tuple(typed(head["groups"], (str,)))
        if len(set(groups)) < len(groups):
            raise ValueError("a group twice")
        read = {name: typed(head[name], kind) for name, kind in fields.items()}
        array = None if numbers is None else _arrays(content).array(_NUMBERS, numbers[0], axes=numbers[1])
        return Reply(groups, read, array)


def join_weights(weights: ArrayRecord) -> npt.NDArray[np.float32]:
    """Named float32 arrays -> one (P,), by the order of their names.

    Flower asks for every array in requests of its own, at every party that a message passes: PluralLLM's 38 took longer
    than its training.
    """
    parts = [np.ravel(weights[name].numpy()) for name in sorted(weights)]
    return np.concatenate(parts, dtype=np.float32, casting="no")


def split_weights(weight_P: npt.NDArray[np.float32], shapes: Mapping[str, Sequence[int]]) -> ArrayRecord:
    """The arrays that `join_weights` joined, by these shapes, in their order; a ValueError where they do not fit."""
    sizes = {name: math.prod(shapes[name]) for name in sorted(shapes)}
    if weight_P.shape != (sum(sizes.values()),):
        raise ValueError("another number of weights")
    parts = dict(zip(sizes, np.split(weight_P, np.cumsum(list(sizes.values()))[:-1]), strict=True))
    return ArrayRecord({name: Array(parts[name].reshape(shape)) for name, shape in shapes.items()})


def arrays_record(arrays: Mapping[str, npt.NDArray[Any]]) -> ArrayRecord:
    """Named NumPy arrays as a record."""
    return ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()})


def _arrays(content: RecordDict) -> Ask:
    """A content's arrays, to be read with their types."""
    return Ask("", {name: array.numpy() for name, array in content.array_records[_ARRAYS].items()})


@contextmanager
def _following_the_protocol(what: str) -> Iterator[None]:
    """Whatever decoding another party's bytes raises becomes one ValueError that quotes nothing."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} does not follow the protocol ({type(error).__name__})") from None
