"""Policy, reference and value share weights, but neither gradients nor each other's changes.

Axis letters: J rollouts, T response tokens, V vocabulary.
"""

from __future__ import annotations

import copy

import pytest
import torch
from fakes import ARCHITECTURES, PAD_ID, PREFIX, PROMPTS, VOCABULARY, WIDE_WINDOW, tiny_causal_lm
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from server_app.engine.logprobs import response_logprobs
from server_app.engine.prefix import Prefix, why_not
from server_app.engine.sequences import Sequences, pad_prompts
from server_app.models.policy import FullModels, LoraModels

TUNINGS = ("full", "lora")
TEMPERATURE = 0.7


def batch(shared):
    prompts = pad_prompts(PROMPTS, pad_id=PAD_ID, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    response_JT = torch.randint(1, VOCABULARY, (4, 6), generator=generator)
    mask_JT = torch.arange(6)[None] < torch.tensor([6, 2, 4, 1])[:, None]
    prefix_C = torch.tensor(PREFIX[:shared], dtype=torch.long)
    return Sequences(prefix_C, *prompts, response_JT * mask_JT, mask_JT)


@pytest.fixture(scope="module", params=[0, len(PREFIX)], ids=["plain", "shared"])
def sequences(request):
    return batch(request.param)


def build(tuning, model):
    if tuning == "full":
        return FullModels(model)
    torch.manual_seed(1)
    return LoraModels(
        model, rank=3, alpha=6, policy_targets=["q_proj", "v_proj", "down_proj"], value_targets=["k_proj", "o_proj"]
    )


def policy_pass(models, sequences, *, train=False):
    return models.policy_pass(sequences.prefix_C, temperature=TEMPERATURE, train=train)


def value_pass(models, sequences, *, train=False):
    return models.value_pass(sequences.prefix_C, train=train)


def reference_pass(models, sequences):
    return models.reference_pass(sequences.prefix_C, temperature=TEMPERATURE)


def found(one_pass, models, sequences):
    """What a pass without gradient gives: (J, T)."""
    with one_pass(models, sequences) as scorer:
        result_JT = scorer(sequences)
    assert not result_JT.requires_grad
    return result_JT


def learn(one_pass, models, sequences):
    """One pass of its own that goes backward from the squares of what it gives."""
    with one_pass(models, sequences, train=True) as scorer:
        scorer(sequences).square().sum().backward()


@pytest.fixture(params=[(t, a) for t in TUNINGS for a in ARCHITECTURES], ids="-".join)
def case(request):
    """The models, and an untouched copy of what they were built on."""
    tuning, architecture = request.param
    model = tiny_causal_lm(architecture, window=WIDE_WINDOW)
    assert why_not(model) is None
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
        prefix = Prefix(untouched.base_model, sequences.prefix_C)
        return response_logprobs(untouched, sequences, temperature=TEMPERATURE, prefix=prefix)


def test_before_any_step_all_three_are_the_untouched_base(case, sequences):
    models, untouched = case
    expected_JT = base_logprobs(untouched, sequences)
    for _ in range(2):
        assert torch.equal(found(policy_pass, models, sequences), expected_JT)
        assert torch.equal(found(reference_pass, models, sequences), expected_JT)
        assert not found(value_pass, models, sequences).any()  # the value head begins at zero
    assert (expected_JT[sequences.mask_JT] < 0).all()
    assert not expected_JT[~sequences.mask_JT].any()


def test_after_a_step_the_reference_is_still_the_untouched_base(case, sequences):
    models, untouched = case
    optimizer = torch.optim.AdamW(models.policy_parameters() + models.value_parameters(), lr=0.05)
    for _ in range(2):
        learn(policy_pass, models, sequences)
        with value_pass(models, sequences, train=True) as values:
            values(sequences).sum().backward()  # a square's gradient would be zero at value zero
        optimizer.step()
        optimizer.zero_grad()
    expected_JT = base_logprobs(untouched, sequences)
    assert torch.equal(found(reference_pass, models, sequences), expected_JT)
    policy_JT = found(policy_pass, models, sequences)
    assert ((policy_JT - expected_JT).abs()[sequences.mask_JT] > 1e-3).all()
    # what samples is the policy, not the reference; merged weights round otherwise
    assert torch.equal(base_logprobs(models.policy(), sequences), policy_JT)
    with models.sampling() as model:
        torch.testing.assert_close(base_logprobs(model, sequences), policy_JT, rtol=0, atol=1e-4)
    assert torch.equal(found(reference_pass, models, sequences), expected_JT)
    assert torch.equal(found(policy_pass, models, sequences), policy_JT)


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
    passes = [(policy_pass, own, other), (value_pass, other, own)]
    passes = passes[::-1] if value_first else passes
    alone = []
    for one_pass, trained, spared in passes:
        learn(one_pass, models, sequences)
        alone += gradients(trained)
        assert all(g is not None and g.abs().sum() > 0 for g in alone)
        assert all(g is None for g in gradients(spared))
    # one after the other without clearing, and the reference between them: as an update does it
    learn(passes[0][0], models, sequences)
    found(reference_pass, models, sequences)
    learn(passes[1][0], models, sequences)
    together = gradients(passes[0][1]) + gradients(passes[1][1])
    for expected, gradient in zip(alone, together, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tuning", TUNINGS)
def test_checkpointed_layers_recompute_themselves_under_the_pass_they_belong_to(tuning, architecture):
    sequences = batch(0)  # there is no shared prefix with gradient checkpointing
    found_gradients, calls = {}, {}
    for checkpointed in (False, True):
        model = tiny_causal_lm(architecture)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        models = build(tuning, model)
        disturb(models.policy_parameters() + models.value_parameters())
        calls[checkpointed] = made = []
        layer = models.policy().base_model.layers[0]
        layer.input_layernorm.register_forward_pre_hook(lambda *_, made=made: made.append(1))
        learn(policy_pass, models, sequences)
        found(value_pass, models, sequences)  # another adapter in between
        learn(value_pass, models, sequences)
        found_gradients[checkpointed] = gradients(models.policy_parameters()) + gradients(models.value_parameters())
        assert all(g is not None and g.abs().sum() > 0 for g in found_gradients[checkpointed])
        recomputing = [m for m in models.policy().modules() if isinstance(m, GradientCheckpointingLayer)]
        assert not any(m.training for m in recomputing)
    extra = 2 if tuning == "lora" else 1  # with full tuning the value's pass runs in another trunk
    assert len(calls[True]) == len(calls[False]) + extra
    for gradient, plain in zip(found_gradients[True], found_gradients[False], strict=True):
        torch.testing.assert_close(gradient, plain, rtol=1e-5, atol=1e-5)


def test_the_two_families_share_no_parameter_and_no_effect(case, sequences):
    models, _ = case
    own, other = models.policy_parameters(), models.value_parameters()
    assert not {id(p) for p in own} & {id(p) for p in other}
    disturb(own + other)
    policy_JT = found(policy_pass, models, sequences)
    value_JT = found(value_pass, models, sequences)
    disturb(own, seed=3)
    assert torch.equal(found(value_pass, models, sequences), value_JT)
    changed_JT = found(policy_pass, models, sequences)
    assert not torch.equal(changed_JT, policy_JT)
    disturb(other, seed=4)
    assert torch.equal(found(policy_pass, models, sequences), changed_JT)
    assert not torch.equal(found(value_pass, models, sequences), value_JT)


def test_requires_grad_survives_every_switch(case, sequences):
    models, _ = case
    trained = models.policy_parameters() + models.value_parameters()

    def sampling():
        with models.sampling():
            pass

    calls = (
        lambda: found(value_pass, models, sequences),
        lambda: found(reference_pass, models, sequences),
        lambda: found(policy_pass, models, sequences),
        sampling,
        models.policy,
    )
    for first in calls:
        for second in calls:
            first()
            second()
            assert all(p.requires_grad for p in trained)
    with pytest.raises(AttributeError), value_pass(models, sequences) as values:
        values(None)
    assert all(p.requires_grad for p in trained)
    if isinstance(models, LoraModels):
        mine = {id(p) for p in trained}
        frozen = [p for p in models.policy().parameters() if id(p) not in mine]
        assert frozen
        assert not any(p.requires_grad for p in frozen)


@pytest.mark.parametrize("one_pass", [value_pass, reference_pass])
def test_a_failed_pass_leaves_the_policy_in_force(case, sequences, one_pass):
    models, _ = case
    disturb(models.policy_parameters() + models.value_parameters())
    before_JT = found(policy_pass, models, sequences)
    with pytest.raises(AttributeError), one_pass(models, sequences) as scorer:
        scorer(None)
    assert torch.equal(found(policy_pass, models, sequences), before_JT)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_full_policy_loads_with_transformers(architecture, sequences, tmp_path):
    models = FullModels(tiny_causal_lm(architecture, window=WIDE_WINDOW))
    disturb(models.policy_parameters())
    models.save_policy(tmp_path / "policy")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", attn_implementation="eager").eval()
    expected_JT = found(policy_pass, models, sequences)
    torch.testing.assert_close(base_logprobs(loaded, sequences), expected_JT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_lora_policy_loads_with_peft(architecture, sequences, tmp_path):
    tiny_causal_lm(architecture, window=WIDE_WINDOW).save_pretrained(tmp_path / "base")
    attention = "eager" if architecture == "gemma2" else "sdpa"
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation=attention)
    models = build("lora", base)
    disturb(models.policy_parameters() + models.value_parameters())
    found(value_pass, models, sequences)  # the value's adapter was the last one in use
    models.save_policy(tmp_path / "policy")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "policy", attn_implementation=attention).eval()
    expected_JT = found(policy_pass, models, sequences)
    torch.testing.assert_close(base_logprobs(loaded.get_base_model(), sequences), expected_JT, rtol=0, atol=1e-5)
    # the value model stays at home
    assert list((tmp_path / "policy").rglob("adapter_model.safetensors")) == [
        tmp_path / "policy" / "adapter_model.safetensors"
    ]


def test_lora_weights_are_float32_on_a_bfloat16_base(sequences):
    models = build("lora", tiny_causal_lm().to(torch.bfloat16))
    assert {p.dtype for p in models.policy_parameters() + models.value_parameters()} == {torch.float32}
    assert torch.isfinite(found(policy_pass, models, sequences)).all()
    assert torch.isfinite(found(value_pass, models, sequences)).all()
