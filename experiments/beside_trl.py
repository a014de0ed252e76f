"""Benchmark: our PPO and TRL 1.12's PPOTrainer, our SFT and TRL's SFTTrainer, in CPU seconds of one thread.

    python -m experiments.beside_trl --trl-python TRL_ENVIRONMENT/bin/python    # without the option only SFT

Both sides of a case get the same random model, prompts, answer lengths and optimizer steps. They run in separate
processes, so that one's freed memory cannot hide the other's use. TRL's PPO runs without our packages.

Axis letters: J rollouts, V vocabulary.
"""

import itertools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import psutil
import tokenizers
import torch
import transformers
import typer
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from appa_flwr.core.errors import UserError

SEED = 0
PAD_ID, EOS_ID, FIRST_WORD = range(3)
SHORTEST_ANSWER, LONGEST_ANSWER = 10, 25  # lengths of answers that end
LORA_RANK, LORA_TARGETS = 16, ["q_proj", "k_proj", "v_proj", "o_proj"]
LORA: dict[str, Any] = {"r": LORA_RANK, "lora_alpha": 2 * LORA_RANK, "target_modules": LORA_TARGETS}
PPO_EPOCHS = 2
TRL_MICRO_BATCH, TRL_MINI_BATCHES = 4, 8  # as in the paper; TRL still takes one optimizer step per epoch
LOSSES_APART = 1e-3  # largest difference, due to different orders of summation
FAR = 1e4  # size of a logit that decides at any temperature

_SIZES = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers")
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
QWEN3 = dict(zip(_SIZES + _HEADS, ("qwen3", 128, 512, 4, 4, 2, 32), strict=True))
SMOLLM2 = dict(zip(_SIZES + _HEADS, ("llama", 576, 1536, 30, 9, 3, 64), strict=True))


@dataclass(frozen=True)
class Workload:
    """One case: a model of these `sizes` in `folder`, and the lengths of its prompts and answers.

    All prompts begin with the same `prefix` tokens, followed by `shortest` to `longest` tokens of their own. PPO's
    answers have 60 tokens, or 10 to 25 if `ends`. One more update than `updates` is run, for warm-up.
    """

    prefix: int = 220
    shortest: int = 15
    longest: int = 70
    rollouts: int = 96
    ends: bool = False
    updates: int = 1
    vocabulary: int = 1024
    sizes: dict[str, Any] = field(default_factory=lambda: QWEN3)
    folder: str = ""

    def rows(self) -> list[tuple[list[int], list[int]]]:
        """Random prompts and answers for SFT, one pair for each rollout of all updates, as token ids."""
        rng = random.Random(SEED)

        def tokens(fewest: int, most: int) -> list[int]:
            return rng.choices(range(FIRST_WORD, self.vocabulary), k=rng.randint(fewest, most))

        prefix = tokens(self.prefix, self.prefix)
        return [
            (prefix + tokens(self.shortest, self.longest), [*tokens(SHORTEST_ANSWER, LONGEST_ANSWER), EOS_ID])
            for _ in range(self.rollouts * (1 + self.updates))
        ]

    @property
    def adapter(self) -> Path:
        """Folder of the adapter over which our PPO trains, as after SFT."""
        return Path(self.folder) / "adapter"

    def save_model(self) -> None:
        """Write the model with random weights, and a new adapter, which changes nothing."""
        torch.manual_seed(SEED)
        ids = {"vocab_size": self.vocabulary, "pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}
        config = transformers.AutoConfig.for_model(**self.sizes, **ids, tie_word_embeddings=True)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(self.folder)
        get_peft_model(model, LoraConfig(**LORA, task_type="CAUSAL_LM")).save_pretrained(self.adapter)


CASES = {
    "forced": Workload(),
    "natural": Workload(ends=True),
    "nothing-shared": Workload(prefix=0, shortest=16, longest=32),
    "vocabulary-32k": Workload(prefix=0, shortest=16, longest=32, vocabulary=32_000),
    "sft": Workload(shortest=50, longest=130, rollouts=8, vocabulary=49_152, sizes=SMOLLM2),
}


@contextmanager
def answer_lengths(model: Any, *, ends: bool) -> Iterator[None]:
    """Within the context one rollout of the model never ends a row or, if `ends`, ends rows after 10 to 25 tokens.

    These lengths are equally likely, no matter how a trainer sorts, splits or shortens its rows.
    """
    numbers = itertools.count(1)

    def after_head(_: Any, args: tuple[Any, ...], logits: Tensor) -> None:
        number = next(numbers)
        logit_JV = logits if logits.ndim == 2 else logits[:, -1]
        logit_JV[:, [PAD_ID, EOS_ID]] = -FAR
        if ends and number >= SHORTEST_ANSWER:
            logit_JV[torch.rand(len(logit_JV)) < 1 / max(LONGEST_ANSWER + 1 - number, 1), EOS_ID] = FAR

    hook = model.get_output_embeddings().register_forward_hook(after_head)
    try:
        yield
    finally:
        hook.remove()


class Recorder(transformers.TrainerCallback):  # type: ignore[misc]
    """Measures updates in this process: a trainer calls `on_train_begin`, and `on_step_end` after each update."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Record the state before the first update."""
        self._steps = list[object]()
        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._steps.append(optimizer))
        self._resident = psutil.Process().memory_info().rss
        self._times = [time.process_time()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the end of an update."""
        self._times.append(time.process_time())

    def measured(self) -> dict[str, float]:
        """Median CPU seconds of an update after the first, optimizer steps, and MiB added to the resident set."""
        self._hook.remove()
        added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - self._resident / 2**20
        return {"CPU s": float(np.median(np.diff(self._times)[1:])), "MiB added": added, "steps": len(self._steps)}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer with only two special tokens, since all texts are given as token ids."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": PAD_ID, "<eos>": EOS_ID}, "<pad>"))
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


def our_ppo(work: Workload) -> dict[str, float]:
    """Run the updates with our engine; the reward is 1 if an answer begins with an odd token id, else 0."""
    from appa_flwr.config import Config, Scalar
    from server_app.policy.base import Base
    from server_app.policy.models import load_policy
    from server_app.policy.ppo import PPOEngine

    keys: dict[str, Scalar] = {"policy.tuning": "lora", "policy.lora-rank": LORA_RANK, "ppo.epochs": PPO_EPOCHS}
    keys |= {"policy.ppo-lora-modules": ",".join(LORA_TARGETS), "ppo.num-mini-batches": 1, "ppo.baseline": "value"}
    config = Config.load({**keys, "ppo.answers-per-question": 1, "ppo.batch-size": work.rollouts})
    models = load_policy(config, Base(work.folder, tokenizer(), EOS_ID, (EOS_ID,)), work.adapter)
    engine = PPOEngine(models, config.ppo, num_iterations=1 + work.updates, stop_ids=(EOS_ID,), seed=SEED)
    sample = answer_lengths(models.policy, ends=work.ends)(engine.rollout)
    prompts, recorder = [prompt for prompt, _ in work.rows()], Recorder()
    recorder.on_train_begin()
    for first in range(0, len(prompts), work.rollouts):
        rollout = sample(prompts[first : first + work.rollouts])
        reference = engine.reference_pass(rollout.sequences)
        engine.update(rollout, reference, (rollout.sequences.response_JT[:, 0] % 2).float())
        recorder.on_step_end()
    return recorder.measured()


class _OddIds(nn.Module):
    """Reward model that detects odd token ids; TRL calls the method named by `base_model_prefix`, then `score`."""

    base_model_prefix = "forward"
    score = nn.Identity()

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(hidden_states=[(input_ids % 2).float().unsqueeze(-1)])


def trl_ppo(work: Workload) -> dict[str, float]:
    """Run the updates with TRL's PPOTrainer, with LoRA policy and value on two copies of the model.

    The loader has one batch more than updates: in the loader's last batch TRL would take 48 optimizer steps, because
    Accelerate ends gradient accumulation with the loader.
    """
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    prompts: Any = [{"input_ids": prompt} for prompt, _ in work.rows()]
    value = transformers.AutoModelForSequenceClassification.from_pretrained(work.folder, num_labels=1)
    args = PPOConfig(
        output_dir=f"{work.folder}/trained",
        per_device_train_batch_size=TRL_MICRO_BATCH,
        gradient_accumulation_steps=work.rollouts // TRL_MICRO_BATCH,
        num_mini_batches=TRL_MINI_BATCHES,
        num_ppo_epochs=PPO_EPOCHS,
        total_episodes=len(prompts),
        response_length=60,
        stop_token="eos",
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=False,
    )
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer(),
        model=transformers.AutoModelForCausalLM.from_pretrained(work.folder),
        ref_model=None,
        reward_model=_OddIds(),
        value_model=get_peft_model(value, LoraConfig(**LORA, task_type="SEQ_CLS", modules_to_save=["score"])),
        train_dataset=prompts,
        eval_dataset=prompts[:1],
        peft_config=LoraConfig(**LORA, task_type="CAUSAL_LM"),
    )
    batches: dict[str, Any] = {"batch_size": work.rollouts, "collate_fn": trainer.data_collator}
    trainer.dataloader = trainer.accelerator.prepare(DataLoader(prompts + prompts[: work.rollouts], **batches))
    policy, recorder = trainer.policy_model, Recorder()
    policy.generate = answer_lengths(policy.get_base_model(), ends=work.ends)(policy.generate)
    trainer.add_callback(recorder)
    trainer.train()
    return recorder.measured()


def sft(work: Workload, *, ours: bool) -> dict[str, float]:
    """Run the updates with our trainer or, if not `ours`, with TRL's trainer on plain rows."""
    from datasets import Dataset
    from trl import SFTTrainer

    from appa_flwr.config import Config, Scalar
    from server_app.policy.base import Base, load_model
    from server_app.policy.models import lora_config
    from server_app.policy.sft import LORA_DROPOUT, arguments, make_trainer

    keys: dict[str, Scalar] = {"policy.tuning": "lora"}
    keys |= {"sft.steps": 1 + work.updates, "sft.batch-size": work.rollouts, "sft.learning-rate": 5e-6}
    config = Config.load({**keys, "ppo.micro-batch-tokens": 600})  # as in preset smollm2
    model = load_model(config, work.folder, quantized=False)
    rows = [{"input_ids": p + a, "completion_mask": [0] * len(p) + [1] * len(a)} for p, a in work.rows()]
    dataset, folder, recorder = Dataset.from_list(rows), Path(work.folder) / "trained", Recorder()
    if ours:
        base = Base(work.folder, tokenizer(), EOS_ID, (EOS_ID,))
        trainer = make_trainer(model, base, config, dataset, folder=folder, callbacks=[recorder])
    else:
        args = arguments(config, folder, cpu=True)
        args.warmup_steps = args.max_steps // 10  # as our trainer's schedule
        adapter = lora_config(config, config.policy.sft_lora_modules, dropout=LORA_DROPOUT)
        more: dict[str, Any] = {"processing_class": tokenizer(), "peft_config": adapter}
        trainer = SFTTrainer(model, args=args, train_dataset=dataset, callbacks=[recorder], **more)
    return {"loss": trainer.train().training_loss, **recorder.measured()}


def run_side(python: str, side: Callable[..., dict[str, float]], work: Workload, **more: bool) -> dict[str, float]:
    """Measure a side in a process of this Python; if it fails, prints its output and raises UserError."""
    call = f"module.{side.__name__}(module.Workload(**json.load(sys.stdin)), **{more})"
    code = f"import json, sys; from experiments import beside_trl as module; print('\\n', json.dumps({call}))"
    alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **alone, "PYTHONPATH": str(Path(__file__).parents[1])}
    pipes: dict[str, Any] = {"input": json.dumps(asdict(work)), "capture_output": True, "text": True}
    done = subprocess.run([python, "-c", code], env=environment, check=False, **pipes)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        raise UserError(f"{side.__name__} by {python} ended with status {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(
    trl_python: Annotated[str, typer.Option(help="Python of an environment with trl==1.12.0; else SFT alone.")] = "",
) -> None:
    """Compare PPO with TRL's PPOTrainer and SFT with its SFTTrainer."""
    for name, case in CASES.items() if trl_python else (("sft", CASES["sft"]),):
        with tempfile.TemporaryDirectory() as folder:
            work = replace(case, folder=folder)
            work.save_model()
            if name == "sft":
                ours, trl = (run_side(sys.executable, sft, work, ours=side) for side in (True, False))
            else:
                ours, trl = run_side(sys.executable, our_ppo, work), run_side(trl_python, trl_ppo, work)
        if ours["steps"] != trl["steps"] or abs(ours.get("loss", 0) - trl.get("loss", 0)) > LOSSES_APART:
            raise RuntimeError(f"{name}: the sides did other work: {ours}, TRL {trl}")
        for unit in ("CPU s", "MiB added"):
            typer.echo(f"{name}: {ours[unit]:.2f} {unit}, TRL {trl[unit]:.2f}, ratio {ours[unit] / trl[unit]:.2f}")


if __name__ == "__main__":
    from experiments import entry

    entry.run(main)
