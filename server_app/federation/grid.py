"""A Flower Grid that polls quickly and lets the server compute while the groups score.

Flower's own `send_and_receive` sleeps three seconds between polls when deployed. This one delegates every call and only
replaces that waiting loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import cycle

from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run

FIRST_PAUSE, LONGEST_PAUSE, GROWTH = 0.005, 0.25, 1.3  # seconds, seconds, factor


class OverlapGrid(Grid):
    """Delegates to another Grid; waits for replies with short, growing pauses.

    Attributes:
        seconds_waited: seconds of the last `send_and_receive` in which the server had nothing else to do.
        members: the nodes of the run, once it is known who takes part. Flower's stock strategies ask all nodes there
            are, and wait without end for one that has gone; told of the members, they ask just these, and one that
            has gone answers with an error.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self.seconds_waited = 0.0
        self.members: tuple[int, ...] | None = None

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
        return self._grid.get_node_ids() if self.members is None else self.members

    def online(self) -> frozenset[int]:
        """All nodes that Flower knows to be there, members or not."""
        return frozenset(self._grid.get_node_ids())

    def get_nodes(self) -> Iterable[NodeInfo]:
        """See Grid."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See Grid."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """See Grid."""
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
            messages: what to send; none at all is answered at once.
            timeout: seconds from the push; None waits for ever.
            meanwhile: what the server has to compute while the nodes work.

        Returns:
            The replies that came, error replies included, in the order they came; each one's `src_node_id` is the node
            that was asked, whatever the reply says of itself.
        """
        outgoing = list(messages)
        keys = self.push_messages(outgoing) if outgoing else ()
        asked = {key: message.metadata.dst_node_id for key, message in zip(keys, outgoing, strict=False) if key}
        started = time.monotonic()
        if meanwhile is not None:
            meanwhile()
        idle_from = time.monotonic()
        replies: list[Message] = []
        pause = FIRST_PAUSE
        turns = cycle(list(asked))
        while asked:
            late = timeout is not None and time.monotonic() - started > timeout
            # One a turn, since each is a request to the SuperLink; nodes take about as long, so one brings all.
            turn = next(key for key in turns if key in asked)
            came = self._reply_to(turn, asked)
            if came or late:
                came += [reply for key in list(asked) for reply in self._reply_to(key, asked)]
            replies += came
            if not asked or late:
                break
            pause = FIRST_PAUSE if came else min(pause * GROWTH, LONGEST_PAUSE)
            time.sleep(pause)
        self.seconds_waited = time.monotonic() - idle_from
        return replies

    def _reply_to(self, key: str, asked: dict[str, int]) -> list[Message]:
        """The reply to one message, if it has come; the message is taken from those `asked` of nodes then.

        Pulled one by one: the SuperLink knows which node a reply to a message is of, while its own record of who sent
        it and to what it replies is the node's to write.
        """
        for reply in self.pull_messages([key]):
            if reply.metadata.reply_to_message_id == key:
                reply.metadata.__dict__["_src_node_id"] = asked.pop(key)
                return [reply]
        return []
