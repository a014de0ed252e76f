"""Log-probabilities and values of response tokens: one forward for reference, value, policy and training passes.

A survey prompt is one long fixed instruction before one short question. So the common prefix of all prompts runs once,
and all rows share its keys and values; in a batch of rows with one prompt, the rows share the whole prompt.

Axis letters: C tokens that all prompts begin with, J rollouts, T response tokens, S scored tokens of all rows, B scored
tokens of a block, V vocabulary, H hidden size, N key heads, D head size.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from appa_flwr.core.errors import UserError
from server_app.policy.last_layer import computing_only
from server_app.policy.sequences import Sequences

LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**26}
"""Most logits in a block, by device; a smaller block would slow the matrix product down. On a GPU this limit is 262
tokens of Gemma. With gradients a logit takes about 24 bytes.
"""
TOKENS = "tokens (ppo.micro-batch-tokens)"
FEWEST_TOKENS = 64  # smallest limit of a pass; if memory does not hold such a pass, the run ends
PROBE_TOKENS = 6  # length of the row that `finite_logits` checks

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of a prefix, (1, N, C, D) each, by layer."""

_T = TypeVar("_T")

log = logging.getLogger("appa.server")


class NotFinite(UserError):
    """Training has made losses or logits infinite or NaN; the message names the config key to lower."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the policy's losses or logits are no longer finite; lower {key}")


class Budget:
    """Limit of a pass, in tokens or another unit, which is halved for good when GPU memory runs out."""

    def __init__(self, unit: str, size: int, *, fewest: int = FEWEST_TOKENS) -> None:
        self.size, self._unit, self._fewest = size, unit, fewest

    def run(self, passes: Callable[[int], _T]) -> _T:
        """Return `passes(size)`; when memory runs out, start again with half the size.

        Raises:
            torch.OutOfMemoryError: memory does not hold a pass of the smallest size.
        """
        while True:
            try:
                return passes(self.size)
            except torch.OutOfMemoryError:
                if self.size < 2 * self._fewest:
                    raise
            torch.cuda.empty_cache()
            self.size //= 2
            log.warning("out of memory: from here on passes have %d %s", self.size, self._unit)


@contextmanager
def shared_prefix(trunk: nn.Module, prefix_C: Tensor) -> Iterator[Layers]:
    """Yield the keys and values of the common prefix of all rows, under the current weights.

    The keys and values are detached leaves: each row's backward pass adds its gradient to theirs. At the end of the
    block one backward pass sends the summed gradients through the prefix. The optimizer must step after the block.

    Raises:
        ValueError: the model keeps no keys and values, as with gradient checkpointing while it trains.
    """
    if not len(prefix_C):
        yield ()
        return
    cache = DynamicCache(config=trunk.config)
    with computing_only(trunk, torch.zeros_like(prefix_C[None], dtype=torch.bool)):
        trunk(input_ids=prefix_C[None], past_key_values=cache, use_cache=True)
    if cache.get_seq_length() != len(prefix_C):
        raise ValueError(f"{type(trunk).__name__} keeps no keys and values; is gradient checkpointing on?")
    computed = [(layer.keys, layer.values) for layer in cache.layers]
    shared = [
        (k.detach().requires_grad_(k.requires_grad), v.detach().requires_grad_(v.requires_grad)) for k, v in computed
    ]
    yield shared
    pairs = zip(chain(*computed), chain(*shared), strict=True)
    reached = [(state, leaf.grad) for state, leaf in pairs if leaf.grad is not None]
    if reached:
        states, gradients = zip(*reached, strict=True)
        torch.autograd.backward(states, gradients)


def _response_states(trunk: nn.Module, sequences: Sequences, prefix: Layers) -> Tensor:
    """Hidden states that predict the response tokens, row by row: (S, H).

    Rows are padded on the right, where causal attention hides the padding: no mask and no positions are needed.
    """
    cache = None
    if prefix:
        cache = DynamicCache(prefix, config=trunk.config)
        if tokens := sequences.num_shared_prompt_tokens:
            prompt_1P = sequences.prompt_JP[:1, :tokens]
            with computing_only(trunk, torch.zeros_like(prompt_1P, dtype=torch.bool)):
                trunk(input_ids=prompt_1P, past_key_values=cache, use_cache=True)
            sequences = sequences.after(tokens)
        cache.batch_repeat_interleave(len(sequences.mask_JT))
    ids_JL, predicts_JL = sequences.packed()
    with computing_only(trunk, predicts_JL):
        result = trunk(input_ids=ids_JL, past_key_values=cache, use_cache=cache is not None)
    hidden_SH: Tensor = result.last_hidden_state[predicts_JL]
    return hidden_SH


def logits(model: PreTrainedModel, hidden_SH: Tensor) -> Tensor:
    """Logits (S, V) from the last hidden states, as the model's own forward computes them."""
    logits_SV: Tensor = model.get_output_embeddings()(hidden_SH)
    cap = getattr(model.config, "final_logit_softcapping", None)  # Gemma
    return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)


def token_logprobs(logits_SV: Tensor, token_S: Tensor, *, temperature: float) -> Tensor:
    """Log-probability of given tokens under softmax(logits / temperature), by gather and logsumexp.

    `logits_SV` are the logits at the position before each token. S may be any shape; `token_S` and the result have the
    same shape. `temperature` > 0. The result is float32, or float64 for float64 logits.
    """
    scaled_SV = (logits_SV if logits_SV.dtype == torch.float64 else logits_SV.float()) / temperature
    return scaled_SV.gather(-1, token_S.unsqueeze(-1)).squeeze(-1) - scaled_SV.logsumexp(-1)


def response_logprobs(
    model: PreTrainedModel, sequences: Sequences, *, temperature: float, prefix: Layers = ()
) -> Tensor:
    """Log-probabilities of the response tokens (J, T), 0 outside the mask.

    Computes logits only for these tokens, block by block. `temperature` > 0. `prefix` comes from `shared_prefix` and
    is empty if the rows have no prefix.
    """
    hidden_SH = _response_states(model.base_model, sequences, prefix)
    token_S = sequences.response_JT[sequences.mask_JT]

    def block(hidden_BH: Tensor, token_B: Tensor) -> Tensor:
        return token_logprobs(logits(model, hidden_BH), token_B, temperature=temperature)

    size = max(1, LOGITS_AT_ONCE[hidden_SH.device.type] // model.config.get_text_config().vocab_size)
    blocks = list(zip(hidden_SH.split(size), token_S.split(size), strict=True))
    if len(blocks) > 1 and torch.is_grad_enabled():
        # Logits are recomputed in the backward pass: stored, they would be the largest tensor of the update.
        parts = [checkpoint(block, *each, use_reentrant=False) for each in blocks]
    else:
        parts = [block(*each) for each in blocks]
    return _spread(torch.cat(parts), sequences.mask_JT)


def response_values(trunk: nn.Module, head: nn.Linear, sequences: Sequences, *, prefix: Layers = ()) -> Tensor:
    """V(s) before each response token: the head on the trunk's last hidden states; (J, T), 0 outside the mask."""
    hidden_SH = _response_states(trunk, sequences, prefix)
    return _spread(head(hidden_SH.to(head.weight.dtype)).squeeze(-1), sequences.mask_JT)


def _spread(value_S: Tensor, mask_JT: Tensor) -> Tensor:
    return value_S.new_zeros(mask_JT.shape).masked_scatter(mask_JT, value_S)


@torch.inference_mode()
def finite_logits(model: PreTrainedModel) -> bool:
    """True if the logits of a few tokens are finite under the current weights."""
    ids_1L = torch.arange(PROBE_TOKENS, device=model.device)[None]
    return bool(model(input_ids=ids_1L, use_cache=False).logits.logsumexp(-1).isfinite().all())
