"""PluralLLM trained on the pooled answers: what federated training is measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.network import PluralLLM
from pluralllm.training import BETAS, MAX_GRADIENT_NORM, EpisodeConfig, sample_episodes, step_size_factor


def train_centrally(
    model: PluralLLM,
    groups: Sequence[GroupData],
    embedding: OptionEmbedding,
    *,
    steps: int,
    learning_rate: float,
    episodes: EpisodeConfig,
    generator: torch.Generator,
) -> float:
    """Train `model` in place with Adam on the pooled answers: what federated training is measured against.

    One step sees episodes of every group, weighted by its number of answers as FedAvg weights its update. A fair
    comparison gives it as many steps as rounds times local steps. `learning_rate` is the largest, see
    `step_size_factor`; the rest is as in `local_update`.

    Returns:
        Mean over steps of the weighted loss.
    """
    parameters = list(model.parameters())
    update = torch.optim.Adam(parameters, lr=learning_rate, betas=BETAS)
    num_answers = sum(len(data) for data in groups)
    device = parameters[0].device
    model.train()
    total = 0.0
    for step in range(steps):
        for group in update.param_groups:
            group["lr"] = learning_rate * step_size_factor(step, steps)
        update.zero_grad(set_to_none=True)
        for data in groups:
            batch = sample_episodes(data, embedding, config=episodes, generator=generator)
            value = len(data) / num_answers * model.loss(batch.to(device))
            torch.autograd.backward(value)
            total += float(value.detach())
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        update.step()
    return total / steps
