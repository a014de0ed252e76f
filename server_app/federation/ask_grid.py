"""A Grid for strategies of Flower's kind: what they send becomes one request for numbers, and its answer their replies.

Axis letter: P weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from appa_flwr.protocol import asks
from appa_flwr.protocol.asks import Ask
from appa_flwr.protocol.messages import ASK, join_weights, split_weights
from pluralllm.training import choices
from server_app.federation.ask import FloatArray, LostSum, Replies
from server_app.federation.groups import Groups

TRAIN = "train"

TRIES = 3
"""At a round of PluralLLM's training whose sums are lost, before the run ends."""

log = logging.getLogger("appa.server")


class AskMessage(Message):
    """A request for numbers, from a strategy of our own to an `AskGrid`."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(RecordDict(), 1, ASK)
        self.ask = ask


class RepliesMessage(Message):
    """The reply to it."""

    def __init__(self, replies: Replies, request: AskMessage) -> None:
        super().__init__(RecordDict(), reply_to=request)
        self.replies = replies


class AskGrid(Grid):
    """The groups as strategies take them: a node for each group that trains, or one that is their sum."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def _unused(self, *_: Any, **__: Any) -> Any:
        """Not for strategies."""
        raise NotImplementedError

    set_run = create_message = get_nodes = push_messages = pull_messages = _unused
    run = property(_unused)

    def get_node_ids(self) -> Iterable[int]:
        """Places of the groups that train, from 1 on; a single one where only the sum is known."""
        if not self._groups.plain:
            return [1]
        unseen = self._groups.config.unseen_group_names
        return [place for place, name in enumerate(self._groups.names, start=1) if name not in unseen]

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Message]:
        """The replies to messages that all have one content, in the order of the groups.

        See `Groups.ask` for `meanwhile` and errors; the groups' own patience holds, not `timeout`.
        """
        sent = sorted(messages, key=lambda message: message.metadata.dst_node_id)
        if not sent:
            return []
        if isinstance(sent[0], AskMessage):
            return [RepliesMessage(self._groups.ask(sent[0].ask, meanwhile=meanwhile), sent[0])]
        content = sent[0].content
        weights = {"weights": join_weights(content.array_records["arrays"])}
        if sent[0].metadata.message_type == TRAIN:
            config, replied = content.config_records["config"], _trained
            ask = Ask(asks.UPDATE, weights, {"round": int(str(config["server-round"]))})
        else:
            size, replied = len(choices(self._groups.config.pluralllm.architecture)), _validated
            ask = Ask(asks.VALIDATION, weights, {"size": size})
        own = self._by_place(self._answer(ask))
        return [
            Message(replied(content, own[place]), reply_to=message)
            for message in sent
            if (place := message.metadata.dst_node_id) in own
        ]

    def _answer(self, ask: Ask) -> Replies:
        """The groups' numbers; where a sum is lost, those of another round with the same weights."""
        for attempt in range(1, TRIES):
            try:
                return self._groups.ask(ask)
            except LostSum as error:
                log.warning("%s; asked anew", error)
                ask = replace(ask, settings={**ask.settings, "attempt": attempt})
        return self._groups.ask(ask)

    def _by_place(self, replies: Replies) -> dict[int, dict[str, FloatArray]]:
        """The arrays of each node, by its place."""
        rows = {1: replies.data}
        if replies.data.ndim > 1:
            places = (self._groups.names.index(name) + 1 for name in replies.groups)
            rows = dict(zip(places, replies.data, strict=True))
        return {place: asks.split(row_N, replies.numbers) for place, row_N in rows.items()}


def _trained(sent: RecordDict, own: Mapping[str, FloatArray]) -> RecordDict:
    """Weights after a round, with how many answers they rest on and the mean loss, as Flower's strategies want them."""
    arrays, number = sent.array_records["arrays"], float(own["answers"][0])
    start_P, total = join_weights(arrays), number or 1.0  # a reply that rests on none is not used
    weight_P = (start_P + own["step"] / total).astype(np.float32)
    metrics = MetricRecord({"num-examples": round(number), "loss": float(own["loss"][0]) / total})
    shapes = {name: array.shape for name, array in arrays.items()}
    return RecordDict({"arrays": split_weights(weight_P, shapes), "metrics": metrics})


def _validated(sent: RecordDict, own: Mapping[str, FloatArray]) -> RecordDict:
    number = float(own["answers"][0])
    errors = np.clip(own["error"] / (number or 1.0), 0.0, asks.LARGEST_ERROR)
    return RecordDict({"metrics": MetricRecord({"num-examples": round(number), "errors": errors.tolist()})})
