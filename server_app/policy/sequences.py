"""The padded batch of prompts and responses that every pass works on.

Axis letters: C tokens that all prompts begin with, J rollouts, Q different prompts, P further prompt tokens (padded
left), T response tokens (padded right), L tokens of a row in one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel

from appa_flwr.core.errors import UserError

MOST_PADDED = 1.25  # largest ratio of all tokens of a pass, padding included, to the real tokens
MIN_TOKENS = 8  # shortest shared prefix: for a shorter one, a separate pass costs more than it saves


@dataclass(frozen=True)
class Sequences:
    """Prompts and responses of one batch."""

    prefix_C: Tensor  # token ids that every prompt begins with; may be empty
    prompt_JP: Tensor  # token ids of the rest, padded left
    prompt_mask_JP: Tensor  # True on real prompt tokens; each row has at least one
    response_JT: Tensor  # token ids, padded right
    mask_JT: Tensor  # True on response tokens up to and including the end of sequence

    @property
    def length_J(self) -> Tensor:
        """Tokens of each row after the prefix."""
        return self.prompt_mask_JP.sum(1) + self.mask_JT.sum(1)

    def rows(self, index: Tensor) -> "Sequences":
        """The rows `index`, cut to the columns they need."""
        prompt_mask, mask = self.prompt_mask_JP[index], self.mask_JT[index]
        prompt, response = int(prompt_mask.sum(1).max()), max(1, int(mask.sum(1).max()))
        return Sequences(
            self.prefix_C,
            self.prompt_JP[index, -prompt:],
            prompt_mask[:, -prompt:],
            self.response_JT[index, :response],
            mask[:, :response],
        )

    @cached_property
    def prompts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The different prompts, ids and mask (Q, P), padded right; and the number of each row's prompt (J,)."""
        marked_JP = self.prompt_JP.masked_fill(~self.prompt_mask_JP, -1)
        marked_QP, prompt_J = marked_JP.unique(dim=0, return_inverse=True)
        return *_padded_right(marked_QP.clamp(min=0), marked_QP >= 0), prompt_J

    @property
    def repeated(self) -> bool:
        """True if the rows have so few different prompts that a separate pass over these pays."""
        return 2 * len(self.prompts[0]) <= len(self.prompt_JP)

    def micro_batches(self, rows: Tensor, *, tokens: int) -> list[Tensor]:
        """Sort rows by length and split them into chunks of at most `tokens` tokens, padding included.

        At most a fifth of a chunk is padding; a row of more than `tokens` tokens is its own chunk. If prompts are
        `repeated`, rows of one prompt stand together, and the prompt counts once in a chunk.
        """
        chosen = self.rows(rows)
        if chosen.repeated:
            own_J, more_J = chosen.prompt_mask_JP.sum(1), chosen.mask_JT.sum(1) - 1
            return _chunks(rows, chosen.prompts[2], own_J, more_J, tokens=tokens)
        length_J = chosen.length_J
        return _chunks(rows, torch.arange(len(rows), device=rows.device), 0 * length_J, length_J, tokens=tokens)

    def packed(self) -> tuple[Tensor, Tensor]:
        """Join prompt and response of each row for one pass, with all padding on the right.

        Returns token ids (J, L), without the last token of the longest row, which predicts nothing; and a mask (J, L),
        True at the positions that predict a response token.
        """
        real_JL = torch.cat([self.prompt_mask_JP, self.mask_JT], 1)
        ids_JL, _ = _padded_right(torch.cat([self.prompt_JP, self.response_JT], 1), real_JL)
        width = int(self.length_J.max()) - 1
        first_J1 = self.prompt_mask_JP.sum(1, keepdim=True) - 1
        column_L = torch.arange(width, device=first_J1.device)
        predicts_JL = (column_L >= first_J1) & (column_L < first_J1 + self.mask_JT.sum(1, keepdim=True))
        return ids_JL[:, :width], predicts_JL


def _padded_right(ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and mask (rows, width) with the real tokens of each row first."""
    order = (~real).int().argsort(dim=1, stable=True)
    return ids.gather(1, order), real.gather(1, order)


class _Chunk(NamedTuple):
    """Rows of a pass, those of one prompt in turn; numbers of tokens."""

    prompt: int = -1  # of the last row
    prompts: int = 0
    rows: int = 0
    widest: int = 0  # prompt
    longest: int = 0  # rest of a row
    real: int = 0

    @property
    def padded(self) -> int:
        return self.prompts * self.widest + self.rows * self.longest

    def with_row(self, prompt: int, own: int, more: int) -> "_Chunk":
        new = prompt != self.prompt
        widest, longest = max(self.widest, own), max(self.longest, more)
        return _Chunk(prompt, self.prompts + new, self.rows + 1, widest, longest, self.real + more + new * own)


def _chunks(rows: Tensor, prompt_J: Tensor, own_J: Tensor, more_J: Tensor, *, tokens: int) -> list[Tensor]:
    """Split rows of these prompts, which have `own_J` tokens, once in a chunk; each row has `more_J` further ones."""
    longest_Q = torch.zeros_like(more_J).scatter_reduce(0, prompt_J, more_J, "amax")
    keys = torch.stack([-longest_Q[prompt_J], -own_J, prompt_J, -more_J], 1).tolist()
    order = sorted(range(len(keys)), key=keys.__getitem__)
    chunks, held = [0], _Chunk()
    for place, j in enumerate(order):
        _, own, prompt, more = keys[j]
        grown = held.with_row(prompt, -own, -more)
        if grown.rows > 1 and grown.padded > min(tokens, MOST_PADDED * grown.real):
            chunks.append(place)
            grown = _Chunk().with_row(prompt, -own, -more)
        held = grown
    return list(rows[torch.tensor(order, device=rows.device)].tensor_split(chunks[1:]))


def pad(rows: Sequence[Sequence[int]], *, device: torch.device, left: bool = False) -> tuple[Tensor, Tensor]:
    """Pad token id lists with zeros to one width: ids and mask, both (J, width)."""
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    padded = partial(pad_sequence, batch_first=True, padding_side="left" if left else "right")
    return padded(ids).to(device), padded([torch.ones_like(row, dtype=torch.bool) for row in ids]).to(device)


@torch.inference_mode(False)  # autograd saves token ids for the embeddings' gradient, and rejects inference tensors
def split_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, response_length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split prompts into the common prefix (C,) that rows can share, and the rest with its mask, both (J, P).

    Raises:
        UserError: the longest prompt with `response_length` more tokens is above the model's `longest_row`.
    """
    longest, most = max(map(len, prompts)) + response_length, longest_row(model.config)
    if longest > most:
        raise UserError(f"a prompt with its answer has {longest} tokens; the model reads {most} at most")
    shared = common_length(prompts)
    prefix_C = torch.tensor(prompts[0][:shared], dtype=torch.long, device=model.device)
    return prefix_C, *pad([prompt[shared:] for prompt in prompts], device=model.device, left=True)


def common_length(prompts: Sequence[Sequence[int]]) -> int:
    """Length in tokens of the common prefix of J non-empty prompts, or 0 if sharing it does not pay.

    Less than the shortest prompt, whose last token predicts the first token of the answer.
    """
    # In sorted order, all prompts share the common prefix of the first and the last.
    first, last = min(map(list, prompts)), max(map(list, prompts))
    differ = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    common = min(next(differ, len(first)), min(map(len, prompts)) - 1)
    return common if common >= MIN_TOKENS else 0


def longest_row(config: PreTrainedConfig) -> int:
    """Longest row, in tokens, that is computed correctly: the context length, or a sliding window if it is shorter.

    In a longer row padding would count as distance within the window, and a full window would drop the shared prefix.
    """
    length: int = config.max_position_embeddings
    window: int | None = getattr(config, "sliding_window", None)
    return min(length, window or length)
