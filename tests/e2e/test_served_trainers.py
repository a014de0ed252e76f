"""TRL's trainers on a served run: in this process, and in two that `accelerate` starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from served import CATALOGUE, serving
from train_served import BATCH, STEPS, fixed_rewards, train
from transformers import AutoModelForCausalLM

from appa_flwr.run.served import ServedRuns
from appa_flwr.trainers import client
from server_app.models import tiny
from server_app.models.tiny import TinyRecipe

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    recipe = TinyRecipe("dpa", steps=1, batch_size=2, hidden_size=32, num_layers=1, num_heads=2)
    built, tokenizer = tiny.build(recipe, CATALOGUE.questions)
    built.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with serving(tmp_path) as (_, url, token):
        monkeypatch.setenv(client.URL, url)
        monkeypatch.setenv(client.TOKEN, token)
        yield tmp_path


def rounds(folder, run):
    store = ServedRuns(folder)
    try:
        return store.rounds(run)
    finally:
        store.close()


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_two_steps_in_one_process(folder, name):
    before = dict(AutoModelForCausalLM.from_pretrained(folder / "model").named_parameters())
    rewards, running = train(folder, name, per_device=BATCH)
    found = rounds(folder, name)
    assert [line.round for line in found] == [1, 1001]
    assert [line.size for line in found] == [BATCH] * STEPS
    # The trainer's own log holds what came from the groups.
    lines = [line for line in running.state.log_history if "reward" in line]
    assert [line["rewards/group_reward/mean"] for line in lines] == pytest.approx(
        [np.mean(values) for values in rewards.returned]
    )
    assert [line["group_reward/group/A"] for line in lines] == pytest.approx([line.rewards["A"] for line in found])
    assert any(not torch.equal(before[name], p) for name, p in running.model.named_parameters())


def launched(folder, *more):
    # By its name of several GPUs, for else accelerate starts processes on CPUs by MPI alone; `use_cpu` makes it gloo.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(TESTS / "train_served.py"), str(folder), "grpo", *more],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"found.{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.long
def test_two_processes_train_and_get_the_rewards_of_one_bit_for_bit(folder):
    first, second = launched(folder)
    assert first["backend"] == second["backend"] == "gloo"
    assert first["fixed"] + second["fixed"] == fixed_rewards(0, 1)
    found = rounds(folder, "grpo")
    assert [(line.round, line.size, line.exact) for line in found] == [(1, 4, True), (1001, 4, True)]
    for step, line in enumerate(found):
        assert line.reward == pytest.approx(np.mean(first["returned"][step] + second["returned"][step]))
    launched(folder, "--resume")  # its checkpoint is of the second step
    assert [(line.round, line.attempt) for line in rounds(folder, "grpo")] == [(n * 1000 + 1, 0) for n in range(4)]
