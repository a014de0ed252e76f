"""Skip work in the last layer for positions whose outputs are not read.

After the last layer's attention no position depends on another. So for positions that are not read, the last layer's
queries, attention output and feed-forward are not needed. Their keys and values are needed.

Axis letters: J rows, L tokens of a row, S positions that are read, H features.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def computing_only(trunk: Any, read_JL: Tensor) -> Iterator[None]:
    """Within the block, the trunk's last hidden states are correct where `read_JL` is True, and arbitrary elsewhere."""
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
