"""The paper's architecture: a few-shot transformer from a group's answered questions to its answers on other questions.

Every answer option is one token. Options of a question are mixed through their mean, so only their embedding holds an
order. Context questions attend to each other; target questions attend to the context and never to each other. The
context has no positions. Padding is removed before any token is computed.

The network first predicts each question without context (the prior), then reads the context's answers and their
differences from the prior. Groups differ by these differences multiplied with the content of the question. So answers
also enter as a factor, and the feed-forward layers are gated products. Without these two, federated training got stuck
at the prior, with the same answer for every group.

Axis letters: B episodes, C context questions, M target questions, S questions of either kind, K options,
E embedding, D hidden features, N real option tokens of the batch in a row, T tokens of the longest episode,
H attention heads.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pluralllm.data import EMBEDDING_DIM, HIDDEN_DIM, NUM_BLOCKS, NUM_HEADS
from pluralllm.network import Episodes, Head, OptionMixing, PluralLLM, Questions, TokenLayout, layout, log_share

# K y - 1 (0 where the answer is uniform), the centred log of y, and the differences of both from the prior
ANSWER_FEATURES = 4
# smallest share in the log feature: a survey of 1,000 people cannot tell 0.002 from 0
LOG_FLOOR = 2e-3
# differences between groups are a few tenths; without scaling, the network would learn from them last
DIFFERENCE_SCALE = 4.0


class _ContextAttention(nn.Module):
    """Pre-norm multi-head attention of any tokens to the context tokens of their episode.

    One learned key and value are added to the context, so that an empty context is no special case.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN_DIM)
        self.query = nn.Linear(HIDDEN_DIM, HIDDEN_DIM)
        self.key_value = nn.Linear(HIDDEN_DIM, 2 * HIDDEN_DIM)
        self.null_key_value = nn.Parameter(torch.zeros(2 * HIDDEN_DIM))
        self.out = nn.Linear(HIDDEN_DIM, HIDDEN_DIM)

    def keys_and_values(self, token_ND: Tensor, tokens: TokenLayout) -> tuple[Tensor, Tensor]:
        """Keys and values of the context, each (B, H, 1 + T, D / H); the first ones are learned."""
        key_value = tokens.pad(self.key_value(self.norm(token_ND)))
        null = self.null_key_value.expand(key_value.shape[0], 1, -1)
        key, value = torch.cat([null, key_value], dim=1).chunk(2, dim=-1)
        return self._heads(key), self._heads(value)

    def forward(
        self, token_ND: Tensor, tokens: TokenLayout, key_value: tuple[Tensor, Tensor], real_BT: Tensor
    ) -> Tensor:
        """Attend from tokens (N, D) to the keys and values of a context; `real_BT` masks its real tokens."""
        query = self._heads(tokens.pad(self.query(self.norm(token_ND))))
        mask = F.pad(real_BT, (1, 0), value=True)[:, None, None, :]
        seen = F.scaled_dot_product_attention(query, *key_value, attn_mask=mask)
        attended: Tensor = self.out(tokens.unpad(seen.transpose(1, 2).flatten(2)))
        return token_ND + attended

    def _heads(self, value_BTD: Tensor) -> Tensor:
        batch, length, dim = value_BTD.shape
        return value_BTD.view(batch, length, NUM_HEADS, dim // NUM_HEADS).transpose(1, 2)


class FewShotAttention(PluralLLM):
    """Few-shot preference predictor (paper, appendix "PluralLLM Preference Probability Modeling").

    An untrained network answers uniformly: both heads start at 0. The state dict holds float parameters only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.option = nn.Linear(EMBEDDING_DIM, HIDDEN_DIM)
        self.answer = nn.Linear(ANSWER_FEATURES, 2 * HIDDEN_DIM)
        self.answered = nn.Sequential(nn.LayerNorm(HIDDEN_DIM), nn.Linear(HIDDEN_DIM, HIDDEN_DIM))
        self.unanswered = nn.Parameter(torch.zeros(HIDDEN_DIM))
        self.prior_mixing = OptionMixing()
        self.prior_head = Head()
        self.mixing = nn.ModuleList(OptionMixing() for _ in range(NUM_BLOCKS + 1))
        self.attention = nn.ModuleList(_ContextAttention() for _ in range(NUM_BLOCKS))
        self.head = Head()

    def loss(self, episodes: Episodes) -> Tensor:
        """Soft-label cross entropy of the targets. All options of a question get the same noise on their features."""
        context, target = (
            part._replace(embedding=part.embedding + noise[..., None, :])
            for part, noise in zip((episodes.context, episodes.target), episodes.noise, strict=True)
        )
        assert target.answer is not None
        return soft_cross_entropy(self(context, target), target.answer, target.options)

    def forward(self, context: Questions, target: Questions) -> Tensor:
        """Predict the group's answers to M target questions from C >= 0 answered ones; log-probabilities (B, M, K).

        Log-probabilities are -inf on padding.
        """
        assert context.answer is not None
        known, tokens = layout(context.options), layout(target.options)
        context_ND, prior_N = self._question(context.embedding, known)
        expected_BCK = log_share(prior_N, context.options)
        answer_NA = _answer_features(context.answer, expected_BCK, context.options)[context.options]
        shift, scale = self.answer(answer_NA).chunk(2, dim=-1)
        context_ND = context_ND + shift + scale * self.answered(context_ND)
        target_ND, prior_N = self._question(target.embedding, tokens)
        target_ND = target_ND + self.unanswered
        for block, (mixing, module) in enumerate(zip(self.mixing[:-1], self.attention, strict=True)):
            attention = cast(_ContextAttention, module)
            context_ND = mixing(context_ND, known)
            key_value = attention.keys_and_values(context_ND, known)
            if block + 1 < len(self.attention):  # the context is not read after its last keys and values
                context_ND = attention(context_ND, known, key_value, known.real_BT)
            target_ND = attention(mixing(target_ND, tokens), tokens, key_value, known.real_BT)
        return log_share(prior_N + self.head(self.mixing[-1](target_ND, tokens)), target.options)

    def _question(self, embedding: Tensor, tokens: TokenLayout) -> tuple[Tensor, Tensor]:
        """Tokens (N, D) of questions before any answer is read, and their scores without context (N,)."""
        token_ND = self.prior_mixing(self.option(embedding[tokens.option_BSK]), tokens)
        return token_ND, self.prior_head(token_ND)


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


def soft_cross_entropy(log_probability_BMK: Tensor, target_BMK: Tensor, option_BMK: Tensor) -> Tensor:
    """Mean over real target questions of `-sum_k y_k log p_k`, in nats; padding (-inf) does not count."""
    surprise_BMK = -target_BMK * log_probability_BMK.masked_fill(~option_BMK, 0.0)
    return surprise_BMK.sum() / option_BMK.any(-1).sum()
