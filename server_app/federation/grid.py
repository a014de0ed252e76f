"""Flower's Grid with another waiting loop: it polls quickly, computes while the groups do, and waits once for a node.

Flower's own `send_and_receive` sleeps three seconds between polls when deployed, and waits for the last node until its
timeout, every time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle

import httpx
from flwr.app import Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import RunNotRunningException
from flwr.superlink.grid import InMemoryGrid

from appa_flwr.protocol.refusals import FAILED
from server_app.federation.foreign import plain

FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 0.005, 0.25, 1.3  # seconds, seconds, factor

LATE_SECONDS = 5.0
"""For a late node, once all others have answered: a node asks for messages every three, and starts a process then."""

LATE_TTL = 600.0
"""Seconds for which a message to a late node stands: one that hung for hours need not catch up with them."""

log = logging.getLogger("appa.server")


class SuperLinkLost(Exception):
    """Flower's SuperLink refuses what it is asked, or cannot be reached."""


class OverlapGrid:
    """Sends through a Grid of Flower's, and waits with short, growing pauses.

    A node that has not answered in time is late until it answers. It is sent all messages, but the wait for it ends
    soon after the others' answers.

    Attributes:
        simulated: nobody is late, and a busy machine may take its time: each wait is bounded by its timeout alone.
        seconds_waited: seconds of the last `send_and_receive` in which the server had nothing else to do.
        answered_after: node -> seconds until its reply to the last `send_and_receive`, but for errors.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.simulated = isinstance(grid, InMemoryGrid)
        self.seconds_waited = 0.0
        self.answered_after: dict[int, float] = {}
        self._late: dict[int, str] = {}  # node -> the last message that it has not answered

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """See Grid."""
        ttl = LATE_TTL if ttl is None and dst_node_id in self._late else ttl
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def online(self) -> frozenset[int]:
        """All nodes that Flower knows to be there."""
        with _superlink():
            return frozenset(self._grid.get_node_ids())

    def get_nodes(self) -> Iterable[NodeInfo]:
        """See Grid."""
        with _superlink():
            return self._grid.get_nodes()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float, meanwhile: Callable[[], None] | None = None
    ) -> list[Message]:
        """Push, compute `meanwhile`, then pull until every reply is in or the time is up.

        Args:
            messages: what to send, at most one to a node.
            timeout: seconds from the push that nobody is waited for longer than.
            meanwhile: what the server has to compute while the nodes work.

        Returns:
            The replies that came, error replies included, in the order they came; each one's `src_node_id` is the node
            that was asked, whatever the reply says of itself.
        """
        self._hear_late()
        outgoing = list(messages)
        with _superlink():
            keys = self._grid.push_messages(outgoing) if outgoing else ()
        asked = {key: message.metadata.dst_node_id for key, message in zip(keys, outgoing, strict=False) if key}
        started, self.answered_after = time.monotonic(), {}
        if meanwhile is not None:
            meanwhile()
        idle_from = now = time.monotonic()
        replies: list[Message] = []
        pause, ends = FIRST_PAUSE, started + timeout
        turns = cycle(list(asked))
        while asked:
            if self._late.keys() >= set(asked.values()):
                ends = min(ends, now + LATE_SECONDS)
            over = now > ends
            # One a turn, since each is a request to the SuperLink; nodes take about as long, so one brings all.
            turn = next(key for key in turns if key in asked)
            came = self._replies_to(turn, asked)
            if came or over:
                came += [reply for key in list(asked) for reply in self._replies_to(key, asked)]
            replies += came
            answers = (reply.metadata.src_node_id for reply in came if not reply.has_error())
            self.answered_after |= dict.fromkeys(answers, time.monotonic() - started)
            if not asked or over:
                break
            pause = FIRST_PAUSE if came else min(pause * GROWTH, LONGEST_PAUSE)
            time.sleep(pause)
            now = time.monotonic()
        self.seconds_waited = time.monotonic() - idle_from
        self._note_late(asked, replies, seconds=now - started)
        return replies

    def _hear_late(self) -> None:
        """Learn which late nodes have answered by now."""
        for node, key in list(self._late.items()):
            self._note_late({}, self._replies_to(key, {key: node}), seconds=0.0)

    def _note_late(self, silent: dict[str, int], replies: Iterable[Message], *, seconds: float) -> None:
        for reply in replies:
            # Flower's own word that a node has not answered is none of the node's.
            if not reply.has_error() or reply.error.code >= FAILED:
                self._late.pop(reply.metadata.src_node_id, None)
        if not self.simulated:
            for key, node in silent.items():
                if node not in self._late:
                    log.warning("node %s has not answered for %.0f s; until it does, others go on", node, seconds)
                self._late[node] = key

    def _replies_to(self, key: str, asked: dict[str, int]) -> list[Message]:
        """The reply to one message, if it has come; the message is taken from those `asked` of nodes then.

        Pulled one by one: the SuperLink knows which node a reply to a message is of, while its own record of who sent
        it and to what it replies is the node's to write.
        """
        try:
            with _superlink():
                replies = self._grid.pull_messages([key])
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
