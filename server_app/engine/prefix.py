"""The tokens all prompts of a batch begin with: their keys and values, computed once and shared by every row.

Survey prompts are one long fixed instruction before one short question, so most of every pass would be the same work
once a row. A `Prefix` does it at batch size 1, in passes with gradients too: each micro-batch leaves its gradient at
the shared keys and values, and `backward` sends the sum through the prefix once.

Axis letters: C prefix tokens, J rows, L tokens after the prefix, H hidden size, N attention heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from server_app.engine.last_layer import computing_only
from server_app.engine.prefix_attention import ATTENTION

MIN_TOKENS = 8  # a shorter prefix costs a pass of its own and saves next to nothing
PROBE_TOKENS = 6
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
HALF_TOLERANCE = 0.1  # of the largest number: two kernels of a 16-bit model differ by this much at most


class _SharedLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values of the prefix, put before those of the rows of one pass; nothing is stored."""

    def __init__(self, keys_1NCD: Tensor, values_1NCD: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys_1NCD, values_1NCD)
        self.keys, self.values = keys_1NCD, values_1NCD

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        rows = key_states.shape[0]
        return (
            torch.cat([self.keys.expand(rows, -1, -1, -1), key_states], dim=-2),
            torch.cat([self.values.expand(rows, -1, -1, -1), value_states], dim=-2),
        )


class Prefix:
    """Keys and values of a prefix under one model.

    Args:
        trunk: the model without its head.
        ids_C: token ids; empty = there is nothing to share, and every pass is a plain one.
        train: whether `backward` will be called, and gradients of the shared keys and values are collected for it.
        after: another prefix that these tokens follow; its `backward` comes after this one's.

    Attributes:
        length: C, with what it follows.
        layers: keys and values of each layer, (1, N, C, D); empty without a prefix.
        apart: whether attention meets the prefix apart from the rows (`prefix_attention`), or as a copy in each row.
    """

    def __init__(self, trunk: nn.Module, ids_C: Tensor, *, train: bool = False, after: Prefix | None = None) -> None:
        self.length: int = len(ids_C) + (after.length if after else 0)
        config: Any = trunk.config
        self.apart = bool(self.length) and config._attn_implementation == ATTENTION
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._computed: list[Tensor] = []
        if not self.length:
            return
        own = DynamicCache(config=config)
        for i, before in enumerate(after.layers if after else []):
            own.update(*before, i)
        with computing_only(trunk, torch.zeros_like(ids_C[None], dtype=torch.bool)):
            trunk(input_ids=ids_C[None], past_key_values=own, use_cache=True)
        self._computed = [state for layer in own.layers for state in (layer.keys, layer.values)]
        shared = [state.detach().requires_grad_() for state in self._computed] if train else self._computed
        self.layers = list(zip(shared[::2], shared[1::2], strict=True))

    def hidden_states(
        self,
        trunk: nn.Module,
        ids_JL: Tensor,
        *,
        read_JL: Tensor | None = None,
        cache: Cache | None = None,
        **inputs: Tensor,
    ) -> Tensor:
        """Last hidden states (J, L, H) of tokens that follow the prefix, and what `cache` holds of their rows.

        Rows are padded on the right: causal attention keeps what stands right of a token out of it, so padding needs no
        mask.

        Args:
            trunk: the model the prefix was computed by.
            ids_JL: token ids.
            read_JL: bool, where the result will be read; it may be anything elsewhere. None = everywhere.
            cache: where the rows' own keys and values go; if the prefix is not `apart`, it holds those of the prefix.
            inputs: a mask and positions, for the steps of a generation.
        """
        given: dict[str, Any] = dict(inputs)
        if self.apart:
            given["shared_layers"] = self.layers
            if "position_ids" not in inputs:
                given["position_ids"] = torch.arange(self.length, self.length + ids_JL.shape[1])[None]
        elif cache is None and self.layers:
            cache = Cache(layers=[_SharedLayer(*layer) for layer in self.layers])
        with computing_only(trunk, read_JL) if read_JL is not None else nullcontext():
            result = trunk(input_ids=ids_JL, past_key_values=cache, use_cache=cache is not None, **given)
        hidden_JLH: Tensor = result.last_hidden_state
        return hidden_JLH

    def backward(self) -> None:
        """Send the gradients that the rows left at the shared keys and values through the prefix."""
        shared = [state for layer in self.layers for state in layer]
        reached = [
            (computed, leaf.grad)
            for computed, leaf in zip(self._computed, shared, strict=True)
            if computed.requires_grad and leaf.grad is not None
        ]
        if reached:
            tensors, gradients = zip(*reached, strict=True)
            torch.autograd.backward(tensors, gradients)


def common_length(prompts: Sequence[Sequence[int]], *, window: int | None, longest: int) -> int:
    """Length in tokens of all prompts' common prefix, as far as sharing them is possible and pays.

    Args:
        prompts: J non-empty token id lists.
        window: the model's sliding attention window; None = it sees everything.
        longest: tokens of the longest prompt and answer together.

    Returns:
        0, or at least `MIN_TOKENS` and less than the shortest prompt: the last token has to be run to be followed.
    """
    if window is not None and longest > window:
        return 0  # padding between prompt and answer would count as distance there
    first, last = min(map(list, prompts)), max(map(list, prompts))  # what these two share, all between them share
    differ = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    common = min(next(differ, len(first)), min(map(len, prompts)) - 1)
    return common if common >= MIN_TOKENS else 0


def window_of(model: PreTrainedModel) -> int | None:
    """The sliding attention window of a model that has such layers."""
    config = model.config
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    window: int | None = getattr(config, "sliding_window", None) if sliding else None
    return window


def why_not(model: PreTrainedModel) -> str | None:
    """Why a model's passes cannot share a prefix, found by trying it on a few tokens; None = they can.

    On the way, a model on the CPU changes from sdpa attention to the fastest that computes the same: in 16 bits to
    eager, since torch's kernel takes three times as long there in the backward pass, else to `prefix_attention`.
    """
    if model.config._attn_implementation == "sdpa" and model.device.type == "cpu":
        model.set_attn_implementation("eager" if model.dtype.itemsize < torch.float32.itemsize else ATTENTION)
        if _differs(model):
            model.set_attn_implementation("sdpa")
    return _differs(model)


@torch.inference_mode()
def _differs(model: PreTrainedModel) -> str | None:
    ids_L = torch.arange(2 * PROBE_TOKENS, device=model.device) % model.config.vocab_size
    trunk, name = model.base_model, type(model).__name__
    try:
        plain_JLH = trunk(input_ids=ids_L[None].expand(2, -1), use_cache=False).last_hidden_state
        half = PROBE_TOKENS // 2
        prefix = Prefix(trunk, ids_L[half:PROBE_TOKENS], after=Prefix(trunk, ids_L[:half]))
        rest_JL = ids_L[None, PROBE_TOKENS:].expand(2, -1)
        read_JL = torch.arange(2 * PROBE_TOKENS, device=model.device).view(2, -1) % 2 == 0
        shared_JLH = prefix.hidden_states(trunk, rest_JL, read_JL=read_JL)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"{name} does not take shared keys and values ({type(error).__name__})"
    tolerance = PROBE_TOLERANCE.get(plain_JLH.dtype, HALF_TOLERANCE) * plain_JLH.abs().max()
    if not (plain_JLH[:, PROBE_TOKENS:] - shared_JLH)[read_JL].abs().max() <= tolerance:
        return f"{name} computes something else with shared keys and values"
    return None
