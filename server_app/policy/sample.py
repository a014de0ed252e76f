"""Sampling answers from the policy.

Axis letters: C tokens that all prompts begin with, J rollouts, Q different prompts, P further prompt tokens, T response
tokens, L tokens of a row so far, V vocabulary, A rows still in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from server_app.policy.limits import ANSWERS, Budget
from server_app.policy.logprobs import computing_only, logits, shared_prefix
from server_app.policy.sequences import Sequences, split_prompts

COMPACT_BELOW = 0.75  # share of unfinished rows; below it, finished rows are taken out of the batch
LOOK_EVERY = {"cpu": 1, "cuda": 8}  # tokens between two checks for finished rows: a check waits for the GPU

Prompts = tuple[Tensor, Tensor, Tensor]  # see `split_prompts`


@dataclass(frozen=True)
class Decoding:
    """Settings of sampling."""

    max_new_tokens: int
    temperature: float  # divides the logits before sampling; 0 decodes greedily
    stop_ids: tuple[int, ...]  # tokens that end an answer, and are part of the answer


@dataclass(frozen=True)
class Rollout:
    """The sampled sequences and the log-probability of each sampled token, (J, T), 0 outside the mask."""

    sequences: Sequences
    logprob_JT: Tensor


class _BufferLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of a layer in a buffer of their final size: a step writes one column instead of copying all."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity, self._length = capacity, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = (
            states.new_empty(*states.shape[:2], self._capacity, states.shape[-1])
            for states in (key_states, value_states)
        )

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self._length = self._length, self._length + key_states.shape[-2]
        self.keys[..., start : self._length, :] = key_states
        self.values[..., start : self._length, :] = value_states
        return self.keys[..., : self._length, :], self.values[..., : self._length, :]

    def get_seq_length(self) -> int:
        return self._length


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    generator: torch.Generator | None = None,
    budget: Budget | None = None,
) -> Rollout:
    """Sample one answer to each of J prompts under softmax(logits / temperature), or decode greedily, with
    log-probabilities at temperature 1.

    `generator` is on the model's device, and None only for greedy decoding. `budget` has the most rows of a pass, for
    later batches too; without it, all rows are one pass. A batch that does not fit into memory is sampled again in
    halves, by the same random numbers.

    Raises:
        UserError: a prompt and its answer may be longer than the model's `longest_row`.
    """
    prefix_C, prompt_JP, prompt_mask_JP = split_prompts(model, prompts, response_length=decoding.max_new_tokens)
    size = len(prompts), decoding.max_new_tokens if decoding.temperature else 0
    # One number for each row and token, whether the token is drawn or not: answers do not depend on the passes.
    uniform_JT = torch.rand(size, generator=generator, dtype=torch.float64, device=prefix_C.device)

    def passes(rows: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        parts = zip(prompt_JP.split(rows), prompt_mask_JP.split(rows), uniform_JT.split(rows), strict=True)
        return [_decode(model, (prefix_C, *prompt), decoding, uniform) for *prompt, uniform in parts]

    parts = (budget or Budget(ANSWERS, len(prompts), fewest=1)).run(passes)
    response_JT, mask_JT, logprob_JT = (torch.cat(part) for part in zip(*parts, strict=True))
    width = int(mask_JT.any(0).sum())
    sequences = Sequences(prefix_C, prompt_JP, prompt_mask_JP, response_JT[:, :width], mask_JT[:, :width])
    return Rollout(sequences, logprob_JT[:, :width])


def _decode(
    model: PreTrainedModel, prompt: Prompts, decoding: Decoding, uniform_JT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, mask and log-probabilities, (J, T) each, with T = `max_new_tokens`; `uniform_JT` in [0, 1) draws."""
    trunk, device, temperature = model.base_model, prompt[0].device, decoding.temperature
    cache, hidden_AH, seen_AL, position_A = _run_prompts(model, prompt, decoding.max_new_tokens)
    stop, look_every = torch.tensor(decoding.stop_ids, device=device), LOOK_EVERY[device.type]
    logprob_JT = torch.zeros(len(hidden_AH), decoding.max_new_tokens, device=device)
    response_JT = torch.zeros_like(logprob_JT, dtype=torch.long)
    mask_JT = torch.zeros_like(response_JT, dtype=torch.bool)
    row_A = torch.arange(len(hidden_AH), device=device)
    live_A = torch.ones_like(row_A, dtype=torch.bool)
    for t in range(decoding.max_new_tokens):
        logprob_AV = (logits(model, hidden_AH).float() / (temperature or 1.0)).log_softmax(-1)
        token_A1 = _draw(logprob_AV, uniform_JT[row_A, t]) if temperature else logprob_AV.argmax(-1, keepdim=True)
        response_JT[row_A, t] = token_A1[:, 0].where(live_A, 0)
        logprob_JT[row_A, t] = logprob_AV.gather(1, token_A1)[:, 0].where(live_A, 0.0)
        mask_JT[row_A, t] = live_A
        live_A = live_A & ~torch.isin(token_A1[:, 0], stop)
        if t + 1 == decoding.max_new_tokens:
            break
        live = int(live_A.sum()) if (t + 1) % look_every == 0 else len(live_A)
        if not live:
            break
        if live < COMPACT_BELOW * len(live_A):
            token_A1, position_A, seen_AL, row_A = (x[live_A] for x in (token_A1, position_A, seen_AL, row_A))
            cache.batch_select_indices(live_A)
            live_A = torch.ones_like(row_A, dtype=torch.bool)
        seen_AL = torch.nn.functional.pad(seen_AL, (0, 1), value=True)
        position_A = position_A + 1
        hidden_AH = trunk(
            input_ids=token_A1, attention_mask=seen_AL, position_ids=position_A[:, None], past_key_values=cache
        ).last_hidden_state[:, -1]
    return response_JT, mask_JT, logprob_JT


def _run_prompts(model: PreTrainedModel, prompt: Prompts, new_tokens: int) -> tuple[Cache, Tensor, Tensor, Tensor]:
    """Run the common prefix once and each different prompt once.

    Returns a cache of J rows with room for `new_tokens` more, last hidden states (J, H), a mask of real tokens
    (J, C + P), and the position of the last token of each row (J,).
    """
    prefix_C, prompt_JP, prompt_mask_JP = prompt
    prompt_QP, prompt_J = prompt_JP.masked_fill(~prompt_mask_JP, -1).unique(dim=0, return_inverse=True)
    real_QP = prompt_QP >= 0
    seen_QL = torch.nn.functional.pad(real_QP, (len(prefix_C), 0), value=True)
    position_QP = (len(prefix_C) + real_QP.cumsum(1) - 1).clamp(min=0)
    with shared_prefix(model.base_model, prefix_C) as prefix:
        cache: Cache = DynamicCache(prefix, config=model.config)
    cache.batch_repeat_interleave(len(prompt_QP))
    read_QP = torch.zeros_like(real_QP)
    read_QP[:, -1] = True
    with computing_only(model.base_model, read_QP):
        hidden_QH = model.base_model(
            input_ids=prompt_QP.clamp(min=0), attention_mask=seen_QL, position_ids=position_QP, past_key_values=cache
        ).last_hidden_state[:, -1]
    cache.batch_select_indices(prompt_J)
    states = [(layer.keys, layer.values) for layer in cache.layers]
    cache = Cache(layers=[_BufferLayer(seen_QL.shape[1] + new_tokens) for _ in states])
    for number, layer in enumerate(states):
        cache.update(*layer, number)
    return cache, hidden_QH[prompt_J], seen_QL[prompt_J], position_QP[prompt_J, -1]


def _draw(logprob_AV: Tensor, uniform_A: Tensor) -> Tensor:
    """Draw one token per row by inverting the cumulative probabilities at a uniform number in [0, 1).

    `torch.multinomial` is slow because it draws a number for each row and token of the vocabulary.
    """
    cumulated_AV = logprob_AV.double().exp().cumsum(-1)
    # right=True: a token of probability 0 is never drawn
    token_A1 = torch.searchsorted(cumulated_AV, uniform_A[:, None] * cumulated_AV[:, -1:], right=True)
    return token_A1.clamp(max=logprob_AV.shape[1] - 1)
