"""Rows packed for one pass, by hand.

Axis letters: J rollouts, P prompt tokens, T response tokens, L tokens of a row in one pass.
"""

from __future__ import annotations

import pytest
import torch

from server_app.engine.sequences import Sequences, pad_prompts

SEQUENCES = Sequences(
    torch.tensor([90, 91]),
    torch.tensor([[7, 0, 0], [8, 9, 0], [3, 4, 5]]),
    torch.tensor([[True, False, False], [True, True, False], [True, True, True]]),
    torch.tensor([[21, 22, 1], [31, 1, 0], [1, 0, 0]]),
    torch.tensor([[True, True, True], [True, True, False], [True, False, False]]),
)


def test_prompts_are_padded_on_the_right():
    ids_JP, mask_JP = pad_prompts([[7, 8, 9], [5]], pad_id=0, device=torch.device("cpu"))
    assert ids_JP.tolist() == [[7, 8, 9], [5, 0, 0]]
    assert mask_JP.tolist() == [[True, True, True], [True, False, False]]


def test_packed_rows_have_no_padding_within_and_read_where_a_response_token_is_predicted():
    ids_JL, read_JL = SEQUENCES.packed()
    # the last token of the longest row predicts nothing; shorter rows end in padding that nobody reads
    assert ids_JL.tolist() == [[7, 21, 22], [8, 9, 31], [3, 4, 5]]
    assert read_JL.tolist() == [[True, True, True], [False, True, True], [False, False, True]]
    assert SEQUENCES.length_J.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("index", "prompt_JP", "response_JT"),
    [([0], [[7]], [[21, 22, 1]]), ([2, 1], [[3, 4, 5], [8, 9, 0]], [[1, 0], [31, 1]])],
)
def test_rows_are_cut_to_the_columns_they_need(index, prompt_JP, response_JT):
    part = SEQUENCES.rows(torch.tensor(index))
    assert part.prefix_C.tolist() == [90, 91]
    assert part.prompt_JP.tolist() == prompt_JP
    assert part.response_JT.tolist() == response_JT
    assert part.prompt_mask_JP.tolist() == SEQUENCES.prompt_mask_JP[index, : len(prompt_JP[0])].tolist()
    assert part.mask_JT.tolist() == SEQUENCES.mask_JT[index, : len(response_JT[0])].tolist()
