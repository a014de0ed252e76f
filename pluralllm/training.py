"""Training PluralLLM: a fresh network, episodes of one group, and one client's local update.

In an episode a few answered questions of one group are the context, others of the same group are to be predicted.

Axis letters: B episodes, C context questions, M target questions, E embedding.
"""

from __future__ import annotations

import torch

from appa_flwr.config.sections import Architecture, PluralLLMSection
from appa_flwr.core.errors import UserError
from appa_flwr.protocol.asks import Catalogue
from pluralllm.attention import FewShotAttention
from pluralllm.data import EMBEDDING_DIM, GroupData
from pluralllm.network import Episodes, PluralLLM, Questions
from pluralllm.residual import SHARES, ExactResidual, Shares

# One odd episode must not throw the weights away. Gradients of attention are well under this; those of a residual's
# kernel are over it at first, and Adam does not mind how long they are.
MAX_GRADIENT_NORM = 1.0
WARM_UP_STEPS = 5
FALLING_SHARE = 1 / 3
# the residual is conditioned on any number of answers, and is trained on as many as a step can afford
RESIDUAL_CONTEXT = (8, 100)
ATTENTION_EPISODES = 4  # of a step; "residual" has one
MOST_TARGETS = 32  # of an episode
# Largest standard deviation of Gaussian noise on a question's features (of order 1), drawn anew each time. Half of the
# questions get none, the others anything up to this: the network may know the training questions by heart and still
# learns what to say about others.
EMBEDDING_NOISE = 0.3
# of episodes: blind to the question, with learned features, and plain, whatever the others say; a plain kernel has few
# numbers, and needs no more
VIEW_SHARES = (0.5, 0.5, 0.1)


def build(architecture: Architecture) -> PluralLLM:
    """A fresh network of a run, its weights drawn from torch's generator; untrained it answers uniformly."""
    if architecture == "residual":
        return ExactResidual()
    return FewShotAttention()


def choices(architecture: Architecture) -> tuple[Shares | None, ...]:
    """Shares of views that validation chooses from; None alone where there are none."""
    return SHARES if architecture == "residual" else (None,)


def sample_episodes(
    data: GroupData, public: Catalogue, settings: PluralLLMSection, *, generator: torch.Generator
) -> Episodes:
    """Draw one optimizer step's episodes from a group's answers; within each, context and targets share no question.

    The contexts of "attention" are few-shot ones as at prediction, those of "residual" of any size. At most half of a
    group's answers are context.

    Raises:
        UserError: the group answered no question.
    """
    if not len(data):
        raise UserError(f"group '{data.group}' has no answered training question; PluralLLM needs at least one")
    most, residual = settings.num_context_questions, settings.architecture == "residual"
    least, largest = (min(size, most) for size in RESIDUAL_CONTEXT) if residual else (most, most)
    num_episodes = 1 if residual else ATTENTION_EPISODES
    drawn = int(torch.randint(least, largest + 1, (), generator=generator))
    num_context = min(drawn, len(data) // 2)
    num_targets = min(MOST_TARGETS, len(data) - num_context)
    shuffled = torch.rand(num_episodes, len(data), generator=generator).argsort(dim=1)
    chosen = shuffled[:, : num_context + num_targets]
    question = torch.from_numpy(data.question_N)[chosen]
    noise = torch.randn(*question.shape, EMBEDDING_DIM, generator=generator)
    amount = EMBEDDING_NOISE * (2.0 * torch.rand(question.shape, generator=generator) - 1.0).clamp_min(0.0)
    noise = amount[..., None] * noise
    asked = Questions(
        torch.from_numpy(public.embedding_QKE)[question],
        torch.from_numpy(public.option_QK)[question],
        torch.from_numpy(data.answer_NK)[chosen],
    )
    return Episodes(
        context=asked.map(lambda part: part[:, :num_context]),
        target=asked.map(lambda part: part[:, num_context:]),
        noise=(noise[:, :num_context], noise[:, num_context:]),
        view_B3=torch.rand(num_episodes, 3, generator=generator) < torch.tensor(VIEW_SHARES),
    )


def step_size_factor(step: int, steps: int) -> float:
    """Factor of the step size, in (0, 1]: a short rise, and a fall over the last third of the steps, counted from 0.

    A network that ends on large steps carries the last batches' noise, which costs more than what they teach.
    """
    return min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, (steps - step) / (FALLING_SHARE * steps))


def local_update(
    model: PluralLLM,
    data: GroupData,
    public: Catalogue,
    settings: PluralLLMSection,
    *,
    round_number: int,
    generator: torch.Generator,
) -> float:
    """Train `model` in place on one group's answers, as one client does in a federated round, the first of which is 1.

    The model holds the server's weights on entry, the client's on return; the optimizer is a fresh one, as clients keep
    no state.

    Returns:
        Mean loss over the steps.

    Raises:
        UserError: a group without answers.
    """
    parameters = list(model.parameters())
    learning_rate = settings.learning_rate * step_size_factor(round_number - 1, settings.rounds)
    update = torch.optim.Adam(parameters, lr=learning_rate)
    model.train()
    total = 0.0
    for _ in range(settings.local_steps):
        batch = sample_episodes(data, public, settings, generator=generator)
        value = model.loss(batch)
        update.zero_grad(set_to_none=True)
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        update.step()
        total += float(value.detach())
    return total / settings.local_steps
