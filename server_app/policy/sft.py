"""Supervised fine-tuning on the groups' votes (section "SFT Baseline and Majority Aggregation"), by TRL's SFTTrainer.

Axis letters: G groups, Q questions, K options.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback
from trl import SFTConfig, SFTTrainer

from appa_flwr.config import Config
from appa_flwr.core.arrays import BoolArray, FloatArray, IntArray
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import formats
from server_app.policy.base import Base
from server_app.policy.limits import TOKENS, Budget, NotFinite, finite_logits
from server_app.policy.logprobs import response_logprobs, shared_prefix
from server_app.policy.lora_product import round_once
from server_app.policy.models import lora_config
from server_app.policy.sequences import Sequences, pad, split_prompts

MAX_PASS = 32  # most answers in a forward pass
IGNORED_LABEL = -100  # label of tokens without a loss in TRL's collator
LORA_DROPOUT = 0.05  # of SFT's adapter (SFT table)


def sft_targets(votes_GQK: FloatArray, option_QK: BoolArray, *, target: str) -> FloatArray:
    """Compute SFT's target answers (Q, K), 0 on padding, from the groups' votes, as scores for `formats.answer`.

    Votes are one-hot (DPA), K..1 by rank (OPA) or distributions. Targets:

    - "majority": 1 on the option with most votes (DPA), or the most frequent full ranking (OPA). Ties go to the earlier
      option, or to the ranking that has earlier options first.
    - "votes": the vote shares; "smoothed-votes": the shares after one more vote for every option (Laplace's estimate).
      For rankings both order the options by mean rank score.
    - "mean" and "predicted-mean": the mean distribution.
    """
    if target == "majority":
        chosen_QK = np.zeros(option_QK.shape)
        for q in range(votes_GQK.shape[1]):
            ballots, counts = np.unique(votes_GQK[:, q], axis=0, return_counts=True)  # sorted, earlier options last
            chosen_QK[q] = ballots[::-1][counts[::-1].argmax()]
        return chosen_QK
    mean_QK = np.where(option_QK, votes_GQK.mean(0), 0.0)
    if target != "smoothed-votes":
        return mean_QK
    # For rankings this changes all scores of a question alike, so the order of the options stays.
    number = len(votes_GQK)
    return np.where(option_QK, (number * mean_QK + 1) / (number + option_QK.sum(1, keepdims=True)), 0.0)


def passes_of_texts(
    config: Config, scores_QK: FloatArray, option_QK: BoolArray, train_J: IntArray
) -> list[tuple[int, str]]:
    """Return (question, answer text) of every SFT row, for all passes over the questions.

    Each pass rounds probabilities to `sft.answer-step` up or down at random, so that answers are right on average.
    """
    rows = config.sft.steps * config.sft.batch_size
    passes = math.ceil(rows / len(train_J)) if rows else config.sft.epochs
    rng = np.random.default_rng(child_seed(config.seed, "sft.rounding"))
    return [
        (int(q), formats.answer(config.task, scores_QK[q][option_QK[q]], step=config.sft.answer_step, rng=rng))
        for _ in range(passes)
        for q in train_J
    ]


class _Report(TrainerCallback):  # type: ignore[misc]
    def __init__(self, progress: Callable[[int, int, float], None]) -> None:
        self._progress = progress

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self._progress(state.global_step, state.max_steps, float(logs["loss"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log |= state.global_step == state.max_steps


class _LeanTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer with PPO's forward pass: runs the common prefix once, computes logits of answers only."""

    def __init__(self, model: nn.Module, *, tokens: int, **options: Any) -> None:
        super().__init__(model, **options)
        self._budget = Budget(TOKENS, tokens)
        self._causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The settings' schedule, with a warm-up of a tenth of the steps, rounded down.

        Transformers rounds up and begins at 0: of up to ten steps the first would be lost, which may be the only one.
        """
        self.args.warmup_steps = num_training_steps // 10
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Backpropagate and return -sum log p / `num_items_in_batch` (all answer tokens of the optimizer step)."""
        model.train()
        batch = self._sequences(inputs)
        count = int(batch.mask_JT.sum()) if num_items_in_batch is None else int(num_items_in_batch)
        rows_J = torch.arange(len(batch.mask_JT), device=batch.mask_JT.device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        earlier = [parameter.grad for parameter in trained]  # from earlier batches of this optimizer step

        def passes(tokens: int) -> Tensor:
            for parameter, gradient in zip(trained, earlier, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            total = torch.zeros((), device=rows_J.device)
            with shared_prefix(self._causal.base_model, batch.prefix_C) as prefix:
                for rows in batch.micro_batches(rows_J, tokens=tokens):
                    logprob_JT = response_logprobs(self._causal, batch.rows(rows), temperature=1.0, prefix=prefix)
                    loss = -logprob_JT.sum() / count
                    loss.backward()
                    total += loss.detach()
            return total

        loss = self._budget.run(passes)
        if not loss.isfinite():
            raise NotFinite("sft.learning-rate")
        return loss

    def _sequences(self, inputs: dict[str, Tensor]) -> Sequences:
        real_JL, answer_JL = inputs["attention_mask"].bool(), inputs["labels"] != IGNORED_LABEL
        rows = list(zip(inputs["input_ids"], real_JL & ~answer_JL, answer_JL, strict=True))
        answers = [ids[answer].tolist() for ids, _, answer in rows]
        response_JT, mask_JT = pad(answers, device=real_JL.device)
        prompts = [ids[prompt].tolist() for ids, prompt, _ in rows]
        split = split_prompts(self._causal, prompts, response_length=response_JT.shape[1])
        return Sequences(*split, response_JT, mask_JT)


def dataset(base: Base, prompts: Sequence[Sequence[int]], answers: Sequence[str]) -> Dataset:
    """Rows for the trainer: prompt, answer and end token, with a mask of the tokens that count in the loss."""
    ids = {text: base.tokenizer(text, add_special_tokens=False)["input_ids"] for text in {*answers}}
    completions = [[*ids[text], base.end_id] for text in answers]
    rows = {
        "input_ids": [[*p, *c] for p, c in zip(prompts, completions, strict=True)],
        "completion_mask": [[0] * len(p) + [1] * len(c) for p, c in zip(prompts, completions, strict=True)],
    }
    return Dataset.from_dict(rows)


def arguments(config: Config, folder: Path, *, cpu: bool) -> SFTConfig:
    """The trainer's settings (SFT table)."""
    batch_size = config.sft.batch_size
    pass_size = next(size for size in range(min(batch_size, MAX_PASS), 0, -1) if batch_size % size == 0)
    settings = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=pass_size,
        gradient_accumulation_steps=batch_size // pass_size,
        learning_rate=config.sft.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,  # of all steps, see `create_scheduler`
        weight_decay=0.01,
        num_train_epochs=1,  # see `passes_of_texts`
        max_steps=config.sft.steps or -1,
        max_length=config.policy.max_sequence_length,
        completion_only_loss=True,
        bf16=False,  # the trainer computes in the dtype of the weights
        use_cpu=cpu,
        gradient_checkpointing=False,
        seed=config.seed,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    # Use the first GPU only, which holds the model. Transformers would spread the batch over all GPUs, which TRL
    # refuses. No public setting exists; Transformers itself sets `_n_gpu` for a model that lies on many GPUs.
    settings._n_gpu = min(settings.n_gpu, 1)
    return settings


def make_trainer(
    model: PreTrainedModel,
    base: Base,
    config: Config,
    rows: Dataset,
    *,
    folder: Path,
    callbacks: Sequence[TrainerCallback] = (),
) -> SFTTrainer:
    """Build the trainer of `fine_tune`; it may write into `folder`."""
    trained: PreTrainedModel | PeftModel = model
    torch.manual_seed(child_seed(config.seed, "sft"))  # the adapter is made before the trainer sets its seed
    if config.policy.tuning != "full":
        model.name_or_path = base.hub_id or base.source  # the saved adapter names this as its base model
        adapter = lora_config(config, config.policy.sft_lora_modules, dropout=LORA_DROPOUT)
        trained = get_peft_model(model, adapter)  # in float32, also on a base of 16 bits
        round_once(trained)
    return _LeanTrainer(
        trained,
        args=arguments(config, folder, cpu=model.device.type == "cpu"),
        train_dataset=rows,
        processing_class=base.tokenizer,
        callbacks=list(callbacks),
        tokens=config.ppo.micro_batch_tokens,
    )


def fine_tune(
    model: PreTrainedModel,
    base: Base,
    config: Config,
    *,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[str],
    folder: Path,
    progress: Callable[[int, int, float], None],
) -> None:
    """Fine-tune on pairs of prompt ids and answer text; only the answer's tokens count (SFT table, "Loss masking").

    The tokenizer and the adapter, or with `policy.tuning = "full"` the model, are saved to `folder`, not returned:
    accelerate wraps the trained model's `forward` in a closure, so a copy of the model, such as PPO's frozen reference,
    would still compute with the weights of the original. `progress` is called with (step, steps, loss).

    Raises:
        NotFinite: a loss, or a logit of the trained model, is infinite or NaN.
    """
    with tempfile.TemporaryDirectory(prefix="appa-sft-") as scratch:
        rows = dataset(base, prompts, answers)
        trainer = make_trainer(model, base, config, rows, folder=Path(scratch), callbacks=[_Report(progress)])
        trainer.train()
    trained = trainer.model.eval()
    if not finite_logits(trained):
        raise NotFinite("sft.learning-rate")
    # The saved model generates with these settings; without them it would not stop at the end tokens of this run.
    model.generation_config.eos_token_id = list(base.stop_ids)
    # the vocabulary has not changed; otherwise PEFT asks the hub whether it has
    trained.save_pretrained(folder, **({} if trained is model else {"save_embedding_layers": False}))
    base.tokenizer.save_pretrained(folder)
