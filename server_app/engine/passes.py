"""A pass of a model over rows that follow one prefix: the prefix is computed, the rows scored, its gradient sent back.

Axis letters: C tokens that all rows begin with, J rollouts, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from server_app.engine.logprobs import response_logprobs, response_values
from server_app.engine.prefix import Prefix
from server_app.engine.sequences import Sequences

Scorer = Callable[[Sequences], Tensor]
"""Gives a (J, T) tensor, 0 outside the mask, for rows that follow the pass's prefix."""


@contextmanager
def _prefix(trunk: nn.Module, prefix_C: Tensor, *, train: bool) -> Iterator[Prefix]:
    """The prefix of one pass under the weights now in force, and its part of the gradient at the end."""
    checkpointed = [m for m in trunk.modules() if isinstance(m, GradientCheckpointingLayer)]
    with torch.set_grad_enabled(train):
        for layer in checkpointed:  # which recompute themselves only in training
            layer.training = train
        try:
            prefix = Prefix(trunk, prefix_C, train=train)
            yield prefix
            prefix.backward()
        finally:
            for layer in checkpointed:
                layer.training = False


@contextmanager
def logprob_pass(
    model: PreTrainedModel, prefix_C: Tensor, *, temperature: float, train: bool = False
) -> Iterator[Scorer]:
    """Log-probabilities of response tokens under softmax(logits / temperature), temperature > 0.

    With `train` the caller calls `backward` on what it makes of each result before the next one, and leaves the block
    before the optimizer's step: the prefix gets its gradient then.
    """
    with _prefix(model.base_model, prefix_C, train=train) as prefix:
        yield lambda sequences: response_logprobs(model, sequences, temperature=temperature, prefix=prefix)


@contextmanager
def value_pass(trunk: nn.Module, head: nn.Linear, prefix_C: Tensor, *, train: bool = False) -> Iterator[Scorer]:
    """V before each response token: a head on the trunk's last hidden states; `train` as for `logprob_pass`."""
    with _prefix(trunk, prefix_C, train=train) as prefix:
        yield lambda sequences: response_values(trunk, head, sequences, prefix=prefix)
