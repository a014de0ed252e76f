"""PluralLLM's federated pretraining, by Flower's stock strategies as the config names them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg, FedYogi, Strategy
from flwr.serverapp.strategy.fedopt import FedOpt

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.seeds import child_seed
from pluralllm.residual import SHARES_KEY
from pluralllm.training import BETAS, build, choices, step_size_factor
from server_app.federation.ask_grid import AskGrid
from server_app.federation.groups import Groups

LARGEST_STEP = 10.0  # of a group, in units of the round's median
# Adaptivity floor of FedAdam and FedYogi. At 1e-4 the small gradients of the context path vanish in it, and PluralLLM
# ends up predicting the same answers for every group.
TAU = 1e-6
SERVER_LEARNING_RATE = 3e-3  # of FedAdam and FedYogi; Adam's usual step for a network of this size

_ADAPTIVE = {"eta": SERVER_LEARNING_RATE, "tau": TAU, "beta_1": BETAS[0], "beta_2": BETAS[1]}
STRATEGIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "fedavg": (FedAvg, {}),
    "fedadam": (FedAdam, _ADAPTIVE),
    "fedyogi": (FedYogi, _ADAPTIVE),
}

Progress = Callable[[int, int, float], None]

log = logging.getLogger("appa.server")


class _Watched(Strategy):
    """One of Flower's strategies, which reports every round and keeps the last one's weights.

    Its replies are the groups', or one that is their mean. A round without a single answer is refused, which Flower
    itself would pass over.
    """

    def __init__(self, inner: Strategy, config: Config, names: Sequence[str], progress: Progress) -> None:
        self._inner, self._names, self._progress = inner, names, progress
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
        return self._inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        trained = [reply for reply in replies if _answers(reply)]  # Flower would divide by none
        bound_steps(trained, self._sent, self._names)
        arrays, metrics = self._inner.aggregate_train(server_round, trained)
        if arrays is None or metrics is None:
            raise UserError(f"PluralLLM round {server_round}: no group trained; the groups' own logs say why")
        self.losses.append(float(str(metrics["loss"])))
        self._progress(server_round, self._num_rounds, self.losses[-1])
        # Adaptive strategies' arithmetic ends in float64, which would double what travels.
        narrow = ArrayRecord({name: Array(array.numpy().astype(np.float32)) for name, array in arrays.items()})
        if SHARES_KEY in narrow:  # nobody trains it: no group's to change
            narrow[SHARES_KEY] = self._sent[SHARES_KEY]
        self.weights = narrow
        return narrow, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if server_round != self._num_rounds:
            return []
        return self._inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Choose how much each view counts, where the network has several (`pluralllm.residual.Shares`).

        It is what gives the groups' mean error on held-out questions its lowest value.
        """
        errors = [(_answers(reply), np.array(reply.content.metric_records["metrics"]["errors"])) for reply in replies]
        if not (num_answers := sum(number for number, _ in errors)):
            return None
        error_V = np.sum([number * mean_V for number, mean_V in errors], axis=0) / num_answers
        best = int(error_V.argmin())
        self.validation = float(error_V[best])
        if (shares := self._choices[best]) is not None:
            self.weights[SHARES_KEY] = Array(np.array(shares, np.float32))
        return MetricRecord({"error": self.validation})


def _answers(reply: Message) -> int:
    """Number of the answers that a reply rests on."""
    return int(str(reply.content.metric_records["metrics"]["num-examples"]))


def bound_steps(replies: Sequence[Message], sent: ArrayRecord, names: Sequence[str]) -> None:
    """Shorten steps that are more than `LARGEST_STEP` times as long as the median's (the lower one's of two) to that.

    So one group's huge weights do not decide the round.

    Args:
        replies: to a training round; their weights are changed in place.
        sent: the weights they start from.
        names: the groups', by the places that stand for nodes, from 1 on.
    """
    start = {name: array.numpy().astype(np.float64) for name, array in sent.items()}
    weights = [reply.content.array_records["arrays"] for reply in replies]
    steps = [{name: arrays[name].numpy() - value for name, value in start.items()} for arrays in weights]
    lengths = [_length(step.values()) for step in steps]
    longest = LARGEST_STEP * median_low(lengths) if lengths else 0.0
    for reply, step, length in zip(replies, steps, lengths, strict=True):
        if length > longest > 0:
            log.warning(
                "group %s: its step is %.0f times as long as the round's median, and counts for %.0f times",
                *(names[reply.metadata.src_node_id - 1], length / longest * LARGEST_STEP, LARGEST_STEP),
            )
            cut = {name: value + step[name] * (longest / length) for name, value in start.items()}
            narrow = {name: Array(value.astype(sent[name].numpy().dtype)) for name, value in cut.items()}
            reply.content["arrays"] = ArrayRecord(narrow)


def _length(step: Iterable[npt.NDArray[np.float64]]) -> float:
    # float64: the square of a float32 may be infinite
    return math.sqrt(sum(float(np.square(part).sum()) for part in step))


def initial_weights(config: Config) -> ArrayRecord:
    """PluralLLM before any training, by the run's seed."""
    torch.manual_seed(child_seed(config.seed, "pluralllm"))
    return ArrayRecord(build(config.pluralllm.architecture).state_dict())


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


def _flower_strategy(config: Config, num_nodes: int) -> Strategy:
    """The strategy that `pluralllm.strategy` names, for so many nodes."""
    strategy_class, settings = STRATEGIES[config.pluralllm.strategy]
    counts = {"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": num_nodes}
    strategy: Strategy = strategy_class(**counts, **settings)
    return strategy


def pretrain(groups: Groups, config: Config, start: ArrayRecord, *, progress: Progress) -> Pretraining:
    """Train PluralLLM over the groups; only weights travel (appendix "PluralLLM Preference Probability Modeling").

    How much each view counts is chosen after the last round, on the training groups' held-out questions. The groups
    hold the catalogue already. `progress` is called with (round, rounds, mean loss).

    Raises:
        UserError: a round in which no group trained, or fewer answered than `run.min-groups`.
    """
    if not config.pluralllm.rounds:
        return Pretraining(start)
    grid = AskGrid(groups)
    strategy = _Watched(_flower_strategy(config, len([*grid.get_node_ids()])), config, groups.names, progress)
    strategy.start(grid, start, num_rounds=config.pluralllm.rounds, timeout=config.run.reply_timeout)
    return Pretraining(strategy.weights, tuple(strategy.losses), strategy.validation)
