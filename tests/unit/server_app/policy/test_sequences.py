"""Rows packed for one pass, by hand.

Axis letters: J rollouts, P prompt tokens, T response tokens, L tokens of a row in one pass.
"""

from itertools import pairwise

import pytest
import torch

from server_app.policy.sequences import MIN_TOKENS, Sequences, pad

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


LONG, LONGER, SHORT = [7] * (MIN_TOKENS + 1), [7] * (MIN_TOKENS + 2), [5] * MIN_TOKENS
ASKED = [LONG, LONGER, SHORT, LONG, LONGER, SHORT, LONG, [6] * 20]


def asked(prefix=(90, 91)):
    ids = pad(ASKED, device=torch.device("cpu"), left=True)  # LONG differs from LONGER by its mask alone
    mask_JT = torch.arange(5)[None] < torch.tensor([2, 5, 4, 3, 1, 1, 5, 2])[:, None]
    return Sequences(torch.tensor(prefix), *ids, torch.ones(mask_JT.shape, dtype=torch.long), mask_JT)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # a pass with 6, 4 and 3 would be 18 tokens for 13, with 6 and 2 12 for 8, with 22 and 12 44 for 34
        (10**6, [[6, 3], [0], [1], [4], [7], [2, 5]]),
        # rows of 6, 4, 3 and of 6, 2 tokens after their prompts; of 22, 12, 9 with them
        (12, [[6, 3], [0], [1], [4], [7], [2], [5]]),
        (9, [[6], [3, 0], [1], [4], [7], [2], [5]]),
    ],
)
def test_rows_of_one_prompt_stand_together(tokens, expected):
    chunks = asked().micro_batches(torch.arange(len(ASKED)), tokens=tokens, by_prompt=True)
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


def test_rows_follow_their_one_prompt_and_no_other():
    sequences = asked()
    same = sequences.rows(torch.tensor([0, 3]))
    assert same.num_shared_prompt_tokens == MIN_TOKENS
    after = same.after(same.num_shared_prompt_tokens)
    assert after.prompt_JP.tolist() == [[7], [7]]
    assert after.prompt_mask_JP.tolist() == [[True], [True]]
    assert after.length_J.tolist() == [3, 4]
    same.prompt_JP[1, 3] = 5
    assert same.num_shared_prompt_tokens == 0  # of the same length, and one token differs
    for others in ([0], [0, 1], [2, 5]):  # alone, of another length, too short to pay
        assert sequences.rows(torch.tensor(others)).num_shared_prompt_tokens == 0
    assert asked(prefix=()).rows(torch.tensor([0, 3])).num_shared_prompt_tokens == 0  # the model cannot share
