"""Episodes: a few answered questions of one group as context, others of the same group to predict.

Axis letters: B episodes, C context questions, M target questions, K options, E embedding, N answered questions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from appa_flwr.errors import UserError
from pluralllm.data import GroupData, OptionEmbedding


@dataclass(frozen=True)
class EpisodeConfig:
    """Shape of the episodes of one optimizer step.

    Attributes:
        num_context: C, context questions; fewer where the group answered too few to leave as many targets.
        num_targets: M, target questions; fewer where the group has no more.
        num_episodes: B, episodes drawn from one group for one step.
        embedding_noise: standard deviation of Gaussian noise on a question's features (of order 1), drawn anew
            each time and alike for all its options. It keeps the network from learning the few training
            questions by heart, which costs it the unseen ones.
    """

    num_context: int = 16
    num_targets: int = 32
    num_episodes: int = 4
    embedding_noise: float = 0.2

    def __post_init__(self) -> None:
        """Refuse an episode without targets."""
        if self.num_context < 0 or self.num_targets < 1 or self.num_episodes < 1 or not self.embedding_noise >= 0.0:
            raise UserError(f"PluralLLM episodes need a target and an episode, no negative context; got {self}")


@dataclass(frozen=True)
class Episodes:
    """A batch ready for the network; field shapes as in `PluralLLM.forward`.

    Attributes:
        context_embedding: (B, C, K, E).
        context_answer: (B, C, K).
        context_options: (B, C, K) bool.
        target_embedding: (B, M, K, E).
        target_answer: (B, M, K), what is to be predicted.
        target_options: (B, M, K) bool.
        context_question: (B, C) rows of the embedding table.
        target_question: (B, M) rows of the embedding table, none of them in the context of the same episode.
    """

    context_embedding: Tensor
    context_answer: Tensor
    context_options: Tensor
    target_embedding: Tensor
    target_answer: Tensor
    target_options: Tensor
    context_question: Tensor
    target_question: Tensor


def sample_episodes(
    data: GroupData, embedding: OptionEmbedding, *, config: EpisodeConfig, generator: torch.Generator
) -> Episodes:
    """Draw context and targets without replacement from one group's answers.

    Args:
        data: the group's answers, N >= 1; only these can become context or target.
        embedding: the public table.
        config: sizes; a group with too few questions gives at most half of them as context.
        generator: source of randomness (CPU).

    Returns:
        `config.num_episodes` episodes; within each, context and targets share no question.

    Raises:
        UserError: the group answered no question.
    """
    if not len(data):
        raise UserError(f"group '{data.group}' has no answered training question; PluralLLM needs at least one")
    num_context = min(config.num_context, len(data) // 2)
    num_targets = min(config.num_targets, len(data) - num_context)
    shuffled = torch.rand(config.num_episodes, len(data), generator=generator).argsort(dim=1)
    drawn = shuffled[:, : num_context + num_targets]
    question = torch.from_numpy(data.question_N)[drawn]
    answer = torch.from_numpy(data.answer_NK)[drawn]
    noise = torch.randn(*question.shape, 1, embedding.dim, generator=generator)
    value = torch.from_numpy(embedding.value_QKE)[question] + config.embedding_noise * noise
    option = torch.from_numpy(embedding.option_QK)[question]
    return Episodes(
        context_embedding=value[:, :num_context],
        context_answer=answer[:, :num_context],
        context_options=option[:, :num_context],
        target_embedding=value[:, num_context:],
        target_answer=answer[:, num_context:],
        target_options=option[:, num_context:],
        context_question=question[:, :num_context],
        target_question=question[:, num_context:],
    )


def to_device(episodes: Episodes, device: torch.device) -> Episodes:
    """Move every array of a batch to `device`."""
    return Episodes(**{field.name: getattr(episodes, field.name).to(device) for field in fields(Episodes)})
