"""A pass of a model over rows that follow one prefix: the prefix is computed, the rows scored, its gradient sent back.

Rows of one call that have the same prompt share all of it but its last token, by a second prefix after the first.

Axis letters: C tokens that all rows begin with, J rollouts, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from server_app.engine.logprobs import response_logprobs, response_values
from server_app.engine.prefix import Prefix
from server_app.engine.sequences import Sequences


class _Beginnings:
    """The prefix of a pass, and after it, one at a time, those of prompts that all rows of a call have."""

    def __init__(self, trunk: nn.Module, prefix_C: Tensor, *, train: bool) -> None:
        self._trunk, self._train = trunk, train
        self._common = Prefix(trunk, prefix_C, train=train)
        self._prompt: Prefix | None = None

    def of(self, sequences: Sequences) -> tuple[Prefix, Sequences]:
        """The prefix that these rows follow, and the rows after it; the caller is done with the rows before."""
        self._close_prompt()
        if not (tokens := sequences.common_prompt):
            return self._common, sequences
        self._prompt = Prefix(self._trunk, sequences.prompt_JP[0, :tokens], train=self._train, after=self._common)
        return self._prompt, sequences.following(tokens)

    def backward(self) -> None:
        """Send what the rows left at the keys and values through the prefixes."""
        self._close_prompt()
        self._common.backward()

    def _close_prompt(self) -> None:
        if self._prompt is not None:
            self._prompt.backward()
            self._prompt = None


Scorer = Callable[[Sequences], Tensor]
"""Gives a (J, T) tensor, 0 outside the mask, for rows that follow the pass's prefix."""


@contextmanager
def _beginnings(trunk: nn.Module, prefix_C: Tensor, *, train: bool) -> Iterator[_Beginnings]:
    """The prefix of one pass under the weights now in force, and its part of the gradient at the end."""
    with torch.set_grad_enabled(train):
        beginnings = _Beginnings(trunk, prefix_C, train=train)
        yield beginnings
        beginnings.backward()


@contextmanager
def logprob_pass(
    model: PreTrainedModel, prefix_C: Tensor, *, temperature: float, train: bool = False
) -> Iterator[Scorer]:
    """Log-probabilities of response tokens under softmax(logits / temperature), temperature > 0.

    With `train` the caller calls `backward` on what it makes of each result before the next one, and leaves the block
    before the optimizer's step: the prefix gets its gradient then.
    """
    with _beginnings(model.base_model, prefix_C, train=train) as beginnings:

        def scorer(sequences: Sequences) -> Tensor:
            prefix, rows = beginnings.of(sequences)
            return response_logprobs(model, rows, temperature=temperature, prefix=prefix)

        yield scorer


@contextmanager
def value_pass(trunk: nn.Module, head: nn.Linear, prefix_C: Tensor, *, train: bool = False) -> Iterator[Scorer]:
    """V before each response token: a head on the trunk's last hidden states; `train` as for `logprob_pass`."""
    with _beginnings(trunk, prefix_C, train=train) as beginnings:

        def scorer(sequences: Sequences) -> Tensor:
            prefix, rows = beginnings.of(sequences)
            return response_values(trunk, head, rows, prefix=prefix)

        yield scorer
