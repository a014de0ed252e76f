"""Requests for numbers, and the layout of the arrays in the replies.

Server and group both derive names, shapes and bounds of the arrays from the query, so that a reply holds only numbers.

Axis letters: Q public questions, K options, J scored answers, E features, N numbers.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from appa_flwr.config import Config
from appa_flwr.core.arrays import BoolArray, FloatArray, IntArray
from appa_flwr.protocol import votes
from appa_flwr.survey.types import Question

Setting = str | int | float | list[str]

VOTES, PREDICTIONS, ANSWERS = "votes", "predictions", "answers"
UPDATE, VALIDATION, SCORES = "update", "validation", "scores"
REWARDS = "rewards"
QUERY_KINDS = (VOTES, PREDICTIONS, ANSWERS, UPDATE, VALIDATION, SCORES, REWARDS)
"""Kinds of numbers: votes, predictions and answers to the public questions; training, validation and scores of
PluralLLM; rewards of the policy's answers."""

TARGET_REFERENCE, TRUTH_REFERENCE = "targets", "truth"
"""Targets of an answer's score: PluralLLM's predictions, or the group's own survey answers where it has them."""

MOST_ANSWERS = 20_000
"""Most answers in one request."""

LARGEST_STEP, LARGEST_LOSS = 16.0, 64.0
"""Largest change of one of PluralLLM's weights in a training round, and largest loss."""

SUM_TOLERANCE = 1e-4
"""By which the shares of a vote may miss the sum 1: predictions are computed in float32."""

MOST_MEASURES = 1000
"""Most measures of a validation, or of PluralLLM's scores; the server sets their number."""

_NOT_OF_GROUPS = ("run-name", "run", "policy", "sft", "ppo", "eval", "serve")
"""Keys and sections of the config that do not affect groups' numbers, except `sft.target`, which selects the votes."""

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Masks:
    """What bounds a group's numbers: the training questions, and each question's options."""

    train_Q: BoolArray
    option_QK: BoolArray  # True where a question has that option


@dataclass(frozen=True, eq=False)
class Catalogue(Masks):
    """The public questions, which the server sends to every group once; later messages refer to them by position.

    Groups' answers to training questions are PluralLLM's context. With unanswered questions the policy is trained on
    predictions only: groups' answers to them are not used, and none is a training question.
    """

    questions: tuple[Question, ...]
    embedding_QKE: npt.NDArray[np.float32]  # features of every option, 0 on padding
    unanswered_Q: BoolArray

    @property
    def held_out_Q(self) -> BoolArray:
        """True for held-out questions, whose answers are not used in training."""
        return ~(self.train_Q | self.unanswered_Q)


@dataclass(frozen=True, eq=False)
class Query:
    """A request for numbers: their kind, and their inputs other than catalogue, targets, config and private answers."""

    kind: str
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    settings: Mapping[str, Setting] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the request, in hexadecimal digits."""
        made = hashlib.sha256(json.dumps([self.kind, dict(self.settings)], sort_keys=True).encode())
        for name in sorted(self.arrays):
            array = np.ascontiguousarray(self.arrays[name])
            made.update(json.dumps([name, array.dtype.str, array.shape]).encode() + array.tobytes())
        return made.hexdigest()

    def setting(self, name: str, kind: type[Any] | tuple[type[Any]]) -> Any:
        """Return a setting; raises ValueError if it is missing or of another type (see `typed`)."""
        return typed(self.settings.get(name), kind)

    def count(self, name: str, *, least: int = 0, most: int = 1 << 62) -> int:
        """Return a setting; raises ValueError if it is missing or not an integer in this range."""
        value = int(self.setting(name, int))
        if not least <= value <= most:
            raise ValueError(f"{name} must be between {least} and {most}")
        return value

    def number(self, name: str, *, most: float) -> float:
        """Return a setting; raises ValueError if it is missing or not a float from 0 to `most`."""
        value = float(self.setting(name, float))
        if not 0.0 <= value <= most:
            raise ValueError(f"{name} must be between 0 and {most}")
        return value

    def array(self, name: str, dtype: type[_Scalar], *, axes: int) -> npt.NDArray[_Scalar]:
        """Return an array; raises ValueError if it is missing, or of another type or number of axes."""
        value = self.arrays.get(name)
        if value is None or value.dtype != dtype or value.ndim != axes:
            raise ValueError(f"{name} must be an array of {np.dtype(dtype)} with {axes} axes")
        return value


@dataclass(frozen=True, eq=False)
class RewardQuery:
    """Answers to be scored."""

    question_J: IntArray  # position of each answer's question in the catalogue
    prediction_JK: FloatArray  # parsed answers; a row of NaN is an unreadable answer, which scores 0
    metrics: tuple[str, ...]
    references: tuple[str, ...] = (TARGET_REFERENCE,)
    context_seed: int = 0  # 0 = the run's target table; other numbers select a fresh context for predictions

    @property
    def readable_J(self) -> BoolArray:
        """True where an answer gives a prediction."""
        return np.logical_not(np.isnan(self.prediction_JK).all(axis=1))

    @property
    def keys(self) -> list[tuple[str, str]]:
        """All pairs of a metric and a reference."""
        return [(metric, reference) for reference in self.references for metric in self.metrics]

    def query(self) -> Query:
        """The request for the answers' rewards."""
        arrays = {
            "question": np.asarray(self.question_J, dtype=np.int64),
            "prediction": np.asarray(self.prediction_JK, dtype=np.float64),
        }
        names = {"metrics": list(self.metrics), "references": list(self.references)}
        return Query(REWARDS, arrays, {**names, "context_seed": self.context_seed})

    @classmethod
    def of(cls, query: Query) -> "RewardQuery":
        """Read the answers of such a request; raises ValueError if they are malformed or too many."""
        question_J = query.array("question", np.int64, axes=1)
        prediction_JK = query.array("prediction", np.float64, axes=2)
        if not len(question_J) == len(prediction_JK) <= MOST_ANSWERS:
            raise ValueError("questions and answers differ in number, or there are too many answers")
        references, metrics = tuple(query.setting("references", (str,))), tuple(query.setting("metrics", (str,)))
        is_known = {*references} <= {TARGET_REFERENCE, TRUTH_REFERENCE}
        if not is_known or any(len({*names}) < len(names) for names in (references, metrics)):
            raise ValueError("a reference is unknown, or a reference or metric appears twice")
        return cls(question_J, prediction_JK, metrics, references, query.count("context_seed"))


@dataclass(frozen=True)
class Layout:
    """An array of a group's numbers: its shape, and the bounds of each number."""

    shape: tuple[int, ...]
    least: float
    most: float


def layouts_of(query: Query, masks: Masks) -> dict[str, Layout]:
    """Layout of the arrays in a reply, by name; server and group both derive it from the request and the masks.

    Only rewards against survey answers say whether they are known: every answer has a target.

    Raises:
        ValueError: the request does not fit its kind.
    """
    training = int(masks.train_Q.sum())
    if query.kind in (VOTES, PREDICTIONS, ANSWERS):
        return {"votes": Layout(masks.option_QK.shape, 0.0, float(masks.option_QK.shape[1]))}
    if query.kind == UPDATE:
        step = LARGEST_STEP * training
        return {
            "step": Layout(query.array("weights", np.float32, axes=1).shape, -step, step),
            "answers": Layout((1,), 0.0, training),
            "loss": Layout((1,), -LARGEST_LOSS * training, LARGEST_LOSS * training),
        }
    if query.kind in (VALIDATION, SCORES):
        size = query.count("size", least=1, most=MOST_MEASURES)
        if query.kind == SCORES:
            return {"scores": Layout((size,), 0.0, len(masks.train_Q))}
        return {
            "answers": Layout((1,), 0.0, training),
            "gain": Layout((size,), -training, training),
            "square": Layout((size,), 0.0, training),
        }
    reward_query = RewardQuery.of(query)
    parts = {TARGET_REFERENCE: ("reward",), TRUTH_REFERENCE: ("reward", "known")}
    names = [f"{metric} {reference} {part}" for metric, reference in reward_query.keys for part in parts[reference]]
    return dict.fromkeys(names, Layout((len(reward_query.question_J),), 0.0, 1.0))


def flatten(values: Mapping[str, npt.ArrayLike], layouts: Mapping[str, Layout]) -> FloatArray:
    """Flatten a group's arrays to one row (N,), in the layout of `layouts_of`.

    Raises:
        ValueError: names or shapes differ from the layout, or a number is outside its bounds.
    """
    parts = []
    if values.keys() != layouts.keys():
        raise ValueError(f"the numbers are {', '.join(values)}; the request asks for {', '.join(layouts)}")
    for name, layout in layouts.items():
        array = np.asarray(values[name], dtype=np.float64)
        if array.shape != layout.shape:
            raise ValueError(f"{name} has shape {array.shape} instead of {layout.shape}")
        if not ((array >= layout.least) & (array <= layout.most)).all():
            raise ValueError(f"{name} is outside [{layout.least:g}, {layout.most:g}]")
        parts.append(array.ravel())
    return np.concatenate(parts)


def split(flat: FloatArray, layouts: Mapping[str, Layout]) -> dict[str, FloatArray]:
    """Undo `flatten` for one row or several: (..., N) -> arrays by name, each (..., its shape).

    Raises:
        ValueError: N does not fit the layout.
    """
    sizes = [math.prod(layout.shape) for layout in layouts.values()]
    if flat.shape[-1] != sum(sizes):
        raise ValueError(f"the row has {flat.shape[-1]} numbers; the request asks for {sum(sizes)}")
    parts = np.split(flat, np.cumsum(sizes)[:-1], axis=-1)
    return {
        name: part.reshape(*flat.shape[:-1], *layout.shape)
        for part, (name, layout) in zip(parts, layouts.items(), strict=True)
    }


def ballot_of(query: Query, task: str) -> str:
    """The kind of vote (`votes.cast`) that a request asks for, in a run of this task."""
    return votes.BALLOTS[task] if query.kind == VOTES else votes.DISTRIBUTION


def fault(query: Query, row_N: FloatArray, masks: Masks, *, task: str) -> str | None:
    """Fault in a group's row of numbers (N,), in words; None if the row can be used."""
    layouts, option_QK = layouts_of(query, masks), masks.option_QK
    try:
        own = split(row_N, layouts)
        flatten(own, layouts)  # for its checks
    except ValueError as error:
        return str(error)
    if query.kind in (VOTES, PREDICTIONS, ANSWERS):
        vote_QK, ballot = own["votes"], ballot_of(query, task)
        fits = (votes.cast(vote_QK, option_QK, kind=ballot) == vote_QK).all()
        if ballot == votes.DISTRIBUTION:
            fits &= np.isclose(vote_QK.sum(1), 1.0, atol=SUM_TOLERANCE).all()
        return None if fits else f"votes that are not one {ballot} for each question"
    if query.kind in (UPDATE, VALIDATION) and own["answers"] % 1:
        return "a number of answers that is not whole"
    if query.kind != REWARDS:
        return None
    reward_query = RewardQuery.of(query)
    for metric, reference in reward_query.keys:
        if (own[f"{metric} {reference} reward"][~reward_query.readable_J] > 0).any():
            return f"{metric} rewards above 0 for answers that nobody can read"
        if reference == TRUTH_REFERENCE and not np.isin(own[f"{metric} {reference} known"], (0.0, 1.0)).all():
            return f"{metric} flags of known rewards that are neither 0 nor 1"
    return None


def context_hash(config: Config, catalogue: str, targets: str) -> str:
    """Hash of a group's inputs other than the request: the config, and the hashes of catalogue and targets."""
    keys = {key: value for key, value in config.flat().items() if key.partition(".")[0] not in _NOT_OF_GROUPS}
    return _hashed([sorted(keys.items()), config.sft.target, catalogue, targets])


def query_digest(query: Query, context: str) -> str:
    """Hash of a request and its context (`context_hash`), by which the run's folder stores the replies."""
    return _hashed([query.digest, context])


def _hashed(value: object) -> str:
    """SHA-256 of a value as JSON, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def typed(value: object, kind: type[Any] | tuple[type[Any]]) -> Any:
    """Check that a value has this type, or is a list of it for `(type,)`; raises ValueError otherwise."""
    if isinstance(kind, tuple):
        return [typed(item, kind[0]) for item in typed(value, list)]
    if type(value) is not kind:
        raise ValueError(f"a value is not of type {kind.__name__}")
    return value
