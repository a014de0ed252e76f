"""Messages between server and groups, and their conversion to and from Flower records.

The server greets the nodes (`HELLO`), then sends the public questions (`CATALOGUE`) and PluralLLM's final weights
(`TARGETS`). Groups send numbers only in replies to `ASK`. Below the apps only this module uses Flower's records. Each
reply names the groups; further parts of the replies:

- to `CATALOGUE`: fields `answered` (number of training answers of each group), `may` (`may-leave` of the owner) and
  `noise` (the epsilon of all releases, and a standard deviation in people; empty for exact answers)
- to `TARGETS`: field `by_mean` (questions of each group that are predicted by the mean alone)
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

from appa_flwr.core.arrays import BoolArray, IntArray
from appa_flwr.protocol.queries import QUERY_KINDS, Catalogue, Query, typed
from appa_flwr.survey.types import MAX_OPTIONS, MIN_OPTIONS, Question

HELLO, CATALOGUE, TARGETS, ASK = (f"query.{name}" for name in ("hello", "catalogue", "targets", "ask"))
MESSAGES = (HELLO, CATALOGUE, TARGETS, ASK)

LONGEST_ID = 1000
"""Most characters of a question's id, which a group writes to its ledger."""

MOST_BYTES = 64 << 20
"""Size of the largest message to a group."""

MOST_FEATURES = 64 << 20
"""Most numbers in a catalogue's features: of 17,000 questions with `MAX_OPTIONS` options each."""

_CATALOGUE_ARRAYS = ("train", "unanswered", "scale", "question", "question_features", "option", "option_features")
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
    """Catalogue -> records.

    Each list of options is sent once (`scales`), and so is each vector: the first features are the same for all options
    of a question, as those of its text are, and the rest belongs to the option.
    """
    value_QKE, option_QK = np.asarray(catalogue.embedding_QKE, dtype=np.float32), catalogue.option_QK
    bits_QKE = value_QKE.view(np.int32)
    of_question_E = ((bits_QKE == bits_QKE[:, :1]) | ~option_QK[..., None]).all(axis=(0, 1))
    width = int(np.argmin(np.append(of_question_E, False)))
    of_option_QKF = value_QKE[..., width:]
    keys = [(q.options, q.ordinal, row.tobytes()) for q, row in zip(catalogue.questions, of_option_QKF, strict=True)]
    first_S, scale_Q = _distinct(keys)
    vectors = {"question": value_QKE[:, 0, :width], "option": of_option_QKF[first_S][option_QK[first_S]]}
    arrays: dict[str, npt.NDArray[Any]] = {
        "train": np.asarray(catalogue.train_Q, dtype=np.bool_),
        "unanswered": np.asarray(catalogue.unanswered_Q, dtype=np.bool_),
        "scale": scale_Q,
    }
    for name, value_NF in vectors.items():
        first_U, arrays[name] = _distinct([row.tobytes() for row in value_NF])
        arrays[f"{name}_features"] = value_NF[first_U]
    questions = json.dumps([[question.question_id, question.text] for question in catalogue.questions])
    scales = json.dumps([[list(q.options), q.ordinal] for q in (catalogue.questions[row] for row in first_S)])
    head = ConfigRecord({"questions": questions, "scales": scales})
    return RecordDict({_ARRAYS: arrays_record(arrays), _HEAD: head})


def unpack_catalogue(content: RecordDict) -> Catalogue:
    """Records -> catalogue."""
    with _checked("a catalogue", content, head=["questions", "scales"], arrays=_CATALOGUE_ARRAYS):
        arrays = _arrays(content)
        train_Q, unanswered_Q = (arrays.array(name, np.bool_, axes=1) for name in ("train", "unanswered"))
        texts, scales = (json.loads(str(content.config_records[_HEAD][name])) for name in ("questions", "scales"))
        if not {train_Q.shape, unanswered_Q.shape} == {(len(texts),)} or len(scales) > len(texts):
            raise ValueError("questions, scales and arrays differ in length")
        size_S = np.array([len(options) for options, _ in scales])
        # The mask of options is computed here, and ids must be unique. Otherwise a server could ask for means that hold
        # one answer only: one question at many positions, or several options in one question only.
        if not MIN_OPTIONS <= size_S.min() <= size_S.max() <= MAX_OPTIONS:
            raise ValueError("a question has too few or too many options")
        scale_Q, option_SK = _places(arrays, "scale", len(texts)), np.arange(size_S.max()) < size_S[:, None]
        scales = [(tuple(options), None if ordinal is None else tuple(ordinal)) for options, ordinal in scales]
        questions = tuple(
            Question(str(key), str(text), *scales[place]) for (key, text), place in zip(texts, scale_Q, strict=True)
        )
        if len({question.question_id for question in questions}) < len(questions):
            raise ValueError("a question appears twice")
        if (train_Q & unanswered_Q).any():
            raise ValueError("a training question is marked as unanswered")
        if not all(q.question_id.isprintable() and len(q.question_id) <= LONGEST_ID for q in questions):
            raise ValueError("an id has control characters or is too long")
        embedding_QKE = _features(arrays, scale_Q, option_SK)
        return Catalogue(train_Q, option_SK[scale_Q], questions, embedding_QKE, unanswered_Q)


def _features(arrays: Query, scale_Q: npt.NDArray[np.int32], option_SK: BoolArray) -> npt.NDArray[np.float32]:
    """Features of every option (Q, K, E), 0 on padding, from a catalogue's vectors."""
    question_UF, option_UF = (arrays.array(f"{name}_features", np.float32, axes=2) for name in ("question", "option"))
    width = question_UF.shape[1] + option_UF.shape[1]
    # A few bytes could describe features that fill the memory of each group.
    if not 0 < width * len(scale_Q) * option_SK.shape[1] <= MOST_FEATURES:
        raise ValueError("there are no features, or too many")
    if not (np.isfinite(question_UF).all() and np.isfinite(option_UF).all()):
        raise ValueError("features are not finite")
    question_Q = _places(arrays, "question", len(scale_Q))
    of_option_SKF = np.zeros((*option_SK.shape, option_UF.shape[1]), dtype=np.float32)
    of_option_SKF[option_SK] = option_UF[_places(arrays, "option", int(option_SK.sum()))]
    value_QKE = np.empty((len(scale_Q), option_SK.shape[1], width), dtype=np.float32)
    value_QKE[..., : question_UF.shape[1]] = question_UF[question_Q][:, None]
    value_QKE[..., question_UF.shape[1] :] = of_option_SKF[scale_Q]
    value_QKE[~option_SK[scale_Q]] = 0.0
    return value_QKE


def _distinct(values: Sequence[Any]) -> tuple[IntArray, npt.NDArray[np.int32]]:
    """The first position of each distinct value, and the place of each value among the distinct ones."""
    place_of: dict[Any, int] = {}
    place_N = np.array([place_of.setdefault(value, len(place_of)) for value in values], dtype=np.int32)
    return np.unique(place_N, return_index=True)[1], place_N


def _places(arrays: Query, name: str, count: int) -> npt.NDArray[np.int32]:
    """So many places in an array; those past its end raise an IndexError where they are used."""
    place_N = arrays.array(name, np.int32, axes=1)
    if place_N.shape != (count,) or (place_N < 0).any():
        raise ValueError(f"{name} must hold {count} places")
    return place_N


def pack_weights(weights: ArrayRecord) -> RecordDict:
    """PluralLLM's final weights -> records."""
    return RecordDict({_ARRAYS: arrays_record({_WEIGHTS: join_weights(weights)})})


def unpack_weights(content: RecordDict) -> npt.NDArray[np.float32]:
    """The weights of `pack_weights`, joined (P,)."""
    with _checked("a message with weights", content, arrays=[_WEIGHTS]):
        return _arrays(content).array(_WEIGHTS, np.float32, axes=1)


def pack_query(query: Query, digest: str) -> RecordDict:
    """Request and its digest (`appa_flwr.protocol.queries.query_digest`) -> records."""
    head = ConfigRecord({"kind": query.kind, "request": digest})
    return RecordDict({_HEAD: head, _SETTINGS: ConfigRecord({**query.settings}), _ARRAYS: arrays_record(query.arrays)})


def unpack_query(content: RecordDict) -> tuple[Query, str]:
    """Records -> request and its digest."""
    with _checked("a request for numbers", content, head=["kind", "request"], settings=None, arrays=None):
        settings: Mapping[str, Any] = dict(content.config_records[_SETTINGS])
        kind, request = (typed(content.config_records[_HEAD][name], str) for name in ("kind", "request"))
        if kind not in QUERY_KINDS:
            raise ValueError("the kind is unknown")
        return Query(kind, _arrays(content).arrays, settings), request


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


def _arrays(content: RecordDict) -> Query:
    """Wrap a content's arrays in a `Query`, whose method `array` checks types."""
    return Query("", {name: array.numpy() for name, array in content.array_records[_ARRAYS].items()})


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
