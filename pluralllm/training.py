"""Training PluralLLM: a fresh network, episodes of one group, and one client's local update.

In an episode a few answered questions of one group are the context, others of the same group are to be predicted.

Axis letters: B episodes, C context questions, M target questions, E embedding.
"""

import torch

from appa_flwr.config.sections import Architecture, PluralLLMSection
from appa_flwr.protocol.queries import Catalogue
from pluralllm.attention import FewShotAttention
from pluralllm.data import EMBEDDING_DIM, GroupData
from pluralllm.network import Episodes, PluralLLM, Questions
from pluralllm.residual import ExactResidual

# Protects the weights from one odd episode. Gradients of attention are well below this norm. Gradients of a residual's
# kernel exceed it at first, which does no harm, since Adam does not depend on their length.
MAX_GRADIENT_NORM = 1.0
ADAPTIVE_STRATEGIES = ("fedadam", "fedyogi")  # have an optimizer on the server
WARM_UP_STEPS = 5
FALLING_SHARE = 1 / 3
# range of context sizes of "residual": it can be conditioned on any number of answers, but larger steps cost too much
RESIDUAL_CONTEXT = (8, 100)
ATTENTION_EPISODES = 4  # episodes per step; "residual" has one
MOST_TARGETS = 32  # most targets of an episode
# Largest standard deviation of Gaussian noise on a question's features (of order 1), drawn anew each time. Half of the
# questions get no noise, the others up to this amount. So the network may memorise the training questions and still
# learns to predict others.
EMBEDDING_NOISE = 0.3
# shares of episodes that are blind to the question, that have learned features, and that are plain regardless of the
# first two; a plain kernel has few parameters and needs few episodes
VIEW_SHARES = (0.5, 0.5, 0.1)


def build(architecture: Architecture) -> PluralLLM:
    """Build an untrained network, its weights drawn from torch's generator; it predicts uniform answers."""
    if architecture == "residual":
        return ExactResidual()
    return FewShotAttention()


def validation_round(settings: PluralLLMSection) -> int:
    """The last round without validation questions, halfway down the fall of the steps; 0 for a network without views.

    Before the fall the network knows less than in the end, and other shares are best.
    """
    return int(settings.rounds * (1.0 - FALLING_SHARE / 2)) if settings.architecture == "residual" else 0


def sample_episodes(
    data: GroupData, public: Catalogue, settings: PluralLLMSection, *, generator: torch.Generator
) -> Episodes:
    """Draw one optimizer step's episodes from a group's answers; within each, context and targets share no question.

    Contexts of "attention" have the size of contexts at prediction, contexts of "residual" a random size. At most half
    of a group's answers, of which there is at least one, are context.
    """
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
    """Factor of the step size, in (0, 1]: a short rise, and a fall over the last third of the steps; `step` >= 0.

    Large steps at the end would leave the noise of the last batches in the weights, which costs more than it gains.
    """
    return min(1.0, (step + 1) / WARM_UP_STEPS) * min(1.0, (steps - step) / (FALLING_SHARE * steps))


def local_update(
    model: PluralLLM,
    data: GroupData,
    public: Catalogue,
    settings: PluralLLMSection,
    *,
    round_number: int,
    proximal: float = 0.0,
    generator: torch.Generator,
) -> float:
    """Train `model` in place on one group's answers, as one client does in federated round `round_number` (from 1).

    The model holds the server's weights on entry, the client's weights on return. The optimizer is always new, since
    clients keep no state: Adam, whose step falls over the rounds, or SGD under a strategy with an optimizer on the
    server. `proximal` is the mu of FedProx, whose term mu / 2 |w - w_server|^2 is added to the loss.

    Returns the mean loss over the steps.
    """
    parameters = list(model.parameters())
    update: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=settings.learning_rate)
    if settings.strategy not in ADAPTIVE_STRATEGIES:
        learning_rate = settings.learning_rate * step_size_factor(round_number - 1, settings.rounds)
        update = torch.optim.Adam(parameters, lr=learning_rate)
    anchor = [parameter.detach().clone() for parameter in parameters]
    model.train()
    total = 0.0
    for _ in range(settings.local_steps):
        batch = sample_episodes(data, public, settings, generator=generator)
        value = model.loss(batch)
        update.zero_grad(set_to_none=True)
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        for parameter, before in zip(parameters, anchor, strict=True) if proximal else ():
            if parameter.grad is not None:  # the gradient of the proximal term
                parameter.grad += proximal * (parameter.detach() - before)
        update.step()
        total += float(value.detach())
    return total / settings.local_steps
