"""The estimate of a GPU's memory against tensors that are really there, and the tokens that it leaves room for."""

from __future__ import annotations

import io
import json
import logging

import families
import pytest
import torch
from fakes import catalogue_of
from peft import LoraConfig, get_peft_model
from pretended_cuda import MEMORY, pretended_cuda
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, DynamicCache

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from server_app import preflight
from server_app.engine.logprobs import logits_at_once
from server_app.models import gpu_memory
from server_app.models.base import load_model
from server_app.models.one_product import round_once

LENGTH, GIB = 40, 2**30
KEYS = {
    "policy.max-sequence-length": LENGTH,
    "rollout.batch-size": 8,
    "rollout.answers-per-question": 1,
    "ppo.baseline": "value",
    "ppo.num-mini-batches": 1,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    questions = catalogue_of([2, 3], train=[True] * 2).questions
    return {name: families.save(name, tmp_path_factory.mktemp(name) / "model", questions) for name in families.FAMILIES}


def config_for(folder, tuning, **keys):
    dtype = "float32" if tuning == "full" else "bfloat16"
    given = {"model": str(folder), "policy.tuning": tuning, "policy.compute-dtype": dtype, "policy.attention": "eager"}
    return Config.load(KEYS | given | keys)


def estimated(config, free=None):
    return gpu_memory.estimate(config, AutoConfig.from_pretrained(config.model), free=free)


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_a_pass_keeps_is_what_the_allocator_has_given_after_one(folders, family, tuning):
    """By torch's profiler of memory, on a real model with SFT's adapter; a cache and the result are kept beside it."""
    config = config_for(folders[family], tuning)
    model = load_model(config, config.model, quantized=False)
    for parameter in model.parameters():
        parameter.requires_grad_(tuning == "full")
    if tuning == "lora":
        targets = config.lora.sft_targets.split(",")
        round_once(get_peft_model(model, LoraConfig(r=config.lora.rank, target_modules=targets, task_type="CAUSAL_LM")))
    trunk, grown, cached = model.base_model, [], []
    for length in (LENGTH, LENGTH, 2 * LENGTH):  # the first warms up
        cache = DynamicCache(config=model.config)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            result = trunk(input_ids=torch.zeros(1, length, dtype=torch.long), past_key_values=cache, use_cache=True)
        grown.append(sum(event.self_cpu_memory_usage for event in seen.key_averages()))
        cached.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))
        del result
    needs = estimated(config)
    assert needs["SFT"].token * LENGTH == pytest.approx(grown[1], rel=0.1)
    assert needs["PPO"].sampling["keys and values of 8 answers"] == 8 * cached[1]


@pytest.mark.parametrize("tuning", ["lora", "qlora"])
def test_weights_are_as_many_bytes_as_are_loaded(folders, tuning):
    config = config_for(folders["gemma2"], tuning)
    model = load_model(config, config.model, quantized=tuning == "qlora")
    there = 0
    for parameter in model.parameters():
        there += parameter.nbytes
        if (state := getattr(parameter, "quant_state", None)) is not None:
            there += state.absmax.nbytes + state.state2.absmax.nbytes
    assert estimated(config)["PPO"].held["weights"] == pytest.approx(there, rel=0.01)
    assert estimated(config)["SFT"].held["weights"] == sum(2 * p.numel() for p in load_plain(config).parameters())


def load_plain(config):
    return load_model(config, config.model, quantized=False)


def test_what_learns_has_a_gradient_and_two_means(folders):
    """Full: three models of N numbers in 4 bytes, the value's without a head; two of them with 12 bytes more."""
    needs = estimated(config_for(folders["qwen3"], "full"))
    numbers = sum(p.numel() for p in load_plain(config_for(folders["qwen3"], "full")).parameters())  # tied: no head
    assert needs["SFT"].held == {"weights": 4 * numbers, "gradients and optimizer": 12 * numbers}
    assert needs["PPO"].held == {"weights": 12 * numbers, "gradients and optimizer": 24 * numbers}
    assert needs["PPO"].at_most(0) - needs["SFT"].at_most(0) >= 20 * numbers - needs["SFT"].logits


def test_weights_of_32_bits_are_put_aside_while_adapters_are_added_to_them(folders):
    config = config_for(folders["llama"], "lora", **{"policy.compute-dtype": "float32"})
    linear = sum(
        layer.weight.nbytes
        for name, layer in load_plain(config).named_modules()
        if name.rpartition(".")[2] in config.lora.sft_targets.split(",")
    )
    assert estimated(config)["PPO"].sampling["a copy of the weights"] == linear
    assert "a copy of the weights" not in estimated(config_for(folders["llama"], "lora"))["PPO"].sampling


def test_weights_are_unpacked_in_the_estimate_where_half_of_the_memory_holds_them(folders):
    config = config_for(folders["llama"], "qlora")
    unpacked = estimated(config, free=GIB)["PPO"].held["unpacked weights"]
    assert 0 < unpacked < GIB
    packed = estimated(config, free=GIB)["PPO"].held["weights"]
    assert "unpacked weights" in estimated(config, free=int(2 * unpacked + packed) + 1)["PPO"].held
    assert "unpacked weights" not in estimated(config, free=int(2 * unpacked + packed) - 2)["PPO"].held


def test_tokens_of_a_pass_are_a_power_of_two_that_fits_with_a_fifth_to_spare():
    small = gpu_memory.Needs({"weights": 20.0 * GIB}, token=4 * 2**20, logits=2.0 * GIB)
    large = gpu_memory.Needs({"weights": 10.0 * GIB}, token=8 * 2**20, logits=2.0 * GIB, sampling={"keys": 5.0 * GIB})
    config = Config.load(KEYS | {"rollout.batch-size": 96, "policy.max-sequence-length": 500})
    # .8 x 80 = 64: 42 GiB are left for 4 MiB a token, 10752 tokens
    assert gpu_memory._fitting(config, {"SFT": small}, 80 * GIB) == 8192
    # sampling takes more than the logits: 64 - 15 = 49 GiB for 8 MiB a token, 6272 tokens
    assert gpu_memory._fitting(config, {"SFT": small, "PPO": large}, 80 * GIB) == 4096
    assert gpu_memory._fitting(config, {"SFT": small}, 20 * GIB) == gpu_memory.LEAST_TOKENS
    assert gpu_memory._fitting(config, {"SFT": small}, 9999 * GIB) == 65536  # 96 x 500 = 48000 are all there are


def test_tokens_are_left_to_the_machine_where_the_key_is_0(folders, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "appa.server")
    config = config_for(folders["gemma2"], "qlora", **{"ppo.micro-batch-tokens": 0})
    given = config_for(folders["gemma2"], "qlora", **{"ppo.micro-batch-tokens": 700})
    assert gpu_memory.with_tokens(given, given.model) is given
    assert gpu_memory.with_tokens(config, config.model).ppo.micro_batch_tokens == 2048  # a CPU's
    assert caplog.messages == ["ppo.micro-batch-tokens = 0: 2048 tokens a pass"]
    need = estimated(config, free=MEMORY)["PPO"]  # of a model so small that SFT needs less
    free = (need.at_most(0) + 300 * need.token) / gpu_memory.SHARE
    with pretended_cuda():
        found = gpu_memory.with_tokens(config, config.model)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(free), MEMORY))
        less = gpu_memory.with_tokens(config, config.model)
    assert found.flat() == {**config.flat(), "ppo.micro-batch-tokens": 512}  # 8 answers of 40 tokens are 320
    assert less.ppo.micro_batch_tokens == 256
    assert caplog.messages[1].startswith("GPU memory, GiB of 80.0 free: SFT ")
    assert caplog.messages[2] == "ppo.micro-batch-tokens = 0: 512 tokens a pass"


def test_what_a_run_needs_is_told_with_its_parts_and_refused_where_it_does_not_fit(folders, monkeypatch, capsys):
    config = config_for(folders["gemma2"], "qlora", **{"ppo.micro-batch-tokens": 2000})
    text = gpu_memory.told(config)
    assert text.startswith("an estimate for qlora in bfloat16, GiB at most (parts): SFT 0.")
    assert "a pass of 2000 tokens" in text
    assert text.endswith("; there is no GPU here")
    monkeypatch.setattr(gpu_memory, "_free", lambda: 8 * GIB)
    assert gpu_memory.told(config).endswith("; 8.0 free on the first GPU")
    monkeypatch.setattr(gpu_memory, "_free", lambda: GIB // 64)
    with pytest.raises(UserError, match=r"; 0\.0 free on the first GPU: too little; lower ppo\.micro-batch-tokens"):
        gpu_memory.told(config)
    monkeypatch.setattr("sys.argv", ["preflight", "--memory"])
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(config.flat())))
    with pytest.raises(SystemExit, match="2"):
        preflight.main()
    assert "too little" in capsys.readouterr().out
    assert gpu_memory.told(Config.load({})) == "the tiny policy fits any GPU"


@pytest.mark.parametrize(
    ("gib", "numbers"),
    # at 24 bytes a number, 2^26 fill 1.5 GiB, a sixteenth of 24
    [(16, 2**26), (24, 2**26), (47, 2**26), (48, 2**27), (80, 2**27), (140, 2**28)],
)
def test_a_block_of_logits_grows_with_the_card(gib, numbers):
    assert logits_at_once("cuda", memory=gib * GIB) == numbers
    assert logits_at_once("cpu", memory=gib * GIB) == logits_at_once("cpu")
