"""Sampling answers from the policy.

By our own loop, which computes the prompts' common beginning once and drops rows that have ended; or by Transformers'
`generate`, for models that cannot share keys and values.

Axis letters: C tokens that all prompts begin with, J rollouts, P further prompt tokens, T response tokens, L tokens of
a row so far, V vocabulary, A rows still in the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from server_app.engine.head import check_head, logits
from server_app.engine.logprobs import response_logprobs
from server_app.engine.memory import UnlessMemoryEnds
from server_app.engine.prefix import Prefix, common_length, why_not, window_of
from server_app.engine.sequences import Sequences, pad_prompts, split_prompts

COMPACT_BELOW = 0.75  # share of live rows under which the others leave the batch
LOOK_EVERY = {"cpu": 1, "cuda": 8}  # tokens; to see which rows have ended makes the host wait for the GPU
SCORED_ROWS = 16  # in one pass that scores what was written elsewhere
SEEDS = 2**63 - 1

log = logging.getLogger("appa.server")

Method = Literal["own", "generate"]
"""The own loop, or Transformers' `generate`."""


@dataclass(frozen=True)
class Decoding:
    """Settings of sampling.

    Attributes:
        max_new_tokens: answers are cut there.
        temperature: logits are divided by it before sampling; 0 decodes greedily.
        stop_ids: tokens that end an answer; they belong to it.
        pad_id: fills what follows.
        share_prefix: whether the tokens all prompts begin with are kept apart, to be computed once in every pass.
        method: see `Method`.
    """

    max_new_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    pad_id: int
    share_prefix: bool
    method: Method

    @classmethod
    def fitting(
        cls,
        model: PreTrainedModel,
        *,
        max_new_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        pad_id: int,
        shared_prefix: bool = True,
    ) -> Decoding:
        """The fields as given; for a model that takes no shared keys and values the plain path, and a log line.

        Raises:
            UserError: see `check_head`.
        """
        check_head(model)
        method: Method = "own"
        refused = why_not(model)
        if refused is not None:
            log.warning("every pass computes the prompts' common beginning anew: %s", refused)
            shared_prefix, method = False, "generate"
        return cls(max_new_tokens, temperature, tuple(stop_ids), pad_id, shared_prefix, method)


@dataclass(frozen=True)
class Rollout:
    """The sampled sequences and the log-probability of each sampled token, (J, T), 0 outside the mask."""

    sequences: Sequences
    logprob_JT: Tensor


class _BufferLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values in a buffer of their final size: a step writes a column, where `cat` copies all."""

    def __init__(self, prefix: tuple[Tensor, Tensor] | None, capacity: int) -> None:
        super().__init__()
        self._prefix, self._capacity = prefix, capacity
        self._length = 0 if prefix is None else prefix[0].shape[-2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = (
            new.new_empty(*new.shape[:-2], self._capacity, new.shape[-1]) for new in (key_states, value_states)
        )
        if self._prefix is not None:
            self.keys[..., : self._length, :], self.values[..., : self._length, :] = self._prefix

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self._length = self._length, self._length + key_states.shape[-2]
        self.keys[..., start : self._length, :] = key_states
        self.values[..., start : self._length, :] = value_states
        return self.keys[..., : self._length, :], self.values[..., : self._length, :]

    def get_seq_length(self) -> int:
        return self._length


def _draw(logprob_AV: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token a row, by where a uniform number falls in the cumulated probabilities.

    A number a row instead of one a row and token, which is what `torch.multinomial` spends its time on.
    """
    cumulated_AV = logprob_AV.double().exp().cumsum(-1)
    uniform_A1 = torch.rand(len(logprob_AV), 1, generator=generator, dtype=torch.float64, device=logprob_AV.device)
    # right: a token without probability is never what the number falls on
    token_A1 = torch.searchsorted(cumulated_AV, uniform_A1 * cumulated_AV[:, -1:], right=True)
    return token_A1.clamp(max=logprob_AV.shape[1] - 1)


def _longest(prompts: Sequence[Sequence[int]], decoding: Decoding) -> int:
    return max(map(len, prompts)) + decoding.max_new_tokens


@torch.inference_mode(False)  # autograd keeps token ids for the embeddings' gradient, and takes no inference tensors
def _split(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], decoding: Decoding
) -> tuple[Tensor, Tensor, Tensor]:
    """The prompts' common beginning (C,), the rest and its mask, both (J, P)."""
    window, longest = window_of(model), _longest(prompts, decoding)
    shared = common_length(prompts, window=window, longest=longest) if decoding.share_prefix else 0
    return split_prompts(prompts, shared=shared, pad_id=decoding.pad_id, device=model.device)


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    generator: torch.Generator | None = None,
) -> Rollout:
    """Sample one answer per prompt, or decode greedily.

    Args:
        model: causal LM; its adapters as the caller set them.
        prompts: J token id lists.
        decoding: how.
        generator: source of randomness on the model's device; None only for greedy decoding.

    What memory does not hold is sampled in halves, whose random numbers are other than the whole's.

    Returns:
        Sequences and the log-probabilities under softmax(logits / temperature) (greedy: temperature 1).
    """
    own, window = decoding.method == "own", window_of(model)
    if own and window is not None and _longest(prompts, decoding) > window:
        log.info("answers come from Transformers' generate: prompt and answer exceed a window of %d tokens", window)
        own = False  # its padding lies between prompt and answer, and would count as distance
    by = _by_own_loop if own else _by_generate
    if len(prompts) == 1:
        return by(model, prompts, decoding, generator)
    state = torch.Tensor() if generator is None else generator.get_state()
    with UnlessMemoryEnds(f"the {len(prompts)} answers are sampled in two halves"):
        return by(model, prompts, decoding, generator)
    if generator is not None:
        generator.set_state(state)
    half = len(prompts) // 2
    halves = [sample(model, part, decoding, generator=generator) for part in (prompts[:half], prompts[half:])]
    return _together(model, prompts, decoding, halves)


def _together(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], decoding: Decoding, parts: Sequence[Rollout]
) -> Rollout:
    """Rollouts to parts of the prompts, in their order, as one."""
    width = max(part.logprob_JT.shape[1] for part in parts)

    def wide(values: Sequence[Tensor], fill: int) -> Tensor:
        return torch.cat([nn.functional.pad(value, (0, width - value.shape[1]), value=fill) for value in values])

    response_JT = wide([part.sequences.response_JT for part in parts], decoding.pad_id)
    mask_JT = wide([part.sequences.mask_JT for part in parts], False)
    sequences = Sequences(*_split(model, prompts, decoding), response_JT, mask_JT)
    return Rollout(sequences, wide([part.logprob_JT for part in parts], 0))


def _by_own_loop(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], decoding: Decoding, generator: torch.Generator | None
) -> Rollout:
    trunk, temperature, max_new_tokens = model.base_model, decoding.temperature, decoding.max_new_tokens
    prefix_C, prompt_JP, prompt_mask_JP = _split(model, prompts, decoding)
    device, shared = prefix_C.device, len(prefix_C)
    prefix = Prefix(trunk, prefix_C)
    own_prefix: list[tuple[Tensor, Tensor] | None] = [] if prefix.apart else [*prefix.layers]
    capacity = shared + prompt_JP.shape[1] + max_new_tokens
    num_layers = model.config.get_text_config().num_hidden_layers
    cache = Cache(layers=[_BufferLayer(layer, capacity) for layer in own_prefix or [None] * num_layers])
    stop, look_every = torch.tensor(decoding.stop_ids, device=device), LOOK_EVERY[device.type]
    row_A = torch.arange(len(prompts), device=device)
    response_JT = torch.full((len(prompts), max_new_tokens), decoding.pad_id, device=device)
    logprob_JT = torch.zeros(response_JT.shape, device=device)
    pad, zero = torch.tensor(decoding.pad_id, device=device), torch.zeros((), device=device)
    mask_JT = torch.zeros(response_JT.shape, dtype=torch.bool, device=device)
    live_A = torch.ones(len(prompts), dtype=torch.bool, device=device)
    length_A = prompt_mask_JP.sum(1)
    last_JP = torch.arange(prompt_JP.shape[1], device=device) == length_A[:, None] - 1
    first: dict[tuple[int, ...], int] = {}  # each prompt is run once, however many answers it gets
    same_J = [first.setdefault(tuple(prompt), j) for j, prompt in enumerate(prompts)]
    run = sorted(first.values())
    hidden_AH = prefix.hidden_states(trunk, prompt_JP[run], read_JL=last_JP[run], cache=cache)[last_JP[run]]
    if len(run) < len(prompts):
        place_J = torch.tensor([run.index(j) for j in same_J], device=device)
        cache.batch_select_indices(place_J)
        hidden_AH = hidden_AH[place_J]
    mask_AL = nn.functional.pad(prompt_mask_JP, (shared if own_prefix else 0, 0), value=True)
    position_A = shared + length_A
    for t in range(max_new_tokens):
        logprob_AV = (logits(model, hidden_AH).float() / (temperature or 1.0)).log_softmax(-1)
        token_A1 = _draw(logprob_AV, generator) if temperature else logprob_AV.argmax(-1, keepdim=True)
        token_A = token_A1[:, 0]
        response_JT[row_A, t] = token_A.where(live_A, pad)
        logprob_JT[row_A, t] = logprob_AV.gather(1, token_A1)[:, 0].where(live_A, zero)
        mask_JT[row_A, t] = live_A
        live_A = live_A & ~torch.isin(token_A, stop)
        if t + 1 == max_new_tokens:
            break
        mask_AL = nn.functional.pad(mask_AL, (0, 1), value=True)
        live = int(live_A.sum()) if (t + 1) % look_every == 0 else len(live_A)
        if not live:
            break
        if live < COMPACT_BELOW * len(live_A):
            token_A1, position_A, mask_AL, row_A = token_A1[live_A], position_A[live_A], mask_AL[live_A], row_A[live_A]
            cache.batch_select_indices(live_A)
            live_A = live_A[live_A]
        hidden_AH = prefix.hidden_states(
            trunk, token_A1, cache=cache, attention_mask=mask_AL.long(), position_ids=position_A[:, None]
        )[:, -1]
        position_A = position_A + 1
    width = int(mask_JT.any(0).sum())
    sequences = Sequences(prefix_C, prompt_JP, prompt_mask_JP, response_JT[:, :width], mask_JT[:, :width])
    return Rollout(sequences, logprob_JT[:, :width])


def _by_generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], decoding: Decoding, generator: torch.Generator | None
) -> Rollout:
    device, width = model.device, max(map(len, prompts))
    ids_JP = torch.tensor([[decoding.pad_id] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask_JP = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    how: dict[str, Any] = {"do_sample": False}
    if decoding.temperature:
        how = {"do_sample": True, "temperature": decoding.temperature, "top_k": 0, "top_p": 1.0}
    settings = GenerationConfig(
        max_new_tokens=decoding.max_new_tokens,
        eos_token_id=list(decoding.stop_ids),
        pad_token_id=decoding.pad_id,
        **how,
    )
    # In place of the model's own, which fills in what a given config leaves open: penalties and cuts, for example.
    own, model.generation_config = model.generation_config, settings
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if generator is not None:  # `generate` draws from torch's own generator
                torch.manual_seed(int(torch.randint(SEEDS, (1,), generator=generator, device=device)))
            written_JL = model.generate(input_ids=ids_JP, attention_mask=mask_JP)
    finally:
        model.generation_config = own
    return _scored(model, prompts, written_JL[:, width:].tolist(), decoding)


@torch.inference_mode()
def _scored(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    decoding: Decoding,
) -> Rollout:
    """Output of `generate`, cut after the first token that ends an answer, with its log-probabilities."""
    device, stop_ids = model.device, frozenset(decoding.stop_ids)
    answers = [row[: next((t + 1 for t, token in enumerate(row) if token in stop_ids), None)] for row in responses]
    response_JT, mask_JT = pad_prompts(answers, pad_id=decoding.pad_id, device=device)
    sequences = Sequences(*_split(model, prompts, decoding), response_JT, mask_JT)
    logprob_JT = torch.zeros(mask_JT.shape, device=device)
    prefix = Prefix(model.base_model, sequences.prefix_C)
    for row_B in torch.arange(len(prompts), device=device).split(SCORED_ROWS):
        part_BT = response_logprobs(
            model, sequences.rows(row_B), temperature=decoding.temperature or 1.0, prefix=prefix
        )
        logprob_JT[row_B, : part_BT.shape[1]] = part_BT.to(logprob_JT.dtype)
    return Rollout(sequences, logprob_JT)
