"""Training PluralLLM: a fresh network, episodes of one group, and one client's local update.

In an episode a few answered questions of one group are the context, others of the same group are to be predicted.

Axis letters: B episodes, C context questions, M target questions, E embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from appa_flwr.config.sections import Architecture, PluralLLMSection
from appa_flwr.core.errors import UserError
from pluralllm.attention import FewShotAttention
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.network import EMBEDDING_DIM, HIDDEN_DIM, NUM_BLOCKS, NUM_HEADS, RANK, Episodes, PluralLLM, Questions
from pluralllm.residual import SHARES, ExactResidual, Shares

# One odd episode must not throw the weights away. Gradients of attention are well under this; those of a residual's
# kernel are over it at first, and Adam, a group's own or the server's, does not mind how long they are.
MAX_GRADIENT_NORM = 1.0
# Adam's moments, of the central run and of the federation's server
BETAS = (0.9, 0.99)
WARM_UP_STEPS = 5
FALLING_SHARE = 1 / 3
# the residual is conditioned on any number of answers, and is trained on as many as a step can afford
RESIDUAL_CONTEXT = (8, 100)
# of episodes: blind to the question, with learned features, and plain, whatever the others say; a plain kernel has few
# numbers, and needs no more
VIEW_SHARES = (0.5, 0.5, 0.1)


def build(architecture: Architecture) -> PluralLLM:
    """A fresh network of a run, its weights drawn from torch's generator; untrained it answers uniformly."""
    if architecture == "residual":
        return ExactResidual(EMBEDDING_DIM, HIDDEN_DIM, num_blocks=NUM_BLOCKS, rank=RANK)
    return FewShotAttention(EMBEDDING_DIM, HIDDEN_DIM, num_blocks=NUM_BLOCKS, num_heads=NUM_HEADS)


def choices(architecture: Architecture) -> tuple[Shares | None, ...]:
    """Shares of views that validation chooses from; None alone where there are none."""
    return SHARES if architecture == "residual" else (None,)


@dataclass(frozen=True)
class EpisodeConfig:
    """Shape of the episodes of one optimizer step.

    Attributes:
        num_context: C, most context questions; a group with too few questions gives at most half of them.
        least_context: fewest; each batch draws its C from here to `num_context`.
        num_targets: M, target questions; fewer where the group has no more.
        num_episodes: B, episodes drawn from one group for one step.
        embedding_noise: largest standard deviation of Gaussian noise on a question's features (of order 1), drawn anew
            each time. Half of the questions get none, the others anything up to this: the network may know the
            training questions by heart and still learns what to say about others.
    """

    num_context: int = 16
    least_context: int = 16
    num_targets: int = 32
    num_episodes: int = 4
    embedding_noise: float = 0.3

    @classmethod
    def of(cls, settings: PluralLLMSection) -> EpisodeConfig:
        """The episodes of a run: few-shot ones as at prediction for "attention", of any size for "residual"."""
        most = settings.num_context_questions
        if settings.architecture == "attention":
            return cls(most, most)
        least, largest = RESIDUAL_CONTEXT
        return cls(min(largest, most), min(least, most), num_episodes=1)


def sample_episodes(
    data: GroupData, embedding: OptionEmbedding, *, config: EpisodeConfig, generator: torch.Generator
) -> Episodes:
    """Draw episodes from one group's answers; within each, context and targets share no question.

    Raises:
        UserError: the group answered no question.
    """
    if not len(data):
        raise UserError(f"group '{data.group}' has no answered training question; PluralLLM needs at least one")
    drawn = int(torch.randint(config.least_context, config.num_context + 1, (), generator=generator))
    num_context = min(drawn, len(data) // 2)
    num_targets = min(config.num_targets, len(data) - num_context)
    shuffled = torch.rand(config.num_episodes, len(data), generator=generator).argsort(dim=1)
    chosen = shuffled[:, : num_context + num_targets]
    question = torch.from_numpy(data.question_N)[chosen]
    noise = torch.randn(*question.shape, embedding.dim, generator=generator)
    amount = config.embedding_noise * (2.0 * torch.rand(question.shape, generator=generator) - 1.0).clamp_min(0.0)
    noise = amount[..., None] * noise
    asked = Questions(
        torch.from_numpy(embedding.value_QKE)[question],
        torch.from_numpy(embedding.option_QK)[question],
        torch.from_numpy(data.answer_NK)[chosen],
    )
    return Episodes(
        context=asked.map(lambda part: part[:, :num_context]),
        target=asked.map(lambda part: part[:, num_context:]),
        noise=(noise[:, :num_context], noise[:, num_context:]),
        view_B3=torch.rand(config.num_episodes, 3, generator=generator) < torch.tensor(VIEW_SHARES),
    )


def step_size_factor(step: int, steps: int) -> float:
    """Factor of the step size, in (0, 1]: a short rise, and a fall over the last third of the steps, counted from 0.

    A network that ends on large steps carries the last batches' noise, which costs more than what they teach.
    """
    return min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, (steps - step) / (FALLING_SHARE * steps))


def local_update(
    model: PluralLLM,
    data: GroupData,
    embedding: OptionEmbedding,
    settings: PluralLLMSection,
    *,
    learning_rate: float,
    generator: torch.Generator,
) -> float:
    """Train `model` in place on one group's answers, as one client does in one federated round.

    The model holds the server's weights on entry, the client's on return; the optimizer is a fresh one, as clients keep
    no state.

    Returns:
        Mean loss over the steps.

    Raises:
        UserError: a group without answers.
    """
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam if settings.local_optimizer == "adam" else torch.optim.SGD
    update: torch.optim.Optimizer = optimizer(parameters, lr=learning_rate)
    episodes = EpisodeConfig.of(settings)
    model.train()
    total = 0.0
    for _ in range(settings.local_steps):
        batch = sample_episodes(data, embedding, config=episodes, generator=generator)
        value = model.loss(batch)
        update.zero_grad(set_to_none=True)
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        update.step()
        total += float(value.detach())
    return total / settings.local_steps
