"""Sampling answers from the policy, and the padded batch of sequences every later pass works on.

Axis letters: J rollouts, P prompt tokens (padded left), T response tokens (padded right), L = P + T, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


@dataclass(frozen=True)
class Sequences:
    """Prompts and responses of one batch: prompts end, and so responses begin, at the same column.

    Attributes:
        prompt_JP: token ids, padded left.
        prompt_mask_JP: True on real prompt tokens.
        response_JT: token ids, padded right.
        mask_JT: True on response tokens up to and including the end of sequence.
    """

    prompt_JP: Tensor
    prompt_mask_JP: Tensor
    response_JT: Tensor
    mask_JT: Tensor

    def rows(self, index: Tensor) -> Sequences:
        """The rows `index`, with columns no row needs cut off both sides."""
        prompt_mask, mask = self.prompt_mask_JP[index], self.mask_JT[index]
        first = int(prompt_mask.any(0).int().argmax())
        width = max(1, int(mask.sum(1).max()))
        return Sequences(
            self.prompt_JP[index, first:], prompt_mask[:, first:], self.response_JT[index, :width], mask[:, :width]
        )

    def model_inputs(self) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and `position_ids` of shape (J, L - 1): the last token predicts nothing."""
        ids_JL = torch.cat([self.prompt_JP, self.response_JT], 1)[:, :-1]
        mask_JL = torch.cat([self.prompt_mask_JP, self.mask_JT], 1)[:, :-1]
        return {
            "input_ids": ids_JL,
            "attention_mask": mask_JL.long(),
            "position_ids": positions(mask_JL),
        }


def positions(mask_JL: Tensor) -> Tensor:
    """Position of each token in its row, not counting padding; 0 on padding."""
    return (mask_JL.long().cumsum(1) - 1).clamp(min=0)


def pad_prompts(prompts: Sequence[Sequence[int]], *, pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Left-pad token id lists to one width.

    Args:
        prompts: J non-empty lists of token ids.
        pad_id: what fills the left side.
        device: where the tensors go.

    Returns:
        Ids and mask, both (J, P).
    """
    width = max(len(p) for p in prompts)
    ids_JP = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask_JP = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts], device=device)
    return ids_JP, mask_JP


@dataclass(frozen=True)
class Sample:
    """The sampled sequences and the log-probability of each sampled token, (J, T), 0 outside the mask."""

    sequences: Sequences
    logprob_JT: Tensor


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    stop_ids: Sequence[int],
    pad_id: int,
    generator: torch.Generator | None,
) -> Sample:
    """Sample one answer per prompt, or decode greedily.

    Args:
        model: causal LM; its adapters as the caller set them.
        prompts: J token id lists.
        max_new_tokens: answers are cut there.
        temperature: logits are divided by it before sampling; 0 decodes greedily.
        stop_ids: tokens that end an answer; they belong to it.
        pad_id: fills what follows.
        generator: source of randomness on the model's device; None only for greedy decoding.

    Returns:
        Sequences and the log-probabilities under softmax(logits / temperature) (greedy: temperature 1).
    """
    device = next(model.parameters()).device
    prompt_JP, prompt_mask_JP = pad_prompts(prompts, pad_id=pad_id, device=device)
    stop = torch.tensor(list(stop_ids), device=device)
    mask_JL = prompt_mask_JP
    ids, position = prompt_JP, positions(prompt_mask_JP)
    cache = DynamicCache(config=model.config)
    done_J = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    tokens, logprobs, masks = [], [], []
    for _ in range(max_new_tokens):
        logits_JV = model(
            input_ids=ids,
            attention_mask=mask_JL.long(),
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        logprob_JV = (logits_JV.float() / (temperature or 1.0)).log_softmax(-1)
        if temperature:
            token_J1 = torch.multinomial(logprob_JV.exp(), 1, generator=generator)
        else:
            token_J1 = logprob_JV.argmax(-1, keepdim=True)
        alive_J1 = ~done_J.unsqueeze(1)
        tokens.append(token_J1.masked_fill(~alive_J1, pad_id))
        logprobs.append(logprob_JV.gather(1, token_J1) * alive_J1)
        masks.append(alive_J1)
        done_J = done_J | torch.isin(token_J1.squeeze(1), stop)
        if bool(done_J.all()):
            break
        ids, position = tokens[-1], position[:, -1:] + 1
        mask_JL = torch.cat([mask_JL, alive_J1], 1)
    sequences = Sequences(prompt_JP, prompt_mask_JP, torch.cat(tokens, 1), torch.cat(masks, 1))
    return Sample(sequences, torch.cat(logprobs, 1))
