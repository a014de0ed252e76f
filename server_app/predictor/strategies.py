"""Flower's own strategies for PluralLLM's pretraining, as the run's config names them."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    Strategy,
)
from scipy.optimize import brentq
from scipy.stats import norm

from appa_flwr.config import Config
from appa_flwr.config.sections import BYZANTINE_NODES
from appa_flwr.core.errors import UserError
from pluralllm.training import BETAS

# Adaptivity floor of FedAdam and its kin. At 1e-4 the small gradients of the context path vanish in it, and PluralLLM
# ends up predicting the same answers for every group.
TAU = 1e-6
DELTA = 1e-5
SERVER_LEARNING_RATE = 3e-3  # of FedAdam and its kin; Adam's usual step for a network of this size
PROXIMAL_MU = 0.01  # pull of FedProx towards the server's weights: it only steadies groups whose steps are few

_ADAPTIVE = {"eta": SERVER_LEARNING_RATE, "tau": TAU}
_MOMENTS = _ADAPTIVE | {"beta_1": BETAS[0], "beta_2": BETAS[1]}
STRATEGIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "fedavg": (FedAvg, {}),
    "fedprox": (FedProx, {"proximal_mu": PROXIMAL_MU}),
    "fedadam": (FedAdam, _MOMENTS),
    "fedyogi": (FedYogi, _MOMENTS),
    "fedadagrad": (FedAdagrad, _ADAPTIVE),
    "fedmedian": (FedMedian, {}),
    "fedtrimmedavg": (FedTrimmedAvg, {}),
    "krum": (Krum, {"num_malicious_nodes": BYZANTINE_NODES}),
    "multikrum": (MultiKrum, {"num_malicious_nodes": BYZANTINE_NODES}),
}

log = logging.getLogger("appa.server")


def flower_strategy(config: Config, num_nodes: int) -> Strategy:
    """The strategy that `pluralllm.strategy` names, for so many nodes, with noise where `pluralllm.dp-noise` asks.

    Raises:
        UserError: a Byzantine-robust strategy has too few nodes.
    """
    keys = config.pluralllm
    if num_nodes < keys.least_nodes:
        raise UserError(keys.too_few(num_nodes))
    strategy_class, settings = STRATEGIES[keys.strategy]
    strategy: Strategy = strategy_class(
        fraction_train=keys.fraction,
        fraction_evaluate=1.0,
        min_train_nodes=min(num_nodes, keys.least_nodes),
        min_evaluate_nodes=1,
        min_available_nodes=num_nodes,
        **settings,
    )
    if keys.dp_noise:
        strategy = DifferentialPrivacyServerSideFixedClipping(strategy, keys.dp_noise, keys.dp_clip, num_nodes)
    return strategy


def fit(strategy: Strategy, config: Config, num_replies: int) -> None:
    """Set what depends on how many nodes have sent usable weights in a round: one may have gone."""
    keys = config.pluralllm
    if num_replies < keys.least_nodes:
        log.warning("%s, and in this round fewer sent weights that can be used", keys.too_few(num_replies))
    match strategy:
        case DifferentialPrivacyServerSideFixedClipping():  # fewer hide one another less
            strategy.num_sampled_clients = num_replies
        case FedTrimmedAvg():
            trimmed = min(BYZANTINE_NODES, (num_replies - 1) // 2)
            # Flower rounds nodes x share down; a little more than the share keeps rounding from losing a node.
            strategy.beta = (trimmed + 0.1) / num_replies if trimmed else 0.0
        case MultiKrum() if not isinstance(strategy, Krum):
            strategy.num_nodes_to_select = max(1, num_replies - BYZANTINE_NODES)


def epsilon(noise: float, rounds: int, *, delta: float = DELTA) -> float:
    """Privacy loss of one node over so many rounds: the epsilon of (epsilon, delta)-differential privacy.

    Of two runs that differ in all that one node sent, for the same nodes. It moves a round's mean by up to twice the
    clip / nodes, and the noise is `noise` times the clip / nodes. Each round is a Gaussian mechanism, and together they
    are one with a noise of `noise` / sqrt(rounds); its delta is exact (Balle and Wang 2018, Theorem 8). All nodes take
    part in every round: nothing is won by sampling.
    """
    mu = 2 * rounds**0.5 / noise

    def excess(candidate: float) -> float:
        left, right = mu / 2 - candidate / mu, -mu / 2 - candidate / mu
        return float(norm.cdf(left) - np.exp(candidate + norm.logcdf(right)) - delta)

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, mu * (mu / 2 + 40.0)))
