"""LoRA layers that round once.

In 16 bits PEFT adds an adapter's output to a layer output that is already rounded, and rounds the sum again. At small
step sizes the adapter's output is mostly below half of the last digit and gets lost: at the paper's SFT step size a
fifth of SFT's update was left. Here the adapter's output is added inside the matrix product with the base weights,
which accumulates in 32 bits. With 32-bit weights this saves the memory passes of PEFT's separate sum.

Axis letters: S positions (any leading shape), I and O features in and out, R ranks of all adapters together.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from peft.tuners.lora import Linear, Linear4bit
from torch import Tensor, nn


def round_once(model: nn.Module) -> None:
    """Make the LoRA layers of a model round once."""
    for layer in model.modules():
        if type(layer) in (Linear, Linear4bit):
            layer.forward = MethodType(_forward, layer)


def _forward(layer: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """PEFT's forward of a LoRA layer: W x + sum of s B A x over the active adapters."""
    base = layer.get_base_layer()
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or not active:
        plain: Tensor = base(x)
        return plain
    inner = [nn.functional.linear(layer.lora_dropout[a](x), layer.lora_A[a].weight.to(x.dtype)) for a in active]
    outer_OR = torch.cat([(layer.scaling[a] * layer.lora_B[a].weight).to(x.dtype) for a in active], 1)
    part_SO = nn.functional.linear(torch.cat(inner, -1), outer_OR, base.bias)
    add: Callable[..., Tensor] = _Add.apply
    return add(part_SO, x, base.weight)


class _Add(torch.autograd.Function):
    """part + W x, rounded once. The frozen W gets no gradient; the backward pass dequantizes W again."""

    @staticmethod
    def forward(ctx: Any, part_SO: Tensor, x_SI: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        flat = torch.addmm(part_SO.flatten(0, -2), x_SI.flatten(0, -2), _dense(weight, x_SI.dtype).T)
        return flat.view(part_SO.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grad_SO,) = gradients
        return grad_SO, grad_SO @ _dense(ctx.weight, grad_SO.dtype) if ctx.needs_input_grad[1] else None, None


def _dense(weight: Any, dtype: torch.dtype) -> Tensor:
    """Dequantized W, (O, I)."""
    state = getattr(weight, "quant_state", None)
    dense: Tensor = weight if state is None else dequantize_4bit(weight.data, state)
    return dense.to(dtype)
