"""OpenRLHF's and verl's own code calls our reward functions on a served run; `make conformance` fetches them for it.

What needs a GPU or a cluster is stubbed: vLLM, the tokenizer, verl's containers. The calls, and what is made of the
rewards, are theirs.
"""

import asyncio
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from runs import MEAN_OF_TWO, TWO, rounds_of, serving

from appa_flwr.reward_client import engines

ENGINES = Path(os.environ.get("APPA_ENGINES", ""))
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("APPA_ENGINES" not in os.environ, reason="make conformance fetches the engines"),
]
PROMPT = "<|im_start|>What about topic 0? scores:"


@pytest.fixture
def service(tmp_path):
    with serving(tmp_path):
        yield tmp_path


def loaded(name, monkeypatch, **stubs):
    """An engine's module, without what the packages around it import; stubs are modules' contents."""
    parts = name.split(".")
    packages = [".".join(parts[:cut]) for cut in range(1, len(parts))]
    for module in (*packages, *stubs):
        made = ModuleType(module)
        made.__path__ = [str(ENGINES / module.replace(".", "/"))]
        vars(made).update(stubs.get(module, {}))
        monkeypatch.setitem(sys.modules, module, made)
    return importlib.import_module(name)


class Tokenizer:
    """A token a character."""

    def __call__(self, text, **_):
        return {"input_ids": torch.tensor([[ord(letter) for letter in text]])}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(int(one)) for one in ids)


class Engine:
    """vLLM's, which has one answer."""

    async def generate(self, ids, parameters, multi_modal_data=None):
        written = [ord(letter) for letter in f"{TWO[0]}<|im_end|>"]
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=written, finish_reason="stop", logprobs=None)])


def test_openrlhf_s_executor(service, monkeypatch):
    agent = loaded("openrlhf.utils.agent", monkeypatch, aiohttp={})
    executor = agent.SingleTurnAgentExecutor([engines.__file__])
    sampling = SimpleNamespace(max_tokens=60, logprobs=None)
    found = asyncio.run(executor.execute(PROMPT, "Q0", sampling, 200, Tokenizer(), Engine()))
    assert found["reward"] == found["scores"] == pytest.approx(MEAN_OF_TWO[0])
    assert found["extra_logs"] == {"alignment": pytest.approx(0.8), "format": 1.0}
    assert [line.size for line in rounds_of(service, "openrlhf")] == [1]


class Data:
    """Of verl's DataProto what its reward manager reads."""

    def __init__(self):
        ids = torch.tensor([ord(letter) for letter in TWO[0]])
        self.batch = {"responses": ids, "attention_mask": torch.ones(len(PROMPT) + len(ids), dtype=torch.long)}
        row = {"data_source": "appa", "reward_model": {"style": "rule", "ground_truth": "Q0"}, "extra_info": {}}
        self.non_tensor_batch = row

    def __getitem__(self, key):
        return self


def test_verl_s_naive_reward_manager(service, monkeypatch):
    stubs = {
        "verl": {"DataProto": Data},
        "verl.utils": {},
        "verl.utils.ray_utils": {"get_event_loop": asyncio.get_event_loop},
        "verl.utils.reward_score": {"default_compute_score": None},
        "verl.experimental.reward_loop.reward_manager": {"register": lambda name: lambda kind: kind},
        "omegaconf": {"DictConfig": dict},
    }
    naive = loaded("verl.experimental.reward_loop.reward_manager.naive", monkeypatch, **stubs)

    async def run():
        return await naive.NaiveRewardManager({}, Tokenizer(), engines.compute_score).run_single(Data())

    found = asyncio.run(run())
    assert found["reward_score"] == pytest.approx(MEAN_OF_TWO[0])
    assert found["reward_extra_info"]["alignment"] == pytest.approx(0.8)
