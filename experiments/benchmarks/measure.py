"""Seconds by phase and peak memory of a training process, the same way on every side of a benchmark.

TRL's side runs in an environment of its own, so this module needs nothing but PyTorch and psutil.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from experiments.benchmarks.workload import Workload

MIB = 2**20
_SAMPLING_SECONDS = 0.005


@dataclass(frozen=True)
class Seconds:
    """Wall-clock seconds, and CPU seconds of the whole process."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Update:
    """One update as it was measured; tokens are real ones, without padding and with the end of sequence."""

    total: Seconds
    phases: dict[str, Seconds]
    prompt_tokens: int
    response_tokens: int
    optimizer_steps: int


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
    versions: dict[str, str]


def _now() -> Seconds:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Seconds(time.perf_counter(), time.process_time())


class Stopwatch:
    """Adds up the seconds of named phases until `lap`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything and begin an update."""
        self._phases: dict[str, Seconds] = {}
        self._started = _now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; blocks of one name add up."""
        started = _now()
        yield
        ended, before = _now(), self._phases.get(name, Seconds(0.0, 0.0))
        self._phases[name] = Seconds(before.wall + ended.wall - started.wall, before.cpu + ended.cpu - started.cpu)

    def timed(self, function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        """`function`, timed under the phase that `name` gives for its arguments."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name(*args, **kwargs)):
                return function(*args, **kwargs)

        return call

    def lap(self) -> tuple[Seconds, dict[str, Seconds]]:
        """The update's total and phases; the next update begins."""
        ended, phases = _now(), self._phases
        total = Seconds(ended.wall - self._started.wall, ended.cpu - self._started.cpu)
        self.restart()
        return total, phases


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
        self.stopwatch, self._memory = Stopwatch(), PeakMemory()
        self._workload, self._trained = workload, trained
        self._before = [[parameter.detach().clone() for parameter in model] for model in trained]
        self._updates: list[Update] = []
        self._steps = 0

    def start(self) -> None:
        """Take the baselines."""
        self._memory.start()
        self.stopwatch.restart()

    def count_step(self, *_: Any) -> None:
        """To be called after every optimizer step."""
        self._steps += 1

    def close(self, lengths: list[int]) -> None:
        """End an update whose answers have these lengths.

        Raises:
            RuntimeError: they are not those planned.
        """
        total, phases = self.stopwatch.lap()
        number = len(self._updates)
        if lengths != self._workload.planned_lengths(number):
            raise RuntimeError(f"update {number}: answers of other lengths than planned: {lengths}")
        prompt_tokens = sum(map(len, self._workload.batches[number]))
        self._updates.append(Update(total, phases, prompt_tokens, sum(lengths), self._steps))
        self._steps = 0

    def measured(self, *packages: str) -> Measured:
        """All that was found, with the versions of these packages."""
        added = self._memory.stop()
        policy_change, value_change = (
            max(float((now.detach() - was).abs().max()) for now, was in zip(model, before, strict=True))
            for model, before in zip(self._trained, self._before, strict=True)
        )
        versions = {name: importlib.metadata.version(name) for name in packages}
        return Measured(self._updates[1:], self._memory.baseline_mib, added, policy_change, value_change, versions)


def main(measure: Callable[[Workload], Measured]) -> None:
    """What either side's command does: measure the workload of one file and write what was found into another."""
    source, result = map(Path, sys.argv[1:])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as the side that started this one says
    result.write_text(json.dumps(asdict(measure(Workload.read(source))), indent=1))
