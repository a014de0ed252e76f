"""Layers of both networks: options that see each other, and a score an option.

Axis letters: B episodes, S questions, K options, D hidden features, N real option tokens in a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pluralllm.questions import Layout


class OptionMixing(nn.Module):
    """Pre-norm gated feed-forward in which each option also sees the mean over its question's options."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        # each gives a gate and a value
        self.own = nn.Linear(dim, 2 * dim)
        self.mean = nn.Linear(dim, 2 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, token_ND: Tensor, tokens: Layout) -> Tensor:
        """(N, D) to (N, D)."""
        normed = self.norm(token_ND)
        shared = self.mean(tokens.question_mean(normed)).index_select(0, tokens.question_N)
        gate, value = (self.own(normed) + shared).chunk(2, dim=-1)
        mixed: Tensor = self.out(F.gelu(gate) * value)
        return token_ND + mixed


class Head(nn.Module):
    """One score a token, 0 before training."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.score = nn.Linear(dim, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def forward(self, token_ND: Tensor) -> Tensor:
        """(N, D) to (N,)."""
        score: Tensor = self.score(self.norm(token_ND))
        return score[:, 0]


def log_softmax(score_N: Tensor, option_BSK: Tensor) -> Tensor:
    """Normalise the tokens' scores over each question's options; (B, S, K), -inf on padding."""
    lowest = torch.finfo(score_N.dtype).min
    score = score_N.new_full(option_BSK.shape, lowest).masked_scatter(option_BSK, score_N)
    return F.log_softmax(score, dim=-1).masked_fill(~option_BSK, float("-inf"))
