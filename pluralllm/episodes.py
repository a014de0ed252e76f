"""Episodes: a few answered questions of one group as context, others of the same group to predict.

Axis letters: B episodes, C context questions, M target questions, S questions of either kind, K options, E embedding,
N answered questions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from appa_flwr.config.sections import PluralLLMSection
from appa_flwr.core.errors import UserError
from pluralllm.data import GroupData, OptionEmbedding
from pluralllm.questions import Questions

# the residual is conditioned on any number of answers, and is trained on as many as a step can afford
RESIDUAL_CONTEXT = (8, 100)
# of episodes: blind to the question, with learned features, and plain, whatever the others say; a plain kernel has few
# numbers, and needs no more
VIEW_SHARES = (0.5, 0.5, 0.1)


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


class Episodes(NamedTuple):
    """A batch ready for the network: C answered questions and M to be predicted, with the answers that are right.

    Attributes:
        context: (B, C, ...) of them.
        target: (B, M, ...) of them.
        noise: (B, C, E) and (B, M, E), for the features of the two.
        view_B3: which view of the residual architecture an episode is for (fields of `pluralllm.residual.View`).
        question: (B, C + M) rows of the embedding table, the context's first; none twice in an episode.
    """

    context: Questions
    target: Questions
    noise: tuple[Tensor, Tensor]
    view_B3: Tensor
    question: Tensor

    def to(self, device: torch.device) -> Episodes:
        """The same on a device."""

        def move(value: Tensor) -> Tensor:
            return value.to(device)

        noise = (move(self.noise[0]), move(self.noise[1]))
        return Episodes(self.context.map(move), self.target.map(move), noise, move(self.view_B3), move(self.question))


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
        question=question,
    )
