"""SFT's adapter reaches PPO as it was learned, and the policy's folder holds both.

Axis letters: J rows, T answer tokens.
"""

from __future__ import annotations

import pytest
import torch
from fakes import answer_rows, save_adapter, tiny_causal_lm
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from appa_flwr.config import Config
from server_app.engine.logprobs import response_logprobs
from server_app.engine.prefix import Prefix
from server_app.models import exports
from server_app.models.base import Base

ROWS = answer_rows()


def base_of(folder, tokenizer):
    return Base(str(folder), tokenizer, 1, (1, 2))


class Tokenizer:
    """Whatever is saved beside the weights."""

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def logprobs(model):
    with torch.no_grad():
        prefix = Prefix(model.base_model, ROWS.prefix_C)
        return response_logprobs(model, ROWS, temperature=1.0, prefix=prefix)


@pytest.fixture
def trained(tmp_path):
    """PPO's models over an adapter of SFT, some steps on, and the base they belong to."""
    model = tiny_causal_lm()
    model.save_pretrained(tmp_path / "base")
    base = base_of(tmp_path / "base", Tokenizer())
    sft = save_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "sft")
    keys = {"policy.tuning": "lora", "lora.rank": 2, "lora.ppo-targets": "q_proj,v_proj"}
    models = exports.load_policy(Config.load(keys), base, sft)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in models.policy_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return models, base, keys


@pytest.mark.parametrize(
    ("export", "loader"), [("adapter", AutoPeftModelForCausalLM), ("merged", AutoModelForCausalLM)]
)
def test_both_forms_of_the_policy_load_and_answer_alike(trained, tmp_path, export, loader):
    models, base, keys = trained
    expected_JT = logprobs(models.policy())
    folder = tmp_path / "policy"
    folder.mkdir()
    exports.save(Config.load({**keys, "lora.export": export}), models, base, folder)
    loaded = loader.from_pretrained(folder).eval()
    loaded = loaded.get_base_model() if export == "adapter" else loaded
    torch.testing.assert_close(logprobs(loaded), expected_JT, rtol=0, atol=1e-5)
    assert torch.equal(logprobs(models.policy()), expected_JT)  # and the models go on as they were
    assert sorted(path.suffix for path in folder.iterdir()).count(".safetensors") == 1
    assert (folder / "tokenizer.json").exists()
    if export == "merged":
        assert set(loaded.generation_config.eos_token_id) == {1, 2}
        assert {p.dtype for p in loaded.parameters()} == {torch.float32}
