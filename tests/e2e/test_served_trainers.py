"""TRL's GRPO on a served run; its RLOO calls rewards in the same way."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from served import CATALOGUE, rounds_of, serving
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from appa_flwr.trainers.trl import RemoteGroupRewards
from server_app.policy import tiny
from server_app.policy.tiny import TinyRecipe

BATCH = 4


class Dressed(RemoteGroupRewards):
    """A random model writes no answers, so the length of its noise decides which answer is scored in its place."""

    def __init__(self, **keys):
        super().__init__(**keys)
        self.returned = []

    async def group_reward(self, prompts, completions, **columns):
        shares = [len(text) % 10 / 10 for text in completions]
        dressed = [f"{share:.2f},{1 - share:.2f}" for share in shares]
        self.returned.append(await super().group_reward(prompts, dressed, **columns))
        return self.returned[-1]


@pytest.fixture
def folder(tmp_path):
    recipe = TinyRecipe("dpa", steps=1, batch_size=2, hidden_size=32, num_layers=1, num_heads=2)
    built, tokenizer = tiny.build(recipe, CATALOGUE.questions)
    built.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with serving(tmp_path):
        yield tmp_path


def test_two_steps_in_one_process(folder):
    rewards, model = Dressed(run="grpo"), str(folder / "model")
    arguments = GRPOConfig(
        output_dir=str(folder / "out"),
        max_steps=2,
        per_device_train_batch_size=BATCH,
        num_generations=2,
        max_completion_length=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    rows = [{"prompt": q.text, "question_id": q.question_id} for q in CATALOGUE.questions[:2]]
    running = GRPOTrainer(
        model,
        rewards.group_reward,
        arguments,
        Dataset.from_list(rows * BATCH),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    before = {name: p.clone() for name, p in running.model.named_parameters()}
    running.train()
    found = rounds_of(folder, "grpo")
    assert [(line.round, line.size) for line in found] == [(1, BATCH), (1001, BATCH)]
    # The trainer's own log holds what came from the groups.
    lines = [line for line in running.state.log_history if "reward" in line]
    assert [line["rewards/group_reward/mean"] for line in lines] == pytest.approx(
        [np.mean(values) for values in rewards.returned]
    )
    assert [line["group_reward/group/A"] for line in lines] == pytest.approx([line.rewards["A"] for line in found])
    assert any(not torch.equal(before[name], p) for name, p in running.model.named_parameters())
