"""PPO's two sides: what each is given, how it is measured, and TRL's side, which runs in an environment of its own.

So this module needs nothing but what TRL needs.

Axis letters: J rollouts, L tokens, V vocabulary.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

SEED = 0
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
_SAMPLING_SECONDS = 0.005
_PROCESS = psutil.Process()


@dataclass(frozen=True)
class Workload:
    """One case of a benchmark: a model's folder, how its prompts are drawn, and how long its answers are.

    All prompts begin with the same `prefix` tokens, after which come `shortest` to `longest` of their own, all below
    `vocabulary`. A batch has so many `rollouts`, and asks each prompt for so many `answers`. Where `ends`, answers end
    as `planned_length` says, otherwise all reach `response_length`. `config` holds keys of our run config that differ
    from `engine.KEYS`; `shared_prefix` says whether our side computes what all prompts begin with once a batch.
    """

    model: str = ""
    vocabulary: int = 1024
    prefix: int = 220
    shortest: int = 15
    longest: int = 70
    rollouts: int = 24
    answers: int = 1
    updates: int = 2
    response_length: int = 60
    ends: bool = False
    config: dict[str, bool | int | float | str] = field(default_factory=dict)
    shared_prefix: bool = True

    @cached_property
    def batches(self) -> list[list[list[int]]]:
        """Random prompts as token ids for each update, before which one warms up."""
        rng = random.Random(SEED)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(NUM_SPECIAL, self.vocabulary) for _ in range(count)]

        prefix, batches = tokens(self.prefix), []
        for _ in range(1 + self.updates):
            lengths = (rng.randint(self.shortest, self.longest) for _ in range(self.rollouts // self.answers))
            asked = [prefix + tokens(length) for length in lengths]
            batches.append([prompt for prompt in asked for _ in range(self.answers)])
        return batches

    def planned_lengths(self, update: int) -> list[int]:
        """Tokens that each answer of an update must have."""
        if not self.ends:
            return [self.response_length] * self.rollouts
        return [min(planned_length(len(prompt)), self.response_length) for prompt in self.batches[update]]

    def check(self, update: int, lengths: list[int]) -> None:
        """Raise where an update's answers have other lengths than planned."""
        if lengths != self.planned_lengths(update):
            raise RuntimeError(f"update {update}: answers of other lengths than planned: {lengths}")


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


@contextmanager
def keeping_to_plan(model: Any, *, ends: bool) -> Iterator[None]:
    """While it lasts, one rollout from the model ends each row where the workload says.

    It watches which positions go into the decoder and changes the logits that come out of the head, once a token, and
    needs to know nothing of how a trainer orders, splits or shortens its rows. The prompt's pass may leave the
    positions to the model: they are not needed before an answer may end.
    """
    position_J, number = torch.empty(0), 0

    def before_decoder(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal position_J
        if kwargs.get("position_ids") is not None:
            position_J = kwargs["position_ids"][:, -1] + 2  # counted from 0, and of the token before

    def after_head(_: Any, args: tuple[Any, ...], logits: Tensor) -> None:
        nonlocal number
        number += 1
        steer(logits if logits.ndim == 2 else logits[:, -1], position_J, number=number, ends=ends)

    hooks = [
        model.base_model.register_forward_pre_hook(before_decoder, with_kwargs=True),
        model.get_output_embeddings().register_forward_hook(after_head),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def now() -> float:
    """Seconds of this process's CPU time, or of the wall clock where a GPU computes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


class PeakMemory(threading.Thread):
    """Watches memory from `start` on: the GPU's where there is one, else the process's resident set."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._done = threading.Event()

    def start(self) -> None:
        """Take the baseline."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._baseline = self._peak = self._held()
        super().start()

    def _held(self) -> int:
        """Bytes: the most since the baseline on a GPU, where no moment is missed; else those of this moment."""
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _PROCESS.memory_info().rss

    def run(self) -> None:
        """Look, in a thread of its own."""
        while not self._done.wait(_SAMPLING_SECONDS):
            self._peak = max(self._peak, self._held())

    def stop(self) -> float:
        """MiB above the baseline."""
        self._done.set()
        self.join()
        return (max(self._peak, self._held()) - self._baseline) / 2**20


Update = dict[str, float]
"""One update as it was measured; seconds are of CPU, the whole process's, or of wall clock where there is a GPU.

Seconds of `rollout`, of `reference` (its pass and that of the value), of `update` (all else) and of all of it
(`total`), and by the clock (`wall`); optimizer `steps`; MiB that memory `added` to what there was before the first
update, which warms up; and the largest change of a parameter of the `policy` and of the `value` in the whole run.
"""


class Recorder(transformers.TrainerCallback):  # type: ignore[misc]
    """Measures updates in this process: from `start` on, which a trainer calls as its callback, to each `close`.

    `trained` are parameters by model.
    """

    def __init__(self, **trained: Sequence[Tensor]) -> None:
        self._updates, self._memory = list[Update](), PeakMemory()
        self._trained = {name: [(p, p.detach().clone()) for p in model] for name, model in trained.items()}

    def start(self, *_: Any, **__: Any) -> None:
        """Take the baselines."""
        self._hook = register_optimizer_step_post_hook(lambda *_: self._spend("steps", 1))
        self._memory.start()
        self._restart()

    def _restart(self) -> None:
        self._spent = {"rollout": 0.0, "reference": 0.0, "steps": 0.0}
        self._began, self._wall = now(), time.perf_counter()

    def _spend(self, name: str, amount: float) -> None:
        self._spent[name] += amount

    def timed(self, name: str, function: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Any:
        """`function`, whose seconds add up under this name where `when` says so of its arguments."""

        def call(*args: Any, **kwargs: Any) -> Any:
            started = now()
            found = function(*args, **kwargs)
            if when(*args):
                self._spend(name, now() - started)
            return found

        return call

    def close(self, *_: Any, **__: Any) -> None:
        """End an update, and begin the next one."""
        total, wall = now() - self._began, time.perf_counter() - self._wall
        rest = total - self._spent["rollout"] - self._spent["reference"]
        self._updates.append({**self._spent, "update": rest, "total": total, "wall": wall})
        self._restart()

    on_train_begin, on_step_end = start, close

    def measured(self) -> list[Update]:
        """All updates but the one that warms up."""
        self._hook.remove()
        changed = {n: max(float((p.detach() - was).abs().max()) for p, was in of) for n, of in self._trained.items()}
        of_all = {"added": self._memory.stop(), **changed}
        return [{**update, **of_all} for update in self._updates[1:]]


def answer(measure: Callable[[Workload], list[Update]]) -> None:
    """Measure the workload that standard input holds, and print what was found as the last line."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as the side that started this one says
    workload = Workload(**json.load(sys.stdin))
    torch.manual_seed(SEED)
    print(f"\n{json.dumps(measure(workload))}")


class _EvenShare(nn.Module):
    """The share of even token ids so far, as a reward model: TRL calls what the prefix names, and then `score`."""

    base_model_prefix = "forward"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SimpleNamespace:
        even_JL = ((input_ids % 2 == 0) & attention_mask).float().cumsum(1)
        return SimpleNamespace(hidden_states=[(even_JL / attention_mask.cumsum(1).clamp(min=1)).unsqueeze(-1)])

    def score(self, state_JL1: Tensor) -> Tensor:
        return state_JL1


def instrument(trainer: Any, loop: Any, workload: Workload) -> Recorder:
    """Measure what TRL's loop does in each update, which stays as it is, and make its answers keep to plan.

    What is replaced are functions that the loop looks up by name when it calls them.
    """
    policy, value = trainer.policy_model, trainer.value_model
    policy_weights, value_weights = ([p for p in model.parameters() if p.requires_grad] for model in (policy, value))
    recorder, numbers = Recorder(policy=policy_weights, value=value_weights), itertools.count()
    batch_generation, generate = recorder.timed("rollout", loop.batch_generation), policy.generate

    def checked(model: Any, query_JL: Tensor, *args: Any) -> Any:
        found = batch_generation(model, query_JL, *args)
        workload.check(next(numbers), (found[0][:, query_JL.shape[1] :] != PAD_ID).sum(1).tolist())
        return found

    def to_plan(**kwargs: Any) -> Any:
        with keeping_to_plan(policy.get_base_model(), ends=workload.ends):
            return generate(**kwargs)

    loop.batch_generation, policy.generate = checked, to_plan
    loop.forward = recorder.timed("reference", loop.forward, lambda *_: not torch.is_grad_enabled())
    loop.get_reward = recorder.timed("reference", loop.get_reward, lambda model, *_: model is value)
    return recorder


def make_trainer(workload: Workload, folder: str) -> Any:
    """TRL's trainer with LoRA policy and value on two copies of the model; the reference is the policy's base.

    Its loader keeps the prompts' order, and has one batch more than there are updates: the last one would take 48
    optimizer steps, because Accelerate ends gradient accumulation with the loader. What is not given here is the
    paper's by default.
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
        temperature=TEMPERATURE,
        learning_rate=LEARNING_RATE,
        vf_coef=0.2,
        whiten_rewards=True,
        stop_token="eos",
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=SEED,
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
        peft_config=LoraConfig(**lora, task_type="CAUSAL_LM"),
    )
    spare = prompts[:rollouts]
    trainer.dataloader = trainer.accelerator.prepare(
        DataLoader(prompts + spare, batch_size=rollouts, collate_fn=trainer.data_collator)  # type: ignore[arg-type]
    )
    return trainer


def trl(workload: Workload) -> list[Update]:
    """Run the workload's updates by TRL's PPOTrainer, of the version that this was written for."""
    if (found := importlib.metadata.version("trl")) != TRL_VERSION:
        raise RuntimeError(f"needs trl=={TRL_VERSION}, found {found}; see docs/benchmarks.md")
    import trl.experimental.ppo.ppo_trainer as loop

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(workload, folder)
        recorder = instrument(trainer, loop, workload)
        trainer.add_callback(recorder)
        trainer.train()
    return recorder.measured()
