"""LoRA layers for 16-bit models that round once: base and adapters in one matrix product.

PEFT adds an adapter's part to a layer's output that has been rounded already, and rounds the sum. At small step sizes
the part is mostly less than half of the last digit, so the sum is what it was before: at the paper's SFT step size a
fifth of what SFT learned was left. Here [W, s B] meets [x; A x] in one product, which adds up in 32 bits.

Axis letters: S positions (any leading shape), I and O features in and out, R ranks of all adapters together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from peft.tuners.lora import Linear, Linear4bit, LoraLayer
from torch import Tensor, nn


class _Product(torch.autograd.Function):
    """[x, inner] [W, outer]^T + bias, without a gradient for the frozen W."""

    @staticmethod
    def forward(
        ctx: Any, x_SI: Tensor, inner_SR: Tensor, outer_OR: Tensor, bias_O: Tensor | None, weight: Callable[[], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(inner_SR, outer_OR)
        ctx.weight = weight
        joined = torch.cat([weight(), outer_OR], 1)
        return nn.functional.linear(torch.cat([x_SI, inner_SR], -1), joined, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grad_SO,) = gradients
        inner_SR, outer_OR = ctx.saved_tensors
        to_x = grad_SO @ ctx.weight() if ctx.needs_input_grad[0] else None
        to_outer = None
        if ctx.needs_input_grad[2]:
            to_outer = grad_SO.reshape(-1, grad_SO.shape[-1]).T @ inner_SR.reshape(-1, inner_SR.shape[-1])
        return to_x, grad_SO @ outer_OR, to_outer, None, None


class _Once:
    """Takes the place of PEFT's forward in a LoRA layer."""

    def forward(self: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        active = [name for name in self.active_adapters if name in self.lora_A]
        base = self.get_base_layer()
        if self.disable_adapters or not active:
            plain: Tensor = base(x)
            return plain
        inner = [nn.functional.linear(self.lora_dropout[a](x), self.lora_A[a].weight.to(x.dtype)) for a in active]
        outer = [(self.scaling[a] * self.lora_B[a].weight).to(x.dtype) for a in active]

        def weight() -> Tensor:
            state = getattr(base.weight, "quant_state", None)
            dense: Tensor = base.weight if state is None else dequantize_4bit(base.weight.data, state)
            return dense.to(x.dtype)

        product: Callable[..., Tensor] = _Product.apply
        return product(x, torch.cat(inner, -1), torch.cat(outer, 1), base.bias, weight)


def round_once(model: nn.Module) -> None:
    """Let the LoRA layers of a model whose passes are in 16 bits round once."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and type(layer) in (Linear, Linear4bit):
            layer.__class__ = type(f"Once{type(layer).__name__}", (_Once, type(layer)), {})
