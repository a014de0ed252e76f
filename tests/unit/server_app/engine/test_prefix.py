"""The shared prefix and the thinner last layer are shortcuts: nothing they give may differ from the plain way.

Axis letters: C tokens that all prompts begin with, J rollouts, P prompt tokens, T response tokens, L tokens of a row in
one pass, H hidden size.
"""

from __future__ import annotations

import logging

import pytest
import torch
from fakes import (
    ARCHITECTURES,
    PAD_ID,
    PREFIX,
    PROMPTS,
    SHORT_WINDOW,
    VOCABULARY,
    WIDE_WINDOW,
    answer_rows,
    joined,
    ppo_models,
    tiny_causal_lm,
)
from torch import nn

from server_app.engine import last_layer
from server_app.engine.last_layer import computing_only
from server_app.engine.prefix import MIN_TOKENS, Prefix, common_length, why_not
from server_app.engine.prefix_attention import ATTENTION
from server_app.ppo.rollouts import Decoding, sample

TEMPERATURE = 0.7
PATHS = [
    ("full", "qwen3", "apart"),
    ("lora", "qwen3", "copied"),
    ("lora", "llama", "apart"),
    ("full", "gemma2", "copied"),
    ("lora", "gemma2", "copied"),
]
ALL = [[0, 1, 2, 3, 4]]
ONE, OTHER = [*range(20, 20 + MIN_TOKENS + 3)], [*range(30, 30 + MIN_TOKENS + 1)]
REPEATED = [ONE, OTHER, ONE, ONE, OTHER]
BATCHES = [
    ([*PROMPTS, [9]], [ALL, [[4], [2, 0], [1, 3]]]),  # the last row alone is a pass of one token
    # two prompts in turn, one of them twice, and beside rows that differ
    (REPEATED, [[[0, 2, 3], [1, 4]], [[1, 4], [3, 0], [2]], [[0, 2], [1, 3], [4]]]),
]


def build(tuning, architecture, path="apart"):
    model = tiny_causal_lm(architecture, window=WIDE_WINDOW).double()
    if path == "apart":
        assert why_not(model) is None
        assert model.config._attn_implementation == ATTENTION
    models = ppo_models(tuning, model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in models.policy_parameters() + models.value_parameters():
            # double throughout: heads and adapters would be float32 by themselves
            parameter.data = parameter.double() + 0.1 * torch.randn(parameter.shape, generator=generator)
    return models


def score(models, sequences, which, *, split):
    """Results (J, T) of one training pass and the gradients of a loss that weighs every token differently."""
    parameters = models.policy_parameters() + models.value_parameters()
    weight_JT = torch.randn(sequences.mask_JT.shape, generator=torch.Generator().manual_seed(4))
    result_JT = torch.zeros(weight_JT.shape, dtype=torch.float64)
    temperature = {"temperature": TEMPERATURE} if which == "policy" else {}
    with getattr(models, f"{which}_pass")(sequences.prefix_C, train=True, **temperature) as scorer:
        for index in map(torch.tensor, split):
            part_JT = scorer(sequences.rows(index))
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


@pytest.mark.parametrize(("prompts", "splits"), BATCHES, ids=["other prompts", "same prompts"])
@pytest.mark.parametrize(("tuning", "architecture", "path"), PATHS)
def test_scores_and_gradients_are_those_of_the_plain_path(tuning, architecture, path, prompts, splits):
    models = build(tuning, architecture, path)
    sequences = answer_rows(prompts, shared=len(PREFIX))
    atol = 1e-6 if architecture == "gemma2" else 1e-9  # its softmax is float32 in whatever model
    for which in ("policy", "value"):
        expected = score(models, joined(sequences), which, split=ALL)
        assert max(float(g.abs().max()) for g in expected[1] if g is not None) > 0.1
        for split in splits:
            assert_same(score(models, sequences, which, split=split), expected, atol=atol)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_plain_path_is_the_models_own_forward_row_by_row(architecture):
    models = build("full", architecture, "copied")
    sequences = joined(answer_rows(shared=len(PREFIX)))
    found_JT, gradients = score(models, sequences, "policy", split=[[0, 1, 2, 3]])
    weight_JT = torch.randn(sequences.mask_JT.shape, generator=torch.Generator().manual_seed(4))
    for j, prompt in enumerate(PROMPTS):
        answer = sequences.response_JT[j][sequences.mask_JT[j]].tolist()
        logits_LV = models.policy()(torch.tensor([PREFIX + prompt + answer])).logits[0] / TEMPERATURE
        before = len(PREFIX + prompt) - 1
        own_T = torch.stack([logits_LV[before + t].log_softmax(-1)[token] for t, token in enumerate(answer)])
        (own_T * weight_JT[j, : len(answer)]).sum().backward()
        torch.testing.assert_close(found_JT[j, : len(answer)], own_T.detach(), rtol=0, atol=1e-6)
    for parameter, gradient in zip(models.policy_parameters(), gradients, strict=False):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("prompts", "split", "expected"),
    [
        # no last response token: 7 + 6 - 1, 4 + 4 - 1 and 5 + 1 - 1 columns
        (PROMPTS, [[0], [1, 2], [3]], [(1, 12), (2, 7), (1, 5)]),
        # a prompt of many rows once, but for its last token; answers of 6 and of 2 tokens, the last of which is not run
        (REPEATED, [[0, 2, 3], [1, 4]], [(1, len(ONE) - 1), (3, 6), (1, len(OTHER) - 1), (2, 2)]),
    ],
)
def test_what_rows_share_is_run_once_and_alone(prompts, split, expected):
    models, widths = build("full", "qwen3"), []
    hook = models.policy().get_input_embeddings().register_forward_hook(lambda _, __, out: widths.append(out.shape[:2]))
    score(models, answer_rows(prompts, shared=len(PREFIX)), "policy", split=split)
    hook.remove()
    assert widths == [(1, len(PREFIX)), *expected]


@pytest.mark.parametrize(
    ("prompts", "window", "longest", "expected"),
    [
        ([[*range(9), 50], [*range(9), 51, 52]], 20, 20, 9),
        ([[*range(9), 50], [*range(9), 51, 52]], 20, 21, 0),  # the answer would leave the window
        ([[*range(12)], [*range(12)]], None, 99, 11),  # the last token is run for itself
        ([[*range(9)], [*range(12)]], None, 99, 8),
        ([[*range(MIN_TOKENS - 1), 50], [*range(MIN_TOKENS - 1), 51]], None, 99, 0),
        ([[50, *range(9)], [51, *range(9)]], None, 99, 0),
        ([[*range(9), 50], [*range(9), 51], [1, *range(9)]], None, 99, 0),  # in whatever order
    ],
)
def test_common_length_by_hand(prompts, window, longest, expected):
    assert common_length(prompts, window=window, longest=longest) == expected
    assert common_length(prompts[::-1], window=window, longest=longest) == expected


def fitting(model, **keys):
    return Decoding.fitting(model, max_new_tokens=6, temperature=1.0, stop_ids=(1,), pad_id=PAD_ID, **keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_shares_and_keeps_its_attention_where_no_other_fits(architecture, dtype, caplog):
    model = tiny_causal_lm(architecture, window=WIDE_WINDOW).to(dtype)
    decoding = fitting(model)
    assert (decoding.share_prefix, decoding.method) == (True, "own")
    eager = architecture == "gemma2" or dtype == torch.bfloat16
    assert model.config._attn_implementation == ("eager" if eager else ATTENTION)
    assert not caplog.records


def test_a_window_shorter_than_two_probes_shares_nothing():
    decoding = fitting(tiny_causal_lm("gemma2", window=SHORT_WINDOW))
    assert (decoding.share_prefix, decoding.method) == (False, "generate")


def refusing(forward):
    """A trunk that knows no keys and values but those it makes itself."""

    def strict(*, past_key_values=None, **inputs):
        if "shared_layers" in inputs or type(getattr(past_key_values, "layers", [None])[0]).__name__.startswith("_"):
            raise TypeError("no such argument")
        return forward(past_key_values=past_key_values, **inputs)

    return strict


def ignoring(forward):
    """A trunk that takes shared keys and values, and does not look at them."""

    def deaf(*, past_key_values=None, shared_layers=None, **inputs):
        own = type(getattr(past_key_values, "layers", [None])[0]).__name__ == "_SharedLayer"
        return forward(past_key_values=None if own else past_key_values, **inputs)

    return deaf


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(refusing, "does not take shared keys and values (TypeError)"), (ignoring, "computes something else")],
)
def test_a_model_that_cannot_share_takes_the_plain_path_and_says_so(fault, reason, monkeypatch, caplog):
    model = tiny_causal_lm()
    monkeypatch.setattr(model.base_model, "forward", fault(model.base_model.forward))
    decoding = fitting(model)
    assert (decoding.share_prefix, decoding.method) == (False, "generate")
    assert model.config._attn_implementation == "sdpa"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"common beginning anew: {type(model).__name__} {reason}" in record.getMessage()
    prompts = [PREFIX + p for p in PROMPTS]
    sampled = sample(model, prompts, decoding, generator=torch.Generator().manual_seed(0))
    assert not len(sampled.sequences.prefix_C)
    expected = sample(tiny_causal_lm(), prompts, decoding, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sampled.sequences.response_JT, expected.sequences.response_JT)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_last_layer_computes_what_is_read_and_no_more(architecture):
    trunk, computed = tiny_causal_lm(architecture).double().base_model, []
    ids_JL = torch.randint(1, VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(0))
    read_JL = torch.rand(ids_JL.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    assert 0 < read_JL.sum() < read_JL.numel()
    plain_JLH = trunk(input_ids=ids_JL).last_hidden_state
    hook = trunk.layers[-1].mlp.down_proj.register_forward_hook(lambda _, __, out: computed.append(out.shape[:-1]))
    with computing_only(trunk, read_JL):
        thin_JLH = trunk(input_ids=ids_JL).last_hidden_state
    hook.remove()
    assert computed == [(int(read_JL.sum()),)]
    torch.testing.assert_close(thin_JLH[read_JL], plain_JLH[read_JL], rtol=0, atol=1e-12)
    torch.testing.assert_close(trunk(input_ids=ids_JL).last_hidden_state, plain_JLH, rtol=0, atol=0)


def hooks_of(trunk):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in trunk.modules())


def test_no_hook_outlives_its_block():
    trunk = tiny_causal_lm().base_model
    before, read_JL = hooks_of(trunk), torch.ones(1, 4, dtype=torch.bool)
    with computing_only(trunk, read_JL):
        assert hooks_of(trunk) > before
    assert hooks_of(trunk) == before
    with pytest.raises(RuntimeError, match="in the pass"), computing_only(trunk, read_JL):
        raise RuntimeError("in the pass")
    assert hooks_of(trunk) == before


class Experts(nn.Module):
    """A feed-forward that is not the plain one: it looks at the shape of what it is given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_JLH):
        rows, length, size = hidden_JLH.shape
        return self.inner(hidden_JLH.reshape(-1, size)).reshape(rows, length, size)


def test_a_layer_built_otherwise_is_left_alone():
    trunk, ids_JL = tiny_causal_lm().base_model, torch.tensor([[5, 6, 7]])
    expected_JLH = trunk(input_ids=ids_JL).last_hidden_state
    trunk.layers[-1].mlp = Experts(trunk.layers[-1].mlp)
    before = hooks_of(trunk)
    with computing_only(trunk, torch.tensor([[False, True, False]])):
        assert hooks_of(trunk) == before
        found_JLH = trunk(input_ids=ids_JL).last_hidden_state
    torch.testing.assert_close(found_JLH, expected_JLH)
    assert last_layer._position_wise(nn.Linear(2, 2)) == []
    # and such a model's prefix is right all the same
    prefix = Prefix(trunk, ids_JL[0, :2])
    rest_JLH = prefix.hidden_states(trunk, ids_JL[:, 2:], read_JL=torch.tensor([[True]]))
    torch.testing.assert_close(rest_JLH[0, 0], expected_JLH[0, 2], rtol=0, atol=1e-5)
