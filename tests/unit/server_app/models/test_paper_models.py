"""The paper's models: each family's prompts, ends and padding, and its base in 4 bits.

The folders are made by `families`: everything as published but for weights and text tokens.

Axis letters: J answers, T tokens.
"""

from __future__ import annotations

import itertools
import json

import bitsandbytes.functional
import families
import pytest
import torch
from fakes import catalogue_of, ppo_models
from peft import PeftModel
from transformers import AutoTokenizer, GenerationConfig

from appa_flwr.config import Config
from appa_flwr.config.sections import PPOSection, RolloutSection
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import formats
from server_app.models import base as bases
from server_app.models import exports, sft
from server_app.ppo.engine import PPOEngine

QUESTIONS = catalogue_of([2, 3, 5, 2], train=[True] * 4).questions
ANSWERS = ["0.10,0.90", "0.80,0.10,0.10", "0.20,0.20,0.20,0.20,0.20", "1.00,0.00"]
MERGED_AT = 3  # tokens of the instruction that a tokenizer may join with what follows


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: families.save(name, tmp_path_factory.mktemp(name) / "model", QUESTIONS) for name in families.FAMILIES}


@pytest.fixture(scope="module", params=families.FAMILIES)
def prepared(request, folders):
    """A family, its base and the config it was prepared with."""
    config = Config.load({"model": str(folders[request.param]), "policy.prompt-style": "full"})
    return families.FAMILIES[request.param], bases.prepare(config, QUESTIONS), config


# --- prompts and special tokens -------------------------------------------------------------------


def test_the_prompt_is_the_family_s_own_template_around_the_question(prepared):
    family, base, config = prepared
    for question in QUESTIONS:
        text = formats.prompt("dpa", question.text, question.options, style="full")
        ids = base.prompt_ids(config, question)
        assert base.prompt_text(config, question) == base.tokenizer.decode(ids) == family.opens + text + family.closes
        # the template brings the sequence's beginning, which the tokenizer would put there once more
        assert ids.count(base.tokenizer.bos_token_id) == ("bos_token" in family.roles)


def common_beginning(first, second):
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]


def test_all_prompts_begin_with_the_tokens_of_the_instruction(prepared):
    _, base, config = prepared
    first, second = (base.prompt_text(config, question) for question in QUESTIONS[:2])
    instruction = "".join(common_beginning(first, second))
    assert "decimal point" in instruction
    of_instruction = base.tokenizer(instruction, add_special_tokens=False)["input_ids"]
    shared = common_beginning(*(base.prompt_ids(config, question) for question in QUESTIONS[:2]))
    assert len(shared) >= len(of_instruction) - MERGED_AT > 80


def test_answers_end_where_the_generation_settings_say(prepared):
    family, base, _ = prepared
    assert set(base.tokenizer.convert_ids_to_tokens(list(base.stop_ids))) == {*family.ends, family.end}
    assert base.tokenizer.convert_ids_to_tokens(base.end_id) == family.end


def test_without_generation_settings_the_turn_and_the_sequence_end_an_answer(folders, tmp_path):
    for name, family in families.FAMILIES.items():
        folder = tmp_path / name
        folder.mkdir()
        for file in folders[name].iterdir():
            if file.name != "generation_config.json":
                (folder / file.name).symlink_to(file)
        base = bases.prepare(Config.load({"model": str(folder)}), QUESTIONS)
        assert set(base.tokenizer.convert_ids_to_tokens(list(base.stop_ids))) == {family.roles["eos_token"], family.end}


def test_padding_has_an_embedding_and_ends_no_answer_and_attention_is_chosen_for_the_model(prepared):
    family, base, config = prepared
    assert base.tokenizer.pad_token == family.pad
    assert base.pad_id not in base.stop_ids
    model = bases.load_model(config, base.source, quantized=False)
    assert base.pad_id < model.get_input_embeddings().num_embeddings
    # what Transformers chooses: Gemma-2's capped attention scores cannot be had from sdpa
    assert model.config._attn_implementation == ("eager" if family is families.FAMILIES["gemma2"] else "sdpa")


# --- fine-tuning ----------------------------------------------------------------------------------


SFT_KEYS = {"sft.batch-size": 4, "sft.gradient-accumulation-steps": 1}


def teach(model, base, config, folder):
    sft.fine_tune(
        model,
        base,
        config,
        prompts=[base.prompt_ids(config, question) for question in QUESTIONS],
        answers=ANSWERS,
        folder=folder,
        progress=lambda step, of, loss: None,
    )


@pytest.fixture(scope="module")
def tuned(prepared, tmp_path_factory):
    """One large LoRA step: the family, its base, its config, the rows the loss saw, and the written folder."""
    family, base, config = prepared
    keys = {"policy.tuning": "lora", "sft.steps": 2, "sft.learning-rate": 3e-2}
    config = Config.load({**config.flat(), **SFT_KEYS, **keys})
    seen = []
    step = sft._LeanTrainer.training_step

    def spy(self, model, inputs, *arguments, **keywords):
        seen.extend(zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), strict=True))
        return step(self, model, inputs, *arguments, **keywords)

    torch.manual_seed(0)
    model = bases.load_model(config, base.source, quantized=False)
    model.generation_config = GenerationConfig()  # as of a folder without settings of its own
    folder = tmp_path_factory.mktemp("tuned") / "model"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sft._LeanTrainer, "training_step", spy)
        teach(model, base, config, folder)
    return family, base, config, seen[: len(QUESTIONS)], folder


def test_a_taught_answer_follows_the_prompt_at_once_and_ends_with_the_turn(tuned):
    family, base, _, rows, _ = tuned
    written = []
    for ids, labels in rows:
        first = next(i for i, label in enumerate(labels) if label != -100)
        answer = [label for label in labels if label != -100]
        written.append(base.tokenizer.decode(answer))
        assert base.tokenizer.decode(ids[:first]).endswith(family.closes)
        assert set(ids[first + len(answer) :]) <= {base.pad_id}
    assert set(written) == {text + family.end for text in ANSWERS}  # and nothing that a template writes behind a turn


def test_the_tuned_folder_holds_an_adapter_of_the_base_and_its_tokenizer(tuned):
    _, base, config, _, folder = tuned
    described = json.loads((folder / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == base.source
    assert described["r"] == config.lora.rank
    assert AutoTokenizer.from_pretrained(folder).pad_token_id == base.pad_id


PAPER_RATE = 5e-6  # SFT table


def mean_loss(model, base, config):
    """Of the taught answers' tokens, in nats."""
    total, count = 0.0, 0
    for question, text in zip(QUESTIONS, ANSWERS, strict=True):
        prompt = base.prompt_ids(config, question)
        answer = [*base.tokenizer(text, add_special_tokens=False)["input_ids"], base.end_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].double()
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))
        count += len(answer)
    return total / count


@pytest.mark.parametrize("prepared", ["llama"], indirect=True)
def test_what_sft_learned_reaches_ppo_on_four_bits(prepared, tmp_path):
    """At the paper's step size; `docs/benchmarks.md` says what merging and packing keep of a real one."""
    _, base, config = prepared
    keys = {"policy.tuning": "qlora", "sft.steps": 49, "sft.learning-rate": PAPER_RATE, "lora.dropout": 0.0}
    config = Config.load({**config.flat(), **SFT_KEYS, **keys})

    def load(source, *, quantized):
        return bases.load_model(config, str(source), quantized=quantized)

    teach(load(base.source, quantized=False), base, config, tmp_path / "sft")
    exact = PeftModel.from_pretrained(load(base.source, quantized=False), tmp_path / "sft").eval()
    learned = mean_loss(load(base.source, quantized=False), base, config) - mean_loss(exact, base, config)
    assert learned > 1e-4
    start = mean_loss(load(base.source, quantized=True), base, config)
    policy = exports.load_policy(config, base, tmp_path / "sft").policy()
    assert start - mean_loss(policy, base, config) > 0.75 * learned


# --- attention ------------------------------------------------------------------------------------


def test_gemma_2_s_capped_attention_scores_cannot_be_had_from_sdpa(folders):
    config = Config.load({"model": str(folders["gemma2"]), "policy.attention": "sdpa"})
    with pytest.raises(UserError, match=r'attention = "sdpa" .* "auto"') as error:
        bases.check(config)
    assert "\n" not in str(error.value)


# --- four bits ------------------------------------------------------------------------------------


def dequantized(layer):
    return bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()


def prompt_tensor(base, config):
    return torch.tensor([base.prompt_ids(config, QUESTIONS[0])])


def test_four_bits_are_a_close_copy_of_all_linear_layers_but_the_head(prepared):
    _, base, config = prepared
    model, plain = (bases.load_model(config, base.source, quantized=quantized) for quantized in (True, False))
    layers = {name: layer for name, layer in model.named_modules() if type(layer).__name__ == "Linear4bit"}
    assert len(layers) == 2 * 7  # q, k, v, o, gate, up, down
    assert model.lm_head.weight is model.get_input_embeddings().weight  # tied, and not quantised
    with torch.no_grad():
        for name, layer in layers.items():
            assert layer.weight.quant_state.nested  # double quantisation
            weight = plain.get_submodule(name).weight
            # nf4's sixteen levels lie at most 0.15 of a block's largest weight from any number between them
            assert 0 < (dequantized(layer) - weight).abs().max() < 0.16 * weight.abs().max()
            weight.copy_(dequantized(layer))
        ids = prompt_tensor(base, config)
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)


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


@pytest.mark.parametrize("prepared", ["qwen3"], indirect=True)
def test_ppo_on_four_bits_trains_adapters_only_and_leaves_the_reference(prepared):
    _, base, config = prepared
    model = bases.load_model(config, base.source, quantized=True)
    ids = prompt_tensor(base, config)
    with torch.no_grad():
        untouched = model(ids).logits
    models = ppo_models("lora", model)
    engine = PPOEngine(
        models,
        PPOSection(num_mini_batches=1, epochs=2, learning_rate=1e-2, value_learning_rate=1e-2, baseline="value"),
        RolloutSection(response_length=4, answers_per_question=1),
        num_iterations=3,
        stop_ids=base.stop_ids,
        pad_id=base.pad_id,
        seed=5,
    )
    trained = [*models.policy_parameters(), *models.value_parameters()]
    start = [p.detach().clone() for p in trained]
    # Of an adapter's two factors one begins at zero, and the value head too: a gradient needs its turn to reach all.
    for _ in range(2):
        rollout = engine.rollout([base.prompt_ids(config, question) for question in QUESTIONS])
        engine.update(rollout, engine.reference_pass(rollout.sequences), torch.tensor([1.0, 0.0, 0.5, -1.0]))
    assert len(trained) == (3 + 2) * 2 * 2 + 2  # adapters of 3 and 2 projections, of two layers and factors; the head
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in trained)
    assert not [i for i, (p, old) in enumerate(zip(trained, start, strict=True)) if torch.equal(p, old)]
    with torch.no_grad():
        changed = models.policy()(ids).logits
        with models._peft.disable_adapter():
            reference = models.policy()(ids).logits
    assert torch.equal(reference, untouched)
    assert not torch.equal(changed, untouched)
