"""A Flower Grid that polls quickly, lets the server compute while the groups score, and stalls once for a hung node.

Flower's own `send_and_receive` sleeps three seconds between polls when deployed, and waits for the last node until its
timeout. This one delegates every call and only replaces that waiting loop.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import httpx
from flwr.app import Array, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_object_body
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.run import Run, RunNotRunningException
from flwr.superlink.grid import InMemoryGrid, http_grid

from appa_flwr.protocol import wire
from server_app.federation.foreign import plain

FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 0.005, 0.25, 1.3  # seconds, seconds, factor
# A node that hangs is waited for so many times as long as such a message took when all answered, or, before that, until
# half had answered; and this long at least.
PATIENCE, LEAST_SECONDS = 10.0, 60.0
LARGEST_REPLY = 1 << 28  # bytes
UPLOAD_SECONDS = 30.0  # from when a node says that it has answered until all of the answer is there

log = logging.getLogger("appa.server")


class SuperLinkLost(Exception):
    """Flower's SuperLink refuses what it is asked, or cannot be reached."""


@dataclass
class _Stuck:
    """A node that did not answer in time: the roll call it was sent since, and when; and how many of these it must
    answer before it is asked anything else again.
    """

    call: str | None
    called: float
    calls: int


def _bounded(pull: Callable[..., dict[str, bytes]]) -> Callable[..., dict[str, bytes]]:
    """Flower's way of fetching a reply, which waits two hours for its parts and holds whatever a node sends.

    Flower makes an error of an `ObjectPullError`: that node's reply is lost, and nothing else.
    """

    def pull_bounded(object_ids: list[str], pull_object_fn: Callable[[str], bytes], **given: Any) -> dict[str, bytes]:
        left = LARGEST_REPLY

        def fetch(object_id: str) -> bytes:
            nonlocal left
            content = pull_object_fn(object_id)
            left -= len(content)
            # An array names its pieces, and one that is named a million times stands for terabytes.
            if left < 0 or (content.startswith(b"Array ") and _repeats(content)):
                raise ObjectPullError(object_id, "the reply is too large")
            return content

        return pull(object_ids, fetch, max_time=UPLOAD_SECONDS, **given)

    return pull_bounded


def _repeats(content: bytes) -> bool:
    pieces = json.loads(get_object_body(content, Array))["arraychunk_ids"]
    return len(pieces) != len(set(pieces))


_flower: Any = http_grid
_flower.pull_objects = _bounded(_flower.pull_objects)


class OverlapGrid(Grid):
    """Delegates to another Grid; waits for replies with short, growing pauses, and for nobody much longer than usual.

    A node that did not answer in time is sent nothing but a roll call until it answers that. It has to answer twice as
    many each time that it then hangs again.

    Attributes:
        simulated: nobody hangs, and a busy machine may take its time: each wait is bounded by its timeout alone.
        seconds_waited: seconds of the last `send_and_receive` in which the server had nothing else to do.
        answered_after: node -> seconds until its reply to the last `send_and_receive`, but for errors.
        members: the nodes of the run, once it is known who takes part. Flower's stock strategies ask all nodes there
            are, and wait without end for one that has gone; told of the members, they ask just these, and one that
            has gone answers with an error.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.simulated = isinstance(grid, InMemoryGrid)
        self.seconds_waited = 0.0
        self.answered_after: dict[int, float] = {}
        self.members: tuple[int, ...] | None = None
        self._took: dict[str, float] = {}  # most seconds until all had answered, by kind of message
        self._stuck: dict[int, _Stuck] = {}
        self._lapses: Counter[int] = Counter()  # of a node, since it last answered in time

    @property
    def stuck(self) -> frozenset[int]:
        """Nodes that are sent nothing but roll calls."""
        return frozenset(self._stuck)

    def set_run(self, run: Run) -> None:
        """See Grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """See Grid."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """See Grid."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """The members, or all nodes while they are unknown."""
        if self.members is not None:
            return self.members
        with _superlink():
            return self._grid.get_node_ids()

    def online(self) -> frozenset[int]:
        """All nodes that Flower knows to be there, members or not."""
        with _superlink():
            return frozenset(self._grid.get_node_ids())

    def get_nodes(self) -> Iterable[NodeInfo]:
        """See Grid."""
        with _superlink():
            return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        with _superlink():
            return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
        with _superlink():
            return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Message]:
        """Push, compute `meanwhile`, then pull until every reply is in or the time is up.

        Args:
            messages: what to send, all of one kind; those to nodes that are stuck are left out, and none at all is
                answered at once.
            timeout: seconds from the push that nobody is waited for longer than.
            meanwhile: what the server has to compute while the nodes work.

        Returns:
            The replies that came, error replies included, in the order they came; each one's `src_node_id` is the node
            that was asked, whatever the reply says of itself.
        """
        outgoing = list(messages)
        self._poll_stuck()
        outgoing = [message for message in outgoing if message.metadata.dst_node_id not in self._stuck]
        keys = self.push_messages(outgoing) if outgoing else ()
        asked = {key: message.metadata.dst_node_id for key, message in zip(keys, outgoing, strict=False) if key}
        kind = outgoing[0].metadata.message_type if outgoing else ""
        started, self.answered_after = time.monotonic(), {}
        if meanwhile is not None:
            meanwhile()
        idle_from = now = time.monotonic()
        replies: list[Message] = []
        half: float | None = None  # seconds until half of the nodes had answered
        pause = FIRST_PAUSE
        turns = cycle(list(asked))
        while asked:
            late = now - started > self._patience(kind, math.inf if timeout is None else timeout, half)
            # One a turn, since each is a request to the SuperLink; nodes take about as long, so one brings all.
            turn = next(key for key in turns if key in asked)
            came = self._reply_to(turn, asked)
            if came or late:
                came += [reply for key in list(asked) for reply in self._reply_to(key, asked)]
            replies += came
            answers = (reply.metadata.src_node_id for reply in came if not reply.has_error())
            self.answered_after |= dict.fromkeys(answers, time.monotonic() - started)
            if not asked or late:
                break
            if half is None and len(replies) >= len(asked):
                half = now - started
            pause = FIRST_PAUSE if came else min(pause * GROWTH, LONGEST_PAUSE)
            time.sleep(pause)
            now = time.monotonic()
        self.seconds_waited = time.monotonic() - idle_from
        for reply in replies:
            self._lapses.pop(reply.metadata.src_node_id, None)
        for node in asked.values():
            self._leave_out(node, seconds=now - started)
        if replies and len(replies) == len(outgoing):
            self._took[kind] = max(self._took.get(kind, 0.0), now - started)
        return replies

    def _patience(self, kind: str, timeout: float, half: float | None) -> float:
        usual = self._took.get(kind, half)
        if self.simulated or usual is None:
            return timeout
        return min(timeout, max(LEAST_SECONDS, PATIENCE * usual))

    def _leave_out(self, node: int, *, seconds: float) -> None:
        """Send a node nothing but roll calls from now on: the message may be lost, and the node be well."""
        if self.simulated:
            return
        log.warning("node %s has not answered for %.0f s; it is left out until it does", node, seconds)
        self._stuck[node] = _Stuck(self._call(node), time.monotonic(), 2 ** self._lapses[node])
        self._lapses[node] += 1

    def _call(self, node: int) -> str | None:
        """Send a node a roll call, for whose reply nobody waits."""
        return next(iter(self.push_messages([self.create_message(RecordDict(), wire.ROLL_CALL, node, "0")])), None)

    def _poll_stuck(self) -> None:
        """Have those take part again that have answered by now."""
        for node, stuck in list(self._stuck.items()):
            if stuck.call and self._reply_to(stuck.call, {stuck.call: node}):
                stuck.calls -= 1
                if not stuck.calls:
                    log.warning("node %s answers again", node)
                    del self._stuck[node]
                    continue
            elif time.monotonic() - stuck.called < PATIENCE * LEAST_SECONDS:  # then it is lost too
                continue
            stuck.call, stuck.called = self._call(node), time.monotonic()

    def _reply_to(self, key: str, asked: dict[str, int]) -> list[Message]:
        """The reply to one message, if it has come; the message is taken from those `asked` of nodes then.

        Pulled one by one: the SuperLink knows which node a reply to a message is of, while its own record of who sent
        it and to what it replies is the node's to write.
        """
        try:
            replies = self.pull_messages([key])
        except SuperLinkLost:
            raise
        except Exception as error:  # what a node can do to Flower's reader has no one class
            log.warning("node %s: its reply cannot be read (%s)", asked.pop(key), type(error).__name__)
            return []
        for reply in replies:
            if reply.metadata.reply_to_message_id == key:
                reply.metadata.__dict__["_src_node_id"] = asked.pop(key)
                if reply.has_error():
                    reply.error = Error(reply.error.code, plain(reply.error.reason or ""))
                return [reply]
        return []


@contextmanager
def _superlink() -> Iterator[None]:
    """Tell apart what goes wrong between Flower's grid and its SuperLink; Flower has tried again by then."""
    try:
        yield
    except (httpx.HTTPError, RunNotRunningException) as error:
        raise SuperLinkLost(f"{type(error).__name__}: {error}".rstrip(": ")) from error
