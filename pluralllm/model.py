"""The network: a few-shot transformer from a group's answered questions to its answers on other questions.

Every answer option is one token. Options of a question are mixed through their mean, so they have no order but
the one their embedding carries; context questions attend to each other, target questions attend to the context
and never to each other, and nothing carries a position along the context. Padding is cut out before any token is
computed.

The network first predicts each question without context (the prior), then sees the context's answers as they are and as
they differ from that prediction. What tells groups apart are these differences, multiplied with what the question
is about; so answers enter as a factor too, and the feed-forward layers are gated products. Without either, federated
training found the prior and stayed there, the same answer for every group.

Axis letters: B episodes, C context questions, M target questions, S questions of either kind, K options,
E embedding, D hidden features, N real option tokens of the batch in a row, T tokens of the longest episode,
H attention heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from appa_flwr.errors import UserError

# K y - 1 (0 where the answer is uniform), the centred log of y, and both less what the prior predicts
ANSWER_FEATURES = 4
# a share under this counts as this in the log feature: a survey of 1,000 people cannot tell 0.002 from 0
LOG_FLOOR = 2e-3


@dataclass(frozen=True)
class ModelConfig:
    """Size of the network.

    Attributes:
        embedding_dim: E, features of an option.
        hidden_dim: D, a multiple of `num_heads`.
        num_blocks: blocks of option mixing and attention, at least 1.
        num_heads: H, attention heads.
    """

    embedding_dim: int = 128
    hidden_dim: int = 64
    num_blocks: int = 2
    num_heads: int = 4

    def __post_init__(self) -> None:
        """Refuse a size that cannot be built."""
        if min(self.embedding_dim, self.hidden_dim, self.num_blocks, self.num_heads) < 1:
            raise UserError(f"PluralLLM sizes must be at least 1, got {self}")
        if self.hidden_dim % self.num_heads:
            raise UserError(f"PluralLLM hidden-dim {self.hidden_dim} must be a multiple of its {self.num_heads} heads")


@dataclass(frozen=True)
class _Layout:
    """Where the N real option tokens of a padded (B, S, K) batch lie.

    Attributes:
        option_BSK: True where a token is real.
        question_N: b S + s of each token.
        slot_N: b T + its rank within its episode.
        real_BT: True where a slot holds a token.
        size_S: (B S,) number of options of each question, at least 1 so that it can divide.
    """

    option_BSK: Tensor
    question_N: Tensor
    slot_N: Tensor
    real_BT: Tensor
    size_S: Tensor

    def pad(self, value_ND: Tensor) -> Tensor:
        """Lay the tokens out as (B, T, D), 0 where there is none."""
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


def _layout(option_BSK: Tensor) -> _Layout:
    batch, questions, _ = option_BSK.shape
    flat = option_BSK.flatten(1)
    length_B = flat.sum(1)
    length = int(length_B.max()) if batch and flat.shape[1] else 0
    rank = flat.cumsum(1) - 1 + length * torch.arange(batch, device=flat.device)[:, None]
    episode_N, question_N, _ = option_BSK.nonzero(as_tuple=True)
    return _Layout(
        option_BSK=option_BSK,
        question_N=episode_N * questions + question_N,
        slot_N=rank[flat],
        real_BT=torch.arange(length, device=flat.device)[None] < length_B[:, None],
        size_S=option_BSK.sum(-1).flatten().clamp_min(1),
    )


class _OptionMixing(nn.Module):
    """Pre-norm gated feed-forward in which each option also sees the mean over its question's options."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        # each gives a gate and a value
        self.own = nn.Linear(dim, 2 * dim)
        self.mean = nn.Linear(dim, 2 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, token_ND: Tensor, layout: _Layout) -> Tensor:
        normed = self.norm(token_ND)
        shared = self.mean(layout.question_mean(normed)).index_select(0, layout.question_N)
        gate, value = (self.own(normed) + shared).chunk(2, dim=-1)
        mixed: Tensor = self.out(F.gelu(gate) * value)
        return token_ND + mixed


class _ContextAttention(nn.Module):
    """Pre-norm multi-head attention of any tokens to the context tokens of their episode.

    One learned key and value stand beside the context, so that an empty context is no special case.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.null_key_value = nn.Parameter(torch.zeros(2 * dim))
        self.out = nn.Linear(dim, dim)

    def remember(self, token_ND: Tensor, layout: _Layout) -> tuple[Tensor, Tensor]:
        """Keys and values of the context, each (B, H, 1 + T, D / H); the first is the learned one."""
        key_value = layout.pad(self.key_value(self.norm(token_ND)))
        null = self.null_key_value.expand(key_value.shape[0], 1, -1)
        key, value = torch.cat([null, key_value], dim=1).chunk(2, dim=-1)
        return self._heads(key), self._heads(value)

    def forward(self, token_ND: Tensor, layout: _Layout, memory: tuple[Tensor, Tensor], real_BT: Tensor) -> Tensor:
        query = self._heads(layout.pad(self.query(self.norm(token_ND))))
        mask = F.pad(real_BT, (1, 0), value=True)[:, None, None, :]
        seen = F.scaled_dot_product_attention(query, *memory, attn_mask=mask)
        attended: Tensor = self.out(layout.unpad(seen.transpose(1, 2).flatten(2)))
        return token_ND + attended

    def _heads(self, value_BTD: Tensor) -> Tensor:
        batch, length, dim = value_BTD.shape
        return value_BTD.view(batch, length, self.num_heads, dim // self.num_heads).transpose(1, 2)


class _Head(nn.Module):
    """One score a token, 0 before training."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.score = nn.Linear(dim, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def forward(self, token_ND: Tensor) -> Tensor:
        score: Tensor = self.score(self.norm(token_ND))
        return score[:, 0]


class PluralLLM(nn.Module):
    """Few-shot preference predictor (paper, appendix "PluralLLM Preference Probability Modeling").

    An untrained network answers uniformly: both heads start at 0. The state dict holds float parameters only.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.hidden_dim
        self.option = nn.Linear(config.embedding_dim, dim)
        self.answer = nn.Linear(ANSWER_FEATURES, 2 * dim)
        self.answered = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim))
        self.unanswered = nn.Parameter(torch.zeros(dim))
        self.prior_mixing = _OptionMixing(dim)
        self.prior_head = _Head(dim)
        self.mixing = nn.ModuleList(_OptionMixing(dim) for _ in range(config.num_blocks + 1))
        self.attention = nn.ModuleList(_ContextAttention(dim, config.num_heads) for _ in range(config.num_blocks))
        self.head = _Head(dim)

    def forward(
        self,
        *,
        context_embedding: Tensor,
        context_answer: Tensor,
        context_options: Tensor,
        target_embedding: Tensor,
        target_options: Tensor,
        context_present: Tensor | None = None,
    ) -> Tensor:
        """Predict the group's answers to the target questions.

        Args:
            context_embedding: (B, C, K, E); C may be 0.
            context_answer: (B, C, K) distributions of the group; what lies on padding is ignored.
            context_options: (B, C, K) bool, True where the question has that option.
            target_embedding: (B, M, K, E).
            target_options: (B, M, K) bool; a question without any option is allowed and means padding.
            context_present: (B, C) bool, False for context questions to leave out; all count if None.

        Returns:
            (B, M, K) log-probabilities, -inf on padding.
        """
        if context_present is not None:
            context_options = context_options & context_present[..., None]
        context, target = _layout(context_options), _layout(target_options)
        context_ND = self.prior_mixing(self.option(context_embedding[context_options]), context)
        target_ND = self.prior_mixing(self.option(target_embedding[target_options]), target)
        prior_N = self.prior_head(target_ND)
        expected_BCK = _log_softmax(self.prior_head(context_ND), context_options)
        answer_NA = _answer_features(context_answer, expected_BCK, context_options)[context_options]
        shift, scale = self.answer(answer_NA).chunk(2, dim=-1)
        context_ND = context_ND + shift + scale * self.answered(context_ND)
        target_ND = target_ND + self.unanswered
        last = len(self.attention) - 1
        for block, (mixing, module) in enumerate(zip(self.mixing[:-1], self.attention, strict=True)):
            attention = cast(_ContextAttention, module)
            context_ND, target_ND = mixing(context_ND, context), mixing(target_ND, target)
            memory = attention.remember(context_ND, context)
            target_ND = attention(target_ND, target, memory, context.real_BT)
            if block < last:  # nobody reads the context after its last keys and values
                context_ND = attention(context_ND, context, memory, context.real_BT)
        return _log_softmax(prior_N + self.head(self.mixing[-1](target_ND, target)), target_options)


def _log_softmax(score_N: Tensor, option_BSK: Tensor) -> Tensor:
    """Normalise the tokens' scores over each question's options; (B, S, K), -inf on padding."""
    lowest = torch.finfo(score_N.dtype).min
    score = score_N.new_full(option_BSK.shape, lowest).masked_scatter(option_BSK, score_N)
    return F.log_softmax(score, dim=-1).masked_fill(~option_BSK, float("-inf"))


def _answer_features(answer_BCK: Tensor, expected_BCK: Tensor, option_BCK: Tensor) -> Tensor:
    """Describe answers, and their difference from expected log-probabilities, as (B, C, K, 4)."""
    size = option_BCK.sum(-1, keepdim=True).clamp_min(1)

    def centred_log(share_BCK: Tensor) -> Tensor:
        log = share_BCK.clamp_min(LOG_FLOOR).log().masked_fill(~option_BCK, 0.0)
        return log - log.sum(-1, keepdim=True) / size

    share_BCK = expected_BCK.exp()
    log, expected_log = centred_log(answer_BCK), centred_log(share_BCK)
    return torch.stack([size * answer_BCK - 1.0, log, size * (answer_BCK - share_BCK), log - expected_log], dim=-1)
