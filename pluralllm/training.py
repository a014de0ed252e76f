"""Training PluralLLM: the loss, one client's local update, and the central run it is compared with.

Axis letters: B episodes, Q questions, M target questions, K options, W as in `pluralllm.model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pluralllm.data import FloatArray, GroupData, OptionEmbedding
from pluralllm.episodes import EpisodeConfig, Episodes, sample_episodes
from pluralllm.model import PluralLLM

Optimizer = Literal["sgd", "adam"]
OPTIMIZERS: dict[Optimizer, type[torch.optim.SGD | torch.optim.Adam]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
}
# one odd episode must not throw the weights away; ordinary gradients have a norm well under this
MAX_GRADIENT_NORM = 1.0
# Adam's moments, of the central run and of the federation's server
BETAS = (0.9, 0.99)
WARM_UP_STEPS = 5
FALLING_SHARE = 1 / 3
# of cross entropy in the loss, next to the distance
CROSS_ENTROPY_SHARE = 0.3
# the root's slope must stay finite where a prediction is right
ROOT_FLOOR = 1e-4
# stands for log 0 where a term is multiplied with 0 and -inf would give NaN
ABSENT_LOG = -30.0
TINY = 1e-12


def soft_cross_entropy(log_probability_BMK: Tensor, target_BMK: Tensor, option_BMK: Tensor) -> Tensor:
    """Mean over real target questions of `-sum_k y_k log p_k`, in nats; padding neither adds nor divides.

    Args:
        log_probability_BMK: (B, M, K) from the network, -inf on padding.
        target_BMK: (B, M, K) the group's distributions.
        option_BMK: (B, M, K) bool; at least one question must have an option.

    Returns:
        A scalar >= 0.
    """
    surprise_BMK = -target_BMK * log_probability_BMK.masked_fill(~option_BMK, 0.0)
    return surprise_BMK.sum() / option_BMK.any(-1).sum()


def js_distance_loss(log_probability_BMK: Tensor, target_BMK: Tensor, option_BMK: Tensor) -> Tensor:
    """Mean over real target questions of the natural Jensen-Shannon distance; shapes as in `soft_cross_entropy`.

    Cross entropy alone follows every hint of a difference, right or wrong. A distance, like an absolute error, makes
    the network stay with what is expected until the context gives good reason to leave it.

    Returns:
        A scalar in [0, 0.84].
    """
    log_BMK = log_probability_BMK.masked_fill(~option_BMK, ABSENT_LOG).clamp_min(ABSENT_LOG)
    share_BMK = log_BMK.exp()
    log_middle_BMK = (0.5 * (share_BMK + target_BMK)).clamp_min(TINY).log()
    terms_BMK = share_BMK * (log_BMK - log_middle_BMK) + torch.xlogy(target_BMK, target_BMK)
    divergence_BM = 0.5 * (terms_BMK - target_BMK * log_middle_BMK).sum(-1).clamp_min(0.0)
    distance_BM = (divergence_BM + ROOT_FLOOR).sqrt() * option_BMK.any(-1)
    return distance_BM.sum() / option_BMK.any(-1).sum()


def loss(model: PluralLLM, episodes: Episodes) -> Tensor:
    """What training minimises on a batch of episodes, a scalar with gradient.

    Soft-label cross entropy; with a population prior the Jensen-Shannon distance and a part of the cross entropy.
    Without the prior, what is expected has to be learned first, and the distance was slower to find the groups.
    """
    device = next(model.parameters()).device
    context, target = (part.map(lambda value: value.to(device)) for part in episodes[:2])
    predicted, truth = model(context, target), target.answer
    assert truth is not None
    entropy = soft_cross_entropy(predicted, truth, target.options)
    if target.population is None:
        return entropy
    return js_distance_loss(predicted, truth, target.options) + CROSS_ENTROPY_SHARE * entropy


def step_size_factor(step: int, steps: int) -> float:
    """What the step size is multiplied with, in (0, 1]: a short rise, and a fall over the last third.

    A network that ends on large steps carries the last batches' noise, which costs more than what they teach.

    Args:
        step: number of the step or round, from 0.
        steps: how many there are, >= 1.
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
    population: FloatArray | None = None,
) -> float:
    """Train `model` in place on one group's answers, as one client does in one federated round.

    The model holds the server's weights on entry, the client's on return; the optimizer is a fresh one, as clients keep
    no state. `episodes` is the shape of a step's batch, `population` (Q, K, W) of the other groups, and `proximal` the
    mu of FedProx, which adds `mu / 2 |w - w_server|^2` to the loss.

    Returns:
        Mean loss over the steps.

    Raises:
        UserError: a group without answers.
    """
    parameters = list(model.parameters())
    anchor = [parameter.detach().clone() for parameter in parameters] if proximal else []
    update = OPTIMIZERS[optimizer](parameters, lr=learning_rate)
    model.train()
    total = 0.0
    for _ in range(steps):
        batch = sample_episodes(data, embedding, config=episodes, generator=generator, population=population)
        value = loss(model, batch)
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
    populations: Sequence[FloatArray] | None = None,
) -> float:
    """Train `model` in place with Adam on the pooled answers: what federated training is measured against.

    One step sees episodes of every group, weighted by its number of answers as FedAvg weights its update. A fair
    comparison gives it as many steps as rounds times local steps. `learning_rate` is the largest, see
    `step_size_factor`, and `populations` holds each group's (Q, K, W) of the others; the rest is as in `local_update`.

    Returns:
        Mean over steps of the weighted loss.
    """
    parameters = list(model.parameters())
    update = torch.optim.Adam(parameters, lr=learning_rate, betas=BETAS)
    num_answers = sum(len(data) for data in groups)
    model.train()
    total = 0.0
    others: Sequence[FloatArray | None] = populations if populations is not None else [None] * len(groups)
    for step in range(steps):
        for group in update.param_groups:
            group["lr"] = learning_rate * step_size_factor(step, steps)
        update.zero_grad(set_to_none=True)
        for data, population in zip(groups, others, strict=True):
            batch = sample_episodes(data, embedding, config=episodes, generator=generator, population=population)
            value = len(data) / num_answers * loss(model, batch)
            torch.autograd.backward(value)
            total += float(value.detach())
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        update.step()
    return total / steps
