"""SFT's model or adapter reaches PPO as it was learned, and the policy's folder holds all of it.

Axis letters: J rows, T answer tokens.
"""

from __future__ import annotations

import pytest
import torch
from fakes import answer_rows, save_adapter, tiny_causal_lm
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from server_app.policy import export
from server_app.policy.base import Base
from server_app.policy.logprobs import response_logprobs

ROWS = answer_rows()


def logprobs(model):
    with torch.no_grad():
        return response_logprobs(model, ROWS, temperature=1.0)


@pytest.mark.parametrize(
    ("tuning", "loader", "architecture"),
    [("full", AutoModelForCausalLM, "qwen3"), ("lora", AutoPeftModelForCausalLM, "gemma2")],
)
def test_both_forms_of_the_policy_load_and_answer_alike(tuning, loader, architecture, tmp_path):
    tiny_causal_lm(architecture).save_pretrained(tmp_path / "base")
    base = Base(str(tmp_path / "base"), None, 1, (1, 2))
    keys = {
        "policy.tuning": tuning,
        "ppo.baseline": "value",
        "policy.lora-rank": 2,
        "policy.ppo-targets": "q_proj,v_proj",
    }
    config = Config.load(keys)
    sft = tmp_path / "base"
    if tuning == "lora":
        sft = save_adapter(AutoModelForCausalLM.from_pretrained(base.source), tmp_path / "sft")
    models = export.load_policy(config, base, sft)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in models.policy_parameters + models.value_parameters:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    with models.value():
        pass  # the value's adapter was the last one in use
    expected_JT = logprobs(models.policy())
    folder = tmp_path / "policy"
    folder.mkdir()
    models.save_policy(folder)
    loaded = loader.from_pretrained(folder).eval()
    loaded = loaded.get_base_model() if tuning == "lora" else loaded
    torch.testing.assert_close(logprobs(loaded), expected_JT, rtol=0, atol=1e-5)
    assert torch.equal(logprobs(models.policy()), expected_JT)  # and the models go on as they were
    assert all(parameter.requires_grad for parameter in models.policy_parameters + models.value_parameters)
    assert len(list(folder.rglob("*.safetensors"))) == 1  # the value model is not saved


@pytest.mark.parametrize(("content", "says"), [("{", "is not JSON"), ("[]", "should be an object")])
def test_an_adapter_that_cannot_be_read_is_named(content, says, tmp_path):
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(UserError, match=rf"adapter_config\.json.*{says}"):
        export.opened(Config.load({}), str(tmp_path))
