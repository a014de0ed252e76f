"""Nothing but the protocol's fields leaves a group: every message of a run is recorded and searched for private values.

The groups' real ClientApp answers the real server, each group from a private file of its own, and every message crosses
as bytes. `audit` then holds each reply against a list of what may be in it, and looks for the private answers, as
numbers of any precision, as text and as raw bytes, and for the private texts of the files. That the audit can find
something is tested too: clients that leak on purpose must be caught.

Axis letters: Q public questions, J scored answers, K options.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import message_to_proto
from flwr.serverapp.exception import AggregationError
from in_process import Crossed, InProcessGrid, deployed, flower_task

from appa_flwr import secure_sum, wire
from appa_flwr.config import Config
from appa_flwr.errors import UserError
from appa_flwr.survey.export import export_split
from appa_flwr.survey.generate import generate
from appa_flwr.survey.types import Survey
from client_app import outgoing, predictor, scoring, state
from server_app import main as server
from server_app.federation.catalogue import build_catalogue
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Federation
from server_app.predictor.pretraining import initial_weights, pretrain
from server_app.predictor.sums import exchange_sums

TINY = {
    "data.num-groups": 3,
    "data.num-questions": 32,
    "federation.min-groups": 3,
    "embedding.dim": 8,
    "pluralllm.hidden-dim": 8,
    "pluralllm.blocks": 1,
    "pluralllm.heads": 2,
    "pluralllm.rounds": 2,
    "pluralllm.num-context-questions": 4,
    "policy.base-steps": 20,
    "sft.steps": 40,
    "sft.batch-size": 16,
    "sft.gradient-accumulation-steps": 1,
    "ppo.num-iterations": 2,
    "rollout.batch-size": 8,
    "ppo.num-mini-batches": 2,
    "rollout.response-length": 40,
}
KINDS = (wire.ROLL_CALL, wire.CATALOGUE, wire.POPULATION, "train", "evaluate", wire.TARGETS, wire.VOTE, wire.SCORE)
DIARY = "CANARYdiary"
HIDDEN_QUESTION = "CANARYquestion"
SMALL = 0.001  # shares under this are few, and their digits as text are mostly zeros
TOLERANCE = 1e-6  # float32 keeps a share to 6e-8; a shared value by chance is as good as impossible in a whole row


@dataclass(frozen=True)
class World:
    """A survey whose every private value can be told from all others.

    Attributes:
        config: a run on its public questions.
        files: group -> its private file.
        answers: group -> question id -> distribution (K,), no value twice.
        texts: strings that stand in private files only.
    """

    config: Config
    files: dict[str, Path]
    answers: dict[str, dict[str, np.ndarray]]
    texts: tuple[str, ...]

    @property
    def rows(self) -> list[np.ndarray]:
        """All private distributions."""
        return [row for mine in self.answers.values() for row in mine.values()]


def make_world(folder: Path, **changes: object) -> World:
    config = Config.load(
        {**TINY, **{key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}}
    )
    plain = generate(num_questions=config.data.num_questions, num_groups=config.data.num_groups, seed=config.seed)
    rng = np.random.default_rng(20)
    answers = {
        group: {key: rng.dirichlet(np.full(len(shares), 2.0)) for key, shares in mine.items()}
        for group, mine in plain.answers.items()
    }
    written = export_split(Survey(plain.questions, answers), folder / "split")
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
    flat["run.cache-dir"] = str(folder / "cache")
    return World(Config.load(flat), dict(written.groups), answers, tuple(texts))


# --- the audit ------------------------------------------------------------------------------------


def audit(grid: InProcessGrid, world: World) -> list[str]:
    """What is wrong with the replies, one line a finding; empty when only the protocol's fields left the groups."""
    public = build_catalogue(world.config)
    homes = dict(zip(grid.contexts, world.files, strict=True))
    findings = []
    for asked, reply in zip(grid.requests, grid.replies, strict=True):
        group = homes[asked.message.metadata.dst_node_id]
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
        if error.code != outgoing.FAILED or not plain:
            yield f"an error in its own words: {error.reason}"
        return
    content = reply.message.content
    if reply.kind == "train":
        yield from allowed(content, {"arrays": ArrayRecord, "metrics": MetricRecord})
        sent, got = (m.array_records.get("arrays", {}) for m in (asked.message.content, content))
        if {key: (a.dtype, a.shape) for key, a in sent.items()} != {key: (a.dtype, a.shape) for key, a in got.items()}:
            yield "weights other than those that came"
        metrics = content.metric_records.get("metrics", {})
        if {key: type(value) for key, value in metrics.items()} != {"num-examples": int, "loss": float}:
            yield f"metrics {dict(metrics)}"
        return
    if reply.kind == "evaluate":
        yield from allowed(content, {"metrics": MetricRecord})
        metrics = dict(content.metric_records.get("metrics", {}))
        cells, error = metrics.get("num-examples"), metrics.get("error")
        if {key: type(value) for key, value in metrics.items()} != {"num-examples": int, "error": float}:
            yield f"metrics {metrics}"
        elif not 0 <= cells <= (~public.train_Q).sum():
            yield f"an error over {cells} held-out answers"
        return
    if reply.kind == wire.POPULATION:
        yield from masked_sums(wire.unpack_sums_request(asked.message.content), content, public)
        return
    second: dict[str, tuple[str, type]] = {
        wire.CATALOGUE: ("counts", MetricRecord),
        wire.TARGETS: ("sums", MetricRecord),
        wire.VOTE: ("votes", ArrayRecord),
        wire.SCORE: ("rewards", ArrayRecord),
    }
    yield from allowed(content, {"groups": ConfigRecord, **dict([second[reply.kind]] if reply.kind in second else [])})
    if dict(content.config_records.get("groups", {})) != {"names": [group]}:
        yield "more than the group's name"
    if reply.kind == wire.CATALOGUE:
        counts = content.metric_records.get("counts", {})
        if {key: type(value) for key, value in counts.items()} != {"0|answered": int, "0|known": int}:
            yield f"counts {dict(counts)}"
    if reply.kind == wire.TARGETS:
        yield from sums(dict(content.metric_records.get("sums", {})), public)
    if reply.kind == wire.SCORE:
        yield from rewards(asked, content.array_records.get("rewards", {}), public)
    if reply.kind == wire.VOTE:
        yield from votes(content.array_records.get("votes", {}), public, world.config)


def allowed(content: RecordDict, records: dict[str, type]) -> Iterator[str]:
    for name, record in content.items():
        if records.get(name) is not type(record):
            yield f"a record {name} of type {type(record).__name__}"


def masked_sums(request: wire.SumsRequest, content: RecordDict, public: wire.Catalogue) -> Iterator[str]:
    """A key where one was asked for, and else numbers that are as good as random."""
    yield from allowed(content, {"keys": ConfigRecord, "masked": ArrayRecord})
    keys = content.config_records.get("keys", {})
    if {key: len(value) for key, value in keys.items()} != {"public": int(request.step == wire.KEYS)}:
        yield f"keys {dict(keys)}"
    names = {wire.COUNTS: {"count", "parties"}, wire.ANSWERS: {"answers"}}
    record = content.array_records.get("masked", {})
    if set(record) != names.get(request.step, set()):
        yield f"sums {set(record)} in the step {request.label}"
    for name, array in record.items():
        value = array.numpy()
        if value.dtype != np.uint64 or len(value) != len(public.questions):
            yield f"{name}: {value.dtype} {value.shape}"
        # of random numbers one in eight is as near to 0 as this; unmasked ones all are
        elif (np.abs(value.view(np.int64)) < 2**60).mean() > 0.4 or len(np.unique(value)) != value.size:
            yield f"{name}: numbers without a mask"


def rewards(asked: Crossed, record: ArrayRecord, public: wire.Catalogue) -> Iterator[str]:
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
    measures = {"cells", "js", "js_distance", "wasserstein"}
    names = {"pluralllm": measures | {"spread"}, "uniform": measures, "nearest-question": measures}
    others = {
        f"0|{part}|{name}|{measure}"
        for part in ("training", "held-out")
        for name in ("mean-of-others", "pluralllm-shared", *(f"context-{2**n}" for n in range(7)))
        for measure in measures
    }
    sizes = {"training": public.train_Q.sum(), "held-out": (~public.train_Q).sum()}
    told = {part for part in sizes if f"0|{part}|pluralllm|cells" in found}
    expected = {f"0|{part}|{name}|{measure}" for part in told for name, those in names.items() for measure in those}
    if (
        set(found)
        - expected
        - others
        - {f"0|{part}|calibration|{m}" for part in told for m in ("cells", "rank_correlation")}
    ):
        yield f"sums that nobody asked for: {sorted(set(found) - expected)}"
    if expected - set(found):
        yield f"sums that are missing: {sorted(expected - set(found))}"
    for key, value in found.items():
        _, part, name, measure = key.split("|")
        cells = found.get(f"0|{part}|{name}|cells")
        if not isinstance(value, float) or not isinstance(cells, float):
            yield f"{key} = {value}"
        elif measure == "cells" and (value != int(value) or value > sizes[part]):
            yield f"{key} = {value} of {sizes[part]}"
        elif part == "training" and cells < predictor.MIN_TRAINING_CELLS:
            yield f"{key}: a sum over {cells} training answers"
        elif part == "training" and 0 < found["0|training|pluralllm|cells"] - cells < predictor.MIN_TRAINING_CELLS:
            yield f"{key}: all but a few training answers"
        elif abs(value) > cells:
            yield f"{key} = {value} over {cells} answers"


def votes(record: ArrayRecord, public: wire.Catalogue, config: Config) -> Iterator[str]:
    if set(record) != {"0"}:
        yield f"votes {set(record)}"
    for array in record.values():
        vote_QK = array.numpy()
        if vote_QK.dtype != np.float64 or vote_QK.shape != public.option_QK.shape:
            yield f"votes of {vote_QK.dtype} {vote_QK.shape}"
        elif config.sft.target != "mean":
            for vote_K, size in zip(vote_QK, public.option_QK.sum(1), strict=True):
                # DPA: one 1 and zeros; OPA: each of K..1 once; padding 0
                ballot = [1.0] if config.task == "dpa" else list(range(size, 0, -1))
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
    exempt = "votes" if world.config.sft.target == "mean" else None
    shares = np.unique(np.concatenate(world.rows))
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            for key, array in record.items():
                value = array.numpy()
                if name != exempt and any(holds(value, row) for row in world.rows):
                    yield f"a private answer in {name} {key}"
                # Weights are so many that single ones meet a share by chance, and a reward against the group's own
                # answer can be a share of it (one-hot answer, two options, Wasserstein): whole rows tell there.
                derived = name in ("arrays", exempt) or key.endswith("|truth")
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


# --- runs -----------------------------------------------------------------------------------------


def talk(world: World) -> InProcessGrid:
    """Every kind of message once, without a policy; ends early where the server refuses what it hears."""
    grid = InProcessGrid(deployed(world.config, world.files))
    with contextlib.suppress(UserError, AggregationError):
        _talk(grid, world)
    return grid


def _talk(grid: InProcessGrid, world: World) -> None:
    catalogue = build_catalogue(world.config)
    option_QK = catalogue.option_QK
    uniform_QK = option_QK / option_QK.sum(1, keepdims=True)
    metrics = ("borda",) if world.config.task == "opa" else ("js", "wasserstein", "cosine")
    held_out = np.flatnonzero(~catalogue.train_Q)
    with flower_task():
        prompt = OverlapGrid(grid)
        federation = Federation(prompt, min_groups=world.config.federation.min_groups, timeout=5.0)
        federation.gather((), patience=0.0)
        federation.send_catalogue(catalogue)
        exchange_sums(federation, world.config, catalogue, progress=lambda step, of, text: None)
        weights = pretrain(
            prompt,
            world.config,
            initial_weights(world.config),
            nodes=federation.homes(federation.groups),
            progress=lambda step, of, loss: None,
        ).weights
        federation.send_targets(weights)
        federation.votes()
        federation.score(
            wire.ScoreRequest(held_out, uniform_QK[held_out], metrics, (wire.TARGET_SIDE, wire.TRUTH_SIDE))
        )


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> tuple[World, InProcessGrid]:
    """The embedded run, all phases, by the real server."""
    world = make_world(tmp_path_factory.mktemp("whole"))
    grid = InProcessGrid(deployed(world.config, world.files))
    with flower_task():
        server.app(grid, Context(17, 1, {}, RecordDict(), dict(world.config.flat())))
    return world, grid


def test_a_whole_run_lets_only_the_protocol_out(whole_run):
    world, grid = whole_run
    assert {reply.kind for reply in grid.replies} == set(KINDS)
    assert not any(reply.message.has_error() for reply in grid.replies)
    # roll call, catalogue, sums (keys, counts, answers, totals), 2 rounds, validation of the last, targets, votes,
    # 2 iterations, base, SFT, PPO, uniform, majority, the probe for the ceilings and 2 ceilings in 3 metrics:
    # 25 messages to each of 3 groups
    assert len(grid.replies) == 3 * 25
    assert audit(grid, world) == []


def test_the_groups_did_have_what_was_searched_for(whole_run):
    world, grid = whole_run
    assert len(world.rows) > 60
    assert len(np.unique(np.concatenate(world.rows))) == sum(len(row) for row in world.rows)
    for context, (group, mine) in zip(grid.contexts.values(), world.answers.items(), strict=True):
        truth_QK = state.truth(context.state, group)
        context_NK = state.data(context.state, group).answer_NK
        assert all(holds(truth_QK, row) for row in mine.values())
        assert 0 < sum(holds(context_NK, row) for row in mine.values()) < len(mine)
        assert DIARY in world.files[group].read_text()


def test_what_the_server_sends_and_writes_holds_nothing_private(whole_run):
    world, grid = whole_run
    for asked in grid.requests:
        assert list(texts_in(asked.data, world)) == [], asked.kind
        for name, record in asked.message.content.array_records.items():
            for key, array in record.items():
                assert not any(holds(array.numpy(), row) for row in world.rows), (asked.kind, name, key)
    written = [path for path in world.config.run_folder.rglob("*") if path.is_file()]
    assert {"summary.json", "metrics.jsonl", "report.html"} <= {path.name for path in written}
    for path in written:
        data = path.read_bytes()
        assert DIARY.encode() not in data
        assert HIDDEN_QUESTION.encode() not in data


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "opa"},
        {"sft_target": "majority"},
        {"context_resampling": "every-iteration"},
        {"population_prior": True},
        {"population_prior": True, "mean_of_others": False},
    ],
)
def test_other_tasks_and_settings_let_no_more_out(changes, tmp_path):
    world = make_world(tmp_path, **changes)
    grid = talk(world)
    assert {reply.kind for reply in grid.replies} == set(KINDS)
    assert audit(grid, world) == []


def test_the_mean_as_sft_target_is_the_one_documented_way_out(tmp_path):
    """With sft-target = mean a group gives away its training answers, as the config says; held-out ones stay."""
    world = make_world(tmp_path, sft__target="mean")
    grid = talk(world)
    assert audit(grid, world) == []  # in the votes, and nowhere else
    public = build_catalogue(world.config)
    training = {q.question_id for q, train in zip(public.questions, public.train_Q, strict=True) if train}
    ballots = [reply for reply in grid.replies if reply.kind == wire.VOTE]
    for (_, mine), ballot in zip(world.answers.items(), ballots, strict=True):
        vote_QK = ballot.message.content.array_records["votes"]["0"].numpy()
        assert {key for key, row in mine.items() if holds(vote_QK, row)} == mine.keys() & training
        assert mine.keys() - training


def test_training_answers_are_scored_once_whatever_the_server_asks(tmp_path):
    """Weights made for the purpose, sent again and again, would tell the training answers by their sums."""
    world = make_world(tmp_path, pluralllm__rounds=1)
    grid = talk(world)
    (first, *_) = [asked for asked in grid.requests if asked.kind == wire.TARGETS]
    again = InProcessGrid(grid.contexts)
    again.push_messages([first.message])
    told, repeated = (
        {key.split("|")[1] for key in crossed.message.content.metric_records["sums"]}
        for crossed in (next(reply for reply in grid.replies if reply.kind == wire.TARGETS), again.replies[0])
    )
    assert told == {"training", "held-out"}
    assert repeated == {"held-out"}


def test_errors_of_every_action_hold_nothing_private(whole_run, monkeypatch):
    world, recorded = whole_run

    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError(f"row 3: {DIARY}-x answered {world.rows[0].tolist()}")

    # One request of every kind, as recorded in the whole run, to clients in which everything fails.
    monkeypatch.setattr(wire, "pack_replies", fail)
    monkeypatch.setattr(wire, "pack_sums_reply", fail)
    monkeypatch.setattr(predictor, "train_round", fail)
    monkeypatch.setattr(predictor, "validate", fail)
    grid = InProcessGrid(recorded.contexts)
    grid.push_messages({asked.kind: asked.message for asked in recorded.requests}.values())
    assert {reply.kind for reply in grid.replies} == set(KINDS)
    assert all(reply.message.has_error() for reply in grid.replies)
    assert audit(grid, world) == []


# --- the audit itself -----------------------------------------------------------------------------


def leaking(change: Callable[[RecordDict, np.ndarray], None], kind: str) -> Callable[[World, pytest.MonkeyPatch], None]:
    """A client whose exit changes its replies of one kind by what it knows."""

    def install(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        names = {"train": "send_weights", "evaluate": "send_error", wire.POPULATION: "send_sums"}
        for name in (names.get(kind, "send"),):
            honest = getattr(outgoing, name)

            def dishonest(message: Message, *args: object, honest=honest, **kwargs: object) -> Message:
                reply = honest(message, *args, **kwargs)
                if message.metadata.message_type == kind:
                    change(reply.content, world.rows[0])
                return reply

            monkeypatch.setattr(outgoing, name, dishonest)

    return install


def edited(record: ArrayRecord, key: str, edit: Callable[[np.ndarray], np.ndarray]) -> None:
    record[key] = Array(np.ascontiguousarray(edit(record[key].numpy().copy())))


def hidden_in_weights(content: RecordDict, row: np.ndarray) -> None:
    record = content.array_records["arrays"]
    widest = max(record, key=lambda key: record[key].numpy().size)

    def edit(value: np.ndarray) -> np.ndarray:
        value.reshape(-1)[7 : 7 + len(row)] = row
        return value

    edited(record, widest, edit)


def hidden_in_rewards(content: RecordDict, row: np.ndarray) -> None:
    def edit(reward_J: np.ndarray) -> np.ndarray:
        reward_J[: len(row)] = row
        return reward_J

    edited(content.array_records["rewards"], "0|js|truth", edit)


def one_share_as_reward(content: RecordDict, row: np.ndarray) -> None:
    def edit(reward_J: np.ndarray) -> np.ndarray:
        reward_J[0] = row[0]
        return reward_J

    edited(content.array_records["rewards"], "0|js|targets", edit)


def answer_as_votes(content: RecordDict, row: np.ndarray) -> None:
    def edit(vote_QK: np.ndarray) -> np.ndarray:
        vote_QK[0] = 0.0
        vote_QK[0, : len(row)] = row
        return vote_QK

    edited(content.array_records["votes"], "0", edit)


def soft_votes(content: RecordDict, row: np.ndarray) -> None:
    edited(content.array_records["votes"], "0", lambda vote_QK: 0.9 * vote_QK + 0.01)


LEAKS = {
    "an extra record": (wire.SCORE, lambda c, row: c.__setitem__("notes", ConfigRecord({"x": 1})), "a record notes"),
    "an extra record of numbers": (
        wire.ROLL_CALL,
        lambda c, row: c.__setitem__("counts", MetricRecord({"0|share": row.tolist()})),
        "a private share in counts",
    ),
    "an extra array": (
        wire.SCORE,
        lambda c, row: c["rewards"].__setitem__("0|js|diary", Array(row.astype(np.float32))),
        "a private answer in rewards 0|js|diary",
    ),
    "an extra name": (
        wire.ROLL_CALL,
        lambda c, row: c.__setitem__("groups", ConfigRecord({"names": ["Avaria", f"{DIARY}-1"]})),
        "the private text",
    ),
    "a share as text": (
        wire.VOTE,
        lambda c, row: c.__setitem__("groups", ConfigRecord({"names": [f"it is {row[0]:.7f}"]})),
        "a private answer as text",
    ),
    "a count with a fraction": (
        wire.CATALOGUE,
        lambda c, row: c["counts"].__setitem__("0|known", float(row[1])),
        "counts",
    ),
    "a share as a sum": (
        wire.TARGETS,
        lambda c, row: c["sums"].__setitem__("0|held-out|uniform|js", float(row[0])),
        "a private share in sums",
    ),
    "a sum of its own": (
        wire.TARGETS,
        lambda c, row: c["sums"].__setitem__("0|held-out|uniform|diary", 1.0),
        "sums that nobody asked for",
    ),
    "a list for a sum": (
        wire.TARGETS,
        lambda c, row: c["sums"].__setitem__("0|held-out|uniform|js", [0.5, 0.25]),
        "0|held-out|uniform|js = [0.5, 0.25]",
    ),
    "the sums of one training answer": (
        wire.TARGETS,
        lambda c, row: c["sums"].update({f"0|training|uniform|{key}": 1.0 for key in ("cells", "js")}),
        "0|training|uniform|js: a sum over 1.0 training answers",
    ),
    "a validation error": (
        "evaluate",
        lambda c, row: c["metrics"].update({"num-examples": 30, "error": 0.5}),
        "an error over 30 held-out answers",
    ),
    "a share as validation error": (
        "evaluate",
        lambda c, row: c["metrics"].__setitem__("error", float(row[0])),
        "a private share in metrics",
    ),
    "a sum of its own beside the masked ones": (
        wire.POPULATION,
        lambda c, row: c["masked"].__setitem__("diary", Array(np.arange(32, dtype=np.uint64) << 59)),
        "sums {",
    ),
    "an answer among the masked sums": (
        wire.POPULATION,
        lambda c, row: c["masked"].__setitem__("answers", Array(row)),
        "a private answer in masked answers",
    ),
    "a private key": (
        wire.POPULATION,
        lambda c, row: c["keys"].__setitem__("private", b"0" * 32),
        "keys {",
    ),
    "a loss": ("train", lambda c, row: c["metrics"].__setitem__("loss", float(row[0])), "a private share in metrics"),
    "extra weights": (
        "train",
        lambda c, row: c["arrays"].__setitem__("more", Array(np.zeros(1))),
        "weights other than those that came",
    ),
    "weights that are an answer": ("train", hidden_in_weights, "a private answer in arrays"),
    "rewards that are an answer": (wire.SCORE, hidden_in_rewards, "a private answer in rewards 0|js|truth"),
    "a reward that is a share": (wire.SCORE, one_share_as_reward, "a private share in rewards 0|js|targets"),
    "votes that are an answer": (wire.VOTE, answer_as_votes, "a private answer in votes"),
    "votes that say how much": (wire.VOTE, soft_votes, "a vote"),
}


@pytest.mark.parametrize(("kind", "change", "finding"), LEAKS.values(), ids=LEAKS.keys())
def test_a_client_that_leaks_is_caught(kind, change, finding, tmp_path, monkeypatch):
    world = make_world(tmp_path, pluralllm__rounds=1)
    leaking(change, kind)(world, monkeypatch)
    found = audit(talk(world), world)
    assert any(f"{kind}: {finding}" in line for line in found), found


def test_a_node_that_forgets_its_masks_is_caught(tmp_path, monkeypatch):
    world = make_world(tmp_path, pluralllm__rounds=1)

    def bare(arrays, *, private, public_keys, step):
        return {
            name: np.rint(array * secure_sum.SCALE).astype(np.int64).view(np.uint64) for name, array in arrays.items()
        }

    monkeypatch.setattr(secure_sum, "mask", bare)
    found = audit(talk(world), world)
    assert any("answers: numbers without a mask" in line for line in found), found


def test_a_client_that_votes_with_what_it_was_to_hold_out_is_caught(tmp_path, monkeypatch):
    world = make_world(tmp_path, pluralllm__rounds=1)
    monkeypatch.setattr(scoring, "votes", lambda opinion_QK, option_QK, *, kind: opinion_QK)
    assert any("a private answer in votes" in line for line in audit(talk(world), world))


def test_an_error_in_its_own_words_is_caught(tmp_path):
    world = make_world(tmp_path)
    grid = talk(world)
    asked = grid.requests[0]
    said = Message(Error(code=outgoing.FAILED, reason=f"no {DIARY}-1 in {world.rows[0][0]}"), reply_to=asked.message)
    reply = Crossed(message_to_proto(said).SerializeToString(deterministic=True), said)
    group = next(iter(world.files))
    public = build_catalogue(world.config)
    assert "an error in its own words" in next(structure(asked, reply, group=group, public=public, world=world))
    found = " ".join(private_values(reply, world))
    assert "private text" in found
    assert "as text" in found
