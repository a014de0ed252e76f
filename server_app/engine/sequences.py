"""The padded batch of prompts and responses that every pass after sampling works on.

Axis letters: C tokens that all prompts begin with, J rollouts, P further prompt tokens, T response tokens (both padded
right), L tokens of a row in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server_app.engine.prefix import MIN_TOKENS


@dataclass(frozen=True)
class Sequences:
    """Prompts and responses of one batch.

    Attributes:
        prefix_C: token ids that every prompt begins with; may be empty.
        prompt_JP: token ids of the rest, padded right.
        prompt_mask_JP: True on real prompt tokens; each row has at least one.
        response_JT: token ids, padded right.
        mask_JT: True on response tokens up to and including the end of sequence.
    """

    prefix_C: Tensor
    prompt_JP: Tensor
    prompt_mask_JP: Tensor
    response_JT: Tensor
    mask_JT: Tensor

    @property
    def length_J(self) -> Tensor:
        """Tokens of each row after the prefix."""
        return self.prompt_mask_JP.sum(1) + self.mask_JT.sum(1)

    def rows(self, index: Tensor) -> Sequences:
        """The rows `index`, cut to the columns they need."""
        prompt_mask, mask = self.prompt_mask_JP[index], self.mask_JT[index]
        prompt, response = int(prompt_mask.sum(1).max()), max(1, int(mask.sum(1).max()))
        return Sequences(
            self.prefix_C,
            self.prompt_JP[index, :prompt],
            prompt_mask[:, :prompt],
            self.response_JT[index, :response],
            mask[:, :response],
        )

    @property
    def common_prompt(self) -> int:
        """Length in tokens of this one prompt's prefix: 0 where rows differ in it, or it does not pay."""
        own = int(self.prompt_mask_JP.sum(1).max())
        same = len(self.prompt_JP) > 1 and bool((self.prompt_JP == self.prompt_JP[0]).all())
        # the last token has to be run to be followed; without a prefix the model, or its user, shares nothing
        return own - 1 if same and self.prompt_mask_JP.all() and own > MIN_TOKENS and len(self.prefix_C) else 0

    def following(self, tokens: int) -> Sequences:
        """The same rows, for a prefix that has the first `tokens` tokens of their one prompt too."""
        prefix_C = torch.cat([self.prefix_C, self.prompt_JP[0, :tokens]])
        rest = self.prompt_JP[:, tokens:], self.prompt_mask_JP[:, tokens:]
        return Sequences(prefix_C, *rest, self.response_JT, self.mask_JT)

    def micro_batches(self, rows: Tensor, *, tokens: int, by_prompt: bool = False) -> list[Tensor]:
        """The given rows by length, in chunks of at most `tokens` tokens, padding counted; a long row stands alone.

        With `by_prompt`, rows of one prompt stand in chunks of their own, which need its tokens once.
        """
        if not by_prompt:
            return _chunks(rows, self.length_J[rows], tokens=tokens)
        marked_JP = self.prompt_JP[rows].masked_fill(~self.prompt_mask_JP[rows], -1)
        _, prompt_J = marked_JP.unique(dim=0, return_inverse=True)
        alone, chunks = [], []
        for prompt in range(int(prompt_J.max()) + 1):
            members = rows[prompt_J == prompt]
            if common := self.rows(members).common_prompt:
                chunks += _chunks(members, self.length_J[members] - common, tokens=tokens)
            else:
                alone.append(members)
        if alone:
            others = torch.cat(alone)
            chunks += _chunks(others, self.length_J[others], tokens=tokens)
        return chunks

    def packed(self) -> tuple[Tensor, Tensor]:
        """Prompt and response of each row in one piece, with all padding right of them, for one pass.

        Returns:
            Token ids (J, L), without the last token of the longest row, which predicts nothing; and a mask (J, L), True
            on the positions that predict a response token, row by row in their order.
        """
        ids_JL = torch.cat([self.prompt_JP, self.response_JT], 1)
        real_JL = torch.cat([self.prompt_mask_JP, self.mask_JT], 1)
        order_JL = (~real_JL).int().argsort(dim=1, stable=True)
        width = int(self.length_J.max()) - 1
        first_J1 = self.prompt_mask_JP.sum(1, keepdim=True) - 1
        column_L = torch.arange(width, device=first_J1.device)
        read_JL = (column_L >= first_J1) & (column_L < first_J1 + self.mask_JT.sum(1, keepdim=True))
        return ids_JL.gather(1, order_JL)[:, :width], read_JL


def _chunks(rows: Tensor, length: Tensor, *, tokens: int) -> list[Tensor]:
    order = length.argsort(stable=True, descending=True)
    chunks, widest = [0], 0
    for place, own in enumerate(length[order].tolist()):
        widest = widest or own
        if place > chunks[-1] and (place + 1 - chunks[-1]) * widest > tokens:
            chunks.append(place)
            widest = own
    return list(rows[order].tensor_split(chunks[1:]))


def pad_prompts(prompts: Sequence[Sequence[int]], *, pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Non-empty token id lists padded right to one width: ids and mask, both (J, P)."""
    width = max(len(p) for p in prompts)
    ids_JP = torch.tensor([[*p, *[pad_id] * (width - len(p))] for p in prompts], device=device)
    mask_JP = torch.tensor([[True] * len(p) + [False] * (width - len(p)) for p in prompts], device=device)
    return ids_JP, mask_JP


def split_prompts(
    prompts: Sequence[Sequence[int]], *, shared: int, pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The first `shared` tokens, which all prompts begin with (C,), and the rest and its mask, both (J, P)."""
    prefix_C = torch.tensor(prompts[0][:shared], dtype=torch.long, device=device)
    return prefix_C, *pad_prompts([p[shared:] for p in prompts], pad_id=pad_id, device=device)
