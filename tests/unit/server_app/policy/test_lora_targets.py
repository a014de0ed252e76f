"""Layers that LoRA may adapt: what is saved of them answers as what was sampled; other names end the run at once.

Axis letters: J rows, T answer tokens.
"""

from __future__ import annotations

import pytest
import torch
from fakes import answer_rows, tiny_causal_lm
from peft import AutoPeftModelForCausalLM, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from server_app.policy import export, lora_targets, sft
from server_app.policy.base import Base
from server_app.policy.logprobs import response_logprobs

ROWS = answer_rows()


def config_of(targets, **keys):
    return Config.load({"policy.tuning": "lora", "policy.sft-targets": targets, "policy.ppo-targets": targets, **keys})


def logprobs(model):
    with torch.no_grad():
        return response_logprobs(model, ROWS, temperature=1.0)


def learn(parameters):
    generator = torch.Generator().manual_seed(3)
    for parameter in parameters:
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


def as_sampled_and_saved(config, folder):
    """Log-probabilities of the base in `folder`, of a policy over SFT's adapter as it samples, and of its own folder.

    Nothing is trained: all adapters get random numbers.
    """
    base = Base(str(folder / "base"), None, 1, (1,))
    taught = get_peft_model(AutoModelForCausalLM.from_pretrained(base.source), sft.adapter(config))
    learn(p for p in taught.parameters() if p.requires_grad)
    taught.save_pretrained(folder / "sft", save_embedding_layers=False)
    models = export.load_policy(config, base, folder / "sft")
    learn(models.policy_parameters)
    sampled_JT = logprobs(models.policy())
    models.save_policy(folder / "policy")
    saved = AutoPeftModelForCausalLM.from_pretrained(folder / "policy").eval().get_base_model()
    untaught_JT = logprobs(AutoModelForCausalLM.from_pretrained(base.source).eval())
    return untaught_JT, sampled_JT, logprobs(saved)


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("qwen3", "q_proj,k_proj,v_proj,o_proj"),
        ("gemma2", "gate_proj,up_proj,down_proj"),
        ("phi3", "qkv_proj"),
        ("phi3", "gate_up_proj"),
        ("llama", "lm_head"),
        ("gemma2", "self_attn.q_proj,layers.0.mlp.up_proj,lm_head"),
    ],
)
def test_what_is_saved_gives_the_log_probs_of_what_was_sampled(architecture, targets, tmp_path):
    model, config = tiny_causal_lm(architecture), config_of(targets)
    lora_targets.check(config, model.config)
    model.save_pretrained(tmp_path / "base")
    untaught_JT, sampled_JT, saved_JT = as_sampled_and_saved(config, tmp_path)
    torch.testing.assert_close(saved_JT, sampled_JT, rtol=0, atol=1e-4)
    assert (sampled_JT - untaught_JT).abs().max() > 0.1


def test_a_matrix_that_is_also_the_embedding_is_refused_since_merging_would_change_both(tmp_path):
    model = tiny_causal_lm("qwen3")
    model.config.tie_word_embeddings = True
    config = config_of("q_proj,lm_head", model="m")
    with pytest.raises(UserError, match=r"m has no linear layer 'lm_head' with weights of its own"):
        lora_targets.check(config, model.config)
    AutoModelForCausalLM.from_config(model.config).save_pretrained(tmp_path / "base")
    _, sampled_JT, _ = as_sampled_and_saved(config, tmp_path)
    merged = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "policy").eval().merge_and_unload()
    assert (logprobs(merged) - sampled_JT).abs().max() > 0.1  # where PEFT ends this otherwise, the refusal can go


LAYERS = {
    "phi3": "down_proj, gate_up_proj, lm_head, o_proj, qkv_proj",
    "qwen3": "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj",
}


@pytest.mark.parametrize(
    ("architecture", "targets", "name"),
    [
        ("phi3", "o_proj,q_proj", "q_proj"),  # a part of qkv_proj
        ("qwen3", "q_proj,v_prj", "v_prj"),
        ("qwen3", "q_proj,proj", "proj"),  # the end of a name, not of a path
        ("qwen3", "q_proj,norm", "norm"),  # no linear layer
        ("qwen3", "q_proj,embed_tokens", "embed_tokens"),
        ("qwen3", "mlp", "mlp"),
        ("qwen3", ",", ""),  # no name at all
    ],
)
def test_a_name_that_is_no_linear_layer_is_told_though_others_beside_it_are(architecture, targets, name):
    for tuning in ("lora", "qlora"):
        with pytest.raises(UserError) as error:
            lora_targets.check(
                config_of(targets, **{"policy.tuning": tuning, "model": "m"}), tiny_causal_lm(architecture).config
            )
        assert str(error.value).startswith(f"policy.sft-targets: m has no linear layer '{name}'")
        assert str(error.value).endswith(f" LoRA can adapt {LAYERS[architecture]}")


def test_a_model_without_linear_layers_of_its_own_cannot_be_adapted():
    with pytest.raises(UserError, match=r"'q_proj'.* LoRA can adapt none of its layers"):
        lora_targets.check(config_of("q_proj"), GPT2Config())


def test_a_name_that_linear_layers_share_with_others_is_refused():
    model = nn.ModuleDict(
        {"dense": nn.ModuleDict({"gate": nn.Linear(2, 2)}), "moe": nn.ModuleDict({"gate": nn.Tanh()})}
    )
    with pytest.raises(UserError, match="m has no linear layer 'gate'"):
        lora_targets._check_target(model, "gate", "m")
    lora_targets._check_target(model, "dense.gate", "m")


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_window_shorter_than_the_longest_sequence_is_refused(tuning):
    config = config_of("q_proj", **{"policy.tuning": tuning, "policy.max-sequence-length": 1025})
    with pytest.raises(UserError, match=r"policy\.max-sequence-length = 1025: tiny reads 1024 tokens"):
        lora_targets.check(config, tiny_causal_lm().config)
