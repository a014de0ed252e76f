"""PluralLLM's federated pretraining, by Flower's stock strategies."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.fedopt import FedOpt

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import wire
from pluralllm.architectures import build, choices
from pluralllm.model import ModelConfig
from pluralllm.residual import SHARES_KEY
from pluralllm.training import step_size_factor
from server_app.federation.grid import OverlapGrid
from server_app.predictor.replies import Most, bound, fault, validation_errors
from server_app.predictor.strategies import flower_strategy
from server_app.predictor.summed_training import SummedTraining, SummingGrid

Progress = Callable[[int, int, float], None]

_UNBOUNDED = (math.inf, math.inf)

log = logging.getLogger("appa.server")


class _Watched(Strategy):
    """One of Flower's strategies, which reports every round and keeps the last one's weights.

    A round without a single result is refused, which Flower itself would pass over. A node whose reply does not follow
    the protocol is left out of that round: Flower would end the run over it, or average it in.
    """

    def __init__(self, inner: Strategy, config: Config, most: Most, progress: Progress) -> None:
        self._inner, self._most, self._progress = inner, most, progress
        self._num_rounds = config.pluralllm.rounds
        self._largest_eta = inner.eta if isinstance(inner, FedOpt) else 0.0
        self._choices = choices(config.pluralllm.architecture)
        self.losses: list[float] = []
        self.weights = ArrayRecord()
        self.validation: float | None = None

    def summary(self) -> None:
        self._inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._sent = arrays
        if isinstance(self._inner, FedOpt):  # the server's step size rises and falls over the rounds
            self._inner.eta = self._largest_eta * step_size_factor(server_round - 1, self._num_rounds)
        return _joined(self._inner.configure_train(server_round, arrays, config, grid), arrays)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        usable = self._usable(replies)
        bound(usable, self._sent)
        arrays, metrics = self._inner.aggregate_train(server_round, usable)
        if arrays is None or metrics is None:
            raise UserError(
                f"PluralLLM round {server_round}: no node sent weights that could be used; the groups' own logs say why"
            )
        self.losses.append(float(str(metrics["loss"])))
        self._progress(server_round, self._num_rounds, self.losses[-1])
        # Adaptive strategies' arithmetic ends in float64, which would double what travels.
        narrow = ArrayRecord({name: Array(array.numpy().astype(np.float32)) for name, array in arrays.items()})
        if SHARES_KEY in narrow:  # nobody trains it: no node's to change
            narrow[SHARES_KEY] = self._sent[SHARES_KEY]
        self.weights = narrow
        return narrow, metrics

    def _most_of(self, node: int) -> tuple[float, float]:
        return self._most.get(node, (0, 0)) if self._most else _UNBOUNDED

    def _usable(self, replies: Iterable[Message]) -> list[Message]:
        found = []
        # Sums of floats depend on their order, and who answers first, and under which id, is chance.
        for reply in sorted(replies, key=_content):
            node = reply.metadata.src_node_id
            if reply.has_error():
                log.warning("node %s: %s", node, reply.error.reason)
                continue
            most, _ = self._most_of(node)
            if why := fault(reply, self._sent, most):
                log.warning("node %s: its training reply cannot be used: %s", node, why)
            else:
                found.append(reply)
        return found

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if server_round != self._num_rounds:
            return []
        return _joined(self._inner.configure_evaluate(server_round, arrays, config, grid), arrays)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Choose how much each view counts, where the network has several (`pluralllm.residual.Shares`).

        It is what gives the groups' mean error on held-out questions its lowest value. Nodes without such answers say 0
        of them, by which Flower would divide.
        """
        count = len(self._choices)
        reported = [
            found
            for reply in sorted(replies, key=_content)
            if (found := validation_errors(reply, count, self._most_of(reply.metadata.src_node_id)[1])) is not None
        ]
        num_answers = sum(number for number, _ in reported)
        if not num_answers:
            return None
        error_V = np.sum([number * np.array(means) for number, means in reported], axis=0) / num_answers
        best = int(error_V.argmin())
        self.validation = float(error_V[best])
        if (shares := self._choices[best]) is not None:
            self.weights[SHARES_KEY] = Array(np.array(shares, np.float32))
        return MetricRecord({"error": self.validation})


def _joined(messages: Iterable[Message], arrays: ArrayRecord) -> Iterator[Message]:
    """The same messages with their weights as they travel; Flower's strategies share one record among them."""
    joined = wire.join_weights(arrays)
    for message in messages:
        message.content["arrays"] = joined
        yield message


def _content(reply: Message) -> str:
    return "" if reply.has_error() else str(dict(reply.content.metric_records))


def initial_weights(config: Config) -> ArrayRecord:
    """PluralLLM before any training, by the run's seed."""
    torch.manual_seed(child_seed(config.seed, "pluralllm"))
    return ArrayRecord(build(ModelConfig.of(config.pluralllm.architecture)).state_dict())


@dataclass(frozen=True, eq=False)
class Pretraining:
    """Result of pretraining.

    Attributes:
        weights: of the last round.
        losses: the groups' mean loss in every round.
        validation: error of the weights, as on the card; None where no group has an answer to a held-out question.
    """

    weights: ArrayRecord
    losses: tuple[float, ...] = ()
    validation: float | None = None


def pretrain(
    grid: OverlapGrid,
    config: Config,
    start: ArrayRecord,
    *,
    nodes: Sequence[int],
    most: Most = MappingProxyType({}),
    summed: SummedTraining | None = None,
    progress: Progress,
) -> Pretraining:
    """Train PluralLLM over the groups; only weights travel (appendix "PluralLLM Preference Probability Modeling").

    How much each view counts is chosen after the last round, on the training groups' held-out questions. The nodes hold
    the catalogue already, and `most` bounds how much each counts. With `summed` their results come as sums, of all
    groups alike. `progress` is called with (round, rounds, mean loss).

    Raises:
        UserError: a round in which no node trained.
    """
    if not config.pluralllm.rounds:
        return Pretraining(start)
    through = grid if summed is None else SummingGrid(grid, summed, nodes[0])
    if summed is not None:
        nodes = nodes[:1]
    strategy = _Watched(flower_strategy(config, len(nodes)), config, most, progress)
    members, grid.members = grid.members, tuple(nodes)
    try:
        strategy.start(through, start, num_rounds=config.pluralllm.rounds, timeout=config.run.reply_timeout)
    finally:
        grid.members = members
    return Pretraining(strategy.weights, tuple(strategy.losses), strategy.validation)
