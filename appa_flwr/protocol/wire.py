"""Messages between server and groups: every message's fields, to and from Flower records.

The only module below the apps that knows Flower. What a group may send is exactly the fields of `GroupReply`, in
PluralLLM's training the weights with their example count (`train` messages of Flower's stock strategies), and in its
validation an error summed up (`evaluate` messages).

Axis letters: Q public questions, H held-out ones, K options, J scored answers, E features.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_to_proto

from appa_flwr.protocol.votes import DISTRIBUTION
from appa_flwr.secure.refusals import REASONS
from appa_flwr.survey.types import Question

ROLL_CALL = "query.roll_call"
CATALOGUE = "query.catalogue"
TARGETS = "query.targets"
VOTE = "query.vote"
SCORE = "query.score"
QUERIES = (ROLL_CALL, CATALOGUE, TARGETS, VOTE, SCORE)
KEYS, PREPARE, MASK, UNMASK = "query.keys", "query.prepare", "query.mask", "query.unmask"
IN_SUMS = (KEYS, PREPARE, MASK, UNMASK)
"""Messages of secure sums, see `appa_flwr.protocol.sum_messages`."""
NO_NUMBERS = (ROLL_CALL, CATALOGUE)
"""Messages whose replies hold no score, vote, weight or error."""

TARGET_SIDE, TRUTH_SIDE = "targets", "truth"
"""Targets of an answer's score: PluralLLM's predictions, or the group's own survey answers where it has them."""

TRAINING_PART, HELD_OUT_PART = "training", "held-out"
"""The parts of a group's own answers that PluralLLM is measured on."""

ANSWERS_ASKED, PROBES_ASKED = "answers", "probes"
"""Kinds of scored answers: those of a model or a trivial baseline, or probes, made to find the ceilings."""

_SURVEY = "survey"

FAILED, FORGOTTEN = 100, 101
MEAN_REFUSED, TRAINING_REFUSED = 110, 112
VOTES_REFUSED, PROBES_REFUSED, PREDICTIONS_REFUSED = range(113, 116)
SPENT, REPLIES_SPENT, OTHER_CATALOGUE, NEARLY_SAME, FEW_ANSWERS, WEAK_TRAINING, UNKNOWN_ACTION, METRIC_REFUSED = range(
    116, 124
)
ONLY_SUMS = 124
SECURE_REFUSALS = {name: code for code, name in enumerate(REASONS, start=130)}
"""Flower error codes of a group's reply: an action failed, the node has restarted, or its owner's policy refuses."""

MOST_ANSWERS = 20_000
"""In one score request: each is a line of the group's ledger."""

LARGEST_ERROR = math.log(2) ** 0.5
"""Natural Jensen-Shannon distance of answers that share no option: no validation error is above it."""

LONGEST_ID = 1000
"""Characters of a question's id, which a group writes down."""

REFUSALS = {
    MEAN_REFUSED: "sft.target = mean, or votes as distributions, would send training answers themselves; a deployed"
    " node allows that only by mean = true in its owner's policy",
    TRAINING_REFUSED: "its owner's policy has training = false: it trains no PluralLLM; pluralllm.checkpoint does"
    " without",
    VOTES_REFUSED: "its owner's policy has votes = false: it does not vote for SFT; sft.checkpoint does without",
    PROBES_REFUSED: "its owner's policy has probes = false: it scores no answers made to find ceilings",
    PREDICTIONS_REFUSED: "sft.target = predicted-mean would send its predictions; a deployed node allows that only by"
    " probes = true in its owner's policy",
    FORGOTTEN: "it has restarted, and needs the catalogue and PluralLLM again",
    SPENT: "it has given as many scores of a question as its owner's policy allows (scores-per-question)",
    REPLIES_SPENT: "it has given as many replies of this kind about a question as its owner's policy allows"
    " (training-replies, validation-replies, target-replies)",
    OTHER_CATALOGUE: "it has had another catalogue in this run: a run has one",
    NEARLY_SAME: "its answered questions differ from those of an earlier run by fewer than its owner's policy asks for"
    " (least-answers): the difference of two replies would tell single answers",
    FEW_ANSWERS: "it has answered fewer of the training questions than its owner's policy asks for (least-answers)",
    WEAK_TRAINING: "its owner's policy refuses training by plain SGD (sgd) or by so few steps (least-steps);"
    " preset = deployed does without both",
    METRIC_REFUSED: "metric is not one of appa-flwr, and its owner's policy does not name it (metrics)",
    UNKNOWN_ACTION: "it knows no such message",
    ONLY_SUMS: "its owner's policy names a roster: no number of it leaves but in secure sums",
    **{code: REASONS[name] for name, code in SECURE_REFUSALS.items()},
}
"""A refusal's words, by its error code: the same words for every group, so that none of its own can leave."""

_SEPARATOR, _WEIGHTS, _TOTALS, _WITHIN, _BALLOT = "|", "weights", "totals", "within", "ballot"
_Scalar = TypeVar("_Scalar", bound=np.generic)
_T = TypeVar("_T")


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
    train_Q: npt.NDArray[np.bool_]
    embedding_QKE: npt.NDArray[np.float32]
    option_QK: npt.NDArray[np.bool_]
    unanswered_Q: npt.NDArray[np.bool_]

    @property
    def held_out_Q(self) -> npt.NDArray[np.bool_]:
        """True for questions whose answers nobody learns from."""
        return ~(self.train_Q | self.unanswered_Q)


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """Answers to be scored.

    Attributes:
        question_J: position of each answer's question in the catalogue.
        prediction_JK: parsed answers; a row of NaN is an answer nobody could read and scores 0.
        metrics: names of reward metrics.
        sides: `TARGET_SIDE` and/or `TRUTH_SIDE`.
        draw: 0 scores against the table computed once; another number draws a fresh context with it.
        asked: `ANSWERS_ASKED` or `PROBES_ASKED`.
    """

    question_J: npt.NDArray[np.int64]
    prediction_JK: npt.NDArray[np.float64]
    metrics: tuple[str, ...]
    sides: tuple[str, ...] = (TARGET_SIDE,)
    draw: int = 0
    asked: str = ANSWERS_ASKED


@dataclass(frozen=True, eq=False)
class GroupReply:
    """All that a group ever sends, but for PluralLLM's weights.

    Attributes:
        group: its name.
        rewards: (metric, side) -> rewards (J,) in [0, 1]; NaN only on `TRUTH_SIDE`, where the group has no answer.
        votes_QK: one row a question: 1 on the modal option (DPA), K..1 by rank (OPA), or distributions, where the
            run's `sft.target` is a mean or look-ups are asked for.
        counts: whole numbers, such as how many questions the group answered, and 0 or 1 for what its owner allows.
        sums: (part, predictor) -> measure -> its sum over the group's answers of that part, "answers" their number: how
            good PluralLLM is, and what costs nothing next to it.
        held_out_HK: its answers to held-out questions, rows of NaN where it has none. In a simulation only.
    """

    group: str
    rewards: Mapping[tuple[str, str], npt.NDArray[np.float64]] = field(default_factory=dict)
    votes_QK: npt.NDArray[np.float64] | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    sums: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)
    held_out_HK: npt.NDArray[np.float64] | None = None


@dataclass(frozen=True, eq=False)
class Totals:
    """Answers to held-out questions, added up over the groups of a simulation that train.

    Attributes:
        answer_QK: the sum of the answers to each question, 0 for training questions.
        count_Q: how many groups it is over.
        groups: whose answers are in it.
    """

    answer_QK: npt.NDArray[np.float64]
    count_Q: npt.NDArray[np.int64]
    groups: tuple[str, ...]


def pack_roll_call(survey: str) -> RecordDict:
    """The question which groups live at a node; a simulated one is told the path of the run's survey."""
    return RecordDict({_SURVEY: ConfigRecord({"path": survey})} if survey else {})


def unpack_roll_call(content: RecordDict) -> str:
    """The path of the run's survey; empty where there is none."""
    return str(content.config_records[_SURVEY]["path"]) if _SURVEY in content.config_records else ""


def pack_catalogue(catalogue: Catalogue) -> RecordDict:
    """Catalogue -> records."""
    questions = [[q.question_id, q.text, list(q.options), q.ordinal] for q in catalogue.questions]
    arrays = {
        "train": np.asarray(catalogue.train_Q, dtype=np.bool_),
        "embedding": np.asarray(catalogue.embedding_QKE, dtype=np.float32),
        "option": np.asarray(catalogue.option_QK, dtype=np.bool_),
        "unanswered": np.asarray(catalogue.unanswered_Q, dtype=np.bool_),
    }
    return RecordDict({"catalogue": arrays_record(arrays), "questions": ConfigRecord({"json": json.dumps(questions)})})


def unpack_catalogue(content: RecordDict) -> Catalogue:
    """Records -> catalogue; a ValueError where `pack_catalogue` cannot have made them."""
    with following_the_protocol("a catalogue"):
        arrays = numpy_arrays(content.array_records["catalogue"])
        train_Q = _array(arrays["train"], np.bool_, axes=1)
        embedding_QKE = _array(arrays["embedding"], np.float32, axes=3)
        option_QK = _array(arrays["option"], np.bool_, axes=2)
        unanswered_Q = _array(arrays["unanswered"], np.bool_, axes=1)
        questions = tuple(
            Question(str(key), str(text), tuple(options), None if ordinal is None else tuple(ordinal))
            for key, text, options, ordinal in json.loads(str(content.config_records["questions"]["json"]))
        )
        shapes = {train_Q.shape, unanswered_Q.shape, option_QK.shape[:1], (len(questions),)}
        if len(shapes) > 1 or embedding_QKE.shape[:2] != option_QK.shape:
            raise ValueError("questions and arrays of different length")
        if (train_Q & unanswered_Q).any():
            raise ValueError("a training question that nobody answered")
        if not all(q.question_id.isprintable() and len(q.question_id) <= LONGEST_ID for q in questions):
            raise ValueError("an id with control characters, or too long a one")
        return Catalogue(questions, train_Q, embedding_QKE, option_QK, unanswered_Q)


def digest(content: RecordDict) -> str:
    """Hash of a message's content."""
    return hashlib.sha256(recorddict_to_proto(content).SerializeToString(deterministic=True)).hexdigest()


def pack_score_request(request: ScoreRequest) -> RecordDict:
    """Score request -> records."""
    arrays = {
        "question": np.asarray(request.question_J, dtype=np.int64),
        "prediction": np.asarray(request.prediction_JK, dtype=np.float64),
    }
    names = {"metrics": list(request.metrics), "sides": list(request.sides)}
    settings = ConfigRecord({**names, "draw": request.draw, "asked": request.asked})
    return RecordDict({"answers": arrays_record(arrays), "settings": settings})


def unpack_score_request(content: RecordDict) -> ScoreRequest:
    """Records -> score request; a ValueError where `pack_score_request` cannot have made them."""
    with following_the_protocol("a score request"):
        arrays = numpy_arrays(content.array_records["answers"])
        settings = content.config_records["settings"]
        question_J = _array(arrays["question"], np.int64, axes=1)
        prediction_JK = _array(arrays["prediction"], np.float64, axes=2)
        if len(question_J) != len(prediction_JK):
            raise ValueError("not one question an answer")
        if len(question_J) > MOST_ANSWERS:
            raise ValueError("too many answers")
        sides = tuple(_strings(settings["sides"]))
        if not set(sides) <= {TARGET_SIDE, TRUTH_SIDE}:
            raise ValueError("an unknown side")
        metrics, asked = tuple(_strings(settings["metrics"])), str(settings["asked"])
        if asked not in (ANSWERS_ASKED, PROBES_ASKED):
            raise ValueError("neither answers nor probes")
        return ScoreRequest(question_J, prediction_JK, metrics, sides, int(str(settings["draw"])), asked)


def join_weights(weights: ArrayRecord) -> ArrayRecord:
    """Named float32 arrays -> one, by the order of their names.

    Flower asks for every array in requests of its own, at every party that a message passes: PluralLLM's 38 took longer
    than its training.
    """
    parts = [np.ravel(weights[name].numpy()) for name in sorted(weights)]
    return arrays_record({_WEIGHTS: np.concatenate(parts, dtype=np.float32, casting="no")})


def split_weights(joined: ArrayRecord, shapes: Mapping[str, Sequence[int]]) -> ArrayRecord:
    """The arrays that `join_weights` joined, by these shapes, in their order; a ValueError where they do not fit."""
    with following_the_protocol("a message with weights"):
        (array,) = joined.values()
        flat = _array(array.numpy(), np.float32, axes=1)
        sizes = {name: math.prod(shapes[name]) for name in sorted(shapes)}
        if set(joined) != {_WEIGHTS} or len(flat) != sum(sizes.values()):
            raise ValueError("another number of weights")
        parts = dict(zip(sizes, np.split(flat, np.cumsum(list(sizes.values()))[:-1]), strict=True))
        return ArrayRecord({name: Array(parts[name].reshape(shape)) for name, shape in shapes.items()})


def pack_weights(weights: ArrayRecord) -> RecordDict:
    """PluralLLM's weights -> records."""
    return RecordDict({_WEIGHTS: join_weights(weights)})


def unpack_weights(content: RecordDict) -> ArrayRecord:
    """The weights of `pack_weights`, joined; a ValueError where there are none."""
    with following_the_protocol("a message with weights"):
        return content.array_records[_WEIGHTS]


def pack_totals(totals: Totals) -> RecordDict:
    """Totals -> records."""
    arrays = arrays_record({"answer": totals.answer_QK, "count": totals.count_Q})
    return RecordDict({_TOTALS: arrays, _WITHIN: ConfigRecord({"names": list(totals.groups)})})


def unpack_totals(content: RecordDict) -> Totals | None:
    """Records -> totals, None where there are none; a ValueError where `pack_totals` cannot have made them."""
    if _TOTALS not in content:
        return None
    with following_the_protocol("a message with totals"):
        arrays = numpy_arrays(content.array_records[_TOTALS])
        answer_QK, count_Q = _array(arrays["answer"], np.float64, axes=2), _array(arrays["count"], np.int64, axes=1)
        return Totals(answer_QK, count_Q, tuple(_strings(content.config_records[_WITHIN]["names"])))


def pack_distributions_asked() -> RecordDict:
    """A request for votes as distributions, whatever the run's SFT learns."""
    return RecordDict({_BALLOT: ConfigRecord({"kind": DISTRIBUTION})})


def asks_distributions(content: RecordDict) -> bool:
    """True if a request for votes is one for distributions."""
    return _BALLOT in content and content.config_records[_BALLOT].get("kind") == DISTRIBUTION


def pack_replies(replies: Sequence[GroupReply]) -> RecordDict:
    """The replies of the groups one node hosts -> records; one that would be empty is left out."""
    content = RecordDict({"groups": ConfigRecord({"names": [reply.group for reply in replies]})})
    tables: dict[str, Sequence[Mapping[Any, Any]]] = {
        "rewards": [reply.rewards for reply in replies],
        "votes": [{} if reply.votes_QK is None else {(): reply.votes_QK} for reply in replies],
        "held-out": [{} if reply.held_out_HK is None else {(): reply.held_out_HK} for reply in replies],
    }
    for name, by_group in tables.items():
        if arrays := _flat(by_group):
            content[name] = arrays_record({key: np.asarray(array, np.float64) for key, array in arrays.items()})
    if counts := _flat([{(name,): count for name, count in reply.counts.items()} for reply in replies]):
        content["counts"] = MetricRecord({**counts})
    if sums := _flat([{(*key, m): x for key, of in reply.sums.items() for m, x in of.items()} for reply in replies]):
        content["sums"] = MetricRecord({key: float(value) for key, value in sums.items()})
    return content


def unpack_replies(content: RecordDict) -> tuple[GroupReply, ...]:
    """Records -> the groups' replies; a ValueError where `pack_replies` cannot have made them.

    Whatever does not belong to the protocol is left where it is.
    """
    with following_the_protocol("a reply"):
        names = _strings(content.config_records["groups"]["names"])
        rewards: list[dict[tuple[str, str], npt.NDArray[np.float64]]] = [{} for _ in names]
        for g, (metric, side), array in _entries(content.array_records, "rewards", names):
            rewards[g][metric, side] = _array(array.numpy(), np.float64, axes=1)
        counts: list[dict[str, int]] = [{} for _ in names]
        for g, (name,), count in _entries(content.metric_records, "counts", names):
            counts[g][name] = int(str(count))
        sums: list[dict[tuple[str, str], dict[str, float]]] = [{} for _ in names]
        for g, (part, predictor, measure), total in _entries(content.metric_records, "sums", names):
            sums[g].setdefault((part, predictor), {})[measure] = float(str(total))
        tables: dict[str, list[npt.NDArray[np.float64] | None]] = {}
        for record in ("votes", "held-out"):
            tables[record] = [None for _ in names]
            for g, (), array in _entries(content.array_records, record, names):
                tables[record][g] = _array(array.numpy(), np.float64, axes=2)
        return tuple(map(GroupReply, names, rewards, tables["votes"], counts, sums, tables["held-out"]))


def arrays_record(arrays: Mapping[str, npt.NDArray[Any]]) -> ArrayRecord:
    """Named NumPy arrays as a record."""
    return ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()})


def numpy_arrays(record: ArrayRecord) -> dict[str, npt.NDArray[Any]]:
    """The arrays of `arrays_record`."""
    return {name: array.numpy() for name, array in record.items()}


def _flat(by_group: Sequence[Mapping[Any, _T]]) -> dict[str, _T]:
    """One mapping of all groups: a key is the group's place in the reply, and its own parts."""
    return {_SEPARATOR.join((str(g), *key)): value for g, mine in enumerate(by_group) for key, value in mine.items()}


def _entries(records: Mapping[str, Any], name: str, groups: Sequence[str]) -> Iterator[tuple[int, list[str], Any]]:
    """The inverse of `_flat` for one record: (group's place, its parts, value)."""
    for key, value in records.get(name, {}).items():
        place, *parts = key.split(_SEPARATOR)
        # A negative place would pass for one counted from the end.
        if not 0 <= int(place) < len(groups):
            raise IndexError("a group the reply does not name")
        yield int(place), parts, value


def _array(value: object, dtype: type[_Scalar], *, axes: int) -> npt.NDArray[_Scalar]:
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != axes:
        raise TypeError("an array of another type or number of axes")
    return value


def _strings(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError("expected a list of names")
    return value


@contextmanager
def following_the_protocol(what: str) -> Iterator[None]:
    """Whatever decoding another party's bytes raises becomes one ValueError that quotes nothing."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} does not follow the protocol ({type(error).__name__})") from None
