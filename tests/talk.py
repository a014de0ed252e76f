"""Every kind of message once, from the server's own code, without a language model."""

from __future__ import annotations

import numpy as np
from in_process import InProcessGrid, flower_task
from small import AS_OWNERS_ASK, SMALL_PREDICTOR, VOTES

from appa_flwr.config import Config
from appa_flwr.protocol import wire
from server_app.federation.catalogue import build_catalogue
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Federation
from server_app.predictor.pretraining import initial_weights, pretrain

KINDS = (wire.ROLL_CALL, wire.CATALOGUE, "train", "evaluate", wire.TARGETS, wire.VOTE, wire.SCORE)

TINY = {
    "data.num-groups": 3,
    "data.num-questions": 32,
    "run.min-groups": 3,
    **SMALL_PREDICTOR,
    "pluralllm.rounds": 2,
    **AS_OWNERS_ASK,
    **VOTES,
}


def talk(grid: InProcessGrid, config: Config) -> None:
    """Ask the grid's groups everything that a run would, up to the first score.

    Raises:
        UserError: the server refuses a message.
        AggregationError: of Flower's, for the same reason.
    """
    catalogue = build_catalogue(config)
    option_QK = catalogue.option_QK
    uniform_QK = option_QK / option_QK.sum(1, keepdims=True)
    metrics = ("borda",) if config.task == "opa" else ("js", "wasserstein", "cosine")
    held_out = np.flatnonzero(catalogue.held_out_Q)
    with flower_task():
        overlap = OverlapGrid(grid)
        federation = Federation(overlap, min_groups=config.run.min_groups, timeout=5.0)
        federation.gather((), patience=0.0)
        federation.send_catalogue(catalogue)
        weights = pretrain(
            overlap,
            config,
            initial_weights(config),
            nodes=federation.nodes_of(federation.groups),
            progress=lambda step, of, loss: None,
        ).weights
        federation.send_targets(weights, fault=lambda reply: None)
        federation.votes()
        federation.score(
            wire.ScoreRequest(held_out, uniform_QK[held_out], metrics, (wire.TARGET_SIDE, wire.TRUTH_SIDE))
        )
