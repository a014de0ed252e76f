"""The audit of `test_privacy.py` itself: clients that leak on purpose are caught.

Axis letters: Q public questions, K options.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from audit import DIARY, World, audit, make_world, private_values, structure, talked
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from in_process import Crossed, InProcessGrid, cross, cross_records

from appa_flwr.protocol import wire
from server_app.federation.catalogue import build_catalogue

Change = Callable[[RecordDict, np.ndarray], None]


def put(record: str, key: str, value: object) -> Change:
    """Set an entry of a record, or a whole record where none is named; functions are given a private answer."""

    def change(content: RecordDict, row: np.ndarray) -> None:
        (content[record] if record else content)[key] = value(row) if callable(value) else value

    return change


def edit(record: str, key: str, alter: Callable[[np.ndarray, np.ndarray], None]) -> Change:
    """Alter an array in place, given a private answer; the largest one where none is named."""

    def change(content: RecordDict, row: np.ndarray) -> None:
        arrays = content.array_records[record]
        name = key or max(arrays, key=lambda name: arrays[name].numpy().size)
        value = arrays[name].numpy().copy()
        alter(value, row)
        arrays[name] = Array(value)

    return change


def first_vote(vote_QK: np.ndarray, row: np.ndarray) -> None:
    vote_QK[0] = 0.0
    vote_QK[0, : len(row)] = row


def both(*changes: Change) -> Change:
    return lambda content, row: [change(content, row) for change in changes] and None


def share(row: np.ndarray) -> float:
    return float(row[0])


UNIFORM = "0|held-out|uniform"
ONE_ANSWER = [put("sums", f"0|training|uniform|{measure}", 1.0) for measure in ("answers", "js")]
MANY = [put("metrics", "num-examples", 30), put("metrics", "errors", [0.5] * 3)]
ROLL, SCORE, VOTE, TARGETS = wire.ROLL_CALL, wire.SCORE, wire.VOTE, wire.TARGETS
TRAIN, EVALUATE = "train", "evaluate"


def weights(value: np.ndarray, row: np.ndarray) -> None:
    np.put(value, np.arange(len(row)) + 7, row)


def answer(value: np.ndarray, row: np.ndarray) -> None:
    np.put(value, np.arange(len(row)), row)


def held_out(row: np.ndarray) -> ArrayRecord:
    """What a simulated group sends for the mean of the others."""
    return ArrayRecord({"0": Array(row[None])})


LEAKS = [
    (SCORE, put("", "notes", ConfigRecord({"x": 1})), "a record notes"),
    (ROLL, put("", "counts", lambda row: MetricRecord({"0|share": row.tolist()})), "a private share in counts"),
    (SCORE, put("rewards", "0|js|x", lambda row: Array(row.astype(np.float32))), "a private answer in rewards 0|js|x"),
    (ROLL, put("groups", "names", ["Avaria", f"{DIARY}-1"]), "the private text"),
    (VOTE, put("groups", "names", lambda row: [f"it is {row[0]:.7f}"]), "a private answer as text"),
    (wire.CATALOGUE, put("counts", "0|known", share), "counts"),
    (wire.CATALOGUE, put("", "held-out", held_out), "a record held-out of type ArrayRecord"),
    (TARGETS, put("sums", f"{UNIFORM}|js", share), "a private share in sums"),
    (TARGETS, put("sums", f"{UNIFORM}|diary", 1.0), "sums that nobody asked for"),
    (TARGETS, both(*ONE_ANSWER), "0|training|uniform|js: a sum over 1.0 training answers"),
    (EVALUATE, both(*MANY), "an error over 30 held-out answers"),
    (EVALUATE, put("metrics", "errors", lambda row: [0.5, share(row), 0.5]), "a private share in metrics"),
    (TRAIN, put("arrays", "more", Array(np.zeros(1))), "weights other than those that came"),
    (TRAIN, edit("arrays", "", weights), "a private answer in arrays"),
    (SCORE, edit("rewards", "0|js|truth", answer), "a private answer in rewards 0|js|truth"),
    (VOTE, edit("votes", "0", first_vote), "a private answer in votes"),
]


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> tuple[World, InProcessGrid]:
    world = make_world(tmp_path_factory.mktemp("honest"), pluralllm__rounds=1)
    grid = talked(world)
    assert audit(grid, world) == []
    return world, grid


@pytest.mark.parametrize(("kind", "change", "finding"), LEAKS, ids=[f"{kind}: {finding}" for kind, _, finding in LEAKS])
def test_a_client_that_leaks_is_caught(kind, change, finding, honest):
    """What the groups really sent, with every reply of one kind changed as by a client that leaks."""
    world, recorded = honest

    def leaking(asked: Crossed, reply: Crossed) -> Crossed:
        if reply.kind != kind:
            return reply
        content = cross_records(reply.message.content)
        change(content, world.rows[0])
        return cross(Message(content, reply_to=asked.message))

    grid = InProcessGrid(recorded.contexts)
    grid.requests = recorded.requests
    grid.replies = [leaking(*pair) for pair in zip(recorded.requests, recorded.replies, strict=True)]
    found = audit(grid, world)
    assert any(f"{kind}: {finding}" in line for line in found), found


def test_an_error_in_its_own_words_is_caught(honest):
    world, grid = honest
    asked = grid.requests[0]
    reply = cross(
        Message(Error(code=wire.FAILED, reason=f"no {DIARY}-1 in {world.rows[0][0]}"), reply_to=asked.message)
    )
    group = next(iter(world.files))
    public = build_catalogue(world.config)
    assert "an error in its own words" in next(structure(asked, reply, group=group, public=public, world=world))
    found = " ".join(private_values(reply, world))
    assert "private text" in found
    assert "as text" in found
