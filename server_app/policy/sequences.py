"""The padded batch of prompts and responses that every pass works on.

Axis letters: C tokens that all prompts begin with, J rollouts, P further prompt tokens (padded left), T response tokens
(padded right), L tokens of a row in one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
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

    @property
    def num_shared_prompt_tokens(self) -> int:
        """Number of prompt tokens after the prefix that one pass can serve for all rows; 0 if that does not pay.

        The last token of the prompt is not shared: its hidden state predicts each row's first response token.
        """
        own = self.prompt_JP.shape[1]
        if len(self.prompt_JP) == 1 or own <= MIN_TOKENS or not len(self.prefix_C):
            return 0
        return own - 1 if self.prompt_mask_JP.all() and (self.prompt_JP == self.prompt_JP[0]).all() else 0

    def after(self, tokens: int) -> "Sequences":
        """The same rows without the first `tokens` tokens of their common prompt."""
        rest = self.prompt_JP[:, tokens:], self.prompt_mask_JP[:, tokens:]
        return Sequences(self.prefix_C, *rest, self.response_JT, self.mask_JT)

    def micro_batches(self, rows: Tensor, *, tokens: int, by_prompt: bool = False) -> list[Tensor]:
        """Sort rows by length and split them into chunks of at most `tokens` tokens, padding included.

        At most a fifth of a chunk is padding; a row of more than `tokens` tokens is its own chunk. With `by_prompt`,
        rows that can share their prompt are in chunks of one prompt, and the shared tokens do not count.
        """
        if not by_prompt:
            return _chunks(rows, self.length_J[rows], tokens=tokens)
        marked_JP = self.prompt_JP[rows].masked_fill(~self.prompt_mask_JP[rows], -1)
        _, prompt_J = marked_JP.unique(dim=0, return_inverse=True)
        mixed, chunks = [rows[:0]], []
        for prompt in range(int(prompt_J.max()) + 1):
            members = rows[prompt_J == prompt]
            if common := self.rows(members).num_shared_prompt_tokens:
                chunks += _chunks(members, self.length_J[members] - common, tokens=tokens)
            else:
                mixed.append(members)
        if len(others := torch.cat(mixed)):
            chunks += _chunks(others, self.length_J[others], tokens=tokens)
        return chunks

    def packed(self) -> tuple[Tensor, Tensor]:
        """Join prompt and response of each row for one pass, with all padding on the right.

        Returns token ids (J, L), without the last token of the longest row, which predicts nothing; and a mask (J, L),
        True at the positions that predict a response token.
        """
        ids_JL = torch.cat([self.prompt_JP, self.response_JT], 1)
        real_JL = torch.cat([self.prompt_mask_JP, self.mask_JT], 1)
        order_JL = (~real_JL).int().argsort(dim=1, stable=True)
        width = int(self.length_J.max()) - 1
        first_J1 = self.prompt_mask_JP.sum(1, keepdim=True) - 1
        column_L = torch.arange(width, device=first_J1.device)
        predicts_JL = (column_L >= first_J1) & (column_L < first_J1 + self.mask_JT.sum(1, keepdim=True))
        return ids_JL.gather(1, order_JL)[:, :width], predicts_JL


def _chunks(rows: Tensor, length: Tensor, *, tokens: int) -> list[Tensor]:
    order = length.argsort(stable=True, descending=True)
    chunks, widest, real = [0], 0, 0
    for place, own in enumerate(length[order].tolist()):
        widest, real = widest or own, real + own
        padded = (place + 1 - chunks[-1]) * widest
        if place > chunks[-1] and padded > min(tokens, MOST_PADDED * real):
            chunks.append(place)
            widest = real = own
    return list(rows[order].tensor_split(chunks[1:]))


def pad(rows: Sequence[Sequence[int]], *, device: torch.device, left: bool = False) -> tuple[Tensor, Tensor]:
    """Pad token id lists with zeros to one width: ids and mask, both (J, width)."""
    width = max(map(len, rows))
    mask = torch.tensor([[column < len(row) for column in range(width)] for row in rows], device=device)
    mask = mask.flip(1) if left else mask
    ids = torch.zeros(mask.shape, dtype=torch.long, device=device)
    return ids.masked_scatter(mask, torch.tensor([token for row in rows for token in row], device=device)), mask


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
