"""Two steps of TRL's GRPO on a served run, as `accelerate launch` starts it; what it was given goes to files.

accelerate launch --num_processes 2 --cpu tests/train_served.py FOLDER TRAINER [--resume]
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import torch.distributed
from datasets import Dataset
from served import CATALOGUE
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from appa_flwr.trainers.trl import RemoteGroupRewards

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
STEPS, BATCH = 2, 4
FIXED = [f"{share / 100:.2f},{1 - share / 100:.2f}" for share in range(3, 99, 8)]


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


def fixed_rewards(rank: int, processes: int) -> list[float | None]:
    """The rewards of this process's share of answers that are always the same."""
    share = len(FIXED) // processes
    texts = FIXED[rank * share : (rank + 1) * share]
    asked = {"prompts": texts, "completions": texts, "question_id": [f"Q{n % 2}" for n in range(len(texts))]}
    return asyncio.run(RemoteGroupRewards(run=f"fixed-{processes}").group_reward(**asked))


def train(folder: Path, name: str, *, per_device: int, resume: bool = False) -> tuple[Dressed, object]:
    """Train the model of the folder."""
    trainer, settings = TRAINERS[name]
    rewards = Dressed(run=name)
    arguments = settings(
        output_dir=str(folder / "out"),
        max_steps=STEPS + 2 * resume,
        per_device_train_batch_size=per_device,
        num_generations=2,
        max_completion_length=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    rows = [{"prompt": q.text, "question_id": q.question_id} for q in CATALOGUE.questions[:2]]
    running = trainer(
        str(folder / "model") if name == "rloo" else AutoModelForCausalLM.from_pretrained(folder / "model"),
        rewards.group_reward,
        arguments,
        Dataset.from_list(rows * BATCH),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    running.train(resume_from_checkpoint=resume)
    return rewards, running


def main() -> None:
    """As the module says."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    rewards, running = train(folder, name, per_device=2, resume="--resume" in sys.argv)
    rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = {
        "returned": rewards.returned,
        "log": running.state.log_history,
        "fixed": fixed_rewards(rank, processes),
        "backend": torch.distributed.get_backend(),
    }
    (folder / f"found.{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
