"""Flower's Grid with another waiting loop: it polls quickly, computes while the groups do, and waits once for a node.

Flower's own `send_and_receive` sleeps three seconds between polls when deployed, and waits for the last node until its
timeout, every time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle

import httpx
from flwr.app import Error, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import RunNotRunningException
from flwr.superlink.grid import InMemoryGrid

from appa_flwr.protocol.refusals import FAILED
from server_app.federation.foreign import plain

FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 0.005, 0.25, 1.3  # seconds, seconds, factor

LATE_SECONDS = 5.0
"""For a late node, once all others have answered: a node asks for messages every three, and starts a process then."""

LATE_TTL = 60.0
"""Seconds for which a message to a late node stands. It gets no other meanwhile, or it would have to catch up."""

log = logging.getLogger("appa.server")


class SuperLinkLost(Exception):
    """Flower's SuperLink refuses what it is asked, or cannot be reached."""


class OverlapGrid:
    """Sends through a Grid of Flower's, and waits with short, growing pauses.

    A node that has not answered in time is late until it answers. The wait for it ends soon after the others' answers.

    Attributes:
        simulated: nobody is late, and a busy machine may take its time: each wait is bounded by its timeout alone.
        seconds_waited: seconds, added up until somebody sets them to 0, in which the server had nothing else to do.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.simulated = isinstance(grid, InMemoryGrid)
        self.seconds_waited = 0.0
        self._late: dict[int, tuple[str, float]] = {}  # node -> the message that it has to answer, and its end

    def online(self) -> frozenset[int]:
        """All nodes that Flower knows to be there."""
        with _superlink():
            return frozenset(self._grid.get_node_ids())

    def busy(self) -> frozenset[int]:
        """The late nodes that still have a message to answer, and are to get no other."""
        for node, (key, _) in list(self._late.items()):
            self._note_answers(self._pull([key], {key: node}))
        now = time.monotonic()
        return frozenset(node for node, (_, ends) in self._late.items() if now < ends)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """See Grid."""
        with _superlink():
            return self._grid.get_nodes()

    def send(
        self,
        kind: str,
        contents: Mapping[int, RecordDict],
        *,
        timeout: float,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, RecordDict | Error]:
        """Push a message to each node, compute `meanwhile`, then pull until every reply is in or the time is up.

        Args:
            kind: type of the messages.
            contents: node -> what it is sent.
            timeout: seconds from the push that nobody is waited for longer than.
            meanwhile: what the server has to compute while the nodes work.

        Returns:
            The node that was asked, whatever its reply says of itself -> that reply, in the order they arrived.
        """
        outgoing = [
            self._grid.create_message(content, kind, node, "", LATE_TTL if node in self._late else None)
            for node, content in contents.items()
        ]
        with _superlink():
            keys = self._grid.push_messages(outgoing) if outgoing else ()
        silent = {key: node for key, node in zip(keys, contents, strict=False) if key}
        started = time.monotonic()
        if meanwhile is not None:
            meanwhile()
        idle_from = now = time.monotonic()
        replies: dict[int, RecordDict | Error] = {}
        pause, ends, turns = FIRST_PAUSE, started + timeout, cycle(list(silent))
        while silent:
            if self._late.keys() >= set(silent.values()):
                ends = min(ends, now + LATE_SECONDS)
            over = now > ends
            # One a turn, since each is a request to the SuperLink; nodes take about as long, so one brings all.
            new = self._pull([next(key for key in turns if key in silent)], silent)
            if new or over:
                new |= self._pull(list(silent), silent)
            replies |= new
            if not silent or over:
                break
            pause = FIRST_PAUSE if new else min(pause * GROWTH, LONGEST_PAUSE)
            time.sleep(pause)
            now = time.monotonic()
        self.seconds_waited += time.monotonic() - idle_from
        self._note_answers(replies)
        for key, node in silent.items() if not self.simulated else ():
            if node not in self._late:
                log.warning("node %s has not answered for %.0f s; until it does, others go on", node, now - started)
            self._late[node] = key, started + LATE_TTL
        return replies

    def _note_answers(self, replies: Mapping[int, RecordDict | Error]) -> None:
        for node, reply in replies.items():
            # Flower's own word that a node has not answered is none of the node's.
            if not isinstance(reply, Error) or reply.code >= FAILED:
                self._late.pop(node, None)

    def _pull(self, keys: Iterable[str], silent: dict[str, int]) -> dict[int, RecordDict | Error]:
        """The replies to some messages, as far as they are there; their nodes are taken from the silent ones.

        Pulled one by one: the SuperLink knows which node a reply to a message is of, while its own record of who sent
        it and to what it replies is the node's to write.
        """
        replies: dict[int, RecordDict | Error] = {}
        for key in keys:
            try:
                with _superlink():
                    pulled = self._grid.pull_messages([key])
            except SuperLinkLost:
                raise
            except Exception as error:  # what a node can do to Flower's reader has no one class
                log.warning("node %s: its reply cannot be read (%s)", silent.pop(key), type(error).__name__)
                continue
            for reply in pulled:
                if reply.metadata.reply_to_message_id == key and key in silent:
                    failed = Error(reply.error.code, plain(reply.error.reason or "")) if reply.has_error() else None
                    replies[silent.pop(key)] = failed or reply.content
        return replies


@contextmanager
def _superlink() -> Iterator[None]:
    """Tell apart what goes wrong between Flower's grid and its SuperLink; Flower has tried again by then."""
    try:
        yield
    except (httpx.HTTPError, RunNotRunningException) as error:
        raise SuperLinkLost(f"{type(error).__name__}: {error}".rstrip(": ")) from error
