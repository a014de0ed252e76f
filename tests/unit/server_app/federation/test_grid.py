"""The waiting loop around Flower's grid, and how long it waits for nodes that hang."""

import math
import re
import time
from contextlib import nullcontext
from string import ascii_uppercase
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import GONE, failing, new_request, silent
from flwr.app import Message, RecordDict
from nodes import FakeGrid
from runs import at_work, gathered, replying

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import messages, refusals
from server_app.federation import grid as grids
from server_app.federation import members
from server_app.federation.grid import LATE_SECONDS, LATE_TTL, LONGEST_PAUSE, OverlapGrid, WorkerLost
from server_app.federation.groups import Groups
from server_app.federation.members import JOIN_SECONDS
from server_app.federation.replies import TooFew

TIMEOUT = 600.0
NEVER = math.inf


def named(name):
    return lambda message: Message(messages.pack_reply([name]), reply_to=message)


def send(grid, nodes, *, timeout=5, meanwhile=None):
    """The replies, by the node that was asked; the server works before it reads them."""
    sent = [grid.create_message(RecordDict(), messages.ASK, node) for node in nodes]
    replies = grid.send_and_receive(sent, timeout=timeout)
    if meanwhile is not None:
        meanwhile()
    return {reply.metadata.src_node_id: reply for reply in replies}


def names(replies):
    return [name for reply in replies.values() for name in messages.unpack_reply(reply.content).groups]


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
    replies = send(grid, [1, 2], timeout=1.0)
    assert dict(zip(replies, names(replies), strict=True)) == expected


def test_traffic_counts_equal_messages_once_each_though_they_are_sized_once(monkeypatch):
    sized = []
    monkeypatch.setattr(grids, "num_bytes", lambda content: sized.append(content) or messages.num_bytes(content))
    grid, content = OverlapGrid(FakeGrid({1: named("A"), 2: named("longer"), 3: GONE})), messages.pack_hello("x")
    replies = {
        r.metadata.src_node_id: r
        for r in grid.send_and_receive(
            [
                *(grid.create_message(content, messages.HELLO, node) for node in (1, 2)),
                grid.create_message(messages.pack_hello("another"), messages.HELLO, 3),
            ]
        )
    }
    assert len(sized) == 2 + 2
    assert dict(grid.traffic) == {
        "messages_sent": 3,
        "bytes_sent": 2 * messages.num_bytes(content) + messages.num_bytes(messages.pack_hello("another")),
        "messages_received": 3,
        "bytes_received": sum(messages.num_bytes(replies[node].content) for node in (1, 2)),
    }


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


def test_a_reply_that_flower_cannot_read_is_lost_alone():
    """What a node can do to Flower's reader raises anything: here the pull of the first node's reply does."""

    class Unreadable(FakeGrid):
        def pull_messages(self, message_ids):
            if "message 1" in message_ids:
                raise ValueError(b"junk")
            return super().pull_messages(message_ids)

    grid = OverlapGrid(Unreadable({1: named("A"), 2: named("B")}))
    replies = send(grid, [1, 2])
    assert replies[1].error.reason == "its reply cannot be read (ValueError)"
    assert names({2: replies[2]}) == ["B"]


def test_a_reply_is_at_most_as_large_as_its_own_request_allows():
    """The limit of a request holds for its replies, also after another request with a smaller one was sent."""
    numbers = {1: 9, 2: 10_000}  # 8 bytes each
    reply = lambda m: messages.pack_reply(["A"], np.ones((1, numbers[m.metadata.dst_node_id])))  # noqa: E731
    grid = OverlapGrid(FakeGrid(dict.fromkeys(numbers, lambda m: Message(reply(m), reply_to=m))))
    grid.most_bytes = 50_000
    small = send(grid, numbers, meanwhile=lambda: setattr(grid, "most_bytes", 100))
    assert not small[1].has_error()
    assert re.search(r"\(8\d{4} bytes, where 50000 are enough\)", small[2].error.reason)


# --- nodes that hang, on a clock that only waiting moves --------------------------------------------------------------


class TimedGrid(FakeGrid):
    """Nodes answer so many seconds after they were asked, by the kind of message and its number at that node.

    Attributes:
        now: the clock.
        thawed: node -> when it goes on; what it got before then is answered after that.
    """

    def __init__(self, nodes, seconds):
        super().__init__(nodes)
        self.now, self.seconds, self.thawed = 0.0, seconds, {}
        self._ready = {}

    def push_messages(self, messages):
        messages = list(messages)
        keys = super().push_messages(messages)
        for key, message in zip(keys, messages, strict=True):
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            wait = self.seconds(node, kind, len(self.sent(node, kind)))
            self._ready[key] = max(self.now, self.thawed.get(node, 0.0)) + wait
        return keys

    def pull_messages(self, message_ids):
        return super().pull_messages([key for key in message_ids if self._ready[key] <= self.now])

    def sent(self, node, kind):
        return [m for m in self.pushed if (m.metadata.dst_node_id, m.metadata.message_type) == (node, kind)]

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def timed(monkeypatch):
    """Makes a grid with a clock, of nodes 1, 2, ... with groups A, B, ...; seconds(node, kind, number)."""

    def make(count, seconds):
        grid = TimedGrid({n: replying(ascii_uppercase[n - 1]) for n in range(1, count + 1)}, seconds)
        clock = SimpleNamespace(monotonic=lambda: grid.now, sleep=grid.sleep)
        for module in (grids, members):
            monkeypatch.setattr(module, "time", clock)
        return grid

    return make


def ask(overlap, nodes):
    """Seconds that a message to those of these nodes takes that can be asked."""
    before, there = overlap._grid.now, overlap.get_node_ids() - overlap.late()
    hello = messages.pack_hello("")
    sent = [overlap.create_message(hello, messages.HELLO, node) for node in nodes if node in there]
    list(overlap.send_and_receive(sent, timeout=TIMEOUT))
    return overlap._grid.now - before


def test_a_node_that_hangs_is_waited_for_once_until_it_answers_again(timed):
    grid = timed(3, lambda n, kind, number: 4.0)
    grid.thawed[3] = 705.0
    overlap = OverlapGrid(grid)
    waited = []
    while grid.now < grid.thawed[3]:
        waited.append(ask(overlap, (1, 2, 3)))
    assert waited[0] == pytest.approx(TIMEOUT, abs=LONGEST_PAUSE)
    # The others' messages take 4 s. Once a minute the late node gets one, which takes the patience with it too.
    asked = [round(seconds) for seconds in waited[1:] if round(seconds) != 4]
    assert asked == [4 + LATE_SECONDS] * 2
    assert 22 <= len(waited) <= 25
    grid.sleep(10.0)
    assert [ask(overlap, (1, 2, 3)) for _ in range(3)] == pytest.approx([4.0] * 3, abs=2 * LONGEST_PAUSE)
    assert not overlap._late
    ends = [[message.metadata.ttl == LATE_TTL for message in grid.sent(node, messages.HELLO)] for node in (1, 3)]
    assert (any(ends[0]), ends[1]) == (False, [False, True, True, False, False, False])


def test_flowers_word_that_a_node_is_gone_is_no_answer_of_it(timed):
    grid = timed(2, lambda n, kind, number: NEVER if (n, number) == (2, 1) else 1.0)
    grid.nodes[2] = GONE
    overlap = OverlapGrid(grid)
    for _ in range(2):
        ask(overlap, (1, 2))
    assert set(overlap._late) == {2}
    grid.nodes[2] = lambda message: Message(RecordDict(), reply_to=message)
    ask(overlap, (1, 2))
    assert not overlap._late


def test_a_simulated_node_may_take_as_long_as_it_needs_and_is_seen_to_go_on(timed):
    """Three nodes after one another, each longer than the timeout."""
    each, told = 2 * TIMEOUT, []
    grid = timed(3, lambda n, kind, number: each * n)
    overlap = OverlapGrid(grid)
    overlap.simulated, overlap.progress = True, lambda *step: told.append(step)
    assert [ask(overlap, (1, 2, 3)) for _ in range(2)] == pytest.approx([3 * each] * 2, abs=3 * LONGEST_PAUSE)
    assert not overlap._late
    assert [step[:2] for step in told] == [(1, 3), (2, 3)] * 2
    assert [step[2] for step in told] == pytest.approx([2 * each, each] * 2, rel=1e-3)


DIED = "<class 'ray.exceptions.ActorDiedError'>:<'...\nWorker exit type: SYSTEM_ERROR Worker exit detail: ...'>"


@pytest.mark.parametrize(("code", "raised"), [(0, WorkerLost), (refusals.FAILED, UserError)])
def test_a_simulation_s_join_ends_where_a_worker_has_ended_and_not_for_what_a_group_refuses(code, raised):
    overlap = OverlapGrid(FakeGrid({1: named("A"), 2: failing(code, DIED)}))
    overlap.simulated = True
    with pytest.raises(raised, match="compute: SYSTEM_ERROR W" if raised is WorkerLost else "missing: B"):
        Groups(overlap, Config.load({"run.min-groups": 2})).members.gather(("A", "B"), patience=0.0)


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patience", [0.0, 10.0, 120.0])
@pytest.mark.parametrize("hung", [(2,), (1, 2)])
def test_the_join_ends_when_its_key_says_so(timed, patience, hung):
    grid = timed(2, lambda n, kind, number: NEVER if n in hung else 5.0)
    if len(hung) == 2:
        with pytest.raises(UserError, match="0 groups joined"):
            gathered(grid, ("A", "B"), patience=patience, run__reply_timeout=TIMEOUT)
    else:
        groups = gathered(grid, ("A", "B"), patience=patience, run__reply_timeout=TIMEOUT)
        assert groups.members.present == ("A",)
    assert patience <= grid.now <= max(patience, JOIN_SECONDS) + LATE_SECONDS + 2 * members.JOIN_PAUSE


def test_nodes_are_greeted_until_all_are_there(timed):
    grid = timed(3, lambda n, kind, number: 0.0)
    grid.get_node_ids = lambda: [1, 3] if grid.now < 1.0 else [1, 2, 3]
    assert gathered(grid, ("A", "B"), patience=60.0).members.present == ("A", "B")
    assert grid.now == pytest.approx(1.0, abs=0.1)
    assert sorted(message.metadata.dst_node_id for message in grid.pushed) == [1, 2, 3]  # each once


def working(grid):
    return at_work(grid, ("A", "B"), patience=10.0, run__reply_timeout=TIMEOUT)


def test_a_node_that_hung_while_the_others_were_set_up_is_set_up_before_it_is_asked(timed):
    grid = timed(2, lambda n, kind, number: NEVER if (n, kind, number) == (2, messages.TARGETS, 1) else 1.0)
    groups = working(grid)
    assert groups.ask(new_request()).groups == ("A", "B")
    assert len(grid.sent(2, messages.TARGETS)) == 2
    assert len(grid.sent(1, messages.TARGETS)) == 1


def test_a_node_that_hangs_whenever_it_is_set_up_is_waited_for_at_growing_pauses(timed):
    grid = timed(2, lambda n, kind, number: NEVER if n == 2 and kind != messages.HELLO else 1.0)
    groups, waited = working(grid), [grid.now]
    for _ in range(3):
        before = grid.now
        assert groups.ask(new_request()).groups == ("A",)
        waited.append(grid.now - before)
    # two greetings, two catalogues and A's targets; then A's numbers alone, and a greeting and a catalogue
    assert waited == pytest.approx([2 * TIMEOUT + 3.0, 1.0, TIMEOUT + 2.0, 1.0], abs=8 * LONGEST_PAUSE)
    assert grid.sent(2, messages.ASK) == []  # it has no catalogue


REFUSING = failing(refusals.MAY_NOT_LEAVE["rewards"])


@pytest.mark.parametrize(
    ("ill", "fault", "healed", "answered", "waited"),
    [
        (17, GONE, 60.0, 20, 61.5),  # .5 + 1 + 2 + 4 + 8 + 16 + 30
        (17, GONE, NEVER, 0, TIMEOUT),
        (17, REFUSING, NEVER, 0, 0.0),  # nobody will come
        (11, GONE, NEVER, 0, TIMEOUT),
        (10, GONE, NEVER, 10, 0.0),
    ],
)
def test_half_of_twenty_groups_must_answer_and_are_waited_for(timed, warnings, ill, fault, healed, answered, waited):
    grid = timed(20, lambda n, kind, number: 0.0)
    groups = at_work(grid, run__min_groups=0, run__reply_timeout=TIMEOUT)
    for n in range(1, ill + 1):
        grid.nodes[n] = lambda m, well=grid.nodes[n]: (well if grid.now > healed else fault)(m)
    with nullcontext() if answered else pytest.raises(TooFew, match=rf"only {20 - ill} of 20 .* at least 10 must"):
        assert len(groups.ask(new_request()).groups) == answered
    assert grid.now == pytest.approx(waited, abs=20 * LONGEST_PAUSE)
    assert len(grid.sent(20, messages.ASK)) == 1  # it has answered
    assert any("asked again for 600 s" in line for line in warnings()) == (waited > 0)


def test_the_seconds_of_a_request_are_those_in_which_the_server_had_nothing_else_to_do(timed):
    grid = timed(2, lambda n, kind, number: 5.0 * n)
    groups = working(grid)
    request = groups.pending(new_request())
    replies = groups.grid.send_and_receive(request.messages, timeout=TIMEOUT)
    grid.sleep(7.0)  # the server's own work
    request.read(replies)
    assert groups.grid.seconds_waited == pytest.approx(3.0, abs=LONGEST_PAUSE)
