"""Rows packed for one pass, by hand.

Axis letters: J rollouts, P prompt tokens, T response tokens, L tokens of a row in one pass.
"""

from itertools import pairwise

import pytest
import torch

from server_app.policy.sequences import Sequences, pad

SEQUENCES = Sequences(
    torch.tensor([90, 91]),
    torch.tensor([[0, 0, 7], [0, 8, 9], [3, 4, 5]]),
    torch.tensor([[False, False, True], [False, True, True], [True, True, True]]),
    torch.tensor([[21, 22, 1], [1, 0, 0], [1, 0, 0]]),
    torch.tensor([[True, True, True], [True, False, False], [True, False, False]]),
)


def test_packed_rows_have_no_padding_within_and_read_where_a_response_token_is_predicted():
    ids_JL, predicts_JL = SEQUENCES.packed()
    # the last token of the longest row predicts nothing; shorter rows end in padding that nobody reads
    assert ids_JL.tolist() == [[7, 21, 22], [8, 9, 1], [3, 4, 5]]
    assert predicts_JL.tolist() == [[True, True, True], [False, True, False], [False, False, True]]
    assert SEQUENCES.length_J.tolist() == [4, 3, 4]


@pytest.mark.parametrize(
    ("index", "prompt_JP", "response_JT"),
    [([0], [[7]], [[21, 22, 1]]), ([2, 1], [[3, 4, 5], [0, 8, 9]], [[1], [1]])],
)
def test_rows_are_cut_to_the_columns_they_need(index, prompt_JP, response_JT):
    part = SEQUENCES.rows(torch.tensor(index))
    assert part.prefix_C.tolist() == [90, 91]
    assert part.prompt_JP.tolist() == prompt_JP
    assert part.response_JT.tolist() == response_JT
    assert part.prompt_mask_JP.tolist() == SEQUENCES.prompt_mask_JP[index, -len(prompt_JP[0]) :].tolist()
    assert part.mask_JT.tolist() == SEQUENCES.mask_JT[index, : len(response_JT[0])].tolist()


LONG, LONGER, SHORT = [7] * 9, [7] * 10, [5] * 4
ASKED = [LONG, LONGER, SHORT, LONG, LONGER, SHORT, LONG, [6] * 20]


def asked(prompts=ASKED):
    ids = pad(prompts, device=torch.device("cpu"), left=True)  # LONG differs from LONGER by its mask alone
    mask_JT = torch.arange(7)[None] < torch.tensor([2, 5, 4, 3, 2, 1, 7, 7])[:, None]
    return Sequences(torch.tensor([90, 91]), *ids, torch.ones(mask_JT.shape, dtype=torch.long), mask_JT)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # Prompts of 20, 9, 10 and 4 tokens with 6; 6, 2, 1; 4, 1; 3, 0 more. 20 + 6 for 26; with LONG 2 x 20 + 2 x 6
        # = 52 for 41. LONG: 9 + 3 x 6 = 27 for 18, with two rows 21 for 17. Its last row and LONGER's: 2 x 10 + 3 x 4
        # = 32 for 25, with one row 28 for 24. LONGER's last and SHORT's first: 20 + 6 for 18;
        # SHORT: 4 + 2 x 3 for 7.
        (10**6, [[7], [6, 3], [0, 1], [4], [2], [5]]),
        # LONG: 9 + 6 alone, as 9 + 2 x 6 is 21; 9 + 2 x 2 fits; LONGER 10 + 2 x 4 fits
        (20, [[7], [6], [3, 0], [1, 4], [2], [5]]),
    ],
)
def test_rows_of_one_prompt_stand_together_and_its_tokens_count_once(tokens, expected):
    chunks = asked().micro_batches(torch.arange(len(ASKED)), tokens=tokens)
    assert [chunk.tolist() for chunk in chunks] == expected


@pytest.mark.parametrize("budget", [1, 25, 40, 10**6])
def test_micro_batches_hold_each_row_once_and_keep_to_the_budget(budget):
    sequences, rows = asked(), torch.tensor([7, 2, 0, 5, 4])
    length_J = sequences.prompt_mask_JP.sum(1) + sequences.mask_JT.sum(1)
    chunks = sequences.micro_batches(rows, tokens=budget)
    assert sorted(torch.cat(chunks).tolist()) == sorted(rows.tolist())
    padded = [len(chunk) * int(length_J[chunk].max()) for chunk in chunks]
    assert all(tokens <= budget or len(chunk) == 1 for tokens, chunk in zip(padded, chunks, strict=True))
    real = [int(length_J[chunk].sum()) for chunk in chunks]
    assert all(tokens <= 1.25 * held for tokens, held in zip(padded, real, strict=True))
    for number, (chunk, following) in enumerate(pairwise(chunks)):  # and no chunk could have taken the next row too
        more = (len(chunk) + 1) * int(length_J[chunk].max())
        assert more > min(budget, 1.25 * (real[number] + int(length_J[following[0]])))
        assert length_J[chunk].min() >= length_J[following].max()


def test_different_prompts_are_padded_right_and_known_to_their_rows():
    ids_QP, real_QP, prompt_J = asked().prompts
    assert [ids[real].tolist() for ids, real in zip(ids_QP[prompt_J], real_QP[prompt_J], strict=True)] == ASKED
    assert ids_QP.shape == (4, 20)
    assert all(int(real.sum()) == int(real.nonzero().max()) + 1 for real in real_QP)
    for rows, repeated in (([7], False), ([0, 1, 3], False), ([0, 3], True), ([0, 1, 3, 4], True)):
        assert asked().rows(torch.tensor(rows)).repeated == repeated
