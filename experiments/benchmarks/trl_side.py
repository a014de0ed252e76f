"""TRL 1.12's PPOTrainer on a workload; run in its own environment by `ppo_vs_trl`.

    python -m experiments.benchmarks.trl_side WORKLOAD.json RESULT.json

TRL's loop stays as it is. Its phases are timed around the functions that the loop calls, and the loader is replaced by
one that keeps the prompts' order. Its last batch would take 48 optimizer steps, because Accelerate ends gradient
accumulation with the loader; so the loader has one batch more than there are updates.

Axis letters: J rollouts, L tokens, V vocabulary.
"""

from __future__ import annotations

import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import trl.experimental.ppo.ppo_trainer as loop
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from experiments.benchmarks import workload as plan
from experiments.benchmarks.measure import Measured, Recorder, main
from experiments.benchmarks.workload import EOS_ID, PAD_ID, Workload

# The paper's PPO table; 4 x 24 = 96 rollouts. The mini-batches have no effect on TRL's optimizer steps.
MICRO_BATCH, NUM_MINI_BATCHES = 4, 8
ROLLOUT_FORWARD_BATCH = 64


class KeepToPlan(LogitsProcessor):  # type: ignore[misc]
    """Makes `generate` end each row where the workload says."""

    def __init__(self, prompt_mask_JL: Tensor, *, ends: bool) -> None:
        self._prompt_J, self._width, self._ends = prompt_mask_JL.sum(1), prompt_mask_JL.shape[1], ends

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See base class."""
        number = input_ids.shape[1] - self._width + 1
        plan.steer(scores, self._prompt_J + number, number=number, ends=self._ends)
        return scores


class EvenShare(nn.Module):
    """The share of even token ids so far in the shape of a reward model: a backbone whose last hidden state is it."""

    base_model_prefix = "backbone"

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _EvenShareSoFar()
        self.score = nn.Identity()


class _EvenShareSoFar(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SimpleNamespace:
        even_JL = ((input_ids % 2 == 0) & attention_mask).float().cumsum(1)
        return SimpleNamespace(hidden_states=[(even_JL / attention_mask.cumsum(1).clamp(min=1)).unsqueeze(-1)])


class Instruments(TrainerCallback):  # type: ignore[misc]
    """Measures what the loop does in each update."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._length_J: list[int] = []

    def instrument(self, trainer: Any) -> None:
        """Time the functions that the loop looks up by name when it calls them."""
        models = trainer.policy_model, trainer.value_model
        trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
        self.recorder = Recorder(self._workload, trained)
        timed = self.recorder.stopwatch.timed
        loop.batch_generation = self._counted(timed(loop.batch_generation, lambda *_: "generate"))
        loop.forward = timed(loop.forward, lambda *_: "update forward" if torch.is_grad_enabled() else "reference")
        loop.get_reward = timed(
            loop.get_reward, lambda model, *_: "value" if model is trainer.value_model else "reward"
        )
        trainer.accelerator.backward = timed(trainer.accelerator.backward, lambda *_, **__: "backward")
        trainer.optimizer.optimizer.register_step_post_hook(self.recorder.count_step)
        generate = trainer.policy_model.generate

        def generate_to_plan(**kwargs: Any) -> Any:
            keep = KeepToPlan(kwargs["attention_mask"], ends=self._workload.ends)
            return generate(**kwargs, logits_processor=LogitsProcessorList([keep]))

        trainer.policy_model.generate = generate_to_plan

    def _counted(self, generation: Any) -> Any:
        def call(model: Any, query_JL: Tensor, *args: Any) -> Any:
            found = generation(model, query_JL, *args)
            self._length_J = (found[0][:, query_JL.shape[1] :] != PAD_ID).sum(1).tolist()
            return found

        return call

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """See base class."""
        self.recorder.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """See base class."""
        self.recorder.close(self._length_J)


def make_trainer(workload: Workload, instruments: Instruments, folder: str) -> Any:
    """TRL's trainer with LoRA policy and value on two copies of the model; the reference is the policy's base."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(
            models.WordLevel({"<pad>": PAD_ID, "<eos>": EOS_ID, "<unk>": plan.UNKNOWN_ID}, "<unk>")
        ),
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )
    rollouts = len(workload.batches[0])
    prompts = [{"input_ids": ids} for batch in workload.batches for ids in batch]
    lora: dict[str, Any] = {"r": plan.LORA_RANK, "lora_alpha": plan.LORA_ALPHA, "target_modules": [*plan.LORA_TARGETS]}
    value = AutoModelForSequenceClassification.from_pretrained(workload.model, num_labels=1, dtype=torch.float32)
    args = PPOConfig(
        output_dir=folder,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=rollouts // MICRO_BATCH,
        num_mini_batches=NUM_MINI_BATCHES,
        num_ppo_epochs=plan.PPO_EPOCHS,
        total_episodes=rollouts * len(workload.batches),
        response_length=workload.response_length,
        local_rollout_forward_batch_size=ROLLOUT_FORWARD_BATCH,
        temperature=plan.TEMPERATURE,
        learning_rate=plan.LEARNING_RATE,
        kl_coef=0.05,
        cliprange=0.2,
        cliprange_value=0.2,
        vf_coef=0.2,
        gamma=1.0,
        lam=0.95,
        whiten_rewards=True,
        stop_token="eos",
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=workload.seed,
    )
    trainer = PPOTrainer(
        args,
        tokenizer,
        AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32),
        None,
        EvenShare(),
        Dataset.from_list(prompts),
        get_peft_model(value, LoraConfig(**lora, task_type="SEQ_CLS", modules_to_save=["score"])),
        eval_dataset=Dataset.from_list(prompts[:1]),
        callbacks=[instruments],
        peft_config=LoraConfig(**lora, task_type="CAUSAL_LM"),
    )
    spare = prompts[:rollouts]
    trainer.dataloader = trainer.accelerator.prepare(
        DataLoader(prompts + spare, batch_size=rollouts, collate_fn=trainer.data_collator)  # type: ignore[arg-type]
    )
    return trainer


def measure(workload: Workload) -> Measured:
    """Run the workload's updates."""
    torch.manual_seed(workload.seed)
    instruments = Instruments(workload)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(workload, instruments, folder)
        instruments.instrument(trainer)
        trainer.train()
    return instruments.recorder.measured("torch", "transformers", "peft", "trl")


if __name__ == "__main__":
    main(measure)
