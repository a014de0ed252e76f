"""The network: a few-shot transformer from a group's answered questions to its answers on other questions.

Every answer option is one token. Options of a question are mixed through their mean, so they have no order but
the one their embedding carries; context questions attend to each other, target questions attend to the context
and never to each other, and nothing carries a position along the context. Padding is cut out before any token is
computed.

The network first predicts each question without context (the prior), then sees the context's answers as they are and as
they differ from that prediction. What tells groups apart are these differences, multiplied with what the question
is about; so answers enter as a factor too, and the feed-forward layers are gated products. Without either, federated
training found the prior and stayed there, the same answer for every group.

With a population prior, a question carries the mean answer of other groups where they have one, and the network
predicts how far the group is from it, in log space; an untrained network answers just that. With it may come directions
in which groups differ (`experiments.pluralllm.directions`): ridge regression on the context finds where the group lies
on them.

Axis letters: B episodes, C context questions, M target questions, S questions of either kind, K options,
E embedding, D hidden features, N real option tokens of the batch in a row, T tokens of the longest episode,
H attention heads, W = 1 + F: the mean of other groups and F directions, none in a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from appa_flwr.config.sections import EmbeddingSection, PluralLLMSection, SumsSection
from appa_flwr.errors import UserError

# K y - 1 (0 where the answer is uniform), the centred log of y, and both less what the prior predicts
ANSWER_FEATURES = 4
# a share under this counts as this in the log feature: a survey of 1,000 people cannot tell 0.002 from 0
LOG_FLOOR = 2e-3
# differences between groups are a few tenths; as small numbers they would be learned from last
DIFFERENCE_SCALE = 4.0
# whether other groups' answers are known, the centred log of what they let expect, and K times that less 1
POPULATION_FEATURES = 3
# directions may lead out of the possible; the root of a share ends here
ROOT_FLOOR = 1e-2
# a group's position is drawn to 0 as much as this many average questions draw it to where it lies
POSITION_SHRINKAGE = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Size of the network.

    Attributes:
        embedding_dim: E, features of an option.
        hidden_dim: D, a multiple of `num_heads`.
        num_blocks: blocks of option mixing and attention, at least 1.
        num_heads: H, attention heads.
        population: whether questions can carry the mean answer of other groups.
    """

    embedding_dim: int = 128
    hidden_dim: int = 64
    num_blocks: int = 2
    num_heads: int = 4
    population: bool = False

    @classmethod
    def of(cls, embedding: EmbeddingSection, pluralllm: PluralLLMSection, sums: SumsSection) -> ModelConfig:
        """The sizes a run is configured to have: both sides build from them, since their weights must fit."""
        return cls(
            embedding.dim, pluralllm.hidden_dim, pluralllm.blocks, pluralllm.heads, population=sums.population_prior
        )

    def __post_init__(self) -> None:
        """Refuse a size that cannot be built."""
        if min(self.embedding_dim, self.hidden_dim, self.num_blocks, self.num_heads) < 1:
            raise UserError(f"PluralLLM sizes must be at least 1, got {self}")
        if self.hidden_dim % self.num_heads:
            raise UserError(f"PluralLLM hidden-dim {self.hidden_dim} must be a multiple of its {self.num_heads} heads")


class Questions(NamedTuple):
    """A padded batch of questions as the network takes them.

    Attributes:
        embedding: (B, S, K, E) features of the options.
        options: (B, S, K) bool, True where a question has that option; a question without any is padding.
        answer: (B, S, K) distributions of the group, whatever on padding; None where they are not known.
        population: (B, S, K, W) of other groups, all 0 for a question they have no answer to; None without a prior.
    """

    embedding: Tensor
    options: Tensor
    answer: Tensor | None = None
    population: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Questions:
        """The same change of every array."""
        rest = (None if value is None else change(value) for value in self[2:])
        return Questions(change(self.embedding), change(self.options), *rest)


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


@dataclass(frozen=True)
class ContextMemory:
    """Encoded contexts of B episodes, which any number of targets can be predicted from.

    Attributes:
        key_values: keys and values of each block, each (B, H, 1 + T, D / H).
        real_BT: True where a context token is real.
        position_BF: where the group lies on the directions; None without a population prior.
    """

    key_values: tuple[tuple[Tensor, Tensor], ...]
    real_BT: Tensor
    position_BF: Tensor | None


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
        self.population = nn.Linear(POPULATION_FEATURES, dim, bias=False) if config.population else None
        self.answer = nn.Linear(ANSWER_FEATURES, 2 * dim)
        self.answered = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim))
        self.unanswered = nn.Parameter(torch.zeros(dim))
        self.prior_mixing = _OptionMixing(dim)
        self.prior_head = _Head(dim)
        self.mixing = nn.ModuleList(_OptionMixing(dim) for _ in range(config.num_blocks + 1))
        self.attention = nn.ModuleList(_ContextAttention(dim, config.num_heads) for _ in range(config.num_blocks))
        self.head = _Head(dim)

    def forward(self, context: Questions, target: Questions) -> Tensor:
        """Predict the group's answers to M target questions from C >= 0 answered ones; log-probabilities (B, M, K).

        They are -inf on padding.
        """
        return self.predict(self.remember(context), target)

    def remember(self, context: Questions) -> ContextMemory:
        """Encode contexts, once for however many targets."""
        embedding, options, answer, population = context
        assert answer is not None
        layout = _layout(options)
        position_BF = None if population is None else _position(population, answer, options)
        token_ND, prior_N = self._question(embedding, _moved(population, position_BF, options), layout)
        answer_NA = _answer_features(answer, _log_softmax(prior_N, options), options)[options]
        shift, scale = self.answer(answer_NA).chunk(2, dim=-1)
        token_ND = token_ND + shift + scale * self.answered(token_ND)
        key_values = []
        for block, (mixing, module) in enumerate(zip(self.mixing[:-1], self.attention, strict=True)):
            attention = cast(_ContextAttention, module)
            token_ND = mixing(token_ND, layout)
            key_values.append(attention.remember(token_ND, layout))
            if block + 1 < len(self.attention):  # nobody reads the context after its last keys and values
                token_ND = attention(token_ND, layout, key_values[-1], layout.real_BT)
        return ContextMemory(tuple(key_values), layout.real_BT, position_BF)

    def predict(self, memory: ContextMemory, target: Questions) -> Tensor:
        """Predict targets from encoded contexts; returns what `forward` does."""
        embedding, options, _, population = target
        layout = _layout(options)
        expected = _moved(population, memory.position_BF, options)
        token_ND, prior_N = self._question(embedding, expected, layout)
        token_ND = token_ND + self.unanswered
        for mixing, attention, key_value in zip(self.mixing[:-1], self.attention, memory.key_values, strict=True):
            token_ND = attention(mixing(token_ND, layout), layout, key_value, memory.real_BT)
        return _log_softmax(prior_N + self.head(self.mixing[-1](token_ND, layout)), options)

    def _question(self, embedding: Tensor, expected: Tensor | None, layout: _Layout) -> tuple[Tensor, Tensor]:
        """Tokens (N, D) of questions before any answer is seen, and what is expected of a group (N,), in log space.

        `expected` (B, S, K) is what the population prior says of this group.
        """
        token_ND = self.option(embedding[layout.option_BSK])
        if self.population is None or expected is None:
            token_ND = self.prior_mixing(token_ND, layout)
            return token_ND, self.prior_head(token_ND)
        feature_NA = _population_features(expected, layout.option_BSK)[layout.option_BSK]
        token_ND = self.prior_mixing(token_ND + self.population(feature_NA), layout)
        return token_ND, self.prior_head(token_ND) + feature_NA[:, 1]


def _log_softmax(score_N: Tensor, option_BSK: Tensor) -> Tensor:
    """Normalise the tokens' scores over each question's options; (B, S, K), -inf on padding."""
    lowest = torch.finfo(score_N.dtype).min
    score = score_N.new_full(option_BSK.shape, lowest).masked_scatter(option_BSK, score_N)
    return F.log_softmax(score, dim=-1).masked_fill(~option_BSK, float("-inf"))


def _centred_log(share_BSK: Tensor, option_BSK: Tensor) -> Tensor:
    """Log of shares less its mean over the question's options; 0 on padding."""
    log = share_BSK.clamp_min(LOG_FLOOR).log().masked_fill(~option_BSK, 0.0)
    return log - log.sum(-1, keepdim=True) / option_BSK.sum(-1, keepdim=True).clamp_min(1)


def _answer_features(answer_BCK: Tensor, expected_BCK: Tensor, option_BCK: Tensor) -> Tensor:
    """Describe answers, and their difference from expected log-probabilities, as (B, C, K, 4)."""
    size = option_BCK.sum(-1, keepdim=True)
    share_BCK = expected_BCK.exp()
    log, expected_log = _centred_log(answer_BCK, option_BCK), _centred_log(share_BCK, option_BCK)
    difference = [DIFFERENCE_SCALE * size * (answer_BCK - share_BCK), DIFFERENCE_SCALE * (log - expected_log)]
    return torch.stack([size * answer_BCK - 1.0, log, *difference], dim=-1)


def _position(population_BCKW: Tensor, answer_BCK: Tensor, option_BCK: Tensor) -> Tensor:
    """Where a group lies on the directions, (B, F): ridge regression over its context; 0 without one."""
    population_BCKW = population_BCKW.masked_fill(~option_BCK[..., None], 0.0)
    mean_BCK, direction_BCKF = population_BCKW[..., 0], population_BCKW[..., 1:]
    known_BCK = option_BCK & (mean_BCK.sum(-1, keepdim=True) > 0)
    residual_BCK = (answer_BCK.sqrt() - mean_BCK.sqrt()).masked_fill(~known_BCK, 0.0)
    square_BFF = torch.einsum("bckf,bckg->bfg", direction_BCKF, direction_BCKF)
    product_BF = torch.einsum("bckf,bck->bf", direction_BCKF, residual_BCK)
    ridge_FF = POSITION_SHRINKAGE * torch.eye(square_BFF.shape[-1], dtype=square_BFF.dtype, device=square_BFF.device)
    position_BF: Tensor = torch.linalg.solve(square_BFF + ridge_FF, product_BF)
    return position_BF


def _moved(population_BSKW: Tensor | None, position_BF: Tensor | None, option_BSK: Tensor) -> Tensor | None:
    """The answer expected of a group at a position, (B, S, K); all 0 where other groups have no answer."""
    if population_BSKW is None:
        return None
    if position_BF is None:
        position_BF = population_BSKW.new_zeros(population_BSKW.shape[0], population_BSKW.shape[-1] - 1)
    population_BSKW = population_BSKW.masked_fill(~option_BSK[..., None], 0.0)
    mean_BSK = population_BSKW[..., 0]
    known_BSK = option_BSK & (mean_BSK.sum(-1, keepdim=True) > 0)
    root_BSK = mean_BSK.sqrt() + torch.einsum("bskf,bf->bsk", population_BSKW[..., 1:], position_BF)
    share_BSK = root_BSK.clamp_min(ROOT_FLOOR).square().masked_fill(~known_BSK, 0.0)
    return share_BSK / share_BSK.sum(-1, keepdim=True).clamp_min(torch.finfo(share_BSK.dtype).tiny)


def _population_features(expected_BSK: Tensor, option_BSK: Tensor) -> Tensor:
    """Describe what is expected of a group as (B, S, K, 3), all 0 for a question other groups have no answer to."""
    known = (expected_BSK.sum(-1, keepdim=True) > 0).to(expected_BSK.dtype)
    size = option_BSK.sum(-1, keepdim=True)
    log = _centred_log(expected_BSK, option_BSK)
    return known[..., None] * torch.stack([torch.ones_like(log), log, size * expected_BSK - 1.0], dim=-1)
