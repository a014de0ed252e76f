"""The paper's models: each family's prompts, ends and padding, and its base in 4 bits.

The folders are made by `families`: everything as published but for weights and text tokens.
"""

import families
import pytest
import torch
from fakes import ROUNDING, catalogue_of, save_adapter
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from small import CHOSEN
from transformers import GenerationConfig

from appa_flwr.config import Config
from appa_flwr.protocol import formats
from server_app.policy import base as bases
from server_app.policy import models, sft

QUESTIONS = catalogue_of([2, 3, 5, 2], train=[True] * 4).questions
ANSWERS = ["0.10,0.90", "0.80,0.10,0.10", "0.20,0.20,0.20,0.20,0.20", "1.00,0.00"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: families.save(name, tmp_path_factory.mktemp(name) / "model", QUESTIONS) for name in families.FAMILIES}


@pytest.fixture(scope="module", params=families.FAMILIES)
def prepared(request, folders):
    """A family, its base and the config it was prepared with."""
    config = Config.load({**CHOSEN, "model": str(folders[request.param]), "policy.prompt-style": "full"})
    return families.FAMILIES[request.param], bases.prepare(config, QUESTIONS), config


# --- prompts and special tokens -------------------------------------------------------------------


def test_the_prompt_is_the_family_s_own_template_around_the_question(prepared):
    family, base, config = prepared
    for question in QUESTIONS:
        text = formats.prompt("dpa", question.text, question.options, style="full")
        ids = base.prompt_ids(config, question)
        assert base.tokenizer.decode(ids) == family.opens + text + family.closes
        # the template brings the sequence's beginning, which the tokenizer would put there once more
        assert ids.count(base.tokenizer.bos_token_id) == ("bos_token" in family.roles)


def test_what_ends_and_pads_an_answer_and_how_attention_is_computed_follow_from_the_model(prepared):
    family, base, config = prepared
    assert set(base.tokenizer.convert_ids_to_tokens(list(base.stop_ids))) == {*family.ends, family.end}
    assert base.tokenizer.convert_ids_to_tokens(base.end_id) == family.end
    assert base.tokenizer.pad_token == family.pad
    assert base.tokenizer.pad_token_id not in base.stop_ids
    model = bases.load_model(config, base.source, quantized=False)
    assert base.tokenizer.pad_token_id < model.get_input_embeddings().num_embeddings
    # what Transformers chooses for 32 bits: Gemma-2's capped attention scores cannot be had from sdpa
    assert model.config._attn_implementation == ("eager" if family is families.FAMILIES["gemma2"] else "sdpa")
    halved = Config.load({**config.flat(), "policy.compute-dtype": "bfloat16", "policy.tuning": "lora"})
    half = bases.load_model(halved, base.source, quantized=False)
    assert half.config._attn_implementation == "eager"
    assert [{p.dtype for p in each.parameters()} for each in (model, half)] == [{torch.float32}, {torch.bfloat16}]
    assert not model.training


# --- fine-tuning ----------------------------------------------------------------------------------


def assert_rounds_once(model):
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    assert layers
    assert all("forward" in vars(layer) for layer in layers)


def test_a_taught_answer_follows_the_prompt_at_once_and_ends_with_the_turn(prepared, tmp_path):
    family, base, config = prepared
    config = Config.load({**config.flat(), "policy.tuning": "lora", "sft.steps": 1, "sft.batch-size": 4})
    model = bases.load_model(config, base.source, quantized=False)
    model.generation_config = GenerationConfig()  # as of a folder without settings of its own
    prompts = [base.prompt_ids(config, question) for question in QUESTIONS]
    given = {"prompts": prompts, "answers": ANSWERS, "folder": tmp_path / "model"}
    sft.fine_tune(model, base, config, **given, progress=lambda step, of, loss: None)
    assert_rounds_once(model)
    written = []
    for row in sft.dataset(base, prompts, ANSWERS):
        ids, taught = row["input_ids"], sum(row["completion_mask"])
        assert base.tokenizer.decode(ids[:-taught]).endswith(family.closes)
        written.append(base.tokenizer.decode(ids[-taught:]))
    assert written == [text + family.end for text in ANSWERS]  # and nothing that a template writes behind a turn


@pytest.mark.parametrize("prepared", ["llama"], indirect=True)
def test_sft_s_adapter_reaches_ppo_on_four_bits_as_it_was_saved(prepared, tmp_path):
    _, base, config = prepared
    config = Config.load({**config.flat(), "policy.tuning": "qlora"})
    save_adapter(bases.load_model(config, base.source, quantized=False), tmp_path)
    packed = bases.load_model(config, base.source, quantized=True)
    ids = prompt_tensor(base, config)
    policy = models.load_policy(config, base, tmp_path).policy
    assert_rounds_once(policy)
    with torch.no_grad():
        found, without = policy(ids).logits, packed(ids).logits
        torch.testing.assert_close(found, PeftModel.from_pretrained(packed, tmp_path)(ids).logits, **ROUNDING)
    assert (found - without).abs().max() > 1e-2


# --- four bits ------------------------------------------------------------------------------------


def prompt_tensor(base, config):
    return torch.tensor([base.prompt_ids(config, QUESTIONS[0])])


def test_four_bits_are_all_linear_layers_but_the_head(prepared):
    _, base, config = prepared
    model = bases.load_model(config, base.source, quantized=True)
    packed = [layer for layer in model.modules() if type(layer).__name__ == "Linear4bit"]
    assert len(packed) == 2 * 7  # q, k, v, o, gate, up, down
    states = {(layer.weight.quant_state.quant_type, layer.weight.quant_state.nested) for layer in packed}
    assert states == {("nf4", True)}
    assert {layer.compute_dtype for layer in packed} == {torch.float32}
    assert model.lm_head.weight is model.get_input_embeddings().weight  # tied, and not quantised


@pytest.mark.parametrize("prepared", ["gemma2"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_with_and_without_gradient_compute_the_same(prepared, dtype):
    # bitsandbytes takes another, rounding kernel for passes without gradient on CPUs that have AVX512-BF16.
    _, base, config = prepared
    model = bases.load_model(
        Config.load({**config.flat(), "policy.compute-dtype": dtype, "policy.tuning": "lora"}),
        base.source,
        quantized=True,
    )
    ids = prompt_tensor(base, config)
    embedded = model.get_input_embeddings()(ids).detach()
    with torch.inference_mode():
        without = model(inputs_embeds=embedded).logits
    with_gradient = model(inputs_embeds=embedded.requires_grad_()).logits
    assert with_gradient.requires_grad
    assert torch.equal(without, with_gradient.detach())
