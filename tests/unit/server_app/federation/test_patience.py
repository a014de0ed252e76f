"""How long the server waits for nodes that hang, on a clock that only waiting moves."""

import math
from types import SimpleNamespace

import pytest
from fake_groups import at_work, gathered, new_request, replying
from fakes import FakeGrid
from flwr.app import Error, Message, RecordDict

from appa_flwr.core.errors import UserError
from appa_flwr.protocol import messages
from server_app.federation import grid as grids
from server_app.federation import members
from server_app.federation.grid import LATE_SECONDS, LATE_TTL, LONGEST_PAUSE, OverlapGrid
from server_app.federation.members import JOIN_SECONDS

TIMEOUT = 600.0
NEVER = math.inf


class TimedGrid(FakeGrid):
    """Nodes answer so many seconds after they were asked, by the kind of message and its number at that node.

    Attributes:
        now: the clock.
        thawed: node -> when it goes on; what it got before then is answered after that.
        in_turn: whether a node begins with a message once it has answered the one before.
    """

    in_turn = False

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
            if self.in_turn and wait < NEVER:
                self.thawed[node] = self._ready[key]
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
        grid = TimedGrid({n: replying("ABCDE"[n - 1]) for n in range(1, count + 1)}, seconds)
        clock = SimpleNamespace(monotonic=lambda: grid.now, sleep=grid.sleep)
        for module in (grids, members):
            monkeypatch.setattr(module, "time", clock)
        return grid

    return make


def ask(overlap, nodes):
    """Seconds that a message to those of these nodes takes that can be asked."""
    before, there = overlap._grid.now, overlap.online() - overlap.busy()
    hello = messages.pack_hello("", "")
    overlap.send(messages.HELLO, {node: hello for node in nodes if node in there}, timeout=TIMEOUT)
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


def test_a_node_that_takes_longer_than_the_others_catches_up_after_its_messages_were_lost(timed):
    """It works on one message after the other, slower than the server asks."""
    grid = timed(2, lambda n, kind, number: 2.0 if n == 1 else NEVER if number < 3 else 12.0)
    grid.in_turn = True
    overlap = OverlapGrid(grid)
    for _ in range(60):
        ask(overlap, (1, 2))
    assert not overlap._late
    assert ask(overlap, (1, 2)) == pytest.approx(12.0, abs=LONGEST_PAUSE)


def test_a_hung_node_gets_one_message_a_minute_which_then_ends(timed):
    grid = timed(2, lambda n, kind, number: 1.0 if n == 1 else NEVER)
    overlap = OverlapGrid(grid)
    for _ in range(50):
        ask(overlap, (1, 2))
    assert [message.metadata.ttl == LATE_TTL for message in grid.sent(2, messages.HELLO)] == [False, True]
    assert not any(message.metadata.ttl == LATE_TTL for message in grid.sent(1, messages.HELLO))


def test_flowers_word_that_a_node_is_gone_is_no_answer_of_it(timed):
    grid = timed(2, lambda n, kind, number: NEVER if (n, number) == (2, 1) else 1.0)
    grid.nodes[2] = lambda message: Message(Error(5, "node is gone"), reply_to=message)
    overlap = OverlapGrid(grid)
    for _ in range(2):
        ask(overlap, (1, 2))
    assert set(overlap._late) == {2}
    grid.nodes[2] = lambda message: Message(RecordDict(), reply_to=message)
    ask(overlap, (1, 2))
    assert not overlap._late


def test_in_a_simulation_everybody_is_waited_for_every_time(timed):
    grid = timed(2, lambda n, kind, number: 1.0 if n == 1 else NEVER)
    overlap = OverlapGrid(grid)
    overlap.simulated = True
    assert [ask(overlap, (1, 2)) for _ in range(2)] == pytest.approx([TIMEOUT] * 2, abs=LONGEST_PAUSE)


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
        assert groups.present == ("A",)
    assert patience <= grid.now <= max(patience, JOIN_SECONDS) + LATE_SECONDS + 2 * members.JOIN_PAUSE


def working(grid):
    return at_work(gathered(grid, ("A", "B"), patience=10.0, run__reply_timeout=TIMEOUT))


def test_a_node_that_hung_while_the_others_were_set_up_is_set_up_before_it_is_asked(timed):
    grid = timed(2, lambda n, kind, number: NEVER if (n, kind, number) == (2, messages.TARGETS, 1) else 1.0)
    groups = working(grid)
    assert groups.ask(new_request()).groups == ("A", "B")
    assert len(grid.sent(2, messages.TARGETS)) == 2
    assert len(grid.sent(1, messages.TARGETS)) == 1


def test_a_node_that_hangs_whenever_it_is_set_up_is_waited_for_twice(timed):
    grid = timed(2, lambda n, kind, number: NEVER if n == 2 and kind != messages.HELLO else 1.0)
    groups, waited = working(grid), [grid.now]
    for _ in range(3):
        before = grid.now
        assert groups.ask(new_request()).groups == ("A",)
        waited.append(grid.now - before)
    # two greetings, two catalogues and A's targets; then A's numbers alone
    assert waited == pytest.approx([2 * TIMEOUT + 3.0, 1.0, 1.0, 1.0], abs=8 * LONGEST_PAUSE)
    assert grid.sent(2, messages.ASK) == []  # it has no catalogue


def test_the_seconds_of_a_request_are_those_in_which_the_server_had_nothing_else_to_do(timed):
    grid = timed(2, lambda n, kind, number: 5.0 * n)
    groups = working(grid)
    groups.ask(new_request(), meanwhile=lambda: grid.sleep(7.0))
    assert groups.seconds_waited == pytest.approx(3.0, abs=LONGEST_PAUSE)
