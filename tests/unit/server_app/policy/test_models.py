"""Policy, reference and value share weights, but neither gradients nor each other's changes.

What is saved of a policy answers as what was sampled, whatever layers LoRA adapts.

Axis letters: J rollouts, T response tokens, V vocabulary.
"""

import copy

import pytest
import torch
from fakes import PREFIX, answer_rows, disturb, ppo_models, save_adapter, scoring, tiny_causal_lm
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.loaded import LocalModel
from server_app.policy.base import Base
from server_app.policy.logprobs import response_logprobs, shared_prefix
from server_app.policy.models import LoraModels, load_policy, lora_config

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def sequences():
    return answer_rows(shared=len(PREFIX))


def found(which, models, sequences):
    """What a pass without gradient gives: (J, T)."""
    with torch.no_grad(), scoring(models, which, sequences.prefix_C, temperature=TEMPERATURE) as score:
        return score(sequences)


def learn(which, models, sequences, power=2):
    """One pass of its own that goes backward from the squares of what it gives."""
    with scoring(models, which, sequences.prefix_C, temperature=TEMPERATURE) as score:
        score(sequences).pow(power).sum().backward()


@pytest.fixture(params=[("full", "qwen3"), ("lora", "llama"), ("lora", "gemma2"), ("lora", "qwen3")], ids="-".join)
def case(request, tmp_path):
    """The models, and an untouched copy of what they were built on, with SFT's adapter if there is one."""
    tuning, architecture = request.param
    model = tiny_causal_lm(architecture)
    untouched = copy.deepcopy(model)
    if tuning == "lora":
        untouched = PeftModel.from_pretrained(untouched, save_adapter(model, tmp_path)).eval().get_base_model()
    return ppo_models(tuning, model), untouched


def base_logprobs(untouched, sequences):
    with torch.no_grad(), shared_prefix(untouched.base_model, sequences.prefix_C) as prefix:
        return response_logprobs(untouched, sequences, temperature=TEMPERATURE, prefix=prefix)


def test_policy_and_reference_begin_as_the_untouched_base_which_the_reference_stays(case, sequences):
    models, untouched = case
    expected_JT = base_logprobs(untouched, sequences)
    for which in ("policy", "reference"):
        assert torch.equal(found(which, models, sequences), expected_JT)
    assert not found("value", models, sequences).any()  # the value head begins at zero
    optimizer = torch.optim.AdamW(models.policy_parameters + models.value_parameters, lr=0.05)
    for _ in range(2):
        learn("policy", models, sequences)
        learn("value", models, sequences, power=1)  # a square's gradient would be zero at value zero
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(found("reference", models, sequences), expected_JT)
    policy_JT = found("policy", models, sequences)
    assert ((policy_JT - expected_JT).abs()[sequences.mask_JT] > 1e-3).all()
    assert torch.equal(base_logprobs(models.policy, sequences), policy_JT)  # what samples
    assert torch.equal(found("reference", models, sequences), expected_JT)
    assert torch.equal(found("policy", models, sequences), policy_JT)


def gradients(parameters):
    found = [None if p.grad is None else p.grad.clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


@pytest.mark.parametrize("value_first", [False, True])
def test_each_loss_reaches_all_of_its_own_parameters_and_none_of_the_other(case, sequences, value_first):
    models, _ = case
    own, other = models.policy_parameters, models.value_parameters
    assert not {id(p) for p in own} & {id(p) for p in other}
    disturb(own + other)
    passes = [("policy", own, other), ("value", other, own)]
    passes = passes[::-1] if value_first else passes
    alone = []
    for which, trained, spared in passes:
        learn(which, models, sequences)
        alone += gradients(trained)
        assert all(g is not None and g.abs().sum() > 0 for g in alone)
        assert all(g is None for g in gradients(spared))
    # one after the other without clearing, and the reference between them: as an update does it
    learn(passes[0][0], models, sequences)
    found("reference", models, sequences)
    learn(passes[1][0], models, sequences)
    together = gradients(passes[0][1]) + gradients(passes[1][1])
    for expected, gradient in zip(alone, together, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    if isinstance(models, LoraModels):
        mine = {id(p) for p in own + other}
        assert not any(p.requires_grad for p in models.policy.parameters() if id(p) not in mine)


def test_what_learns_is_float32_on_a_bfloat16_base():
    sequences = answer_rows()
    models = ppo_models("lora", tiny_causal_lm().to(torch.bfloat16))
    assert {p.dtype for p in models.policy_parameters + models.value_parameters} == {torch.float32}
    assert torch.isfinite(found("policy", models, sequences)).all()
    assert torch.isfinite(found("value", models, sequences)).all()


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_without_a_value_model_there_is_neither_trunk_nor_head(tuning, tmp_path):
    model, folder = tiny_causal_lm(), tmp_path / "model"
    model.save_pretrained(folder)
    base = Base(str(folder), tokenizer=None, end_id=0, stop_ids=())
    sft = save_adapter(model, tmp_path / "adapter") if tuning == "lora" else folder
    made = {}
    for baseline in ("question", "value"):
        config = Config.load({"policy.tuning": tuning, "ppo.baseline": baseline})
        made[baseline] = load_policy(config, base, sft)
    assert made["question"].head is None
    assert made["question"].value_parameters == []
    assert len(made["value"].value_parameters) > 2
    held = {baseline: sum(p.numel() for p in all_parameters(models)) for baseline, models in made.items()}
    assert held["value"] - held["question"] == sum(p.numel() for p in made["value"].value_parameters)


def all_parameters(models):
    modules = [part for part in vars(models).values() if isinstance(part, torch.nn.Module)]
    return {id(p): p for module in modules for p in module.parameters()}.values()


# --- what is saved ---

ROWS = answer_rows()


def logprobs(model):
    with torch.no_grad():
        return response_logprobs(model, ROWS, temperature=1.0)


def as_sampled_and_saved(config, folder):
    """Log-probabilities of the base in `folder`, of a policy over SFT's adapter as it samples, and of its own folder.

    Nothing is trained: all adapters, or with full tuning all weights, get random numbers.
    """
    base, start = Base(str(folder / "base"), None, 1, (1,)), folder / "base"
    if lora := config.policy.tuning == "lora":
        taught = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base.source), lora_config(config, config.policy.sft_lora_modules)
        )
        disturb((p for p in taught.parameters() if p.requires_grad), scale=0.05)
        taught.save_pretrained(start := folder / "sft", save_embedding_layers=False)
    models = load_policy(config, base, start)
    trained = models.policy_parameters + models.value_parameters
    disturb(trained, scale=0.05)
    with models.value():
        pass  # the value's adapter was the last one in use
    sampled_JT = logprobs(models.policy)
    models.save_policy(policy := folder / "policy")
    assert torch.equal(logprobs(models.policy), sampled_JT)  # and the models go on as they were
    assert all(parameter.requires_grad for parameter in trained)
    assert len(list(policy.rglob("*.safetensors"))) == 1  # the value model is not saved
    loader = AutoPeftModelForCausalLM if lora else AutoModelForCausalLM
    saved = loader.from_pretrained(policy).eval()
    untaught_JT = logprobs(AutoModelForCausalLM.from_pretrained(base.source).eval())
    return untaught_JT, sampled_JT, logprobs(saved.get_base_model() if lora else saved)


@pytest.mark.parametrize(
    ("architecture", "targets", "tuning"),
    [
        ("qwen3", "q_proj", "full"),
        ("qwen3", "q_proj,k_proj,v_proj,o_proj", "lora"),
        ("gemma2", "gate_proj,up_proj,down_proj", "lora"),
        ("llama", "v_proj,up_proj", "lora"),
    ],
)
def test_what_is_saved_gives_the_log_probs_of_what_was_sampled(architecture, targets, tuning, tmp_path):
    model = tiny_causal_lm(architecture)
    adapted = {"policy.sft-lora-modules": targets, "policy.ppo-lora-modules": targets}
    config = Config.load({"policy.tuning": tuning, "ppo.baseline": "value", **adapted})
    model.save_pretrained(tmp_path / "base")
    untaught_JT, sampled_JT, saved_JT = as_sampled_and_saved(config, tmp_path)
    torch.testing.assert_close(saved_JT, sampled_JT, rtol=0, atol=1e-4)
    assert (sampled_JT - untaught_JT).abs().max() > 0.1


@pytest.mark.parametrize(("content", "says"), [("{", "Invalid JSON"), ("[]", "should be an object")])
def test_an_adapter_that_cannot_be_read_is_named(content, says, tmp_path):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(UserError, match=rf"adapter_config\.json.*{says}"):
        LocalModel(str(tmp_path))
