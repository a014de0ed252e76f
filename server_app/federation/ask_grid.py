"""A Grid for Flower's strategies: what they send becomes one request for numbers, and its answer their replies.

Axis letter: P weights.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from appa_flwr.protocol import asks, messages
from appa_flwr.protocol.asks import Ask, Number
from pluralllm.training import choices
from server_app.federation.ask import Answer, HalfOpened
from server_app.federation.groups import Groups

TRAIN, EVALUATE = "train", "evaluate"

TRIES = 3
"""At a round of PluralLLM's training whose sums are lost, before the run ends."""

log = logging.getLogger("appa.server")


class AskGrid(Grid):
    """The groups as Flower's strategies take them: a node for each group that trains, or one that is their sum."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def set_run(self, run: Run) -> None:
        """Not for strategies."""
        raise NotImplementedError

    @property
    def run(self) -> Run:
        """Not for strategies."""
        raise NotImplementedError

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """See Grid."""
        return self._groups.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Places of the groups that train, from 1 on; a single one where only the sum is known."""
        if not self._groups.plain:
            return [1]
        unseen = self._groups.config.unseen_group_names
        return [place for place, name in enumerate(self._groups.names, start=1) if name not in unseen]

    def get_nodes(self) -> Iterable[NodeInfo]:
        """See Grid."""
        return [NodeInfo(node_id=node) for node in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Not for strategies."""
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Not for strategies."""
        raise NotImplementedError

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Message]:
        """The replies to messages that all have one content, in the order of the groups.

        See `Groups.ask` for what it raises; the groups' own patience holds, not `timeout`.
        """
        sent = sorted(messages, key=lambda message: message.metadata.dst_node_id)
        if not sent:
            return []
        ask, label = _ask_of(sent[0], self._groups), int(sent[0].metadata.group_id or 0)
        if sent[0].metadata.message_type not in (TRAIN, EVALUATE):
            return [Message(_packed(self._groups.ask(ask, meanwhile=meanwhile, label=label)), reply_to=sent[0])]
        made = _trained if ask.kind == asks.UPDATE else _validated
        answer = self._answer(ask, label)
        if answer.data.ndim == 1:
            own = {name: answer.sum(name) for name in answer.numbers}
            return [Message(made(sent[0], own), reply_to=sent[0])]
        place_of = {place: name for place, name in enumerate(self._groups.names, start=1)}
        by_group = {group: g for g, group in enumerate(answer.groups)}
        each = {name: answer.each(name) for name in answer.numbers}
        return [
            Message(made(message, {name: rows_G[by_group[group]] for name, rows_G in each.items()}), reply_to=message)
            for message in sent
            if (group := place_of[message.metadata.dst_node_id]) in by_group
        ]

    def _answer(self, ask: Ask, label: int) -> Answer:
        """The groups' numbers; where a sum is lost, those of another round with the same weights."""
        for attempt in range(1, TRIES):
            try:
                return self._groups.ask(ask, label=label)
            except HalfOpened as error:
                log.warning("%s; asked anew", error)
                ask = replace(ask, settings={**ask.settings, "attempt": attempt})
        return self._groups.ask(ask, label=label)


def ask_message(grid: Grid, ask: Ask, *, label: int) -> Message:
    """A request for numbers as a message for an `AskGrid`; `label` is the strategy's round."""
    return grid.create_message(messages.pack_ask(ask, messages.Head("", "")), messages.ASK, 1, str(label))


def answer_of(reply: Message) -> Answer:
    """The answer that an `AskGrid` has given to such a message."""
    head = reply.content.config_records["head"]
    numbers = {name: Number(tuple(shape), least, most) for name, shape, least, most in json.loads(str(head["numbers"]))}
    data = messages.numpy_arrays(reply.content.array_records["arrays"])["data"]
    groups = tuple(str(name) for name in head["groups"]) if isinstance(head["groups"], list) else ()
    return Answer(groups, numbers, data, str(head["task"]))


def _packed(answer: Answer) -> RecordDict:
    numbers = [[name, list(number.shape), number.least, number.most] for name, number in answer.numbers.items()]
    head = ConfigRecord({"groups": list(answer.groups), "task": answer.task, "numbers": json.dumps(numbers)})
    return RecordDict({"head": head, "arrays": messages.arrays_record({"data": answer.data})})


def _ask_of(message: Message, groups: Groups) -> Ask:
    kind = message.metadata.message_type
    if kind not in (TRAIN, EVALUATE):
        return messages.unpack_ask(message.content)[0]
    weights = {"weights": messages.join_weights(message.content.array_records["arrays"])}
    if kind == EVALUATE:
        return Ask(asks.VALIDATION, weights, {"size": len(choices(groups.config.pluralllm.architecture))})
    config = message.content.config_records["config"]
    proximal = float(str(config.get("proximal-mu", 0.0)))
    return Ask(asks.UPDATE, weights, {"round": int(str(config["server-round"])), "proximal": proximal})


def _trained(message: Message, own: dict[str, Any]) -> RecordDict:
    """Weights after a round, with how many answers they rest on and the mean loss, as Flower's strategies want them."""
    sent = message.content.array_records["arrays"]
    start_P, number = messages.join_weights(sent), float(own["answers"][0])
    step_P = own["step"] / number if number else np.zeros(len(start_P))
    shapes = {name: array.shape for name, array in sent.items()}
    weights = messages.split_weights((start_P + step_P).astype(np.float32), shapes)
    loss = float(own["loss"][0]) / number if number else 0.0
    metrics = MetricRecord({"num-examples": round(number), "loss": loss})
    return RecordDict({"arrays": weights, "metrics": metrics})


def _validated(message: Message, own: dict[str, Any]) -> RecordDict:
    number = float(own["answers"][0])
    errors = np.clip(own["error"] / number, 0.0, asks.LARGEST_ERROR) if number else np.zeros(len(own["error"]))
    return RecordDict({"metrics": MetricRecord({"num-examples": round(number), "errors": errors.tolist()})})
