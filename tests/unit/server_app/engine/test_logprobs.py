"""Log-probabilities and values of response tokens: by hand, by block, and what they may depend on.

Axis letters: J rollouts, T response tokens, S scored tokens, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from fakes import VOCABULARY, answer_rows, tiny_causal_lm
from transformers import GraniteConfig, GraniteForCausalLM

from appa_flwr.core.errors import UserError
from server_app.engine import logprobs
from server_app.engine.prefix import Prefix
from server_app.engine.sequences import Sequences
from server_app.models.policy import value_head
from server_app.ppo.rollouts import Decoding

NOTHING = torch.zeros(0, dtype=torch.long)


@pytest.fixture(scope="module")
def sequences():
    return answer_rows()


def test_token_logprobs_by_hand():
    # weights 1, 3 and 4 of logits ln 1, ln 3, ln 4 at temperature 1; squared at temperature .5: 1, 9, 16
    logits_JTV = torch.tensor([[[1.0, 3.0, 4.0]]]).log()
    token_JT = torch.tensor([[1]])
    assert logprobs.token_logprobs(logits_JTV, token_JT, temperature=1.0).exp().item() == pytest.approx(3 / 8)
    assert logprobs.token_logprobs(logits_JTV, token_JT, temperature=0.5).exp().item() == pytest.approx(9 / 26)


@pytest.mark.parametrize(
    ("gib", "numbers"),
    # at 24 bytes a number, 2^26 fill 1.5 GiB, a sixteenth of 24
    [(16, 2**26), (24, 2**26), (47, 2**26), (48, 2**27), (80, 2**27), (140, 2**28)],
)
def test_a_block_of_logits_grows_with_the_card(gib, numbers):
    assert logprobs.logits_at_once("cuda", memory=gib * 2**30) == numbers
    assert logprobs.logits_at_once("cpu", memory=gib * 2**30) == logprobs.logits_at_once("cpu")


def test_blocks_of_logits_change_nothing_but_their_size(sequences, monkeypatch):
    sizes, found = {}, {}
    for tokens in (100, 3, 1):
        model = tiny_causal_lm().double()
        monkeypatch.setitem(logprobs.LOGITS_AT_ONCE, "cpu", tokens * VOCABULARY)
        sizes[tokens] = made = []
        model.get_output_embeddings().register_forward_hook(lambda _, __, out, made=made: made.append(out.shape))
        prefix = Prefix(model.base_model, NOTHING)
        logprob_JT = logprobs.response_logprobs(model, sequences, temperature=0.7, prefix=prefix)
        logprob_JT.square().sum().backward()
        with torch.inference_mode():  # no block is computed twice
            once = len(made)
            logprobs.response_logprobs(model, sequences, temperature=0.7, prefix=prefix)
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
        before_JT, after_JT = (
            logprobs.response_values(trunk, head, rows, prefix=Prefix(trunk, NOTHING)) for rows in (sequences, changed)
        )
    torch.testing.assert_close(before_JT[0, :4], after_JT[0, :4])
    assert (before_JT[0, 4:] - after_JT[0, 4:]).abs().min() > 1e-4
    assert not before_JT[~sequences.mask_JT].any()


def test_a_model_that_scales_its_logits_is_refused():
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    given = {"max_new_tokens": 2, "temperature": 1.0, "stop_ids": (1,), "pad_id": 0}
    torch.manual_seed(0)
    known, scaled = (
        GraniteForCausalLM(GraniteConfig(logits_scaling=scale, **sizes, **heads)).eval() for scale in (1.0, 8.0)
    )
    Decoding.fitting(known, **given)
    with pytest.raises(UserError, match="GraniteForCausalLM"):
        Decoding.fitting(scaled, **given)
