"""Our PPO engine alone: its phases against prompt length, batch size, vocabulary and model size.

    python -m experiments.benchmarks.engine                               # CPU, one thread, a few minutes
    python -m experiments.benchmarks.engine --paper-models                # CUDA: the paper's models at full size
    python -m experiments.benchmarks.engine --paper-models --scale small  # the same path, anywhere
    python -m experiments.benchmarks.engine --smollm2 --threads 2         # an iteration of preset smollm2
    python -m experiments.benchmarks.engine --run runs/NAME               # a run's wait for its federation

Every cell is a process of its own, so that one cell's memory does not hide another's.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
import typer
from transformers import PretrainedConfig

from appa_flwr import markdown
from appa_flwr.config import Scalar
from appa_flwr.errors import UserError
from appa_flwr.files import replace_file
from appa_flwr.run import files
from experiments import entry
from experiments.benchmarks.chart import stacked_bars
from experiments.benchmarks.measure import Measured, Update
from experiments.benchmarks.models import (
    matmul_parameters,
    paper_models,
    save_random,
    small_qwen3,
    smollm2,
)
from experiments.benchmarks.side import CPU_ONE_THREAD, run_side
from experiments.benchmarks.workload import DPA_PROMPTS, PPO_EPOCHS, Prompts, Workload, draw_batches

PHASES = ("rollout", "reference", "update")
VOCABULARY = 1024
SHARED, PLAIN = "shared prefix", "plain"


@dataclass(frozen=True)
class Cell:
    """One measurement: what is varied, and to what; a model of random weights, and its work, answers of one length.

    `rollouts` counts answers, of which a question has `answers`.
    """

    axis: str
    value: str
    model: PretrainedConfig
    prompts: Prompts = DPA_PROMPTS
    rollouts: int = 24
    response_length: int = 60
    answers: int = 1
    config: dict[str, Scalar] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        return torch.bfloat16 if self.config.get("policy.compute-dtype") == "bfloat16" else torch.float32


def grid() -> list[Cell]:
    """The CPU cells: one thing varied at a time around the paper's prompt and a small model."""
    model = small_qwen3(vocabulary=VOCABULARY)
    cells = [
        Cell("prompt tokens", f"{prefix} + 15 to 70", model, Prompts(prefix, 15, 70)) for prefix in (0, 110, 220, 440)
    ]
    cells += [Cell("prefix", PLAIN, model, config={"ppo.shared-prefix": False})]
    cells += [Cell("rollouts", str(rollouts), model, rollouts=rollouts) for rollouts in (12, 48, 96)]
    cells += [Cell("vocabulary", str(size), small_qwen3(vocabulary=size)) for size in (8_192, 32_768)]
    cells += [Cell("hidden size", str(size), small_qwen3(vocabulary=VOCABULARY, hidden=size)) for size in (64, 256)]
    return cells


def paper_cells(*, small: bool) -> list[Cell]:
    """The paper's models in nf4, with the shared prefix and without."""
    size: dict[str, Any] = {"rollouts": 4, "response_length": 6} if small else {"rollouts": 96, "response_length": 60}
    prompts = Prompts(prefix=20, shortest=3, longest=8) if small else DPA_PROMPTS
    return [
        Cell(
            name,
            SHARED if shared else PLAIN,
            config,
            prompts,
            config={
                "policy.quantization": "nf4",
                "policy.compute-dtype": "bfloat16",
                # Only the eager implementation caps attention logits as Gemma 2 wants.
                "policy.attention": "eager" if config.model_type == "gemma2" else "sdpa",
                "ppo.shared-prefix": shared,
            },
            **size,
        )
        for name, config in paper_models(small=small).items()
        for shared in (True, False)
    ]


def smollm2_cells(*, small: bool) -> list[Cell]:
    """An iteration of 48 answers, 30 tokens each, to compact prompts: by a value model, and as preset `smollm2` does.

    The preset asks 6 questions 8 times and needs no value model.
    """
    size: dict[str, Any] = {"rollouts": 4, "response_length": 6} if small else {"rollouts": 48, "response_length": 30}
    prompts = Prompts(prefix=20, shortest=10, longest=15) if small else Prompts(prefix=30, shortest=40, longest=110)
    answers = 2 if small else 8
    preset = {
        "ppo.baseline": "question",
        "rollout.batch-size": size["rollouts"],
        "rollout.answers-per-question": answers,
    }
    cells = []
    for name, of, dtype, own in (
        ("value model", 1, "bfloat16", {}),
        (f"{answers} answers a question", answers, "bfloat16", preset),
        (f"{answers} answers a question", answers, "float32", preset),
    ):
        keys: dict[str, Scalar] = {"ppo.epochs": 1, "ppo.num-mini-batches": 2, "ppo.micro-batch-tokens": 600}
        keys |= {"policy.compute-dtype": dtype, **own}
        model = smollm2(small=small)
        cells.append(Cell("SmolLM2-135M", f"{name}, {dtype}", model, prompts, answers=of, config=keys, **size))
    return cells


def matmul_flops(cell: Cell, batch: Sequence[Sequence[int]]) -> float:
    """Floating-point operations that no implementation of an update can do without, attention not counted.

    Every distinct token passes the layers once for each of rollout, reference and value, and forward and backward for
    policy and value in each epoch; a backward pass through frozen weights costs as much as a forward one. The head sees
    the answers only, in rollout, reference and the policy's epochs. With the baseline `question` there is no value.
    """
    layers, head = matmul_parameters(cell.model)
    prefix = cell.prompts.prefix
    answers = cell.response_length * len(batch)
    tokens = prefix + sum(len(prompt) - prefix for prompt in set(map(tuple, batch))) + answers
    epochs = int(cell.config.get("ppo.epochs", PPO_EPOCHS))
    passes = 2 + 2 * epochs if cell.config.get("ppo.baseline") == "question" else 3 + 4 * epochs
    return 2.0 * (layers * tokens * passes + head * answers * (2 + 2 * epochs))


def matmul_rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of one large matrix product here; on the CPU with one thread."""
    cuda = torch.cuda.is_available()
    size, rounds = (8192, 20) if cuda else (1024, 5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix = torch.randn(size, size, device="cuda" if cuda else "cpu", dtype=dtype)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        matrix @ matrix
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(threads)
    return 2.0 * size**3 / min(seconds)


@dataclass(frozen=True)
class Result:
    """A cell's measurement; `floor` is its matrix products' seconds at this machine's best rate."""

    axis: str
    value: str
    measured: Measured
    floor: float


def seconds(update: Update, phase: str | None = None) -> float:
    """Of a phase, or of the whole update: wall clock on a GPU, CPU seconds otherwise."""
    spent = update.total if phase is None else update.phases[phase]
    return spent.wall if torch.cuda.is_available() else spent.cpu


def measure(cells: Iterable[Cell], *, updates: int, seed: int, threads: int = 1) -> Iterable[Result]:
    """Run the cells one after another; `updates` are counted, one before them warms up; `threads` on a CPU."""
    environment = {} if torch.cuda.is_available() else {**CPU_ONE_THREAD, "OMP_NUM_THREADS": str(threads)}
    rates: dict[torch.dtype, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        for cell in cells:
            save_random(cell.model, model, seed=seed, dtype=cell.dtype)
            batches = draw_batches(
                cell.prompts,
                vocabulary=cell.model.vocab_size,
                rollouts=cell.rollouts,
                updates=updates,
                seed=seed,
                answers=cell.answers,
            )
            workload = Workload(str(model), batches, cell.response_length, ends=False, config=cell.config, seed=seed)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            measured = run_side(sys.executable, "own_side", workload, scratch=Path(scratch), environment=environment)
            shutil.rmtree(model)
            rate = rates.setdefault(cell.dtype, matmul_rate(cell.dtype))
            yield Result(cell.axis, cell.value, measured, matmul_flops(cell, batches[-1]) / rate)


def table(results: Sequence[Result]) -> str:
    """Markdown: medians over updates."""
    unit = "s" if torch.cuda.is_available() else "CPU s"
    head = ["varied", "to", *(f"{phase}, {unit}" for phase in PHASES), f"update total, {unit}", "matmul floor, s"]
    head += ["wall, s", "MiB before", "MiB added"]
    rows = []
    for result in results:
        updates = result.measured.updates
        cells = [f"{median(seconds(u, phase) for u in updates):.2f}" for phase in (*PHASES, None)]
        cells += [f"{result.floor:.2f}", f"{median(u.total.wall for u in updates):.2f}"]
        cells += [f"{result.measured.baseline_mib:.0f}", f"{result.measured.added_mib:.0f}"]
        rows.append([result.axis, result.value, *cells])
    return markdown.table(head, rows) + "\n"


def plot(results: Sequence[Result]) -> bytes:
    """A bar a cell."""
    rows = [
        (
            f"{result.axis}: {result.value}",
            {phase: median(seconds(u, phase) for u in result.measured.updates) for phase in PHASES},
        )
        for result in results
    ]
    return stacked_bars(rows, axis="seconds an iteration" + ("" if torch.cuda.is_available() else " (of CPU)"))


def federation_wait(run: Path) -> tuple[float, float]:
    """Seconds a run's server waited for the groups, and seconds of all its PPO iterations.

    Raises:
        UserError: the folder holds no iterations, or something else.
    """
    lines = files.METRICS.read(run)
    if not lines:
        raise UserError(f"--run {run}: {files.METRICS.name} is not there, or holds no iteration yet")
    return sum(line.seconds["federation_wait"] for line in lines), sum(sum(line.seconds.values()) for line in lines)


def main(
    paper: Annotated[bool, typer.Option("--paper-models", help="The paper's models instead of the CPU grid.")] = False,
    real: Annotated[bool, typer.Option("--smollm2", help="An iteration of preset smollm2.")] = False,
    scale: Annotated[Literal["full", "small"], typer.Option(help="Of the named models.")] = "full",
    threads: Annotated[int, typer.Option(min=1, help="On a CPU.")] = 1,
    run: Annotated[Path | None, typer.Option(help="Only tell how long this run waited for its federation.")] = None,
    updates: Annotated[int, typer.Option(min=1, help="Counted updates a cell, after one to warm up.")] = 2,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and sampling.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/engine"),
) -> None:
    """Measure our PPO engine."""
    if run is not None:
        waited, total = federation_wait(run)
        print(f"waited {waited:.1f} s for the federation in {total:.1f} s of iterations: {waited / total:.1%}")
        return
    if paper and scale == "full" and not torch.cuda.is_available():
        raise UserError(
            "--paper-models needs a CUDA GPU and none is visible; --scale small runs the same path on a CPU"
        )
    cells = grid()
    if paper or real:
        cells = (paper_cells if paper else smollm2_cells)(small=scale == "small")
    results: list[Result] = []
    for result in measure(cells, updates=updates, seed=seed, threads=threads):
        results.append(result)
        total = median(seconds(update) for update in result.measured.updates)
        print(f"{len(results)} of {len(cells)}: {result.axis} {result.value}: {total:.2f} s an update", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    files.write(out / "results.json", [asdict(result) for result in results])
    replace_file(out / "results.md", table(results).encode())
    replace_file(out / "engine.png", plot(results))
    print(table(results))
    print(f"results: {out}")


if __name__ == "__main__":
    entry.run(main)
