"""Messages between server and groups, and their conversion to and from Flower records.

The server greets the nodes (`HELLO`), then sends the public questions (`CATALOGUE`) and PluralLLM's final weights
(`TARGETS`). Groups send numbers only in replies to `ASK`. Below the apps only this module uses Flower's records. Each
reply names the groups; further parts of the replies:

- to `CATALOGUE`: fields `answered` (number of training answers of each group), `may` (`may-leave` of the owner) and
  `noise` (the epsilon of all releases, and a standard deviation in people; empty for exact answers)
- to `ASK`: rows (G, N) of float64

Each `unpack_...` raises a ValueError without quoting the content if `pack_...` cannot have made the content.

Axis letters: G groups of a node, N numbers, P weights.
"""

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictBytes

from appa_flwr.protocol.asks import KINDS, Ask, Catalogue, typed
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS, Question

HELLO, CATALOGUE, TARGETS, ASK = (f"query.{name}" for name in ("hello", "catalogue", "targets", "ask"))
MESSAGES = (HELLO, CATALOGUE, TARGETS, ASK)

LONGEST_ID = 1000
"""Most characters of a question's id, which a group writes to its ledger."""

MOST_BYTES = 64 << 20
"""Size of the largest message to a group: a catalogue of 4,000 questions with `MAX_OPTIONS` options each."""

_HEAD, _SETTINGS, _ARRAYS, _NUMBERS, _WEIGHTS = "head", "settings", "arrays", "numbers", "weights"


def to_bytes(content: RecordDict) -> bytes:
    """Serialise a message's content, always in the same order."""
    data: bytes = recorddict_to_proto(content).SerializeToString(deterministic=True)
    return data


def from_bytes(data: bytes) -> RecordDict:
    """The inverse of `to_bytes`."""
    return recorddict_from_proto(RecordDictBytes.FromString(data))


def digest(content: RecordDict) -> str:
    """SHA-256 of a message's content, in hexadecimal digits."""
    return hashlib.sha256(to_bytes(content)).hexdigest()


def pack_hello(survey: str) -> RecordDict:
    """Path of the run's survey, empty for deployed nodes -> records."""
    return RecordDict({_HEAD: ConfigRecord({"survey": survey})})


def unpack_hello(content: RecordDict) -> str:
    """Records -> path of the run's survey."""
    with _checked("a greeting", content, head=["survey"]):
        return str(typed(content.config_records[_HEAD]["survey"], str))


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
    with _checked("a catalogue", content, head=["questions"], arrays=["train", "embedding", "unanswered"]):
        arrays = _arrays(content)
        train_Q, unanswered_Q = (arrays.array(name, np.bool_, axes=1) for name in ("train", "unanswered"))
        embedding_QKE = arrays.array("embedding", np.float32, axes=3)
        questions = tuple(
            Question(str(key), str(text), tuple(options), None if ordinal is None else tuple(ordinal))
            for key, text, options, ordinal in json.loads(str(content.config_records[_HEAD]["questions"]))
        )
        if {train_Q.shape, unanswered_Q.shape, embedding_QKE.shape[:1]} != {(len(questions),)}:
            raise ValueError("questions and arrays differ in length")
        # Ids must be unique and the mask of options is computed here. Otherwise a server could ask for means that hold
        # one answer only: one question at many positions, or several options in one question only.
        if len({question.question_id for question in questions}) < len(questions):
            raise ValueError("a question appears twice")
        size_Q = np.array([len(question.options) for question in questions])
        if not MIN_OPTIONS <= size_Q.min() <= size_Q.max() <= embedding_QKE.shape[1] <= MAX_OPTIONS:
            raise ValueError("a question or the embedding has too few or too many options")
        option_QK = np.arange(embedding_QKE.shape[1]) < size_Q[:, None]
        if (train_Q & unanswered_Q).any():
            raise ValueError("a training question is marked as unanswered")
        if not all(q.question_id.isprintable() and len(q.question_id) <= LONGEST_ID for q in questions):
            raise ValueError("an id has control characters or is too long")
        return Catalogue(questions, train_Q, embedding_QKE, option_QK, unanswered_Q)


def pack_weights(weights: ArrayRecord) -> RecordDict:
    """PluralLLM's final weights -> records."""
    return RecordDict({_ARRAYS: arrays_record({_WEIGHTS: join_weights(weights)})})


def unpack_weights(content: RecordDict) -> npt.NDArray[np.float32]:
    """The weights of `pack_weights`, joined (P,)."""
    with _checked("a message with weights", content, arrays=[_WEIGHTS]):
        return _arrays(content).array(_WEIGHTS, np.float32, axes=1)


def pack_ask(ask: Ask, request: str) -> RecordDict:
    """Request and its digest (`appa_flwr.protocol.asks.request_digest`) -> records."""
    head = ConfigRecord({"kind": ask.kind, "request": request})
    return RecordDict({_HEAD: head, _SETTINGS: ConfigRecord({**ask.settings}), _ARRAYS: arrays_record(ask.arrays)})


def unpack_ask(content: RecordDict) -> tuple[Ask, str]:
    """Records -> request and its digest."""
    with _checked("a request for numbers", content, head=["kind", "request"], settings=None, arrays=None):
        settings: Mapping[str, Any] = dict(content.config_records[_SETTINGS])
        kind, request = (typed(content.config_records[_HEAD][name], str) for name in ("kind", "request"))
        if kind not in KINDS:
            raise ValueError("the kind is unknown")
        return Ask(kind, _arrays(content).arrays, settings), request


@dataclass(frozen=True, eq=False)
class Reply:
    """A node's reply."""

    groups: tuple[str, ...]  # the groups whose node has sent the reply
    fields: Mapping[str, Any]  # further values by name
    numbers: npt.NDArray[np.float64] | None = None  # a row for each group (G, N); None if there are none


def pack_reply(groups: Sequence[str], numbers: npt.NDArray[np.float64] | None = None, **fields: Any) -> RecordDict:
    """Reply -> records; `fields` are texts, integers, or lists of one of these types."""
    content = RecordDict({_HEAD: ConfigRecord({"groups": list(groups), **fields})})
    if numbers is not None:
        content[_ARRAYS] = arrays_record({_NUMBERS: numbers})
    return content


def unpack_reply(content: RecordDict, *, numbers: bool = False, **fields: type[Any] | tuple[type[Any]]) -> Reply:
    """Records -> reply; reads rows of numbers if asked to, and fields of these types (see `typed`)."""
    records = {_HEAD: ["groups", *fields]} | ({_ARRAYS: [_NUMBERS]} if numbers else {})
    with _checked("a reply", content, **records):
        head = content.config_records[_HEAD]
        groups = tuple(typed(head["groups"], (str,)))
        if len(set(groups)) < len(groups):
            raise ValueError("a group appears twice")
        read = {name: typed(head[name], kind) for name, kind in fields.items()}
        row_GN = _arrays(content).array(_NUMBERS, np.float64, axes=2) if numbers else None
        if row_GN is not None and len(row_GN) != len(groups):
            raise ValueError("the reply does not have a row of numbers for each group")
        return Reply(groups, read, row_GN)


def join_weights(weights: ArrayRecord) -> npt.NDArray[np.float32]:
    """Join named float32 arrays to one (P,), in the order of their names.

    Flower transfers each array in separate requests, at every party that a message passes. With PluralLLM's 38 arrays
    this took longer than the training.
    """
    parts = [np.ravel(weights[name].numpy()) for name in sorted(weights)]
    return np.concatenate(parts, dtype=np.float32, casting="no")


def split_weights(weight_P: npt.NDArray[np.float32], shapes: Mapping[str, Sequence[int]]) -> ArrayRecord:
    """Undo `join_weights`: arrays in the order of `shapes`; raises ValueError if the sizes do not fit."""
    sizes = {name: math.prod(shapes[name]) for name in sorted(shapes)}
    if weight_P.shape != (sum(sizes.values()),):
        raise ValueError("the number of weights differs from the shapes")
    parts = dict(zip(sizes, np.split(weight_P, np.cumsum(list(sizes.values()))[:-1]), strict=True))
    return ArrayRecord({name: Array(parts[name].reshape(shape)) for name, shape in shapes.items()})


def arrays_record(arrays: Mapping[str, npt.NDArray[Any]]) -> ArrayRecord:
    """Named NumPy arrays as a record."""
    return ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()})


def _arrays(content: RecordDict) -> Ask:
    """Wrap a content's arrays in an `Ask`, whose method `array` checks types."""
    return Ask("", {name: array.numpy() for name, array in content.array_records[_ARRAYS].items()})


def num_bytes(content: RecordDict) -> int:
    """Size of a message's content."""
    return int(recorddict_to_proto(content).ByteSize())


@contextmanager
def _checked(what: str, content: RecordDict, **records: Collection[str] | None) -> Iterator[None]:
    """Turn every exception from decoding another party's bytes into a ValueError that quotes no content.

    The content must have `MOST_BYTES` at most, and these records alone, each with these names alone (None: any names).
    """
    fits = content.keys() == records.keys()
    if not fits or not all(names is None or content[key].keys() == {*names} for key, names in records.items()):
        wanted = "; ".join(f"{key}: {'any' if names is None else ', '.join(names)}" for key, names in records.items())
        raise ValueError(f"{what} does not follow the protocol (it must have {wanted}, and nothing else)")
    if (size := num_bytes(content)) > MOST_BYTES:
        raise ValueError(f"{what} does not follow the protocol (it has {size} bytes, and may have {MOST_BYTES})")
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} does not follow the protocol ({type(error).__name__})") from None
