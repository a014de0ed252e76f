"""LoRA layers that round once compute what PEFT's do, and keep small adapters that PEFT's lose in 16 bits."""

import copy

import pytest
import torch
from fakes import ARCHITECTURES, tiny_causal_lm
from peft import LoraConfig, get_peft_model

from server_app.policy.lora_product import round_once

IDS = torch.randint(0, 60, (3, 9), generator=torch.Generator().manual_seed(1))


def adapted(architecture="llama", *, size=0.1):
    """A model with two adapters in force on some layers and one on others, all factors random, and some biases."""
    model = tiny_causal_lm(architecture)
    for layer in model.base_model.layers:
        projection = layer.self_attn.q_proj
        projection.bias = torch.nn.Parameter(torch.linspace(-1, 1, projection.out_features))
    dropout = {"lora_dropout": 0.5}
    peft = get_peft_model(
        model, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "up_proj"], **dropout), "first"
    )
    peft.add_adapter("second", LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "o_proj"], **dropout))
    peft.base_model.set_adapter(["first", "second"])
    generator = torch.Generator().manual_seed(2)
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            scale = size if "lora_B" in name else 0.1
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
            parameter.requires_grad_(True)
    return peft.train()


def gradients(peft):
    return {name: p.grad for name, p in peft.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_results_and_gradients_are_those_of_pefts_layers(architecture):
    theirs = adapted(architecture).double()
    ours = copy.deepcopy(theirs)
    round_once(ours)
    found = []
    for peft in (theirs, ours):
        torch.manual_seed(3)  # of what is dropped
        logits = peft(input_ids=IDS).logits
        logits.square().mean().backward()
        found.append(logits)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)
    expected = gradients(theirs)
    for name, gradient in gradients(ours).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-12)
    assert any(gradient.any() for gradient in expected.values())
    assert not [name for name, p in ours.named_parameters() if p.grad is not None and "lora_" not in name]
    with torch.no_grad(), theirs.disable_adapter(), ours.disable_adapter():
        assert torch.equal(ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits)


def test_a_part_under_half_of_the_last_digit_counts():
    """One layer, 16 bits: what the adapter adds is, over many outputs, what it should be, and with PEFT's layer 0."""
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 512, bias=False)).to(torch.bfloat16)
    peft = get_peft_model(layer, LoraConfig(r=2, lora_alpha=2, target_modules=["0"]))
    adapter = peft.base_model.model[0]
    adapter.lora_B["default"].weight.data.fill_(2e-4)
    x = torch.randn(256, 64).to(torch.bfloat16)
    with torch.no_grad(), peft.disable_adapter():
        base = peft(x).double()
    part = (x.double() @ adapter.lora_A["default"].weight.double().T) @ adapter.lora_B["default"].weight.double().T
    kept = []
    for change in (lambda _: None, round_once):
        change(peft)
        with torch.no_grad():
            kept.append(float(((peft(x).double() - base) * part).sum() / part.square().sum()))
    assert abs(kept[0]) < 0.3
    assert kept[1] == pytest.approx(1, abs=0.3)
