"""Supervised fine-tuning on the groups' votes (section "SFT Baseline and Majority Aggregation"), by TRL's SFTTrainer.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback
from trl import SFTConfig, SFTTrainer

from appa_flwr.config import Config, split_names
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import formats
from server_app.policy.base import Base
from server_app.policy.logprobs import TOKENS, Budget, NotFinite, finite_logits, response_logprobs, shared_prefix
from server_app.policy.models import ALPHA_PER_RANK
from server_app.policy.one_product import round_once
from server_app.policy.sequences import Sequences, pad, split_prompts

FloatArray = npt.NDArray[np.float64]

MAX_PASS = 32  # answers of a forward pass
IGNORED_LABEL = -100  # of tokens without a loss, as TRL's collator marks them
LORA_DROPOUT = 0.05  # of the adapter while it learns (SFT table)


def sft_targets(votes_GQK: FloatArray, option_QK: npt.NDArray[np.bool_], *, target: str) -> FloatArray:
    """Count the votes: what SFT should answer, as scores for `formats.answer`.

    Args:
        votes_GQK: each group's votes: one-hot (DPA), K..1 by rank (OPA) or distributions (`mean`).
        option_QK: True for real options.
        target: "majority": all of it on the option with most votes (DPA), or the most frequent full ranking (OPA);
            "votes": the vote shares; "smoothed-votes": the shares as if every option had one vote more, Laplace's
            estimate of the shares among like groups; for rankings both are the mean rank scores; "mean" and
            "predicted-mean": the mean distribution.

    Returns:
        (Q, K), 0 on padding. Ties go to the earlier option, or to the ranking that the earlier groups gave.
    """
    if target != "majority":
        return targets_of_mean(votes_GQK.mean(0), option_QK, target=target, num_groups=votes_GQK.shape[0])
    chosen_QK = np.zeros(option_QK.shape)
    for q in range(votes_GQK.shape[1]):
        ballots, first, counts = np.unique(votes_GQK[:, q], axis=0, return_index=True, return_counts=True)
        chosen_QK[q] = ballots[np.lexsort((first, -counts))[0]]
    return chosen_QK


def targets_of_mean(
    mean_QK: FloatArray, option_QK: npt.NDArray[np.bool_], *, target: str, num_groups: int
) -> FloatArray:
    """The same from the mean of so many groups' votes (Q, K); a majority of equals is the first option."""
    mean_QK = np.where(option_QK, mean_QK, 0.0)
    if target == "smoothed-votes":
        # Of rankings this changes every score alike, so their order stays.
        return np.where(option_QK, (num_groups * mean_QK + 1) / (num_groups + option_QK.sum(1, keepdims=True)), 0.0)
    if target == "majority":
        return np.where(np.arange(mean_QK.shape[1]) == mean_QK.argmax(axis=1)[:, None], 1.0, 0.0)
    return mean_QK


def passes_of_texts(
    config: Config, scores_QK: FloatArray, option_QK: npt.NDArray[np.bool_], train_J: npt.NDArray[np.int64]
) -> list[tuple[int, str]]:
    """(question, text) for every row that SFT is given, in all passes over the questions.

    Probabilities are rounded to `sft.answer-step` up or down at random, anew in each pass: right on average, and less
    is learned by heart.
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


class _LeanTrainer(SFTTrainer):  # type: ignore[misc]
    """TRL's trainer with PPO's pass for a step: the common prompt once, logits of answers only, few rows at a time."""

    def __init__(self, model: nn.Module, *, tokens: int, **options: Any) -> None:
        super().__init__(model, **options)
        self._budget = Budget(TOKENS, tokens)
        self._causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Send -sum log p / `num_items_in_batch` (all answer tokens of the optimizer step) backward, and return it."""
        model.train()
        batch = self._sequences(inputs)
        count = int(batch.mask_JT.sum()) if num_items_in_batch is None else int(num_items_in_batch)
        rows_J = torch.arange(len(batch.mask_JT), device=batch.mask_JT.device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        earlier = [parameter.grad for parameter in trained]  # of the step's batches before this one

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


def adapter(config: Config) -> LoraConfig:
    """SFT's adapter (SFT table)."""
    return LoraConfig(
        r=config.policy.lora_rank,
        lora_alpha=ALPHA_PER_RANK * config.policy.lora_rank,
        lora_dropout=LORA_DROPOUT,
        target_modules=list(split_names(config.policy.sft_targets)),
        task_type="CAUSAL_LM",
    )


def dataset(base: Base, prompts: Sequence[Sequence[int]], answers: Sequence[str]) -> Dataset:
    """Rows for the trainer: each prompt with its answer and the end token, and which of it is taught."""
    completions = [[*base.tokenizer(text, add_special_tokens=False)["input_ids"], base.end_id] for text in answers]
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
        warmup_steps=0.1,  # of all steps
        weight_decay=0.01,
        num_train_epochs=1,  # see `passes_of_texts`
        max_steps=config.sft.steps or -1,
        max_length=config.policy.max_sequence_length,
        completion_only_loss=True,
        bf16=False,  # the trainer computes in the weights' own format
        use_cpu=cpu,
        gradient_checkpointing=False,
        seed=config.seed,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    # Of several GPUs the first, where the model is: Transformers would spread the batch over all of them, which TRL
    # refuses. No setting says so; this is how Transformers itself does it for a model that lies on many GPUs.
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
    """The trainer of `fine_tune`; `rows` are those of `dataset`, and it may write into `folder`."""
    trained: PreTrainedModel | PeftModel = model
    torch.manual_seed(child_seed(config.seed, "sft"))  # the adapter is drawn here, before the trainer sets its seed
    if config.policy.tuning != "full":
        model.name_or_path = base.hub_id or base.source  # the adapter's folder names it as its base
        trained = get_peft_model(model, adapter(config))  # in float32, also on a base of 16 bits
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
    """Fine-tune on prompt and answer pairs; only the answer's tokens count (SFT table, "Loss masking").

    The result goes to a folder and not back to the caller: accelerate wraps the trained model's `forward` in a closure,
    so that a copy of it, such as PPO's frozen reference, would go on computing with the original's weights.

    Args:
        model: causal LM, of no use afterwards.
        base: its tokenizer.
        config: the SFT keys; with `tuning = "lora"` an adapter is trained.
        prompts: token ids.
        answers: what to answer, one text a prompt.
        folder: where the adapter, or with `tuning = "full"` the model, goes, beside the tokenizer.
        progress: called with (step, steps, loss).

    Raises:
        NotFinite: a loss, or the model after its last step, is infinite or NaN.
    """
    with tempfile.TemporaryDirectory(prefix="appa-sft-") as scratch:
        rows = dataset(base, prompts, answers)
        trainer = make_trainer(model, base, config, rows, folder=Path(scratch), callbacks=[_Report(progress)])
        trainer.train()
    trained = trainer.model.eval()
    if not finite_logits(trained):
        raise NotFinite("sft.learning-rate")
    # Whoever loads the result generates by these settings, and would run past an end that only the run knows.
    model.generation_config.eos_token_id = list(base.stop_ids)
    # the vocabulary is as it was: PEFT would ask the hub whether it is
    trained.save_pretrained(folder, **({"save_embedding_layers": False} if trained is not model else {}))
    base.tokenizer.save_pretrained(folder)
