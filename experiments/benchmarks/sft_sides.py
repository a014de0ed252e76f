"""SFT's optimizer step, by TRL's trainer as it is and by ours, on the same rows.

A side is measured in a process of its own, so that memory it gives back cannot hide what the other one takes.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from trl import SFTTrainer

from appa_flwr.config import Config, Scalar
from experiments.benchmarks.measure import PeakMemory, Stopwatch
from server_app.models import sft
from server_app.models.base import Base, load_model

OURS, TRL = "ours", "TRL"
WARM_UP = 1  # optimizer steps before those that count
DRAWN_STD = 0.02
BATCH_KEYS: dict[str, Scalar] = {
    "policy.compute-dtype": "float32",
    "lora.dropout": 0.0,
    "sft.gradient-accumulation-steps": 1,
    "sft.steps": 1,
}
"""For one loss of one batch: what rounding and chance would add is left out."""


@dataclass(frozen=True)
class Rows:
    """Prompts as token ids, and what is taught as their answers."""

    prompts: Sequence[Sequence[int]]
    answers: Sequence[str]

    def first(self, number: int) -> Rows:
        """The first rows."""
        return Rows(self.prompts[:number], self.answers[:number])


@dataclass(frozen=True)
class Side:
    """What a side took: CPU seconds of each counted step, memory as in `Measured`, and its loss of one batch."""

    cpu: list[float]
    baseline_mib: float
    added_mib: float
    loss: float


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Times a trainer's optimizer steps and watches its memory from before the first one."""

    def __init__(self) -> None:
        self.memory, self._stopwatch = PeakMemory(), Stopwatch()
        self.cpu: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.memory.start()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._stopwatch.restart()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.cpu.append(self._stopwatch.lap()[0].cpu)


def make_trainer(
    side: str, base: Base, config: Config, rows: Rows, *, folder: Path, callbacks: Sequence[TrainerCallback] = ()
) -> SFTTrainer:
    """A side's trainer on a model of its own: the base in the config's number format, with a new adapter.

    TRL's gets what it had before ours took its place: plain rows, its own adapter, and autocast in bfloat16.
    """
    model = load_model(config, base.source, quantized=False)
    dataset = sft.dataset(base, rows.prompts, rows.answers)
    if side == OURS:
        return sft.make_trainer(model, base, config, dataset, folder=folder, callbacks=callbacks)
    autocast = config.policy.compute_dtype == "bfloat16"
    return SFTTrainer(
        model,
        args=sft.arguments(config, folder, cpu=model.device.type == "cpu", autocast=autocast),
        train_dataset=dataset,
        processing_class=base.tokenizer,
        peft_config=sft.adapter(config),
        callbacks=list(callbacks),
    )


def batch_loss(side: str, base: Base, config: Config, rows: Rows) -> float:
    """A side's loss of one batch in float32 without dropout, under an adapter that both sides draw alike."""
    exact = Config.load({**config.flat(), **BATCH_KEYS})
    with tempfile.TemporaryDirectory(prefix="appa-sft-") as scratch:
        trainer = make_trainer(side, base, exact, rows.first(exact.sft.batch_size), folder=Path(scratch))
        draw_adapter(trainer.model, seed=config.seed)
        return float(trainer.train().training_loss)


def draw_adapter(model: PreTrainedModel, *, seed: int) -> None:
    """Give a new adapter numbers of which none is 0: as PEFT makes it, it changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            drawn = nn.init.normal_(torch.empty(parameter.shape), std=DRAWN_STD, generator=generator)
            parameter.data.copy_(drawn)


def measure(side: str, base: Base, config: Config, rows: Rows, *, steps: int) -> Side:
    """Take so many counted steps after the warm-up, then the loss of the first batch."""
    torch.set_num_threads(1)
    given = Config.load({**config.flat(), "sft.steps": WARM_UP + steps})
    watch = _Steps()
    with tempfile.TemporaryDirectory(prefix="appa-sft-") as scratch:
        make_trainer(side, base, given, rows, folder=Path(scratch), callbacks=[watch]).train()
    added = watch.memory.stop()
    gc.collect()  # a trainer and its model hold each other
    return Side(watch.cpu[WARM_UP:], watch.memory.baseline_mib, added, batch_loss(side, base, config, rows))


def in_own_process(side: str, base: Base, config: Config, rows: Rows, *, steps: int) -> Side:
    """`measure` where nothing else has taken or freed memory."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, side, base, config, rows, steps=steps).result()
