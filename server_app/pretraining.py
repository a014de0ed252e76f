"""PluralLLM's federated pretraining, by Flower's stock strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAdam, FedAvg

from appa_flwr.config import Config
from appa_flwr.errors import UserError
from appa_flwr.seeds import child_seed
from pluralllm.model import PluralLLM
from pluralllm.settings import model_config
from server_app.grid import PromptGrid

Progress = Callable[[int, int, float], None]

BETA_1, BETA_2 = 0.9, 0.99  # FedAdam's moments
# FedAdam's adaptivity floor. At 1e-4 the small gradients of the context path vanish in it, and PluralLLM ends up
# predicting the same answers for every group.
TAU = 1e-6


class _Watched:
    """Reports every round and refuses one without a single result, which Flower itself would pass over."""

    def watch(self, num_rounds: int, progress: Progress) -> None:
        self._num_rounds, self._progress = num_rounds, progress
        self.losses: list[float] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        aggregated: Any = super()
        arrays, metrics = aggregated.aggregate_train(server_round, replies)
        if arrays is None or metrics is None:
            raise UserError(
                f"PluralLLM round {server_round}: no node sent weights that could be used; the groups' own logs say why"
            )
        self.losses.append(float(metrics["loss"]))
        self._progress(server_round, self._num_rounds, self.losses[-1])
        # FedAdam's arithmetic ends in float64, which would double what travels.
        narrow = ArrayRecord({name: Array(array.numpy().astype(np.float32)) for name, array in arrays.items()})
        return narrow, metrics


class _WatchedFedAvg(_Watched, FedAvg):
    pass


class _WatchedFedAdam(_Watched, FedAdam):
    pass


def initial_weights(config: Config) -> ArrayRecord:
    """PluralLLM before any training, by the run's seed."""
    torch.manual_seed(child_seed(config.seed, "pluralllm"))
    return ArrayRecord(PluralLLM(model_config(config)).state_dict())


def pretrain(
    grid: PromptGrid, config: Config, start: ArrayRecord, *, num_nodes: int, progress: Progress
) -> tuple[ArrayRecord, list[float]]:
    """Train PluralLLM over the groups; only weights travel (appendix "PluralLLM Preference Probability Modeling").

    Args:
        grid: to the nodes, which hold the catalogue already.
        config: strategy, rounds.
        start: the weights of the first round.
        num_nodes: nodes of the federation.
        progress: called with (round, rounds, mean loss).

    Returns:
        The final weights and the mean loss of every round.

    Raises:
        UserError: a round in which no node trained.
    """
    common: dict[str, Any] = {
        "fraction_train": config.pluralllm_fraction,
        "fraction_evaluate": 0.0,
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "min_available_nodes": num_nodes,
    }
    strategy: _WatchedFedAvg | _WatchedFedAdam
    if config.pluralllm_strategy == "fedadam":
        strategy = _WatchedFedAdam(
            eta=config.pluralllm_server_learning_rate, beta_1=BETA_1, beta_2=BETA_2, tau=TAU, **common
        )
    else:
        strategy = _WatchedFedAvg(**common)
    strategy.watch(config.pluralllm_rounds, progress)
    result = strategy.start(grid, start, num_rounds=config.pluralllm_rounds, timeout=config.reply_timeout)
    return (result.arrays if config.pluralllm_rounds else start), strategy.losses
