"""A batch of questions as the networks take them, and where its real option tokens lie.

Axis letters: B episodes, S questions, K options, E embedding, D hidden features, N real option tokens of the batch in a
row, T tokens of the longest episode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Questions(NamedTuple):
    """A padded batch of questions as the network takes them.

    Attributes:
        embedding: (B, S, K, E) features of the options.
        options: (B, S, K) bool, True where a question has that option; a question without any is padding.
        answer: (B, S, K) distributions of the group, whatever on padding; None where they are not known.
    """

    embedding: Tensor
    options: Tensor
    answer: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Questions:
        """The same change of every array."""
        answer = None if self.answer is None else change(self.answer)
        return Questions(change(self.embedding), change(self.options), answer)

    def episode(self, place: int) -> Questions:
        """One episode of the batch, as a batch of one."""
        return self.map(lambda value: value[place : place + 1])


@dataclass(frozen=True)
class Layout:
    """Positions of the N real option tokens in a padded (B, S, K) batch.

    Attributes:
        option_BSK: True where a token is real.
        question_N: b S + s of each token.
        slot_N: b T + its rank within its episode.
        real_BT: True where a slot holds a token.
        size_S: (B S,) number of options of each question, at least 1 so that it can divide.
    """

    option_BSK: Tensor
    question_N: Tensor
    slot_N: Tensor
    real_BT: Tensor
    size_S: Tensor

    def pad(self, value_ND: Tensor) -> Tensor:
        """Lay the tokens out as (B, T, D), 0 where there is none."""
        batch, length = self.real_BT.shape
        padded = value_ND.new_zeros(batch * length, value_ND.shape[-1])
        return padded.index_copy(0, self.slot_N, value_ND).view(batch, length, value_ND.shape[-1])

    def unpad(self, value_BTD: Tensor) -> Tensor:
        """Take the tokens back out of (B, T, D) as (N, D)."""
        return value_BTD.flatten(0, 1).index_select(0, self.slot_N)

    def question_mean(self, value_ND: Tensor) -> Tensor:
        """Mean over each question's options, (B S, D); 0 for a question without options."""
        total = value_ND.new_zeros(len(self.size_S), value_ND.shape[-1])
        return total.index_add(0, self.question_N, value_ND) / self.size_S[:, None]


def layout(option_BSK: Tensor) -> Layout:
    """The layout of a batch, from which options are real."""
    batch, questions, _ = option_BSK.shape
    flat = option_BSK.flatten(1)
    length_B = flat.sum(1)
    length = int(length_B.max()) if batch and flat.shape[1] else 0
    rank = flat.cumsum(1) - 1 + length * torch.arange(batch, device=flat.device)[:, None]
    episode_N, question_N, _ = option_BSK.nonzero(as_tuple=True)
    return Layout(
        option_BSK=option_BSK,
        question_N=episode_N * questions + question_N,
        slot_N=rank[flat],
        real_BT=torch.arange(length, device=flat.device)[None] < length_B[:, None],
        size_S=option_BSK.sum(-1).flatten().clamp_min(1),
    )
