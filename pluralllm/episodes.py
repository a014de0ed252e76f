"""Episodes: a few answered questions of one group as context, others of the same group to predict.

Axis letters: B episodes, C context questions, M target questions, S questions of either kind, K options, E embedding,
N answered questions, W as in `pluralllm.model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from appa_flwr.errors import UserError
from pluralllm.data import FloatArray, GroupData, OptionEmbedding
from pluralllm.model import LOG_FLOOR, Questions

# by how much a group's difference from the others is stretched, either way, and how many episodes keep it as it is
STRETCH = (0.5, 1.5)
REAL_SHARE = 0.3


@dataclass(frozen=True)
class EpisodeConfig:
    """Shape of the episodes of one optimizer step.

    Attributes:
        num_context: C, context questions; fewer where the group answered too few to leave as many targets.
        num_targets: M, target questions; fewer where the group has no more.
        num_episodes: B, episodes drawn from one group for one step.
        embedding_noise: largest standard deviation of Gaussian noise on a question's features (of order 1), drawn anew
            each time and alike for all its options. Half of the questions get none, the others anything up to this:
            the network may know the training questions by heart and still learns what to say about others.
        population_dropout: chance that a question goes without its population prior, so that the network also
            learns to do without one.
    """

    num_context: int = 16
    num_targets: int = 32
    num_episodes: int = 4
    embedding_noise: float = 0.3
    population_dropout: float = 0.2

    def __post_init__(self) -> None:
        """Refuse an episode without targets."""
        if self.num_context < 0 or self.num_targets < 1 or self.num_episodes < 1 or not self.embedding_noise >= 0.0:
            raise UserError(f"PluralLLM episodes need a target and an episode, no negative context; got {self}")


class Episodes(NamedTuple):
    """A batch ready for the network: C answered questions and M to be predicted, with the answers that are right.

    `question` (B, C + M) holds their rows of the embedding table, the context's first; none twice in an episode.
    """

    context: Questions
    target: Questions
    question: Tensor


def sample_episodes(
    data: GroupData,
    embedding: OptionEmbedding,
    *,
    config: EpisodeConfig,
    generator: torch.Generator,
    population: FloatArray | None = None,
) -> Episodes:
    """Draw context and targets without replacement from one group's answers.

    Args:
        data: the group's answers, N >= 1; only these can become context or target.
        embedding: the public table.
        config: sizes; a group with too few questions gives at most half of them as context.
        generator: source of randomness (CPU).
        population: (Q, K, W) of the other groups.

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
    chosen = shuffled[:, : num_context + num_targets]
    question = torch.from_numpy(data.question_N)[chosen]
    answer = torch.from_numpy(data.answer_NK)[chosen]
    noise = torch.randn(*question.shape, 1, embedding.dim, generator=generator)
    amount = config.embedding_noise * (2.0 * torch.rand(question.shape, generator=generator) - 1.0).clamp_min(0.0)
    value = torch.from_numpy(embedding.value_QKE)[question] + amount[..., None, None] * noise
    option = torch.from_numpy(embedding.option_QK)[question]
    others = None
    if population is not None:
        kept = torch.rand(question.shape, generator=generator) >= config.population_dropout
        others = torch.from_numpy(population.astype(np.float32))[question]
        answer = _invented_group(answer, others[..., 0], option, generator)
        others = others * kept[..., None, None]
    drawn = Questions(value, option, answer, others)
    context, target = drawn.map(lambda part: part[:, :num_context]), drawn.map(lambda part: part[:, num_context:])
    return Episodes(context, target, question)


def _invented_group(answer_BSK: Tensor, others_BSK: Tensor, option_BSK: Tensor, generator: torch.Generator) -> Tensor:
    """Answers of a group that differs from the others more, less or the other way round, a new one each episode.

    A few training groups are quickly known by heart: the network then guesses which of them it sees, and is wrong
    about any other. Here the difference to the others' mean, in log space, is multiplied with one number for a whole
    episode, so that what remains to be learned is how the context's differences carry over to the targets.
    Questions without a population prior keep their answer.
    """
    shape = (len(answer_BSK), 1, 1)
    low, high = STRETCH
    stretch = low + (high - low) * torch.rand(shape, generator=generator)
    stretch = stretch * (2 * torch.randint(0, 2, shape, generator=generator) - 1)
    stretch = torch.where(torch.rand(shape, generator=generator) < REAL_SHARE, 1.0, stretch)
    log_others = others_BSK.clamp_min(LOG_FLOOR).log()
    log_answer = log_others + stretch * (answer_BSK.clamp_min(LOG_FLOOR).log() - log_others)
    invented_BSK = log_answer.masked_fill(~option_BSK, float("-inf")).softmax(-1)
    known = others_BSK.sum(-1, keepdim=True) > 0
    real = stretch == 1.0
    return torch.where(known & ~real, invented_BSK, answer_BSK)
