"""The waiting loop around Flower's grid."""

from __future__ import annotations

import time
from types import SimpleNamespace

import httpx
import pytest
from fakes import FakeGrid
from flwr.app import Message, RecordDict

from appa_flwr.protocol import messages
from server_app.federation import grid as grids
from server_app.federation.grid import OverlapGrid, SuperLinkLost


def silent(message):
    return None


def named(name):
    return lambda message: Message(messages.pack_reply([name]), reply_to=message)


def send(grid, nodes, *, timeout=5, meanwhile=None):
    return grid.send(messages.ASK, dict.fromkeys(nodes, RecordDict()), timeout=timeout, meanwhile=meanwhile)


def names(replies):
    return [name for reply in replies.values() for name in messages.unpack_reply(reply).groups]


def test_meanwhile_runs_once_between_push_and_the_first_poll():
    fake = FakeGrid({1: named("A"), 2: named("B")}, polls_to_wait={2: 2})
    grid = OverlapGrid(fake)
    send(grid, [1, 2], meanwhile=lambda: fake.events.append("meanwhile"))
    assert fake.events == ["push", "meanwhile", *["pull"] * 4]  # one for A, three for B


def forged(name, **written):
    """A node that writes what it likes about who sent its reply, and to what."""

    def answer(message):
        reply = named(name)(message)
        reply.metadata.__dict__.update(written)
        return reply

    return answer


def test_a_reply_is_of_the_node_that_was_asked_whatever_it_says_of_itself():
    fake = FakeGrid({1: forged("A", _src_node_id=2), 2: named("B")}, polls_to_wait={2: 3})
    grid = OverlapGrid(fake)
    replies = send(grid, [1, 2])
    assert names(replies) == ["A", "B"]
    assert [*replies] == [1, 2]


def test_a_reply_that_says_to_be_to_another_s_message_is_none():
    fake = FakeGrid({1: forged("A", _reply_to_message_id="message 2"), 2: named("B")}, polls_to_wait={2: 3})
    grid = OverlapGrid(fake)
    assert names(send(grid, [1, 2], timeout=0.2)) == ["B"]


def test_replies_to_a_server_that_computed_beyond_the_timeout_are_returned_too():
    fake = FakeGrid({1: named("A"), 2: named("B")})
    grid = OverlapGrid(fake)
    replies = send(grid, [1, 2], timeout=0.001, meanwhile=lambda: time.sleep(0.02))
    assert sorted(names(replies)) == ["A", "B"]


@pytest.mark.parametrize(("pushed", "expected"), [(lambda key: key.endswith("1") and key, ["A"]), (None, [])])
def test_a_message_that_could_not_be_pushed_is_not_waited_for(pushed, expected):
    """Flower says so by no key; by no keys at all where the messages are too large."""

    class Lossy(FakeGrid):
        def push_messages(self, messages):
            keys = super().push_messages(messages)
            return [pushed(key) for key in keys] if pushed else []

    grid = OverlapGrid(Lossy({1: named("A"), 2: named("B")}))
    assert names(send(grid, [1, 2], timeout=1e9)) == expected


def test_pauses_grow_and_begin_anew_with_every_reply(monkeypatch):
    pauses = []
    monkeypatch.setattr(grids.time, "sleep", pauses.append)
    fake = FakeGrid({1: named("A"), 2: named("B")}, polls_to_wait={1: 2, 2: 40})
    send(OverlapGrid(fake), [1, 2], timeout=1e9)
    # empty polls in turn, A, B, A, B, then A's reply, then empty polls until B's
    assert pauses[:4] == sorted(set(pauses[:4]))
    assert pauses[4] == grids.FIRST_PAUSE
    assert pauses[4:] == sorted(pauses[4:])
    assert pauses[-1] == grids.LONGEST_PAUSE


def test_whoever_has_answered_is_heard_when_the_time_is_up(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(grids, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda pause: None))
    fake = FakeGrid({1: silent, 2: silent, 3: named("C")})
    assert names(send(OverlapGrid(fake), [1, 2, 3], timeout=1.0)) == ["C"]


def test_a_superlink_that_cannot_be_reached_is_no_nodes_fault():
    class Lost(FakeGrid):
        def pull_messages(self, message_ids):
            raise httpx.ConnectError("refused")

    grid = OverlapGrid(Lost({1: named("A")}))
    with pytest.raises(SuperLinkLost, match="ConnectError: refused"):
        send(grid, [1])
