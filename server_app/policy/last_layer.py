"""The last layer computes what its caller will read, and no more.

Behind the last layer no position looks at another any more, so where only some outputs are read, queries, attention
output and feed-forward of the other positions are work for nothing; their keys and values are not.

Axis letters: J rows, L tokens of a row, S positions that are read, H features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn


def _position_wise(trunk: nn.Module) -> list[nn.Module]:
    """The last layer's parts that treat each position alone; none where the layer is not built as we know it."""
    layers = getattr(trunk, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return []
    attention, feed_forward = (getattr(layers[-1], name, None) for name in ("self_attn", "mlp"))
    parts = [getattr(attention, "q_proj", None), getattr(attention, "o_proj", None), feed_forward]
    plain = hasattr(feed_forward, "down_proj")  # experts route, and may return more than one tensor
    return [part for part in parts if isinstance(part, nn.Module)] if plain and None not in parts else []


@contextmanager
def computing_only(trunk: nn.Module, read_JL: Tensor) -> Iterator[None]:
    """Within the block, the trunk's passes give right last hidden states where `read_JL` is True, and any elsewhere."""
    places = read_JL.nonzero(as_tuple=True)  # once: a mask as an index makes the host wait for the GPU at each use

    def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0][places], *inputs[1:])

    def scatter(_: nn.Module, __: Any, result_SH: Tensor) -> Tensor:
        full_JLH = result_SH.new_zeros(*read_JL.shape, result_SH.shape[-1])
        return full_JLH.index_put(places, result_SH)

    with ExitStack() as hooks:
        for part in _position_wise(trunk):
            for handle in (part.register_forward_pre_hook(gather), part.register_forward_hook(scatter)):
                hooks.callback(handle.remove)
        yield
