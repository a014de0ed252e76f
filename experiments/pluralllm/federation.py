"""A federation in this process: Flower's strategies, and nodes that answer as soon as they are asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.logger import FLOWER_LOGGER as logger
from flwr.supercore.task_identity import TaskIdentity

from server_app.federation.grid import OverlapGrid


class LocalGrid(OverlapGrid):
    """A grid whose nodes are a function; the strategies need no more of a grid than its members and their replies."""

    def __init__(self, answer: Callable[[Message], RecordDict]) -> None:
        self._answer = answer
        self.members = None

    def send_and_receive(self, messages: Iterable[Message], **_: object) -> list[Message]:
        """See Grid."""
        return [Message(self._answer(message), reply_to=message) for message in messages]


@contextmanager
def flower_task() -> Iterator[None]:
    """Let `Message` be made as inside a running ServerApp, which Flower tells by the process's identity; no logs."""
    before = {name: getattr(TaskIdentity, name) for name in ("_run_id", "_node_id", "_task_id")}
    level = logger.level
    logger.setLevel(logging.WARNING)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SUPERLINK_NODE_ID, 1
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            setattr(TaskIdentity, name, value)
