"""Policy, reference and value share weights, but neither gradients nor each other's changes.

Axis letters: J rollouts, T response tokens, V vocabulary.
"""

from __future__ import annotations

import copy

import pytest
import torch
from fakes import ARCHITECTURES, PAD_ID, PROMPTS, VOCABULARY, tiny_causal_lm
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from server_app import policy as policies
from server_app.policy import FullModels, LoraModels, response_logprobs
from server_app.rollouts import Sequences, pad_prompts

TUNINGS = ("full", "lora")
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def sequences():
    prompt_JP, prompt_mask_JP = pad_prompts(PROMPTS, pad_id=PAD_ID, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    response_JT = torch.randint(1, VOCABULARY, (4, 6), generator=generator)
    mask_JT = torch.arange(6)[None] < torch.tensor([6, 2, 4, 1])[:, None]
    return Sequences(prompt_JP, prompt_mask_JP, response_JT * mask_JT, mask_JT)


def build(tuning, model):
    if tuning == "full":
        return FullModels(model)
    torch.manual_seed(1)
    return LoraModels(
        model, rank=3, alpha=6, policy_targets=["q_proj", "v_proj", "down_proj"], value_targets=["k_proj", "o_proj"]
    )


@pytest.fixture(params=[(t, a) for t in TUNINGS for a in ARCHITECTURES], ids="-".join)
def case(request):
    """The models, and an untouched copy of what they were built on."""
    tuning, architecture = request.param
    model = tiny_causal_lm(architecture)
    untouched = copy.deepcopy(model)
    return build(tuning, model), untouched


def disturb(parameters, seed=2):
    """Move every weight: LoRA's B and the value head begin at zero, and a zero passes no gradient on."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def base_logprobs(untouched, sequences):
    with torch.no_grad():
        return response_logprobs(untouched, sequences, temperature=TEMPERATURE)


def test_before_any_step_all_three_are_the_untouched_base(case, sequences):
    models, untouched = case
    expected_JT = base_logprobs(untouched, sequences)
    for _ in range(2):
        policy_JT = models.policy_logprobs(sequences, temperature=TEMPERATURE).detach()
        assert torch.equal(policy_JT, expected_JT)
        assert torch.equal(models.reference_logprobs(sequences, temperature=TEMPERATURE), expected_JT)
        assert not models.values(sequences).any()  # the value head begins at zero
    assert (expected_JT[sequences.mask_JT] < 0).all()
    assert not expected_JT[~sequences.mask_JT].any()


def test_after_a_step_the_reference_is_still_the_untouched_base(case, sequences):
    models, untouched = case
    optimizer = torch.optim.AdamW(models.policy_parameters() + models.value_parameters(), lr=0.05)
    for _ in range(2):
        loss = models.policy_logprobs(sequences, temperature=TEMPERATURE).sum() + models.values(sequences).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected_JT = base_logprobs(untouched, sequences)
    reference_JT = models.reference_logprobs(sequences, temperature=TEMPERATURE)
    assert torch.equal(reference_JT, expected_JT)
    assert not reference_JT.requires_grad
    policy_JT = models.policy_logprobs(sequences, temperature=TEMPERATURE).detach()
    assert ((policy_JT - expected_JT).abs()[sequences.mask_JT] > 1e-3).all()
    # what samples is the policy, not the reference
    assert torch.equal(base_logprobs(models.policy(), sequences), policy_JT)


def gradients(parameters):
    found = [None if p.grad is None else p.grad.clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


@pytest.mark.parametrize("value_first", [False, True])
def test_each_loss_reaches_all_of_its_own_parameters_and_none_of_the_other(case, sequences, value_first):
    models, _ = case
    own, other = models.policy_parameters(), models.value_parameters()
    disturb(own + other)

    def run(which):
        if which == "policy":
            return models.policy_logprobs(sequences, temperature=TEMPERATURE)
        return models.values(sequences)

    alone = {}
    for which in ("value", "policy") if value_first else ("policy", "value"):
        run(which).square().sum().backward()
        trained, spared = (own, other) if which == "policy" else (other, own)
        alone[which] = gradients(trained)
        assert all(g is not None and g.abs().sum() > 0 for g in alone[which]), which
        assert all(g is None for g in gradients(spared)), which
    # both passes, and one of the reference, before the first backward: as an update does it
    passes = [run(which) for which in (("value", "policy") if value_first else ("policy", "value"))]
    models.reference_logprobs(sequences, temperature=TEMPERATURE)
    (passes[0].square().sum() + passes[1].square().sum()).backward()
    for expected, found in zip(alone["policy"] + alone["value"], gradients(own) + gradients(other), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_the_two_families_share_no_parameter_and_no_effect(case, sequences):
    models, _ = case
    own, other = models.policy_parameters(), models.value_parameters()
    assert not {id(p) for p in own} & {id(p) for p in other}
    disturb(own + other)
    with torch.no_grad():
        policy_JT = models.policy_logprobs(sequences, temperature=TEMPERATURE)
        value_JT = models.values(sequences)
        disturb(own, seed=3)
        assert torch.equal(models.values(sequences), value_JT)
        changed_JT = models.policy_logprobs(sequences, temperature=TEMPERATURE)
        assert not torch.equal(changed_JT, policy_JT)
        disturb(other, seed=4)
        assert torch.equal(models.policy_logprobs(sequences, temperature=TEMPERATURE), changed_JT)
        assert not torch.equal(models.values(sequences), value_JT)


def test_requires_grad_survives_every_switch(case, sequences):
    models, _ = case
    trained = models.policy_parameters() + models.value_parameters()
    calls = (
        lambda: models.values(sequences),
        lambda: models.reference_logprobs(sequences, temperature=TEMPERATURE),
        lambda: models.policy_logprobs(sequences, temperature=TEMPERATURE),
        models.policy,
    )
    for first in calls:
        for second in calls:
            first()
            second()
            assert all(p.requires_grad for p in trained)
    with pytest.raises(AttributeError):
        models.values(None)
    assert all(p.requires_grad for p in trained)
    if isinstance(models, LoraModels):
        mine = {id(p) for p in trained}
        frozen = [p for p in models.policy().parameters() if id(p) not in mine]
        assert frozen
        assert not any(p.requires_grad for p in frozen)


def test_a_failed_value_pass_leaves_the_policy_in_force(case, sequences):
    models, _ = case
    disturb(models.policy_parameters() + models.value_parameters())
    with torch.no_grad():
        before_JT = models.policy_logprobs(sequences, temperature=TEMPERATURE)
        with pytest.raises(AttributeError):
            models.values(None)
        assert torch.equal(models.policy_logprobs(sequences, temperature=TEMPERATURE), before_JT)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_full_policy_loads_with_transformers(architecture, sequences, tmp_path):
    models = FullModels(tiny_causal_lm(architecture))
    disturb(models.policy_parameters())
    models.save_policy(tmp_path / "policy")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", attn_implementation="eager").eval()
    found_JT = base_logprobs(loaded, sequences)
    expected_JT = models.policy_logprobs(sequences, temperature=TEMPERATURE).detach()
    torch.testing.assert_close(found_JT, expected_JT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_lora_policy_loads_with_peft(architecture, sequences, tmp_path):
    tiny_causal_lm(architecture).save_pretrained(tmp_path / "base")
    attention = "eager" if architecture == "gemma2" else "sdpa"
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation=attention)
    models = build("lora", base)
    disturb(models.policy_parameters() + models.value_parameters())
    models.values(sequences)  # the value's adapter was the last one in use
    models.save_policy(tmp_path / "policy")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "policy", attn_implementation=attention).eval()
    expected_JT = models.policy_logprobs(sequences, temperature=TEMPERATURE).detach()
    torch.testing.assert_close(base_logprobs(loaded, sequences), expected_JT, rtol=0, atol=1e-5)
    # the value model stays at home
    assert list((tmp_path / "policy").rglob("adapter_model.safetensors")) == [
        tmp_path / "policy" / "adapter_model.safetensors"
    ]


def test_token_logprobs_by_hand():
    # weights 1, 3 and 4 of logits ln 1, ln 3, ln 4 at temperature 1; squared at temperature .5: 1, 9, 16
    logits_JTV = torch.tensor([[[1.0, 3.0, 4.0]]]).log()
    token_JT = torch.tensor([[1]])
    assert policies.token_logprobs(logits_JTV, token_JT, temperature=1.0).exp().item() == pytest.approx(3 / 8)
    assert policies.token_logprobs(logits_JTV, token_JT, temperature=0.5).exp().item() == pytest.approx(9 / 26)


def test_values_stand_before_their_tokens(sequences):
    # V(s_t) may depend on the prompt and on tokens before t, so changing token t moves the values after it only
    models = FullModels(tiny_causal_lm())
    disturb(models.value_parameters())
    changed_JT = sequences.response_JT.clone()
    changed_JT[0, 3] = (changed_JT[0, 3] + 1) % VOCABULARY
    changed = Sequences(sequences.prompt_JP, sequences.prompt_mask_JP, changed_JT, sequences.mask_JT)
    with torch.no_grad():
        before_JT, after_JT = models.values(sequences), models.values(changed)
    torch.testing.assert_close(before_JT[0, :4], after_JT[0, :4])
    assert (before_JT[0, 4:] - after_JT[0, 4:]).abs().min() > 1e-4
    assert not before_JT[~sequences.mask_JT].any()


def test_lora_weights_are_float32_on_a_bfloat16_base(sequences):
    models = build("lora", tiny_causal_lm().to(torch.bfloat16))
    assert {p.dtype for p in models.policy_parameters() + models.value_parameters()} == {torch.float32}
    assert torch.isfinite(models.policy_logprobs(sequences, temperature=TEMPERATURE)).all()
    assert torch.isfinite(models.values(sequences)).all()
