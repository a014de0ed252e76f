"""The waiting loop around Flower's grid."""

import time
from types import SimpleNamespace

import pytest
from fakes import FakeGrid, silent
from flwr.app import Message, RecordDict

from appa_flwr.protocol import messages
from server_app.federation import grid as grids
from server_app.federation.grid import OverlapGrid


def named(name):
    return lambda message: Message(messages.pack_reply([name]), reply_to=message)


def send(grid, nodes, *, timeout=5, meanwhile=None):
    return grid.send(messages.ASK, dict.fromkeys(nodes, RecordDict()), timeout=timeout, meanwhile=meanwhile)


def names(replies):
    return [name for reply in replies.values() for name in messages.unpack_reply(reply).groups]


def forged(name, **written):
    """A node that writes what it likes about who sent its reply, and to what."""

    def answer(message):
        reply = named(name)(message)
        reply.metadata.__dict__.update(written)
        return reply

    return answer


@pytest.mark.parametrize(
    ("written", "expected"),
    [({"_src_node_id": 2}, {1: "A", 2: "B"}), ({"_reply_to_message_id": "message 2"}, {2: "B"})],
)
def test_a_reply_is_of_the_node_that_was_asked_and_to_its_message_whatever_it_says_of_itself(written, expected):
    grid = OverlapGrid(FakeGrid({1: forged("A", **written), 2: named("B")}, polls_to_wait={2: 3}))
    replies = send(grid, [1, 2], timeout=0.2)
    assert dict(zip(replies, names(replies), strict=True)) == expected


def test_replies_to_a_server_that_computed_beyond_the_timeout_are_returned_too():
    grid = OverlapGrid(FakeGrid({1: named("A"), 2: named("B")}))
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


def test_a_reply_that_flower_cannot_read_is_lost_alone(caplog):
    """What a node can do to Flower's reader raises anything: here the pull of the first node's reply does."""

    class Unreadable(FakeGrid):
        def pull_messages(self, message_ids):
            if "message 1" in message_ids:
                raise ValueError(b"junk")
            return super().pull_messages(message_ids)

    grid = OverlapGrid(Unreadable({1: named("A"), 2: named("B")}))
    assert names(send(grid, [1, 2])) == ["B"]
    assert caplog.messages == ["node 1: its reply cannot be read (ValueError)"]
