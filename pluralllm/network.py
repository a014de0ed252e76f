"""Shared parts of both architectures of PluralLLM: questions and episodes as tensors, layers, and the base class.

Axis letters: B episodes, C context questions, M target questions, S questions of either kind, K options, E embedding,
D hidden features, N real option tokens of the batch in a row, T tokens of the longest episode.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pluralllm.data import HIDDEN_DIM


class Questions(NamedTuple):
    """A padded batch of questions as the network takes them."""

    embedding: Tensor  # (B, S, K, E) features of the options
    options: Tensor  # (B, S, K) bool, True where a question has that option; a question without any is padding
    answer: Tensor | None = None  # (B, S, K) distributions of the group, arbitrary on padding; None if not known

    def map(self, change: Callable[[Tensor], Tensor]) -> "Questions":
        """Apply `change` to every array."""
        answer = None if self.answer is None else change(self.answer)
        return Questions(change(self.embedding), change(self.options), answer)

    def episode(self, place: int) -> "Questions":
        """One episode of the batch, as a batch of one."""
        return self.map(lambda value: value[place : place + 1])


@dataclass(frozen=True)
class TokenLayout:
    """Positions of the N real option tokens in a padded (B, S, K) batch."""

    option_BSK: Tensor  # True where a token is real
    question_N: Tensor  # b S + s of each token
    slot_N: Tensor  # b T + its rank within its episode
    real_BT: Tensor  # True where a slot holds a token
    size_S: Tensor  # (B S,) number of options of each question, at least 1 so that it can divide

    def pad(self, value_ND: Tensor) -> Tensor:
        """Lay the tokens out as (B, T, D), 0 in empty slots."""
        batch, length = self.real_BT.shape
        padded = value_ND.new_zeros(batch * length, value_ND.shape[-1])
        return padded.index_copy(0, self.slot_N, value_ND).view(batch, length, value_ND.shape[-1])

    def unpad(self, value_BTD: Tensor) -> Tensor:
        """Take the tokens back out of (B, T, D) as (N, D)."""
        return value_BTD.flatten(0, 1).index_select(0, self.slot_N)

    def question_mean(self, value_ND: Tensor) -> Tensor:
        """Mean over each question's options, (B S, D); 0 for a question without options."""
        total = value_ND.new_zeros(len(self.size_S), value_ND.shape[-1])
        return total.index_add(0, self.question_N, value_ND) / self.size_S[:, None]


def layout(option_BSK: Tensor) -> TokenLayout:
    """The layout of a batch, from which options are real."""
    batch, questions, _ = option_BSK.shape
    flat = option_BSK.flatten(1)
    length_B = flat.sum(1)
    length = int(length_B.max()) if batch and flat.shape[1] else 0
    rank = flat.cumsum(1) - 1 + length * torch.arange(batch)[:, None]
    episode_N, question_N, _ = option_BSK.nonzero(as_tuple=True)
    return TokenLayout(
        option_BSK=option_BSK,
        question_N=episode_N * questions + question_N,
        slot_N=rank[flat],
        real_BT=torch.arange(length)[None] < length_B[:, None],
        size_S=option_BSK.sum(-1).flatten().clamp_min(1),
    )


class Episodes(NamedTuple):
    """A batch for training: C answered questions, and M questions to predict with their true answers."""

    context: Questions  # (B, C, ...)
    target: Questions  # (B, M, ...)
    noise: tuple[Tensor, Tensor]  # (B, C, E) and (B, M, E), for the features of context and target
    view_B3: Tensor  # which view of the residual architecture an episode is for (fields of `pluralllm.residual.View`)


class OptionMixing(nn.Module):
    """Pre-norm gated feed-forward in which each option also sees the mean over its question's options."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN_DIM)
        # each gives a gate and a value
        self.own = nn.Linear(HIDDEN_DIM, 2 * HIDDEN_DIM)
        self.mean = nn.Linear(HIDDEN_DIM, 2 * HIDDEN_DIM, bias=False)
        self.out = nn.Linear(HIDDEN_DIM, HIDDEN_DIM)

    def forward(self, token_ND: Tensor, tokens: TokenLayout) -> Tensor:
        """(N, D) to (N, D)."""
        normed = self.norm(token_ND)
        shared = self.mean(tokens.question_mean(normed)).index_select(0, tokens.question_N)
        gate, value = (self.own(normed) + shared).chunk(2, dim=-1)
        mixed: Tensor = self.out(F.gelu(gate) * value)
        return token_ND + mixed


class Head(nn.Module):
    """One score a token, 0 before training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN_DIM)
        self.score = nn.Linear(HIDDEN_DIM, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def forward(self, token_ND: Tensor) -> Tensor:
        """(N, D) to (N,)."""
        score: Tensor = self.score(self.norm(token_ND))
        return score[:, 0]


def log_share(score_N: Tensor, option_BSK: Tensor) -> Tensor:
    """Normalise the tokens' scores over each question's options; (B, S, K), -inf on padding."""
    lowest = torch.finfo(score_N.dtype).min
    score = score_N.new_full(option_BSK.shape, lowest).masked_scatter(option_BSK, score_N)
    return F.log_softmax(score, dim=-1).masked_fill(~option_BSK, float("-inf"))


class PluralLLM(nn.Module, ABC):
    """A preference predictor, of either architecture; `pluralllm.training.build` makes one."""

    @abstractmethod
    def loss(self, episodes: Episodes) -> Tensor:
        """Training loss on a batch of episodes: a scalar with gradient."""
