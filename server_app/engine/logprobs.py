"""Log-probabilities and values of response tokens, from one pass over packed rows.

Axis letters: J rollouts, T response tokens, S scored tokens of all rows, B scored tokens of a block, V vocabulary,
H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from server_app.engine.head import logits
from server_app.engine.prefix import Prefix
from server_app.engine.sequences import Sequences

LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**26}
"""Numbers in a block of logits, by device: fewer would starve the matrix product. On a GPU at least so many, which are
262 tokens of Gemma: from there on the product is bound by arithmetic, and a larger block saves launches alone.
"""
LOGIT_BYTES = 24  # a number of a block: in 16 bits with its cap, in 32 with and without temperature, and gradients
SHARE_FOR_LOGITS = 1 / 16  # of a GPU's memory


def logits_at_once(device: str, *, memory: int | None = None) -> int:
    """Numbers in a block of logits: on a GPU of `memory` bytes a power of two that takes a sixteenth at most."""
    least = LOGITS_AT_ONCE[device]
    if device == "cpu" or memory is None:
        return least
    return max(least, 1 << int(SHARE_FOR_LOGITS * memory / LOGIT_BYTES).bit_length() - 1)


def token_logprobs(logits_SV: Tensor, token_S: Tensor, *, temperature: float) -> Tensor:
    """Log-probability of given tokens under softmax(logits / temperature), by gather and logsumexp.

    `logits_SV` are those of the positions before each token, of any leading shape, which `token_S` and the result have;
    `temperature` > 0. The result is float32, or as wide as the logits.
    """
    scaled_SV = (logits_SV if logits_SV.dtype == torch.float64 else logits_SV.float()) / temperature
    return scaled_SV.gather(-1, token_S.unsqueeze(-1)).squeeze(-1) - scaled_SV.logsumexp(-1)


def _response_states(trunk: nn.Module, sequences: Sequences, prefix: Prefix) -> Tensor:
    """Hidden states that predict the response tokens, row by row: (S, H)."""
    ids_JL, read_JL = sequences.packed()
    return prefix.hidden_states(trunk, ids_JL, read_JL=read_JL)[read_JL]


def _spread(value_S: Tensor, mask_JT: Tensor) -> Tensor:
    return value_S.new_zeros(mask_JT.shape).masked_scatter(mask_JT, value_S)


def response_logprobs(model: PreTrainedModel, sequences: Sequences, *, temperature: float, prefix: Prefix) -> Tensor:
    """Log-probabilities of the response tokens (J, T), 0 outside the mask.

    Logits exist for these tokens alone, and for a block of them at a time. `temperature` > 0; `prefix`, which the rows
    follow, was computed by this model's trunk as it is now.
    """
    hidden_SH = _response_states(model.base_model, sequences, prefix)
    token_S = sequences.response_JT[sequences.mask_JT]

    def block(hidden_BH: Tensor, token_B: Tensor) -> Tensor:
        return token_logprobs(logits(model, hidden_BH), token_B, temperature=temperature)

    device = hidden_SH.device
    # Of all memory, not of what is free: the same card has the same blocks, and their rounding, from pass to pass.
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    size = max(1, logits_at_once(device.type, memory=memory) // model.config.get_text_config().vocab_size)
    blocks = list(zip(hidden_SH.split(size), token_S.split(size), strict=True))
    if len(blocks) > 1 and torch.is_grad_enabled():
        # Logits are recomputed in the backward pass: kept, they would be the largest tensor of the update.
        parts = [checkpoint(block, *given, use_reentrant=False) for given in blocks]
    else:
        parts = [block(*given) for given in blocks]
    return _spread(torch.cat(parts), sequences.mask_JT)


def response_values(trunk: nn.Module, head: nn.Linear, sequences: Sequences, *, prefix: Prefix) -> Tensor:
    """V(s) before each response token: the head on the trunk's last hidden states; (J, T), 0 outside the mask."""
    hidden_SH = _response_states(trunk, sequences, prefix)
    return _spread(head(hidden_SH.to(head.weight.dtype)).squeeze(-1), sequences.mask_JT)
