"""Log-probabilities and values of response tokens: one forward for reference, value, policy and training passes.

A survey prompt is one long fixed instruction before one short question. So the common prefix of all prompts runs once,
and all rows share its keys and values; in a batch of rows with few prompts, the rows of a prompt share it as a whole.

Axis letters: C tokens that all prompts begin with, J rollouts, Q different prompts, P further prompt tokens, T response
tokens, L tokens of a row in one pass, S scored tokens of all rows, B scored tokens of a block, V vocabulary, H hidden
size, N key heads, D head size.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from server_app.policy.sequences import Sequences

LOGITS_AT_ONCE = {"cpu": 2**22, "cuda": 2**26}
"""Most logits in a block, by device: on a GPU 262 tokens of Gemma. With gradients a logit takes about 24 bytes."""

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of a prefix, (1, N, C, D) each, by layer."""


@contextmanager
def computing_only(trunk: Any, read_JL: Tensor) -> Iterator[None]:
    """Within the block, the trunk's last hidden states are correct where `read_JL` is True, and arbitrary elsewhere.

    After the last layer's attention no position depends on another. So of the positions that are not read the last
    layer computes keys and values only.
    """
    places = read_JL.nonzero(as_tuple=True)  # computed once: each indexing by a mask waits for the GPU

    def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0][places], *inputs[1:])

    def scatter(_: nn.Module, __: Any, result_SH: Tensor) -> Tensor:
        full_JLH = result_SH.new_zeros(*read_JL.shape, result_SH.shape[-1])
        return full_JLH.index_put(places, result_SH)

    last = trunk.layers[-1]
    with ExitStack() as hooks:
        for part in (last.self_attn.q_proj, last.self_attn.o_proj, last.mlp):  # they process each position alone
            for handle in (part.register_forward_pre_hook(gather), part.register_forward_hook(scatter)):
                hooks.callback(handle.remove)
        yield


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
    _into_cache(trunk, prefix_C[None], cache, read=torch.zeros_like(prefix_C[None], dtype=torch.bool))
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
    length = prefix[0][0].shape[-2] if prefix else 0
    if length != len(sequences.prefix_C):
        raise ValueError(f"the rows have a common prefix of {len(sequences.prefix_C)} tokens, `prefix` has {length}")
    if sequences.repeated:
        return _states_by_prompt(trunk, sequences, prefix)
    cache = None
    if prefix:
        cache = DynamicCache(prefix, config=trunk.config)
        cache.batch_repeat_interleave(len(sequences.mask_JT))
    ids_JL, predicts_JL = sequences.packed()
    with computing_only(trunk, predicts_JL):
        result = trunk(input_ids=ids_JL, past_key_values=cache, use_cache=cache is not None)
    hidden_SH: Tensor = result.last_hidden_state[predicts_JL]
    return hidden_SH


def _states_by_prompt(trunk: nn.Module, sequences: Sequences, prefix: Layers) -> Tensor:
    """As `_response_states`, each prompt once: its last state predicts the first token of all its answers."""
    prompt_QP, real_QP, prompt_J = sequences.prompts
    cache = DynamicCache(prefix, config=trunk.config)
    cache.batch_repeat_interleave(len(prompt_QP))
    last_QP = torch.arange(real_QP.shape[1], device=real_QP.device) == real_QP.sum(1, keepdim=True) - 1
    first_J1H = _into_cache(trunk, prompt_QP, cache, read=last_QP)[last_QP][prompt_J, None]
    if sequences.mask_JT.shape[1] == 1:
        return first_J1H[:, 0]
    cache.reorder_cache(prompt_J)
    # The answers follow prompts with padding, which takes part in no attention and moves no position.
    before_J, read_JT = len(sequences.prefix_C) + real_QP.sum(1)[prompt_J], sequences.mask_JT[:, 1:]
    seen_JL = nn.functional.pad(real_QP[prompt_J], (len(sequences.prefix_C), read_JT.shape[1]), value=True)
    position_JT = before_J[:, None] + torch.arange(read_JT.shape[1], device=before_J.device)
    with computing_only(trunk, read_JT):
        later_JTH = trunk(
            input_ids=sequences.response_JT[:, :-1],
            attention_mask=seen_JL,
            position_ids=position_JT,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
    hidden_SH: Tensor = torch.cat([first_J1H, later_JTH], 1)[sequences.mask_JT]
    return hidden_SH


def _into_cache(trunk: Any, ids_JL: Tensor, cache: DynamicCache, *, read: Tensor) -> Tensor:
    """Run rows whose keys and values the cache keeps; their last hidden states, (J, L, H), correct where `read` is."""
    length = cache.get_seq_length() + ids_JL.shape[1]
    with computing_only(trunk, read):
        hidden_JLH: Tensor = trunk(input_ids=ids_JL, past_key_values=cache, use_cache=True).last_hidden_state
    if cache.get_seq_length() != length:
        raise ValueError(f"{type(trunk).__name__} keeps no keys and values; is gradient checkpointing on?")
    return hidden_JLH


def logits(model: PreTrainedModel, hidden_SH: Tensor) -> Tensor:
    """Logits (S, V) from the last hidden states, as the model's own forward computes them."""
    logits_SV: Tensor = model.get_output_embeddings()(hidden_SH)
    cap = getattr(model.config, "final_logit_softcapping", None)  # Gemma
    return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)


def response_logprobs(
    model: PreTrainedModel, sequences: Sequences, *, temperature: float, prefix: Layers = ()
) -> Tensor:
    """Log-probabilities of the response tokens (J, T), 0 outside the mask, at a temperature above 0.

    Logits are computed for these tokens only, block by block. `prefix` comes from `shared_prefix`.

    Raises:
        ValueError: `prefix` is not as long as the rows' common prefix.
    """
    hidden_SH = _response_states(model.base_model, sequences, prefix)
    token_S = sequences.response_JT[sequences.mask_JT]

    def block(hidden_BH: Tensor, token_B: Tensor) -> Tensor:
        logits_BV = logits(model, hidden_BH)
        scaled_BV = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.float()
        scaled_BV = scaled_BV if temperature == 1 else scaled_BV / temperature
        return scaled_BV.gather(-1, token_B.unsqueeze(-1)).squeeze(-1) - scaled_BV.logsumexp(-1)

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
