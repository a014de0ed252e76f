"""The audit of `test_privacy.py` itself: clients that leak on purpose are caught.

Axis letters: Q public questions, K options.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from audit import DIARY, World, asked_for, audit, make_world, private_values, structure, talked
from flwr.app import Array, ConfigRecord, Error, Message, RecordDict
from in_process import Crossed, InProcessGrid, cross, cross_records

from appa_flwr.protocol import asks, messages, refusals
from server_app.questions import build_catalogue

Change = Callable[[RecordDict, np.ndarray], None]


def put(record: str, key: str, value: object) -> Change:
    """Set an entry of a record, or a whole record where none is named; functions are given a private answer."""

    def change(content: RecordDict, row: np.ndarray) -> None:
        (content[record] if record else content)[key] = value(row) if callable(value) else value

    return change


def at(start: int, value: Callable[[np.ndarray], np.ndarray] | float) -> Change:
    """Replace the group's numbers from a place on; functions are given a private answer."""

    def change(content: RecordDict, row: np.ndarray) -> None:
        arrays = content.array_records["arrays"]
        changed, numbers = arrays["numbers"].numpy().copy(), np.ravel(value(row) if callable(value) else value)
        changed[0, start : start + len(numbers)] = numbers
        arrays["numbers"] = Array(changed)

    return change


SCORES, VOTES, REWARDS, UPDATE = asks.SCORES, asks.VOTES, asks.REWARDS, asks.UPDATE
LEAKS = [
    (REWARDS, put("", "notes", ConfigRecord({"x": 1})), "records"),
    (REWARDS, put("arrays", "more", lambda row: Array(row[None])), "numbers that were not asked for"),
    (messages.HELLO, put("head", "share", lambda row: row.tolist()), "fields"),
    (messages.HELLO, put("head", "groups", ["Avaria", f"{DIARY}-1"]), "the private text"),
    (VOTES, put("head", "groups", lambda row: [f"it is {row[0]:.7f}"]), "a private answer as text"),
    (messages.CATALOGUE, put("head", "answered", lambda row: [float(row[0])]), "a private share in head"),
    (messages.CATALOGUE, put("head", "may", ["a yes"]), "fields"),
    (SCORES, at(1, lambda row: row[:1]), "a private share in arrays"),
    (asks.VALIDATION, at(1, lambda row: row[:1]), "a private share in arrays"),
    (UPDATE, at(7, np.copy), "a private answer in arrays"),
    (REWARDS, at(3, np.copy), "a private answer in arrays"),
    (REWARDS, at(3, 1.5), "js targets reward outside"),
    (VOTES, at(0, np.copy), "a private answer in arrays"),
    (VOTES, at(0, 0.5), "a vote that is none"),
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
        if asked_for(asked) != kind:
            return reply
        content = cross_records(reply.message.content)
        change(content, world.rows[0])
        return cross(Message(content, reply_to=asked.message))

    grid = InProcessGrid(recorded.contexts)
    grid.requests = recorded.requests
    grid.replies = [leaking(*pair) for pair in zip(recorded.requests, recorded.replies, strict=True)]
    lines = audit(grid, world)
    assert any(f"{kind}: {finding}" in line for line in lines), lines
    assert [line.split(":")[0] for line in lines if "ledger" in line] == [*world.files]


def test_an_error_in_its_own_words_is_caught(honest):
    world, grid = honest
    asked = grid.requests[0]
    reason = f"no {DIARY}-1 in {world.rows[0][0]}"
    reply = cross(Message(Error(code=refusals.FAILED, reason=reason), reply_to=asked.message))
    group, public = next(iter(world.files)), build_catalogue(world.config)
    assert "an error in its own words" in next(structure(asked, reply, group=group, public=public))
    lines = " ".join(private_values(asked, reply, world))
    assert "private text" in lines
    assert "as text" in lines
