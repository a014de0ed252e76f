"""Every kind of message once, from the server's own code, without a language model."""

import numpy as np
from in_process import InProcessGrid, flower_task
from small import AS_OWNERS_ASK, SMALL_PREDICTOR, VOTES

from appa_flwr.config import Config
from appa_flwr.protocol import asks
from appa_flwr.protocol.asks import Ask, ScoreRequest
from pluralllm.scores import summed
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Groups
from server_app.predictor.pretraining import initial_weights, pretrain
from server_app.questions import build_catalogue

KINDS = (asks.VOTES, asks.UPDATE, asks.VALIDATION, asks.SCORES, asks.REWARDS)

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
        groups = Groups(OverlapGrid(grid), config)
        groups.gather([str(context.node_config["group"]) for context in grid.contexts.values()], patience=0.0)
        groups.send_catalogue(catalogue)
        weights, _ = pretrain(groups, config, initial_weights(config), progress=lambda step, of, loss: None)
        groups.send_targets(weights)
        groups.ask(Ask(asks.SCORES, {}, {"size": len(summed())}))
        groups.ask(Ask(asks.VOTES))
        request = ScoreRequest(held_out, uniform_QK[held_out], metrics, (asks.TARGET_SIDE, asks.TRUTH_SIDE))
        groups.ask(request.ask(asks.REWARDS))
