"""The whole loop on a pretended GPU: nothing is left on the host, and the numbers are those of the CPU.

Attention is eager, for on the CPU the project's own takes sdpa's place, and rounds otherwise.
"""

from __future__ import annotations

import json
import math
import zlib

import families
import numpy as np
import pytest
import torch
from pretended_cuda import NAME, pretended_cuda
from safetensors.torch import load_file
from whole_loop import SMALL, lines_of, run_of

from appa_flwr.config import Config
from server_app import evaluation, machine
from server_app.federation.answers import Answers
from server_app.federation.catalogue import build_catalogue
from server_app.ppo import rollouts, strategy
from server_app.ppo.engine import PPOEngine

SHORT = {"sft.steps": 2, "policy.attention": "eager"}
NF4 = {"policy.tuning": "qlora", "policy.compute-dtype": "bfloat16"}
FULL = {"policy.tuning": "full", "policy.compute-dtype": "float32"}
BY_QUESTION = {"rollout.answers-per-question": 4, "ppo.baseline": "question"}


@pytest.fixture(autouse=True)
def no_row_leaves_the_batch(monkeypatch):
    """On a GPU rows leave later, so that those that stay would meet other random numbers."""
    monkeypatch.setattr(rollouts, "COMPACT_BELOW", 0.0)


@pytest.fixture(autouse=True)
def every_answer_is_read(monkeypatch):
    """As some prediction: models of random weights write none, and without rewards nothing would be learned."""

    def read(task, texts, question_J, catalogue):
        option_JK = catalogue.option_QK[question_J]
        share_JK = option_JK * [
            np.random.default_rng(zlib.crc32(text.encode())).random(option_JK.shape[1]) for text in texts
        ]
        every_J = np.ones(len(texts), dtype=bool)
        return Answers(question_J, tuple(texts), share_JK / share_JK.sum(1, keepdims=True), every_J * 1.0, every_J)

    for module in (strategy, evaluation):
        monkeypatch.setattr(module, "parse_answers", read)


class Killed(BaseException):
    """Nothing that a run could catch."""


def model_for(folder, family):
    return str(families.save(family, folder / "model", build_catalogue(Config.load(SMALL)).questions))


def told(config):
    """What a run leaves behind that does not depend on time: iterations, scores, and the policy's weights."""
    folder = config.run_folder
    iterations = [{key: value for key, value in line.items() if key != "seconds"} for line in lines_of(folder)]
    (weights,) = (folder / "policy").glob("*model.safetensors")
    return iterations, json.loads((folder / "summary.json").read_text()), load_file(weights)


def same(one, other):
    assert one[:2] == other[:2]
    assert one[2].keys() == other[2].keys()
    assert all(torch.equal(tensor, other[2][name]) for name, tensor in one[2].items())


@pytest.fixture
def killed_in_the_second_iteration(monkeypatch):
    """Once."""
    rollout, seen = PPOEngine.rollout, []

    def dying(self, prompts):
        seen.append(prompts)
        if len(seen) == 2:
            raise Killed
        return rollout(self, prompts)

    monkeypatch.setattr(PPOEngine, "rollout", dying)


@pytest.mark.parametrize(
    ("family", "keys", "gpus"),
    [
        ("gemma2", NF4, 2),
        pytest.param("llama", NF4 | {"lora.export": "merged"}, 1, marks=pytest.mark.long),
        pytest.param("qwen3", FULL, 1, marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("killed_in_the_second_iteration")
def test_a_run_that_is_killed_and_resumed_is_the_cpus(family, keys, gpus, tmp_path):
    keys = SHORT | keys | {"model": model_for(tmp_path, family), "run.checkpoint-every": 1}
    with pretended_cuda(gpus=gpus) as device:
        with pytest.raises(Killed):
            run_of(tmp_path / "gpu", **keys)
        there = told(run_of(tmp_path / "gpu", **keys, **{"run.resume": True}))
        assert device.counts.kernels.total() > 10_000  # it was not the CPU
    assert len(there[0]) == 2
    assert there[0][1]["kl"]  # the policy has left the reference
    same(there, told(run_of(tmp_path / "cpu", **keys)))


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_several_answers_a_question(family, tmp_path):
    """In other chunks than on a CPU, so that sums round otherwise."""
    keys = SHORT | BY_QUESTION | {"model": model_for(tmp_path, family), "policy.compute-dtype": "float32"}
    with pretended_cuda():
        there = lines_of(run_of(tmp_path / "gpu", **keys).run_folder)
    here = lines_of(run_of(tmp_path / "cpu", **keys).run_folder)
    for key in ("policy_loss", "kl", "entropy", "reward"):
        assert [line[key] for line in there] == pytest.approx([line[key] for line in here], abs=1e-4)


@pytest.mark.long
def test_answers_by_transformers_generate(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "why_not", lambda model: "a test says so")
    keys = SHORT | {"model": model_for(tmp_path, "qwen3"), "policy.compute-dtype": "float32"}
    with pretended_cuda():
        there = told(run_of(tmp_path / "gpu", **keys))
    here = told(run_of(tmp_path / "cpu", **keys))
    # Losses of passes over whole prompts differ by 1e-8 in most runs, not in all; Adam makes more of it in the weights.
    for one, other in zip(there[0], here[0], strict=True):
        assert one["rewards"] == other["rewards"]
        assert all(one[key] == pytest.approx(other[key], abs=1e-5) for key in ("policy_loss", "value_loss", "kl"))
    assert there[1] == here[1]


@pytest.mark.long
def test_the_tiny_policy_is_built_and_trained_in_bfloat16(tmp_path):
    keys = {"policy.base-steps": 20, "policy.prompt-style": "compact", "rollout.response-length": 48}
    keys["policy.compute-dtype"] = "auto"
    with pretended_cuda():
        lines = lines_of(run_of(tmp_path, **(SHORT | {"policy.attention": "auto"} | keys)).run_folder)
    assert all(math.isfinite(line[key]) for line in lines for key in ("policy_loss", "kl", "sampler_spread"))


def test_a_run_says_which_gpu(tmp_path):
    with pretended_cuda():
        assert machine.described(tmp_path).endswith(NAME)
