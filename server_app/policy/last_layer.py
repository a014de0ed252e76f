"""Skip work in the last layer for positions whose outputs are not read.

After the last layer's attention no position depends on another. So for positions that are not read, the last layer's
queries, attention output and feed-forward are not needed. Their keys and values are needed.

Axis letters: J rows, L tokens of a row, S positions that are read, H features.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn


def _position_wise(trunk: nn.Module) -> list[nn.Module]:
    """Modules of the last layer that process each position alone; empty for a layer of unknown structure."""
    layers = getattr(trunk, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return []
    attention, feed_forward = (getattr(layers[-1], name, None) for name in ("self_attn", "mlp"))
    parts = [getattr(attention, "q_proj", None), getattr(attention, "o_proj", None), feed_forward]
    plain = hasattr(feed_forward, "down_proj")  # a mixture of experts may return more than one tensor
    return [part for part in parts if isinstance(part, nn.Module)] if plain and None not in parts else []


@contextmanager
def computing_only(trunk: nn.Module, read_JL: Tensor) -> Iterator[None]:
    """Within the block, the trunk's last hidden states are correct where `read_JL` is True, and arbitrary elsewhere."""
    places = read_JL.nonzero(as_tuple=True)  # computed once: each indexing by a mask waits for the GPU

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
