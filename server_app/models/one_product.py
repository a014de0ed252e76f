"""LoRA layers for 16-bit models that round once: base and adapters in one matrix product.

PEFT adds an adapter's part to a layer's output that has been rounded already, and rounds the sum. At small step sizes
the part is mostly less than half of the last digit, so the sum is what it was before: at the paper's SFT step size a
fifth of what SFT learned was left. Here [W, s B] meets [x; A x] in one product, which adds up in 32 bits.

[W, s B] is kept where there is memory for it: unpacking nf4 weights and copying them beside s B costs more than the
product of a few rows.

Axis letters: S positions (any leading shape), I and O features in and out, R ranks of all adapters together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from bitsandbytes.functional import dequantize_4bit
from peft.tuners.lora import Linear, Linear4bit, LoraLayer
from torch import Tensor, nn

SHARE_OF_FREE_MEMORY = 0.5  # that unpacked weights may take: rollouts and updates need the rest
GIBIBYTE = 2**30

log = logging.getLogger("appa.server")


class _Product(torch.autograd.Function):
    """[x, inner] [W, outer]^T + bias, without a gradient for the frozen W of the layer."""

    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, inner_SR: Tensor, outer_OR: Tensor, layer: _Once) -> Tensor:
        ctx.save_for_backward(inner_SR, outer_OR)
        ctx.layer = layer
        return _apply(x_SI, inner_SR, layer.joined(outer_OR), layer)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grad_SO,) = gradients
        inner_SR, outer_OR = ctx.saved_tensors
        to_x = grad_SO @ ctx.layer.dense(grad_SO.dtype) if ctx.needs_input_grad[0] else None
        to_outer = None
        if ctx.needs_input_grad[2]:
            to_outer = grad_SO.reshape(-1, grad_SO.shape[-1]).T @ inner_SR.reshape(-1, inner_SR.shape[-1])
        return to_x, grad_SO @ outer_OR, to_outer, None


def _apply(x_SI: Tensor, inner_SR: Tensor, joined: Tensor, layer: _Once) -> Tensor:
    return nn.functional.linear(torch.cat([x_SI, inner_SR], -1), joined, layer.get_base_layer().bias)


class _Once:
    """Takes the place of PEFT's forward in a LoRA layer.

    Attributes:
        keeps: whether [W, s B] is kept.
        held: within `holding`, [A] and s B of the active adapters, from the first pass on; None outside.
    """

    get_base_layer: Any
    keeps = False
    held: list[Tensor] | None = None
    _kept: Tensor | None = None

    def forward(self: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or not active:
            plain: Tensor = self.get_base_layer()(x)
            return plain
        if self.held:
            inner_RI, joined = self.held
            return _apply(x, nn.functional.linear(x, inner_RI), joined, self)
        down = [self.lora_A[a].weight.to(x.dtype) for a in active]
        outer = torch.cat([(self.scaling[a] * self.lora_B[a].weight).to(x.dtype) for a in active], 1)
        if self.held is not None and self.keeps:
            self.held += [torch.cat(down), self.joined(outer)]
        inner = [nn.functional.linear(self.lora_dropout[a](x), A) for a, A in zip(active, down, strict=True)]
        product: Callable[..., Tensor] = _Product.apply
        return product(x, torch.cat(inner, -1), outer, self)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W, (O, I)."""
        weight = self.get_base_layer().weight
        if self._kept is not None and self._kept.dtype == dtype:
            return self._kept[:, : self.get_base_layer().in_features]
        state = getattr(weight, "quant_state", None)
        found: Tensor = weight if state is None else dequantize_4bit(weight.data, state)
        return found.to(dtype)

    def joined(self, outer_OR: Tensor) -> Tensor:
        """[W, outer], (O, I + R); where it is kept, the next call overwrites it."""
        features = self.get_base_layer().in_features
        width = features + outer_OR.shape[1]
        if self.keeps and (self._kept is None or self._kept.shape[1] < width or self._kept.dtype != outer_OR.dtype):
            with torch.inference_mode(False), torch.no_grad():  # training passes write to it too
                self._kept = torch.cat([self.dense(outer_OR.dtype), torch.empty_like(outer_OR)], 1)
        if self._kept is None:
            return torch.cat([self.dense(outer_OR.dtype), outer_OR], 1)
        joined = self._kept[:, :width]
        joined[:, features:] = outer_OR
        return joined


def _layers(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, _Once)]


@contextmanager
def holding(model: nn.Module) -> Iterator[None]:
    """Within the block, adapters are as its first pass has them, for passes without a gradient."""
    layers = _layers(model)
    for layer in layers:
        layer.held = []
    try:
        yield
    finally:
        for layer in layers:
            layer.held = None


def round_once(model: nn.Module) -> None:
    """Let the LoRA layers of a model whose passes are in 16 bits round once, with weights kept if they fit."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and type(layer) in (Linear, Linear4bit):
            layer.__class__ = type(f"Once{type(layer).__name__}", (_Once, type(layer)), {})
    sizes = [(layer.get_base_layer(), sum(layer.r.values())) for layer in _layers(model)]
    needed = int(2 * sum(base.out_features * (base.in_features + ranks) for base, ranks in sizes))  # bytes of [W, s B]
    gpu = any(parameter.is_cuda for parameter in model.parameters())
    free = torch.cuda.mem_get_info()[0] if gpu else psutil.virtual_memory().available
    keeps = needed <= SHARE_OF_FREE_MEMORY * free
    for layer in _layers(model):
        layer.keeps = keeps
    what = "are kept beside their adapters" if keeps else "are copied beside their adapters at each use"
    log.info("weights of %.2f GiB %s; %.1f GiB are free", needed / GIBIBYTE, what, free / GIBIBYTE)
