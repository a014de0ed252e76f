"""Flower's Grid with another waiting loop: short polls, server work during the wait, one full wait for a late node.

Flower's own `send_and_receive` sleeps three seconds between polls when deployed, and waits for the last node until the
timeout in every call.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle

import httpx
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run, RunNotRunningException
from flwr.superlink.grid import InMemoryGrid

from appa_flwr.protocol.messages import MOST_BYTES, num_bytes
from appa_flwr.protocol.refusals import FAILED
from server_app import log
from server_app.federation.sanitize import plain

FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 0.005, 0.25, 1.3  # seconds, seconds, factor

LATE_SECONDS = 5.0
"""Wait for late nodes once all others have answered: a node polls every three seconds, and then starts a process."""

PROGRESS_SECONDS = 30.0  # between two reports of how many nodes have answered

LATE_TTL = 60.0
"""Lifetime of a message to a late node, in seconds. The node gets no other message meanwhile, so none pile up."""


class SuperLinkLost(Exception):
    """Flower's SuperLink refuses requests or cannot be reached."""


class WorkerLost(Exception):
    """One of the processes in which a simulation's groups compute has ended, and Flower starts none in its place."""


class OverlapGrid(Grid):
    """A Grid that sends at once and waits, with short and growing pauses, when the replies are read.

    A node that has not answered in time is late until it answers. Waits for late nodes end soon after other replies.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        # Such nodes compute here, one after another, so none is late; of a lost process Flower tells.
        self.simulated = isinstance(grid, InMemoryGrid)
        self.progress: Callable[[int, int, float], None] | None = None  # gets nodes heard, nodes asked, seconds left
        self.seconds_waited = 0.0  # by the idle server, added up until the caller sets it to 0
        self.most_bytes = MOST_BYTES  # of a reply to the messages that are sent next, set by the caller
        self.traffic = Counter[str]()  # messages and bytes of their records, added up until the caller clears it
        self._late: dict[int, tuple[str, float]] = {}  # node -> id of its unanswered message, and when that ends

    def set_run(self, run: Run) -> None:
        """See Grid."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """See Grid."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str = "", ttl: float | None = None
    ) -> Message:
        """See Grid; a message to a late node lives for `LATE_TTL`."""
        if dst_node_id in self._late:
            ttl = LATE_TTL
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """See Grid."""
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

    def late(self) -> frozenset[int]:
        """Late nodes that still have a message to answer, and must not get another."""
        for node, (key, _) in list(self._late.items()):
            self._note_answer(node, self._pull(key)[0])
        now = time.monotonic()
        return frozenset(node for node, (_, ends) in self._late.items() if now < ends)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push the messages at once; the result waits for the replies when it is read, and gives each as it arrives.

        `timeout` is the longest wait for a reply, in seconds from the push; None = no limit, as always in a simulation.
        Each reply is rebuilt as a reply to the message that was sent, since the node itself writes the sender.
        """
        sent = list(messages)
        size_of: dict[int, int] = {}  # equal messages are one object
        for message in sent:
            key = id(message.content)
            size_of[key] = size = size_of.get(key) or num_bytes(message.content)
            self._count("sent", size)
        keys = self.push_messages(sent) if sent else ()
        silent = {key: message for key, message in zip(keys, sent, strict=False) if key}
        patience = float("inf") if timeout is None else timeout
        return self._replies(silent, time.monotonic(), patience, self.most_bytes)

    def _replies(
        self, silent: dict[str, Message], started: float, timeout: float, most_bytes: int
    ) -> Iterator[Message]:
        """Pull until all replies have arrived or time is up; raises WorkerLost in a simulation."""
        node_of = {key: message.metadata.dst_node_id for key, message in silent.items()}
        idle_from = now = reported = time.monotonic()
        pause, turns = FIRST_PAUSE, cycle(node_of)
        ends = float("inf") if self.simulated else started + timeout
        while silent:
            if self._late.keys() >= {node_of[key] for key in silent}:
                ends = min(ends, now + LATE_SECONDS)
            over, new = now > ends, False
            # One pull per turn, as each is a request. Nodes take equally long, so after one reply all are pulled.
            turn = next(key for key in turns if key in silent)
            for key in [turn, *(key for key in silent if key != turn)]:
                reply, size = self._pull(key, most_bytes)
                if reply is not None:
                    new, message = True, silent.pop(key)
                    self._note_answer(node_of[key], reply)
                    self._count("received", size)
                    self.seconds_waited += time.monotonic() - idle_from
                    yield Message(reply, reply_to=message)
                    idle_from = time.monotonic()
                if not (new or over):
                    break
            if not silent or over:
                break
            if self.progress and new and now - reported > PROGRESS_SECONDS:
                reported, heard = now, len(node_of) - len(silent)
                self.progress(heard, len(node_of), (now - started) / heard * len(silent))
            pause = FIRST_PAUSE if new else min(pause * GROWTH, LONGEST_PAUSE)
            time.sleep(pause)
            now = time.monotonic()
        self.seconds_waited += time.monotonic() - idle_from
        for key in silent:
            if (node := node_of[key]) not in self._late:
                log.warning("node %s has not answered for %.0f s; until it does, others go on", node, now - started)
            self._late[node] = key, started + LATE_TTL

    def _count(self, way: str, size: int) -> None:
        self.traffic[f"messages_{way}"] += 1
        self.traffic[f"bytes_{way}"] += size

    def _note_answer(self, node: int, reply: RecordDict | Error | None) -> None:
        # Flower's own error for a missing reply is not a reply of the node.
        if reply is not None and (not isinstance(reply, Error) or reply.code >= FAILED):
            self._late.pop(node, None)

    def _pull(self, key: str, most_bytes: int = MOST_BYTES) -> tuple[RecordDict | Error | None, int]:
        """Pull the reply to a message and its bytes, which are faulty above `most_bytes`; None if it has not arrived.

        Replies are pulled one by one: the SuperLink knows which node answers a message, while the node itself writes
        the sender and the message id in its reply.
        """
        pulled, fault = list[Message](), ""
        try:
            pulled = list(self.pull_messages([key]))
        except SuperLinkLost:
            raise
        except Exception as error:  # a node's reply can make Flower's reader raise errors of any class
            fault = type(error).__name__
        if (size := sum(num_bytes(reply.content) for reply in pulled if reply.has_content())) > most_bytes:
            fault = f"{size} bytes, where {most_bytes} are enough"
        replies = [reply for reply in pulled if reply.metadata.reply_to_message_id == key]
        if not replies and not fault:
            return None, 0
        if fault:
            return Error(FAILED, f"its reply cannot be read ({fault})"), 0
        if not (reply := replies[0]).has_error():
            return reply.content, size
        if self.simulated and reply.error.code == ErrorCode.UNKNOWN:  # Ray's: groups give others
            cause = plain(str(reply.error.reason).rpartition("Worker exit type: ")[2])
            raise WorkerLost(f"Ray lost a process in which groups compute: {cause}")
        return Error(reply.error.code, plain(reply.error.reason or "")), 0


@contextmanager
def _superlink() -> Iterator[None]:
    """Turn errors between Flower's grid and its SuperLink into `SuperLinkLost`; Flower has retried by then."""
    try:
        yield
    except (httpx.HTTPError, RunNotRunningException) as error:
        raise SuperLinkLost(f"{type(error).__name__}: {error}".rstrip(": ")) from error
