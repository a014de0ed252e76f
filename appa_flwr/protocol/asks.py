"""Requests for numbers, and the arrays of numbers that answer them.

Both sides derive names, shapes and bounds of the arrays from the request, so that a reply holds nothing but numbers.
The arrays of several groups can be added up, whether or not the server sees each group's own.

Axis letters: Q public questions, K options, J scored answers, E features, N numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from appa_flwr.config import Config
from appa_flwr.survey.types import Question

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Setting = str | int | float | list[str]

VOTES, PREDICTIONS, ANSWERS = "votes", "predictions", "answers"
UPDATE, VALIDATION, SCORES = "update", "validation", "scores"
REWARDS, TERMS, OWN_SCORES = "rewards", "terms", "own scores"
KINDS = (VOTES, PREDICTIONS, ANSWERS, UPDATE, VALIDATION, SCORES, REWARDS, TERMS, OWN_SCORES)
"""Kinds of numbers: votes, predictions and answers to the public questions; training, validation and scores of
PluralLLM; rewards of the policy's answers, what a rule adds up of them, and a group's own score of an evaluation."""

TARGET_SIDE, TRUTH_SIDE = "targets", "truth"
"""Targets of an answer's score: PluralLLM's predictions, or the group's own survey answers where it has them."""

MOST_ANSWERS = 20_000
"""In one request: each is a line of the group's ledger."""

LARGEST_ERROR = math.log(2) ** 0.5
"""Natural Jensen-Shannon distance of answers that share no option: no validation error is above it."""

LARGEST_STEP, LARGEST_LOSS = 16.0, 64.0
"""Largest change of one of PluralLLM's weights in a training round, and largest loss."""

MOST_MEASURES = 1000
"""Of a validation, or of PluralLLM's scores: the server names their number."""

_NOT_OF_GROUPS = ("run-name", "run", "policy", "sft", "ppo", "eval", "serve")
"""Keys and sections of the config that no group's number depends on; `sft.target` decides which votes it casts."""

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Catalogue:
    """The public questions, as the server hands them to every group once.

    Attributes:
        questions: Q questions; all later messages speak of them by position.
        train_Q: bool, True for training questions: groups' answers to them are PluralLLM's context.
        embedding_QKE: float32 features of every option, 0 on padding.
        option_QK: bool, True where a question has that option.
        unanswered_Q: bool, True for questions that the policy learns from by predictions alone: no group's answer to
            one is used, and none is in `train_Q`.
    """

    questions: tuple[Question, ...]
    train_Q: BoolArray
    embedding_QKE: npt.NDArray[np.float32]
    option_QK: BoolArray
    unanswered_Q: BoolArray

    @property
    def held_out_Q(self) -> BoolArray:
        """True for questions whose answers nobody learns from."""
        return ~(self.train_Q | self.unanswered_Q)


@dataclass(frozen=True, eq=False)
class Ask:
    """A request for numbers: their kind, and all that they depend on beside the catalogue, targets and config."""

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
        """A setting; a ValueError where it is missing or of another type, see `typed`."""
        return typed(self.settings.get(name), kind)

    def count(self, name: str, *, least: int = 0, most: int = 1 << 62) -> int:
        """A setting; a ValueError where it is missing or no whole number in this range."""
        value = int(self.setting(name, int))
        if not least <= value <= most:
            raise ValueError(f"{name}: not between {least} and {most}")
        return value

    def array(self, name: str, dtype: type[_Scalar], *, axes: int) -> npt.NDArray[_Scalar]:
        """An array; a ValueError where it is missing, or of another type or number of axes."""
        value = self.arrays.get(name)
        if value is None or value.dtype != dtype or value.ndim != axes:
            raise ValueError(f"{name}: no array of {np.dtype(dtype)} with {axes} axes")
        return value


@dataclass(frozen=True)
class Task:
    """Where the numbers of a request go.

    Attributes:
        run: the run's name.
        round: number of the masked sum in this run, from 1 on; 0 where the reply is plain.
        cohort: the groups of the sum; none where the reply is plain.
        request: see `request_digest`.
        roster: SHA-256 of the groups' roster.
    """

    run: str = ""
    round: int = 0
    cohort: tuple[str, ...] = ()
    request: str = ""
    roster: str = ""

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all fields; every mask is bound to it."""
        return hashed(astuple(self))


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """Answers to be scored.

    Attributes:
        question_J: position of each answer's question in the catalogue.
        prediction_JK: parsed answers; a row of NaN is an answer nobody could read and scores 0.
        metrics: names of reward metrics.
        sides: `TARGET_SIDE` and/or `TRUTH_SIDE`.
        draw: 0 scores against the table computed once; another number draws a fresh context with it.
    """

    question_J: npt.NDArray[np.int64]
    prediction_JK: FloatArray
    metrics: tuple[str, ...]
    sides: tuple[str, ...] = (TARGET_SIDE,)
    draw: int = 0

    @property
    def keys(self) -> list[tuple[str, str]]:
        """Every metric and side."""
        return [(metric, side) for side in self.sides for metric in self.metrics]

    def ask(self, kind: str, *, arrays: Mapping[str, npt.NDArray[Any]] | None = None, **settings: Setting) -> Ask:
        """The request as one for numbers of a kind, with more arrays and settings that the kind needs."""
        own = {
            "question": np.asarray(self.question_J, dtype=np.int64),
            "prediction": np.asarray(self.prediction_JK, dtype=np.float64),
        }
        named: dict[str, Setting] = {"metrics": list(self.metrics), "sides": list(self.sides), "draw": self.draw}
        return Ask(kind, {**own, **(arrays or {})}, {**named, **settings})

    @classmethod
    def of(cls, ask: Ask) -> ScoreRequest:
        """The answers of such a request; a ValueError where it has none, or too many."""
        question_J, prediction_JK = ask.array("question", np.int64, axes=1), ask.array("prediction", np.float64, axes=2)
        if not len(question_J) == len(prediction_JK) <= MOST_ANSWERS:
            raise ValueError("not one question an answer, or too many answers")
        sides, metrics = tuple(ask.setting("sides", (str,))), tuple(ask.setting("metrics", (str,)))
        if not set(sides) <= {TARGET_SIDE, TRUTH_SIDE} or len({*sides}) + len({*metrics}) < len(sides) + len(metrics):
            raise ValueError("an unknown side, or a side or metric named twice")
        return cls(question_J, prediction_JK, metrics, sides, ask.count("draw"))


@dataclass(frozen=True)
class Number:
    """An array of a group's numbers: its shape, and what each number lies between."""

    shape: tuple[int, ...]
    least: float
    most: float


def numbers_of(ask: Ask, catalogue: Catalogue) -> dict[str, Number]:
    """The arrays that answer a request, by name; both sides derive them from the request alone.

    Raises:
        ValueError: the request is none of its kind.
    """
    training, held_out = int(catalogue.train_Q.sum()), int(catalogue.held_out_Q.sum())
    if ask.kind in (VOTES, PREDICTIONS, ANSWERS):
        return {"votes": Number(catalogue.option_QK.shape, 0.0, float(catalogue.option_QK.shape[1]))}
    if ask.kind == UPDATE:
        step = LARGEST_STEP * training
        return {
            "step": Number(ask.array("weights", np.float32, axes=1).shape, -step, step),
            "answers": Number((1,), 0.0, training),
            "loss": Number((1,), -LARGEST_LOSS * training, LARGEST_LOSS * training),
        }
    if ask.kind in (VALIDATION, SCORES):
        size = ask.count("size", least=1, most=MOST_MEASURES)
        if ask.kind == SCORES:
            return {"scores": Number((2, size), 0.0, len(catalogue.questions))}
        return {"answers": Number((1,), 0.0, held_out), "error": Number((size,), 0.0, LARGEST_ERROR * held_out)}
    request = ScoreRequest.of(ask)
    several, single = Number((len(request.question_J),), 0.0, 1.0), Number((1,), 0.0, 1.0)
    names = [f"{metric} {side}" for metric, side in request.keys]
    if ask.kind == OWN_SCORES:
        return dict.fromkeys(names, Number((2,), 0.0, 1.0))
    if ask.kind == REWARDS:
        return {
            **{f"{name} {what}": several for name in names for what in ("reward", "square", "known")},
            **{f"{name} {what}": single for name in names for what in ("own", "groups")},
        }
    rule = ask.setting("rule", str)
    weighted = {"weight": single, "next": single} if rule == "appa" else {}
    term = {"term": several} if rule in ("alpha", "appa") else {}
    return {**dict.fromkeys(("reward", "square", "training"), several), **term, **weighted}


def flatten(values: Mapping[str, npt.ArrayLike], numbers: Mapping[str, Number], *, cut: bool = False) -> FloatArray:
    """A group's arrays in one row (N,).

    Args:
        values: arrays by name.
        numbers: of `numbers_of`.
        cut: numbers outside their bounds are cut to them, and 0 stands for what is no number. Under masks an error
            would tell whose number it is.

    Raises:
        ValueError: other names or shapes; without `cut`, a number outside its bounds.
    """
    parts = []
    if values.keys() != numbers.keys():
        raise ValueError(f"numbers {', '.join(values)} where {', '.join(numbers)} are asked for")
    for name, number in numbers.items():
        array = np.asarray(values[name], dtype=np.float64)
        if array.shape != number.shape:
            raise ValueError(f"{name} of shape {array.shape}, not {number.shape}")
        if cut:
            array = np.clip(np.nan_to_num(array), number.least, number.most)
        elif not ((array >= number.least) & (array <= number.most)).all():
            raise ValueError(f"{name} outside [{number.least:g}, {number.most:g}]")
        parts.append(array.ravel())
    return np.concatenate(parts)


def split(flat: FloatArray, numbers: Mapping[str, Number]) -> dict[str, FloatArray]:
    """The inverse of `flatten`, of one row or of several: (..., N) -> arrays by name, each (..., its shape).

    Raises:
        ValueError: another number of numbers.
    """
    sizes = [math.prod(number.shape) for number in numbers.values()]
    if flat.shape[-1] != sum(sizes):
        raise ValueError(f"{flat.shape[-1]} numbers where {sum(sizes)} are asked for")
    parts = np.split(flat, np.cumsum(sizes)[:-1], axis=-1)
    return {
        name: part.reshape(*flat.shape[:-1], *number.shape)
        for part, (name, number) in zip(parts, numbers.items(), strict=True)
    }


def scales(numbers: Mapping[str, Number]) -> FloatArray:
    """Largest size of each number of a row (N,), by which numbers are divided before they are masked."""
    return np.concatenate([np.full(math.prod(n.shape), max(abs(n.least), abs(n.most))) for n in numbers.values()])


def world_of(config: Config, catalogue: str, targets: str) -> str:
    """Hash of what a group's numbers rest on beside a request: the config and, by their hashes, setup messages.

    A server that gave the others another config, catalogue or PluralLLM could know what they add, and take it off.
    """
    keys = {key: value for key, value in config.flat().items() if key.partition(".")[0] not in _NOT_OF_GROUPS}
    return hashed([sorted(keys.items()), config.sft.target, catalogue, targets]).hex()


def request_digest(ask: Ask, world: str) -> str:
    """Hash of a request and its world, which masks are bound to."""
    return hashed([ask.digest, world]).hex()


def hashed(value: object) -> bytes:
    """SHA-256 of what JSON holds."""
    return hashlib.sha256(json.dumps(value).encode()).digest()


def typed(value: object, kind: type[Any] | tuple[type[Any]]) -> Any:
    """A value of a type, or for a tuple of a type a list of them; a ValueError where it is of another type."""
    if isinstance(kind, tuple):
        return [typed(item, kind[0]) for item in typed(value, list)]
    if type(value) is not kind:
        raise ValueError(f"no {kind.__name__}")
    return value
