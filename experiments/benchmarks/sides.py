"""PPO's two sides: what each is given, how it is measured, and TRL's side, which runs in an environment of its own.

So this module needs nothing but what TRL needs. Model folder, prompts and the lengths of the answers are one JSON file.

Axis letters: J rollouts, L tokens, V vocabulary.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

TRL_VERSION = "1.12.0"
PAD_ID, EOS_ID, UNKNOWN_ID = 0, 1, 2
NUM_SPECIAL = 3

# The paper's PPO table, but for the optimizer steps: TRL takes one an epoch, whatever its mini-batches.
LORA_RANK, LORA_ALPHA = 16, 32
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
PPO_EPOCHS = 2
TEMPERATURE = 0.6
LEARNING_RATE = 1e-5
MICRO_BATCH, NUM_MINI_BATCHES = 4, 8  # TRL's alone

SHORTEST_ANSWER, ANSWER_CYCLE = 10, 16
"""Answers that end on their own have 10 to 25 tokens; see `planned_length`."""

_FAR = 1e4  # a logit this far out is certain at any temperature, and finite in every number format
MIB = 2**20
_SAMPLING_SECONDS = 0.005


@dataclass(frozen=True)
class Workload:
    """One case of a benchmark: a model's folder, prompts as token ids by update, the first of which warms up.

    Where `ends`, answers end as `planned_length` says, otherwise all reach `response_length`. `config` holds keys of
    our run config that differ from `engine.KEYS`; `shared_prefix` says whether our side computes what all prompts begin
    with once a batch.
    """

    model: str
    batches: list[list[list[int]]]
    response_length: int
    ends: bool
    config: dict[str, bool | int | float | str] = field(default_factory=dict)
    shared_prefix: bool = True
    seed: int = 0

    def planned_lengths(self, update: int) -> list[int]:
        """Tokens that each answer of an update must have."""
        lengths = [
            planned_length(len(prompt)) if self.ends else self.response_length for prompt in self.batches[update]
        ]
        return [min(length, self.response_length) for length in lengths]


def planned_length(prompt_length: int) -> int:
    """Tokens of an answer that ends on its own: the fewest, from 10 on, that bring the row to a multiple of 16.

    A rule on positions needs no bookkeeping of rows, so it holds however a trainer sorts or splits its batch.
    """
    return SHORTEST_ANSWER + -(prompt_length + SHORTEST_ANSWER) % ANSWER_CYCLE


def steer(logit_JV: Tensor, position_J: Tensor, *, number: int, ends: bool) -> None:
    """Change the next token's logits in place so that it keeps to the plan.

    `position_J` are the tokens that each row will have with it, padding not counted; `number` is its place in its
    answer, from 1.
    """
    logit_JV[:, [PAD_ID, EOS_ID]] = -_FAR
    if ends and number >= SHORTEST_ANSWER:
        logit_JV[position_J % ANSWER_CYCLE == 0, EOS_ID] = _FAR


@dataclass(frozen=True)
class Update:
    """One update as it was measured; seconds are of CPU, the whole process's, or of wall clock where there is a GPU."""

    seconds: float
    wall: float
    rollout: float
    reference: float
    optimizer_steps: int

    @property
    def update(self) -> float:
        """Seconds of all that is no rollout and no pass of reference or value."""
        return self.seconds - self.rollout - self.reference


@dataclass(frozen=True)
class Measured:
    """All that a side reports, the warm-up left out but for memory.

    Memory is what there was before the first update, and how far it rose above that; the changes are the largest of a
    parameter.
    """

    updates: list[Update]
    baseline_mib: float
    added_mib: float
    policy_change: float
    value_change: float


def now() -> float:
    """Seconds of this process's CPU time, or of the wall clock where a GPU computes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


class PeakMemory:
    """Watches memory from `start` on: the GPU's where there is one, else the process's resident set."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.baseline_mib = 0.0
        self._peak = 0

    def start(self) -> None:
        """Take the baseline."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.baseline_mib = torch.cuda.memory_allocated() / MIB
            return
        self._peak = self._process.memory_info().rss
        self.baseline_mib = self._peak / MIB
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLING_SECONDS):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def stop(self) -> float:
        """MiB above the baseline."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() / MIB - self.baseline_mib
        self._done.set()
        self._thread.join()
        return self._peak / MIB - self.baseline_mib


class Recorder:
    """Measures a workload's updates in this process; `trained` are the parameters of the policy and of the value."""

    def __init__(self, workload: Workload, trained: Sequence[Sequence[Tensor]]) -> None:
        self._memory, self._workload, self._trained = PeakMemory(), workload, trained
        self._before = [[parameter.detach().clone() for parameter in model] for model in trained]
        self._updates: list[Update] = []

    def start(self) -> None:
        """Take the baselines."""
        self._memory.start()
        self._restart()

    def _restart(self) -> None:
        self._spent = {"rollout": 0.0, "reference": 0.0}
        self._steps = 0
        self._started = now(), time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; blocks of one name add up within an update."""
        started = now()
        yield
        self._spent[name] += now() - started

    def timed(self, name: str, function: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Any:
        """`function`, timed under this phase where `when` says so of its arguments."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name) if when(*args) else nullcontext():
                return function(*args, **kwargs)

        return call

    def count_step(self, *_: Any) -> None:
        """To be called after every optimizer step."""
        self._steps += 1

    def close(self, lengths: list[int]) -> None:
        """End an update whose answers have these lengths, and begin the next one.

        Raises:
            RuntimeError: they are not those planned.
        """
        (began, wall), number = self._started, len(self._updates)
        update = Update(now() - began, time.perf_counter() - wall, **self._spent, optimizer_steps=self._steps)
        if lengths != self._workload.planned_lengths(number):
            raise RuntimeError(f"update {number}: answers of other lengths than planned: {lengths}")
        self._updates.append(update)
        self._restart()

    def measured(self) -> Measured:
        """All that was found."""
        added = self._memory.stop()
        changes = (
            max(float((now.detach() - was).abs().max()) for now, was in zip(model, before, strict=True))
            for model, before in zip(self._trained, self._before, strict=True)
        )
        return Measured(self._updates[1:], self._memory.baseline_mib, added, *changes)


def answer(measure: Callable[[Workload], Measured]) -> None:
    """Measure the workload of the command's first file, and write what was found into the second."""
    source, result = map(Path, sys.argv[1:])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as the side that started this one says
    workload = Workload(**json.loads(source.read_text()))
    torch.manual_seed(workload.seed)
    result.write_text(json.dumps(asdict(measure(workload)), indent=1))


class _KeepToPlan(transformers.LogitsProcessor):  # type: ignore[misc]
    """Makes `generate` end each row where the workload says."""

    def __init__(self, prompt_mask_JL: Tensor, *, ends: bool) -> None:
        self._prompt_J, self._width, self._ends = prompt_mask_JL.sum(1), prompt_mask_JL.shape[1], ends

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        number = input_ids.shape[1] - self._width + 1
        steer(scores, self._prompt_J + number, number=number, ends=self._ends)
        return scores


class _EvenShare(nn.Module):
    """The share of even token ids so far, in the shape of a reward model: a backbone whose last hidden state is it."""

    base_model_prefix = "backbone"

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _EvenShareSoFar()
        self.score = nn.Identity()


class _EvenShareSoFar(nn.Module):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SimpleNamespace:
        even_JL = ((input_ids % 2 == 0) & attention_mask).float().cumsum(1)
        return SimpleNamespace(hidden_states=[(even_JL / attention_mask.cumsum(1).clamp(min=1)).unsqueeze(-1)])


class _Instruments(transformers.TrainerCallback):  # type: ignore[misc]
    """Measures what TRL's loop does in each update, which stays as it is."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._length_J: list[int] = []

    def instrument(self, trainer: Any, loop: Any) -> None:
        """Time the functions that the loop looks up by name when it calls them."""
        models = trainer.policy_model, trainer.value_model
        trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
        self.recorder = Recorder(self._workload, trained)
        timed = self.recorder.timed
        loop.batch_generation = self._counted(timed("rollout", loop.batch_generation))
        loop.forward = timed("reference", loop.forward, lambda *_: not torch.is_grad_enabled())
        loop.get_reward = timed("reference", loop.get_reward, lambda model, *_: model is trainer.value_model)
        trainer.optimizer.optimizer.register_step_post_hook(self.recorder.count_step)
        generate = trainer.policy_model.generate

        def generate_to_plan(**kwargs: Any) -> Any:
            keep = _KeepToPlan(kwargs["attention_mask"], ends=self._workload.ends)
            return generate(**kwargs, logits_processor=transformers.LogitsProcessorList([keep]))

        trainer.policy_model.generate = generate_to_plan

    def _counted(self, generation: Any) -> Any:
        def call(model: Any, query_JL: Tensor, *args: Any) -> Any:
            found = generation(model, query_JL, *args)
            self._length_J = (found[0][:, query_JL.shape[1] :] != PAD_ID).sum(1).tolist()
            return found

        return call

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.recorder.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.recorder.close(self._length_J)


def make_trainer(workload: Workload, instruments: _Instruments, folder: str) -> Any:
    """TRL's trainer with LoRA policy and value on two copies of the model; the reference is the policy's base.

    Its loader keeps the prompts' order, and has one batch more than there are updates: the last one would take 48
    optimizer steps, because Accelerate ends gradient accumulation with the loader.
    """
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer, models
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": PAD_ID, "<eos>": EOS_ID, "<unk>": UNKNOWN_ID}, "<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )
    rollouts = len(workload.batches[0])
    prompts = [{"input_ids": ids} for batch in workload.batches for ids in batch]
    lora: dict[str, Any] = {"r": LORA_RANK, "lora_alpha": LORA_ALPHA, "target_modules": [*LORA_TARGETS]}
    value = transformers.AutoModelForSequenceClassification.from_pretrained(
        workload.model, num_labels=1, dtype=torch.float32
    )
    args = PPOConfig(
        output_dir=folder,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=rollouts // MICRO_BATCH,
        num_mini_batches=NUM_MINI_BATCHES,
        num_ppo_epochs=PPO_EPOCHS,
        total_episodes=rollouts * len(workload.batches),
        response_length=workload.response_length,
        local_rollout_forward_batch_size=64,
        temperature=TEMPERATURE,
        learning_rate=LEARNING_RATE,
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
        transformers.AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32),
        None,
        _EvenShare(),
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


def trl(workload: Workload) -> Measured:
    """Run the workload's updates by TRL's PPOTrainer.

    Raises:
        RuntimeError: it is another TRL than this was written for.
    """
    if (found := importlib.metadata.version("trl")) != TRL_VERSION:
        raise RuntimeError(f"needs trl=={TRL_VERSION}, found {found}; see docs/benchmarks.md")
    import trl.experimental.ppo.ppo_trainer as loop

    instruments = _Instruments(workload)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(workload, instruments, folder)
        instruments.instrument(trainer, loop)
        trainer.train()
    return instruments.recorder.measured()
