"""What is saved of a policy answers as what was sampled, whatever layers LoRA adapts; other names end the run at once.

Axis letters: J rows, T answer tokens.
"""

import pytest
import torch
from fakes import answer_rows, disturb, tiny_causal_lm
from peft import AutoPeftModelForCausalLM, get_peft_model
from transformers import AutoModelForCausalLM

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from server_app.loaded import LocalModel
from server_app.policy import sft
from server_app.policy.base import Base
from server_app.policy.logprobs import response_logprobs
from server_app.policy.models import load_policy

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
        taught = get_peft_model(AutoModelForCausalLM.from_pretrained(base.source), sft.adapter(config))
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
    adapted = {"policy.sft-targets": targets, "policy.ppo-targets": targets}
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
