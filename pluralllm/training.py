"""Training PluralLLM: one client's local update, and the central run it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.episodes import EpisodeConfig, sample_episodes
from pluralllm.model import PluralLLM

Optimizer = Literal["sgd", "adam"]
OPTIMIZERS: dict[Optimizer, type[torch.optim.SGD | torch.optim.Adam]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}
# One odd episode must not throw the weights away. Gradients of attention are well under this; those of a residual's
# kernel are over it at first, and Adam, a group's own or the server's, does not mind how long they are.
MAX_GRADIENT_NORM = 1.0
# Adam's moments, of the central run and of the federation's server
BETAS = (0.9, 0.99)
WARM_UP_STEPS = 5
FALLING_SHARE = 1 / 3


def step_size_factor(step: int, steps: int) -> float:
    """Factor of the step size, in (0, 1]: a short rise, and a fall over the last third of the steps, counted from 0.

    A network that ends on large steps carries the last batches' noise, which costs more than what they teach.
    """
    return min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, (steps - step) / (FALLING_SHARE * steps))


def local_update(
    model: PluralLLM,
    data: GroupData,
    embedding: OptionEmbedding,
    *,
    steps: int,
    learning_rate: float,
    optimizer: Optimizer,
    episodes: EpisodeConfig,
    generator: torch.Generator,
    proximal: float = 0.0,
) -> float:
    """Train `model` in place on one group's answers, as one client does in one federated round.

    The model holds the server's weights on entry, the client's on return; the optimizer is a fresh one, as clients keep
    no state. `episodes` is the shape of a step's batch, and `proximal` the mu of FedProx, which adds
    `mu / 2 |w - w_server|^2` to the loss.

    Returns:
        Mean loss over the steps.

    Raises:
        UserError: a group without answers.
    """
    parameters = list(model.parameters())
    anchor = [parameter.detach().clone() for parameter in parameters] if proximal else []
    update = OPTIMIZERS[optimizer](parameters, lr=learning_rate)
    device = parameters[0].device
    model.train()
    total = 0.0
    for _ in range(steps):
        batch = sample_episodes(data, embedding, config=episodes, generator=generator)
        value = model.loss(batch.to(device))
        update.zero_grad(set_to_none=True)
        torch.autograd.backward(value)
        for parameter, start in zip(parameters, anchor, strict=False):
            # the gradient of mu / 2 |w - w_server|^2, written out to spare a graph over every weight
            parameter.grad = proximal * (parameter.detach() - start) + (
                0.0 if parameter.grad is None else parameter.grad
            )
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        update.step()
        total += float(value.detach())
    return total / steps


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
