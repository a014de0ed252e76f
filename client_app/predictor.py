"""A group's use of PluralLLM: its part of federated pretraining, and its target table from the frozen result.

The only module of this side that imports torch; `main` imports it inside the actions that need it, since deployed every
message starts a fresh process and scoring has no use for torch.

Axis letters: Q public questions, K options.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord

from appa_flwr.config import Config
from appa_flwr.errors import UserError
from appa_flwr.seeds import child_seed
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.model import PluralLLM
from pluralllm.prediction import target_table
from pluralllm.settings import episode_config, model_config
from pluralllm.training import local_update


@dataclass(frozen=True)
class Trained:
    """A node's result of a round: the mean of its groups' weights by number of answers, that number, the loss."""

    weights: ArrayRecord
    num_examples: int
    loss: float


def train_round(
    config: Config, start: ArrayRecord, groups: Sequence[GroupData], embedding: OptionEmbedding, *, round_number: int
) -> Trained:
    """Train a copy of the server's weights on each group's answers and average the copies.

    The weighted mean over a node's groups, weighted again over nodes by the server, is FedAvg over all groups.

    Args:
        config: steps, step size and sizes.
        start: the server's weights.
        groups: the training answers of the groups this node hosts.
        embedding: the public table.
        round_number: seeds the episodes, with the run's seed and the group's name.

    Raises:
        UserError: no group here has an answer.
    """
    torch.set_num_threads(1)
    total: OrderedDict[str, torch.Tensor] = OrderedDict()
    examples, loss = 0, 0.0
    for data in groups:
        if not len(data):
            continue
        model = _model(config, start)
        seed = child_seed(config.seed, "pluralllm", data.group, round_number)
        result = local_update(
            model,
            data,
            embedding,
            steps=config.pluralllm_local_steps,
            learning_rate=config.pluralllm_learning_rate,
            optimizer=config.pluralllm_optimizer,
            episodes=episode_config(config),
            generator=torch.Generator().manual_seed(seed),
        )
        for key, value in model.state_dict().items():
            total[key] = total.get(key, torch.zeros_like(value)) + value * result.num_examples
        examples += result.num_examples
        loss += result.loss * result.num_examples
    if not examples:
        raise UserError("no group of this node has an answer to train on")
    mean = OrderedDict((key, value / examples) for key, value in total.items())
    return Trained(ArrayRecord(mean), examples, loss / examples)


def table(
    config: Config, weights: ArrayRecord, data: GroupData, embedding: OptionEmbedding, *, draw: int
) -> npt.NDArray[np.float64]:
    """The group's predicted distribution on every public question, (Q, K).

    Args:
        config: context size and seed.
        weights: the frozen PluralLLM.
        data: the group's training answers: the only source of context.
        embedding: the public table.
        draw: 0 for the contexts of a run's fixed table; another number for fresh ones.
    """
    torch.set_num_threads(1)
    return target_table(
        _model(config, weights),
        data,
        embedding,
        num_context=config.num_context_questions,
        seed=child_seed(config.seed, "context", draw),
    )


def _model(config: Config, weights: ArrayRecord) -> PluralLLM:
    model = PluralLLM(model_config(config))
    model.load_state_dict(weights.to_torch_state_dict())
    return model
