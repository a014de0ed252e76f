"""Every message of a run searched for private values, and what a reply may hold.

`audit` holds each reply against a list of what may be in it, and looks for the private answers, as numbers of any
precision, as text and as raw bytes, and for the private texts of the files.

Axis letters: Q public questions, J scored answers, K options.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import message_to_proto
from flwr.serverapp.exception import AggregationError
from in_process import Crossed, InProcessGrid, deployed
from talk import TINY, talk

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import sum_messages, wire
from appa_flwr.protocol.rewards import METRICS
from appa_flwr.survey.generate import generate
from appa_flwr.survey.store import write_split
from appa_flwr.survey.types import Survey
from client_app import predictor
from server_app.federation.catalogue import build_catalogue

SMALL_RUN = {
    **TINY,
    "sft.steps": 40,
    "sft.batch-size": 16,
    "baseline-rule": "",
    "ppo.num-iterations": 2,
    "ppo.batch-size": 8,
    "ppo.num-mini-batches": 2,
    "ppo.response-length": 40,
}
DIARY = "CANARYdiary"
HIDDEN_QUESTION = "CANARYquestion"
SMALL = 0.001  # shares under this are few, and their digits as text are mostly zeros
TOLERANCE = 1e-6  # float32 keeps a share to 6e-8; a shared value by chance is as good as impossible in a whole row


@dataclass(frozen=True)
class World:
    """A survey whose every private value can be told from all others."""

    config: Config  # a run on its public questions
    files: dict[str, Path]  # group -> its private file
    answers: dict[str, dict[str, np.ndarray]]  # group -> question id -> distribution (K,), no value twice
    texts: tuple[str, ...]  # strings that stand in private files only

    @property
    def rows(self) -> list[np.ndarray]:
        """All private distributions."""
        return [row for mine in self.answers.values() for row in mine.values()]


def make_world(folder: Path, **changes: object) -> World:
    config = Config.load(
        {**SMALL_RUN, **{key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}}
    )
    plain = generate(num_questions=config.data.num_questions, num_groups=config.data.num_groups, seed=config.seed)
    rng = np.random.default_rng(20)
    answers = {
        group: {key: rng.dirichlet(np.full(len(shares), 2.0)) for key, shares in mine.items()}
        for group, mine in plain.answers.items()
    }
    written = write_split(Survey(plain.questions, answers), folder / "split")
    texts = []
    for group, path in written.groups.items():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for n, row in enumerate(rows):
            texts.append(f"{DIARY}-{group}-{n}")
            row["comment"] = texts[-1]
        texts.append(f"{HIDDEN_QUESTION}-{group}")
        own = {"question_id": texts[-1], "question": texts[-1], "options": [texts[-1], "x"], "group": group}
        rows.append({**own, "distribution": [0.1357913, 0.8642087]})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flat = {**config.flat(), "survey": str(written.questions), "run.output-dir": str(folder / "runs"), "run-name": "r"}
    return World(Config.load(flat), dict(written.groups), answers, tuple(texts))


COUNTS = [f"0|{name}" for name in ("answered", "known", "truth", "probes", "mean")]
_NAMES = {"groups": ConfigRecord}
RECORDS: dict[str, dict[str, type]] = {
    "train": {"arrays": ArrayRecord, "metrics": MetricRecord},
    "evaluate": {"metrics": MetricRecord},
    wire.ROLL_CALL: _NAMES,
    wire.CATALOGUE: {**_NAMES, "counts": MetricRecord},
    wire.TARGETS: {**_NAMES, "sums": MetricRecord},
    wire.VOTE: {**_NAMES, "votes": ArrayRecord},
    wire.SCORE: {**_NAMES, "rewards": ArrayRecord},
    wire.KEYS: {"sum": ConfigRecord},
    wire.PREPARE: {"sum": ConfigRecord, "boxes 0": ConfigRecord},
    wire.MASK: {"sum": ConfigRecord, "words": ArrayRecord, "boxes 0": ConfigRecord, "released 0": MetricRecord},
    wire.UNMASK: {"sum": ConfigRecord, "boxes 0": ConfigRecord},
}
"""What each kind of reply may hold."""


def audit(grid: InProcessGrid, world: World) -> list[str]:
    """What is wrong with the replies, one line a finding; empty when only the protocol's fields left the groups."""
    public = build_catalogue(world.config)
    group_of = dict(zip(grid.contexts, world.files, strict=True))
    findings = []
    for asked, reply in zip(grid.requests, grid.replies, strict=True):
        group = group_of[asked.message.metadata.dst_node_id]
        found = [*structure(asked, reply, group=group, public=public, world=world), *private_values(reply, world)]
        findings += [f"{group}, {reply.kind}: {finding}" for finding in found]
    return findings


def structure(asked: Crossed, reply: Crossed, *, group: str, public: wire.Catalogue, world: World) -> Iterator[str]:
    """Everything in a reply that is not on the list of what this kind of reply holds."""
    if message_to_proto(reply.message).SerializeToString(deterministic=True) != reply.data:
        yield "bytes that no field of Flower's messages accounts for"
    if reply.message.has_error():
        error = reply.message.error
        plain = re.fullmatch(r"\w+ failed: [A-Za-z]+ \(details are in the group's own log\)", error.reason or "")
        if not plain if error.code == wire.FAILED else wire.REFUSALS.get(error.code) != error.reason:
            yield f"an error in its own words: {error.reason}"
        return
    content = reply.message.content
    for name, record in content.items():
        if RECORDS[reply.kind].get(name) is not type(record):
            yield f"a record {name} of type {type(record).__name__}"
    if "groups" in RECORDS[reply.kind] and dict(content.config_records.get("groups", {})) != {"names": [group]}:
        yield "more than the group's name"
    numbers = content.metric_records
    if reply.kind == "train":
        yield from typed(numbers, "metrics", {"num-examples": int, "loss": float})
        sent, got = (m.array_records.get("arrays", {}) for m in (asked.message.content, content))
        if {key: (a.dtype, a.shape) for key, a in sent.items()} != {key: (a.dtype, a.shape) for key, a in got.items()}:
            yield "weights other than those that came"
    elif reply.kind == "evaluate":
        yield from typed(numbers, "metrics", {"num-examples": int, "errors": list})
        errors, settings = numbers["metrics"].get("errors"), world.config.pluralllm
        count = 1 if settings.architecture == "attention" else 7
        if not isinstance(errors, list) or [type(error) for error in errors] != [float] * count:
            yield f"errors {errors}"
        if not 0 <= (num_answers := numbers["metrics"].get("num-examples", 0)) <= (~public.train_Q).sum():
            yield f"an error over {num_answers} held-out answers"
    elif reply.kind == wire.CATALOGUE:
        yield from typed(numbers, "counts", dict.fromkeys(COUNTS, int))
    elif reply.kind == wire.MASK:
        yield from masked(asked, content, group)
    elif reply.kind == wire.TARGETS and world.config.run.sums == "secure":
        if "sums" in content:
            yield "sums of its own"
    elif reply.kind == wire.TARGETS:
        yield from sums(dict(numbers.get("sums", {})), public)
    elif reply.kind == wire.SCORE:
        yield from rewards(asked, content.array_records.get("rewards", {}))
    elif reply.kind == wire.VOTE:
        yield from votes(content.array_records.get("votes", {}), public, world.config.task)


def masked(asked: Crossed, content: RecordDict, group: str) -> Iterator[str]:
    """As many words as were asked for, and of the group's own numbers its score of an evaluation alone."""
    request = sum_messages.unpack_asked(asked.message.content)
    words = {key: (array.dtype, tuple(array.shape)) for key, array in content.array_records["words"].items()}
    if words != {"0": ("uint64", (request.task.count,))}:
        yield f"words {words}"
    if dict(content.config_records["sum"]).get("names") != [group]:
        yield "more than the group's name"
    released = content.metric_records.get("released 0", {})
    if request.what != sum_messages.SCORES and released:
        yield f"numbers beside a sum of {request.what}"
    for key, value in released.items():
        if not isinstance(value, float) or key.split()[0] not in METRICS:
            yield f"{key} = {value}"


def typed(records: Mapping[str, MetricRecord], name: str, types: dict[str, type]) -> Iterator[str]:
    """Other numbers in a record than those of these names and types."""
    found = dict(records.get(name, {}))
    if {key: type(value) for key, value in found.items()} != types:
        yield f"{name} {found}"


def rewards(asked: Crossed, record: ArrayRecord) -> Iterator[str]:
    request = wire.unpack_score_request(asked.message.content)
    size, keys = len(request.question_J), {f"0|{m}|{side}" for m in request.metrics for side in request.sides}
    if set(record) != keys:
        yield f"rewards that were not asked for: {set(record) ^ keys}"
    for key, array in record.items():
        reward_J = array.numpy()
        if reward_J.dtype != np.float64 or reward_J.shape != (size,):
            yield f"{key}: {reward_J.dtype} {reward_J.shape} for {size} answers"
        known_J = ~np.isnan(reward_J)
        if not known_J.all() and not key.endswith("|truth"):
            yield f"{key}: NaN"
        if (reward_J[known_J] < 0).any() or (reward_J[known_J] > 1).any():
            yield f"{key}: outside [0, 1]"


def sums(found: dict[str, object], public: wire.Catalogue) -> Iterator[str]:
    """One sum a part, predictor and measure, over many answers where they are training answers."""
    measures = {"answers", "js", "js_distance", "wasserstein"}
    always = ("pluralllm", "uniform", "nearest-question")
    sizes = {"training": public.train_Q.sum(), "held-out": (~public.train_Q).sum()}
    scored = [part for part in sizes if f"0|{part}|pluralllm|answers" in found]
    expected, allowed = (
        {f"0|{part}|{name}|{measure}" for part in scored for name in names for measure in measures}
        for names in (always, (*always, "mean-of-others", "pluralllm-shared"))
    )
    if set(found) - allowed:
        yield f"sums that nobody asked for: {sorted(set(found) - allowed)}"
    if expected - set(found):
        yield f"sums that are missing: {sorted(expected - set(found))}"
    for key, value in found.items():
        _, part, name, measure = key.split("|")
        num_answers = found.get(f"0|{part}|{name}|answers")
        if not isinstance(value, float) or not isinstance(num_answers, float):
            yield f"{key} = {value}"
        elif measure == "answers" and (value != int(value) or value > sizes[part]):
            yield f"{key} = {value} of {sizes[part]}"
        elif part == "training" and num_answers < predictor.MIN_TRAINING_ANSWERS:
            yield f"{key}: a sum over {num_answers} training answers"
        elif (
            part == "training"
            and 0 < found["0|training|pluralllm|answers"] - num_answers < predictor.MIN_TRAINING_ANSWERS
        ):
            yield f"{key}: all but a few training answers"
        elif abs(value) > num_answers:
            yield f"{key} = {value} over {num_answers} answers"


def votes(record: ArrayRecord, public: wire.Catalogue, task: str) -> Iterator[str]:
    if set(record) != {"0"}:
        yield f"votes {set(record)}"
    for array in record.values():
        vote_QK = array.numpy()
        if vote_QK.dtype != np.float64 or vote_QK.shape != public.option_QK.shape:
            yield f"votes of {vote_QK.dtype} {vote_QK.shape}"
        else:
            for vote_K, size in zip(vote_QK, public.option_QK.sum(1), strict=True):
                # DPA: one 1 and zeros; OPA: each of K..1 once; padding 0
                ballot = [1.0] if task == "dpa" else list(range(size, 0, -1))
                if sorted(vote_K, reverse=True) != [*ballot, *[0.0] * (len(vote_K) - len(ballot))]:
                    yield f"a vote {vote_K}"
                elif vote_K[size:].any():
                    yield "a vote for padding"


def private_values(reply: Crossed, world: World) -> Iterator[str]:
    """Private texts and numbers in a reply, wherever they stand."""
    yield from texts_in(reply.data, world)
    if reply.message.has_error():
        return
    content = reply.message.content
    shares = np.unique(np.concatenate(world.rows))
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            for key, array in record.items():
                value = array.numpy()
                if any(holds(value, row) for row in world.rows):
                    yield f"a private answer in {name} {key}"
                # Weights are so many that single ones meet a share by chance, and a reward against the group's own
                # answer can be a share of it (one-hot answer, two options, Wasserstein): whole rows tell there.
                derived = name == "arrays" or key.endswith("|truth")
                if not derived and np.isin(value.astype(np.float64), shares).any():
                    yield f"a private share in {name} {key}"
        else:
            numbers = np.array([x for v in record.values() for x in np.ravel(v) if isinstance(x, float)])
            if (np.abs(numbers[:, None] - shares) < TOLERANCE * shares).any():
                yield f"a private share in {name}"


def texts_in(data: bytes, world: World) -> Iterator[str]:
    """Private texts, and private shares written as text."""
    for text in (DIARY, HIDDEN_QUESTION):
        if text.encode() in data:
            yield f"the private text {text}"
    for row in world.rows:
        # the point and six digits, cut and not rounded, however many were written
        if any(f"{share:.12f}"[1:8].encode() in data for share in row if share > SMALL):
            yield f"a private answer as text, {row}"


def holds(value: np.ndarray, row: np.ndarray) -> bool:
    """Whether the row stands in the array, along any axis and in any precision down to float32."""
    if not np.issubdtype(value.dtype, np.number) or value.size < len(row):
        return False
    for flat in (value.ravel(), value.T.ravel()):
        (starts,) = np.nonzero(np.abs(flat[: flat.size - len(row) + 1] - row[0]) < TOLERANCE)
        if any(np.abs(flat[start : start + len(row)] - row).max() < TOLERANCE for start in starts):
            return True
    return False


def talked(world: World) -> InProcessGrid:
    """A talk without a language model; ends early where the server refuses a message."""
    grid = InProcessGrid(deployed(world.config, world.files))
    with contextlib.suppress(UserError, AggregationError):
        talk(grid, world.config)
    return grid
