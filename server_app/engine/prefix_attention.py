"""Attention of many rows to one shared prefix and to themselves, without copying the prefix for each row (CPU).

Softmax attention over two sets of keys is the mean of the attentions over each, weighted by their sums of exponentials.
So all rows' queries meet the prefix in one product, and each row meets its own keys in another. Each part's backward
pass is that of plain attention, given the output and the log-sum-exp of the whole.

Transformers calls `attend` under the name `ATTENTION`; a pass without `shared_layers` is plain sdpa.

Axis letters: J rows, L queries of a row, C prefix tokens, T tokens of a row so far, N query heads, M key heads,
G = N / M, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "shared_prefix_sdpa"
SharedLayers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values (1, M, C, D) of the prefix, by layer."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _by_key_head(value_JNLx: Tensor, key_heads: int) -> Tensor:
    """(J, N, L, ...) as (1, M, J G L, ...): what each key head is asked by all rows."""
    rows, heads, length = value_JNLx.shape[:3]
    split = value_JNLx.reshape(rows, key_heads, heads // key_heads, length, *value_JNLx.shape[3:])
    return split.transpose(0, 1).reshape(1, key_heads, -1, *value_JNLx.shape[3:])


def _by_row(value_1Mx: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `_by_key_head`, for the shape (J, N, L) it had."""
    rows, heads, length = shape
    key_heads, tail = value_1Mx.shape[1], value_1Mx.shape[3:]
    split = value_1Mx.reshape(key_heads, rows, heads // key_heads, length, *tail)
    return split.transpose(0, 1).reshape(rows, heads, length, *tail)


class _TwoParts(torch.autograd.Function):
    """Attention (J, N, L, D) to the prefix, and to the rows' own keys: causally, or as far as `bias` allows."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prefix_key: Tensor,
        prefix_value: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        shape, key_heads = tuple(query.shape[:3]), key.shape[1]
        grouped = _by_key_head(query, key_heads)
        out_prefix, lse_prefix = _flash(grouped, prefix_key, prefix_value, scale=scale)
        causal = bias is None and query.shape[2] == key.shape[2]
        if query.shape[2] == 1 and not causal:  # a generation's step: the G heads of a key head act as positions
            packed = query.reshape(query.shape[0], key_heads, -1, query.shape[-1])
            out_own, lse_own = _flash(packed, key, value, attn_mask=bias, scale=scale)
            out_own, lse_own = out_own.reshape(query.shape), lse_own.reshape(shape)
        else:
            groups = query.shape[1] // key_heads
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            out_own, lse_own = _flash(query, key, value, is_causal=causal, attn_mask=bias, scale=scale)
        lse_prefix, out_prefix = _by_row(lse_prefix, shape), _by_row(out_prefix, shape)
        lse = torch.logaddexp(lse_prefix, lse_own)
        out = out_prefix * (lse_prefix - lse).exp()[..., None].to(query.dtype)
        out += out_own * (lse_own - lse).exp()[..., None].to(query.dtype)
        ctx.save_for_backward(query, key, value, prefix_key, prefix_value, out, lse)
        ctx.key_heads, ctx.scale, ctx.causal = key_heads, scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grad,) = gradients
        query, key, value, prefix_key, prefix_value, out, lse = ctx.saved_tensors
        if not ctx.causal:
            raise RuntimeError("training passes attend causally and without a mask")
        shape, key_heads, scale = tuple(query.shape[:3]), ctx.key_heads, ctx.scale
        grad = grad.contiguous()
        grouped = [_by_key_head(part, key_heads) for part in (grad, query, out, lse)]
        to_query, to_prefix_key, to_prefix_value = _flash_backward(
            grouped[0], grouped[1], prefix_key, prefix_value, grouped[2], grouped[3], 0.0, False, scale=scale
        )
        own_query, own_key, own_value = _flash_backward(grad, query, key, value, out, lse, 0.0, True, scale=scale)
        rows, _, length, size = key.shape
        split = (rows, key_heads, -1, length, size)
        return (
            own_query + _by_row(to_query, shape),
            own_key.view(split).sum(2),
            own_value.view(split).sum(2),
            to_prefix_key,
            to_prefix_value,
            None,
            None,
        )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    shared_layers: SharedLayers | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention in the signature of Transformers' interface.

    Args:
        module: the attention layer; its `layer_idx` picks the layer of the prefix.
        query: (J, N, L, D).
        key: (J, M, T, D), the rows' own; with L > 1 and no mask, T = L.
        value: like `key`.
        attention_mask: bool, over the rows' own keys; None = causal.
        scaling: of the scores; None = 1 / sqrt(D).
        shared_layers: the prefix that all rows follow; None = there is none.
        rest: what plain sdpa may need.

    Returns:
        (J, L, N, D), and no weights.
    """
    if shared_layers is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **rest
        )
        return plain
    if rest.get("softcap") is not None:
        raise ValueError("sdpa knows no softcap")
    prefix_key, prefix_value = shared_layers[int(module.layer_idx)]  # type: ignore[arg-type]
    bias = None
    if attention_mask is not None:
        bias = torch.zeros(attention_mask.shape, dtype=query.dtype).masked_fill_(~attention_mask, float("-inf"))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended: Callable[..., Tensor] = _TwoParts.apply
    out = attended(query, key, value, prefix_key, prefix_value, bias, scale)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
