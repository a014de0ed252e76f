"""Flower's Grid with another waiting loop: short polls, server work during the wait, one full wait for a late node.

Flower's own `send_and_receive` sleeps three seconds between polls when deployed, and waits for the last node until the
timeout in every call.
"""

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
"""Wait for late nodes once all others have answered: a node polls every three seconds, and then starts a process."""

LATE_TTL = 60.0
"""Lifetime of a message to a late node, in seconds. The node gets no other message meanwhile, so none pile up."""

Meanwhile = Callable[[], None] | None
"""Work of the server to run while the nodes work."""

log = logging.getLogger("appa.server")


class SuperLinkLost(Exception):
    """Flower's SuperLink refuses requests or cannot be reached."""


class OverlapGrid:
    """Sends through Flower's Grid, and waits with short, growing pauses.

    A node that has not answered in time is late until it answers. Waits for late nodes end soon after other replies.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.simulated = isinstance(grid, InMemoryGrid)  # its nodes are never late; only the timeout limits a wait
        self.seconds_waited = 0.0  # that the server spent idle in waits, added up until the caller sets them to 0
        self._late: dict[int, tuple[str, float]] = {}  # node -> id of its unanswered message, and when that ends

    def online(self) -> frozenset[int]:
        """All nodes that are online according to Flower."""
        with _superlink():
            return frozenset(self._grid.get_node_ids())

    def busy(self) -> frozenset[int]:
        """Late nodes that still have a message to answer, and must not get another."""
        for node, (key, _) in list(self._late.items()):
            self._note_answers(self._pull([key], {key: node}))
        now = time.monotonic()
        return frozenset(node for node, (_, ends) in self._late.items() if now < ends)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """See Grid."""
        with _superlink():
            return self._grid.get_nodes()

    def send(
        self, kind: str, contents: Mapping[int, RecordDict], *, timeout: float, meanwhile: Meanwhile = None
    ) -> dict[int, RecordDict | Error]:
        """Push a message to each node, run `meanwhile`, then pull until all replies have arrived or time is up.

        `timeout` is the longest wait for a reply, in seconds from the push. Returns the replies by the node that was
        asked, in order of arrival. The sender named in a reply is ignored.
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
            # One pull per turn, as each is a request. Nodes take equally long, so after one reply all are pulled.
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
            # Flower's own error for a missing reply is not a reply of the node.
            if not isinstance(reply, Error) or reply.code >= FAILED:
                self._late.pop(node, None)

    def _pull(self, keys: Iterable[str], silent: dict[str, int]) -> dict[int, RecordDict | Error]:
        """Pull the replies to some messages that have arrived; remove their nodes from `silent`.

        Replies are pulled one by one: the SuperLink knows which node answers a message, while the node itself writes
        the sender and the message id in its reply.
        """
        replies: dict[int, RecordDict | Error] = {}
        for key in keys:
            try:
                with _superlink():
                    pulled = self._grid.pull_messages([key])
            except SuperLinkLost:
                raise
            except Exception as error:  # a node's reply can make Flower's reader raise errors of any class
                log.warning("node %s: its reply cannot be read (%s)", silent.pop(key), type(error).__name__)
                continue
            for reply in pulled:
                if reply.metadata.reply_to_message_id == key and key in silent:
                    failed = Error(reply.error.code, plain(reply.error.reason or "")) if reply.has_error() else None
                    replies[silent.pop(key)] = failed or reply.content
        return replies


@contextmanager
def _superlink() -> Iterator[None]:
    """Turn errors between Flower's grid and its SuperLink into `SuperLinkLost`; Flower has retried by then."""
    try:
        yield
    except (httpx.HTTPError, RunNotRunningException) as error:
        raise SuperLinkLost(f"{type(error).__name__}: {error}".rstrip(": ")) from error
