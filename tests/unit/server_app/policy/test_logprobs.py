"""Log-probabilities and values of response tokens: by hand, by block, and by a prefix that may change nothing.

Axis letters: C tokens that all prompts begin with, J rollouts, T response tokens, L tokens of a row in one pass.
"""

from functools import partial

import pytest
import torch
from fakes import (
    ARCHITECTURES,
    PREFIX,
    PROMPTS,
    VOCABULARY,
    answer_rows,
    disturb,
    joined,
    ppo_models,
    raising,
    scoring,
    tiny_causal_lm,
)

from server_app.policy import logprobs
from server_app.policy.limits import Budget
from server_app.policy.logprobs import computing_only, response_logprobs, response_values, shared_prefix
from server_app.policy.models import value_head
from server_app.policy.sequences import MIN_TOKENS, Sequences, common_length

NOTHING = torch.zeros(0, dtype=torch.long)
TEMPERATURE = 0.7
ALL = [[0, 1, 2, 3, 4]]
ONE, OTHER = [*range(20, 20 + MIN_TOKENS + 3)], [*range(30, 30 + MIN_TOKENS + 1)]
REPEATED = [ONE, OTHER, ONE, ONE, OTHER]
BATCHES = [
    (len(PREFIX), [*PROMPTS, [9]], [ALL, [[4], [2, 0], [1, 3]]]),  # the last row alone is a pass of one token
    # two prompts of other lengths in turn, one of them twice, beside rows that differ, and with one-token answers
    *(
        (
            shared,
            REPEATED,
            [ALL, [[0, 2, 3], [1, 4]], [[1, 4], [3, 0], [2]], [[0, 2], [1, 3], [4]], [[0, 3], [4, 1, 2]]],
        )
        for shared in (len(PREFIX), 0)
    ),
]
WINDOW = len(PREFIX) + len(ONE) + 6
"""The least sliding window for the longest row."""


def build(tuning, architecture):
    models = ppo_models(tuning, tiny_causal_lm(architecture, window=WINDOW).double())
    trained = models.policy_parameters + models.value_parameters
    for parameter in trained:
        parameter.data = parameter.double()  # heads and adapters would be float32 by themselves
    disturb(trained)
    return models


def passed(models, sequences, which, *, split):
    """Results (J, T) of one training pass and the gradients of a loss that weighs every token differently."""
    parameters = models.policy_parameters + models.value_parameters
    weight_JT = torch.randn(sequences.mask_JT.shape, generator=torch.Generator().manual_seed(4))
    result_JT = torch.zeros(weight_JT.shape, dtype=torch.float64)
    with scoring(models, which, sequences.prefix_C, temperature=TEMPERATURE) as score:
        for index in map(torch.tensor, split):
            part_JT = score(sequences.rows(index))
            width = part_JT.shape[1]
            (part_JT * weight_JT[index, :width]).sum().backward()
            result_JT[index, :width] = part_JT.detach().double()
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return result_JT, gradients


def assert_same(found, expected, *, atol):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=atol)
    for gradient, plain in zip(found[1], expected[1], strict=True):
        assert (gradient is None) == (plain is None)
        if gradient is not None:
            # norms round their gradients to float32 in whatever model
            torch.testing.assert_close(gradient, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shared", "prompts", "splits"), BATCHES, ids=["other prompts", "same prompts", "no prefix"])
@pytest.mark.parametrize(
    ("tuning", "architecture"), [("full", "qwen3"), ("lora", "llama"), ("full", "gemma2"), ("lora", "gemma2")]
)
def test_what_rows_share_changes_neither_scores_nor_gradients(tuning, architecture, shared, prompts, splits):
    models = build(tuning, architecture)
    sequences = answer_rows(prompts, shared=shared)
    atol = 1e-6 if architecture == "gemma2" else 1e-9  # its softmax is float32 in whatever model
    for which in ("policy", "value"):
        expected = passed(models, joined(sequences), which, split=[[row] for row in range(5)])
        assert max(float(g.abs().max()) for g in expected[1] if g is not None) > 0.1
        for split in splits:
            assert_same(passed(models, sequences, which, split=split), expected, atol=atol)


@pytest.mark.parametrize(
    ("prompts", "split", "expected"),
    [
        # no last response token: 7 + 6 - 1, 4 + 4 - 1 and 5 + 1 - 1 columns
        (PROMPTS, [[0], [1, 2], [3]], [(1, 12), (2, 7), (1, 5)]),
        # a prompt of many rows once; answers of 6 and of 2 tokens, the last of which is not run
        (REPEATED, [[0, 2, 3], [1, 4]], [(1, len(ONE)), (3, 5), (1, len(OTHER)), (2, 1)]),
        (REPEATED, [*ALL, [3, 4]], [(2, len(ONE)), (5, 5), (2, len(ONE))]),
    ],
)
def test_what_rows_share_is_run_once_and_alone(prompts, split, expected):
    models, widths = build("full", "qwen3"), []
    hook = models.policy.get_input_embeddings().register_forward_hook(lambda _, __, out: widths.append(out.shape[:2]))
    passed(models, answer_rows(prompts, shared=len(PREFIX)), "policy", split=split)
    hook.remove()
    assert widths == [(1, len(PREFIX)), *expected]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([[*range(9), 50], [*range(9), 51, 52]], 9),
        ([[*range(12)], [*range(12)]], 11),  # the last token is run for itself
        ([[*range(MIN_TOKENS - 1), 50], [*range(MIN_TOKENS - 1), 51]], 0),
        ([[*range(9), 50], [*range(9), 51], [1, *range(9)]], 0),  # in whatever order
    ],
)
def test_common_length_by_hand(prompts, expected):
    assert common_length(prompts) == common_length(prompts[::-1]) == expected


def test_memory_that_holds_no_pass_at_all_ends_the_run():
    budget = Budget("tokens", 1000)
    with pytest.raises(torch.OutOfMemoryError):
        budget.run(raising(torch.OutOfMemoryError("CUDA out of memory")))
    assert 64 <= budget.size < 128  # fewer were not tried


@pytest.mark.parametrize("length", [0, len(PREFIX) - 1])
def test_rows_are_never_scored_without_their_common_prefix(length):
    rows, model = answer_rows(shared=len(PREFIX)), tiny_causal_lm()
    head = value_head(32, torch.device("cpu"))
    with torch.no_grad(), shared_prefix(model.base_model, rows.prefix_C[:length]) as prefix:
        for score in (
            partial(response_logprobs, model, temperature=1.0),
            partial(response_values, model.base_model, head),
        ):
            with pytest.raises(ValueError, match=f"{len(PREFIX)} tokens, `prefix` has {length}"):
                score(rows, prefix=prefix)


@pytest.mark.parametrize("shared", [len(PREFIX), 0])
def test_keys_and_values_that_training_drops_are_an_error(shared):
    model, rows = tiny_causal_lm().train(), answer_rows(REPEATED, shared=shared)
    model.gradient_checkpointing_enable()
    with (
        pytest.raises(ValueError, match="gradient checkpointing"),
        shared_prefix(model.base_model, rows.prefix_C) as prefix,
    ):
        response_logprobs(model, rows, temperature=1.0, prefix=prefix)


@pytest.fixture(scope="module")
def sequences():
    return answer_rows()


def test_blocks_of_logits_change_nothing_but_their_size(sequences, monkeypatch):
    sizes, found = {}, {}
    for tokens in (100, 3, 1):
        model = tiny_causal_lm().double()
        monkeypatch.setitem(logprobs.LOGITS_AT_ONCE, "cpu", tokens * VOCABULARY)
        sizes[tokens] = made = []
        model.get_output_embeddings().register_forward_hook(lambda _, __, out, made=made: made.append(out.shape))
        logprob_JT = response_logprobs(model, sequences, temperature=0.7)
        logprob_JT.square().sum().backward()
        with torch.inference_mode():  # no block is computed twice
            once = len(made)
            response_logprobs(model, sequences, temperature=0.7)
        assert sum(shape[0] for shape in made[once:]) == 13
        del made[once:]
        found[tokens] = [logprob_JT.detach(), *(p.grad for p in model.parameters())]
    # 13 response tokens: logits of these alone, of a block at a time, and once more for the backward pass
    assert sizes[100] == [(13, VOCABULARY)]
    assert sorted(s[0] for s in sizes[3]) == sorted([3, 3, 3, 3, 1] * 2)
    assert {s[0] for s in sizes[1]} == {1}
    for tokens in (3, 1):
        for one, all_at_once in zip(found[tokens], found[100], strict=True):
            torch.testing.assert_close(one, all_at_once, rtol=0, atol=1e-12)


def test_values_stand_before_their_tokens(sequences):
    # V(s_t) may depend on the prompt and on tokens before t, so changing token t moves the values after it only
    trunk, head = tiny_causal_lm().base_model, value_head(32, torch.device("cpu"))
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(2))
    changed_JT = sequences.response_JT.clone()
    changed_JT[0, 3] = (changed_JT[0, 3] + 1) % VOCABULARY
    changed = Sequences(NOTHING, sequences.prompt_JP, sequences.prompt_mask_JP, changed_JT, sequences.mask_JT)
    with torch.no_grad():
        before_JT, after_JT = (response_values(trunk, head, rows) for rows in (sequences, changed))
    torch.testing.assert_close(before_JT[0, :4], after_JT[0, :4])
    assert (before_JT[0, 4:] - after_JT[0, 4:]).abs().min() > 1e-4
    assert not before_JT[~sequences.mask_JT].any()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_last_layer_computes_what_is_read_and_no_more(architecture):
    trunk, computed = tiny_causal_lm(architecture).double().base_model, []
    ids_JL = torch.randint(1, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(0))
    read_JL = torch.rand(ids_JL.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    assert 0 < read_JL.sum() < read_JL.numel()
    plain_JLH = trunk(input_ids=ids_JL).last_hidden_state
    attention, feed_forward = trunk.layers[-1].self_attn, trunk.layers[-1].mlp
    watched = (attention.q_proj, attention.o_proj, feed_forward.down_proj)
    hooks = [part.register_forward_hook(lambda _, __, out: computed.append(out.shape[:-1])) for part in watched]
    with computing_only(trunk, read_JL):
        thin_JLH = trunk(input_ids=ids_JL).last_hidden_state
    for hook in hooks:
        hook.remove()
    assert computed == [(int(read_JL.sum()),)] * len(watched)
    torch.testing.assert_close(thin_JLH[read_JL], plain_JLH[read_JL], rtol=0, atol=1e-12)
    torch.testing.assert_close(trunk(input_ids=ids_JL).last_hidden_state, plain_JLH, rtol=0, atol=0)
