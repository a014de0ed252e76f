"""A pass of a model over rows that follow one prefix: the prefix is computed, the rows scored, its gradient sent back.

Rows of one call that have the same prompt share all of it but its last token, by a second prefix after the first.

Axis letters: C tokens that all rows begin with, J rollouts, T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from server_app.engine.logprobs import response_logprobs, response_values
from server_app.engine.prefix import Prefix
from server_app.engine.sequences import Sequences

Scorer = Callable[[Sequences], Tensor]
"""Gives a (J, T) tensor, 0 outside the mask, for rows that follow the pass's prefix."""


@contextmanager
def _pass(trunk: nn.Module, prefix_C: Tensor, score: Callable[..., Tensor], *, train: bool) -> Iterator[Scorer]:
    """Score rows behind the prefix under the weights now in force; the prefixes' part of the gradient at the end."""
    with torch.set_grad_enabled(train):
        common = Prefix(trunk, prefix_C, train=train)
        of_prompt: list[Prefix] = []  # of the one prompt that all rows of the last call had

        def close_prompt() -> None:
            while of_prompt:
                of_prompt.pop().backward()

        def scorer(sequences: Sequences) -> Tensor:
            close_prompt()  # the caller is done with the rows before
            if not (tokens := sequences.common_prompt):
                return score(sequences, prefix=common)
            of_prompt.append(Prefix(trunk, sequences.prompt_JP[0, :tokens], train=train, after=common))
            return score(sequences.following(tokens), prefix=of_prompt[0])

        yield scorer
        close_prompt()
        common.backward()


def logprob_pass(
    model: PreTrainedModel, prefix_C: Tensor, *, temperature: float, train: bool = False
) -> AbstractContextManager[Scorer]:
    """Log-probabilities of response tokens under softmax(logits / temperature), temperature > 0.

    With `train` the caller calls `backward` on what it makes of each result before the next one, and leaves the block
    before the optimizer's step: the prefix gets its gradient then.
    """
    score = partial(response_logprobs, model, temperature=temperature)
    return _pass(model.base_model, prefix_C, score, train=train)


def value_pass(
    trunk: nn.Module, head: nn.Linear, prefix_C: Tensor, *, train: bool = False
) -> AbstractContextManager[Scorer]:
    """V before each response token: a head on the trunk's last hidden states; `train` as for `logprob_pass`."""
    return _pass(trunk, prefix_C, partial(response_values, trunk, head), train=train)
