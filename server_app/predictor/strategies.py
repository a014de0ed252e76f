"""Flower's own strategies for PluralLLM's pretraining, as the run's config names them."""

from __future__ import annotations

from typing import Any

from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx, FedYogi, Strategy

from appa_flwr.config import Config
from pluralllm.training import BETAS

# Adaptivity floor of FedAdam and FedYogi. At 1e-4 the small gradients of the context path vanish in it, and PluralLLM
# ends up predicting the same answers for every group.
TAU = 1e-6
SERVER_LEARNING_RATE = 3e-3  # of FedAdam and FedYogi; Adam's usual step for a network of this size
PROXIMAL_MU = 0.01  # pull of FedProx towards the server's weights: it only steadies groups whose steps are few

_ADAPTIVE = {"eta": SERVER_LEARNING_RATE, "tau": TAU, "beta_1": BETAS[0], "beta_2": BETAS[1]}
STRATEGIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "fedavg": (FedAvg, {}),
    "fedprox": (FedProx, {"proximal_mu": PROXIMAL_MU}),
    "fedadam": (FedAdam, _ADAPTIVE),
    "fedyogi": (FedYogi, _ADAPTIVE),
}


def flower_strategy(config: Config, num_nodes: int) -> Strategy:
    """The strategy that `pluralllm.strategy` names, for so many nodes."""
    strategy_class, settings = STRATEGIES[config.pluralllm.strategy]
    strategy: Strategy = strategy_class(
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=num_nodes,
        **settings,
    )
    return strategy
