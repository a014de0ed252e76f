"""Our PPO engine alone: its phases against prompt length, batch size, vocabulary and model size.

    python -m experiments.benchmarks.engine                               # CPU, one thread, a few minutes
    python -m experiments.benchmarks.engine --paper-models                # CUDA: the paper's models at full size
    python -m experiments.benchmarks.engine --paper-models --scale small  # the same path, anywhere
    python -m experiments.benchmarks.engine --smollm2 --threads 2         # an iteration of preset smollm2
    python -m experiments.benchmarks.engine --run runs/NAME               # a run's wait for its federation

Every cell is a process of its own, so that one cell's memory does not hide another's.

Axis letters: J rollouts, T tokens of an answer.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
import typer
from pydantic import TypeAdapter
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PretrainedConfig, PreTrainedModel

import experiments
from appa_flwr.config import Config, Scalar
from appa_flwr.core import markdown
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.run import run_files
from experiments import entry
from experiments.benchmarks import sides
from experiments.benchmarks.models import PAPER_MODELS, SMOLLM2, matmul_parameters, published, save_random, small_qwen3
from experiments.benchmarks.sides import EOS_ID, NUM_SPECIAL, PAD_ID, Measured, Recorder, Workload
from server_app.models.base import load_model
from server_app.models.policy import ppo_models
from server_app.ppo.engine import PPOEngine

KEYS: dict[str, Scalar] = {
    "policy.tuning": "lora",
    "lora.rank": sides.LORA_RANK,
    "lora.alpha": sides.LORA_ALPHA,
    "lora.ppo-targets": ",".join(sides.LORA_TARGETS),
    "ppo.epochs": sides.PPO_EPOCHS,
    "ppo.num-mini-batches": 1,  # as many optimizer steps as TRL really takes
    "rollout.temperature": sides.TEMPERATURE,
    "ppo.learning-rate": sides.LEARNING_RATE,
    "ppo.value-learning-rate": sides.LEARNING_RATE,
    "ppo.scheduler": "linear",
}
"""What differs from our run config's defaults."""

PHASES = {"rollout": "rollout", "reference": "reference", "update": "update", "update total": "seconds"}
"""Head of a column -> field of `Update`."""


@dataclass(frozen=True)
class Prompts:
    """How prompts are drawn: tokens that all of them begin with, and fewest and most tokens after these."""

    prefix: int
    shortest: int
    longest: int


DPA_PROMPTS = Prompts(prefix=220, shortest=15, longest=70)
SHARED, PLAIN = "shared prefix", "plain"

CPU_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}


def draw_batches(
    prompts: Prompts, *, vocabulary: int, rollouts: int, updates: int, seed: int, answers: int = 1
) -> list[list[list[int]]]:
    """Random prompts, each `answers` times, for the warm-up and `updates` more; token ids lie below `vocabulary`."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(NUM_SPECIAL, vocabulary) for _ in range(count)]

    prefix = tokens(prompts.prefix)
    batches = []
    for _ in range(1 + updates):
        asked = [prefix + tokens(rng.randint(prompts.shortest, prompts.longest)) for _ in range(rollouts // answers)]
        batches.append([prompt for prompt in asked for _ in range(answers)])
    return batches


@contextmanager
def keeping_to_plan(model: PreTrainedModel, *, ends: bool) -> Iterator[None]:
    """While it lasts, one rollout from the model ends each row where the workload says.

    It watches which positions go into the decoder and changes the logits that come out of the head, once a token, and
    needs to know nothing of how the engine orders, splits or shortens its rows. The prompt's pass may leave the
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
        sides.steer(logits if logits.ndim == 2 else logits[:, -1], position_J, number=number, ends=ends)

    hooks = [
        model.base_model.register_forward_pre_hook(before_decoder, with_kwargs=True),
        model.get_output_embeddings().register_forward_hook(after_head),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def make_engine(workload: Workload) -> PPOEngine:
    """The engine as a run with these keys would build it."""
    config = Config.load({**KEYS, "rollout.response-length": workload.response_length, **workload.config})
    model = load_model(config, workload.model, quantized=config.policy.tuning == "qlora")
    return PPOEngine(
        ppo_models(config, model),
        config.ppo,
        config.rollout,
        num_iterations=len(workload.batches),
        stop_ids=[EOS_ID],
        pad_id=PAD_ID,
        seed=workload.seed,
        shared_prefix=workload.shared_prefix,
    )


def ours(workload: Workload) -> Measured:
    """Run the workload's updates by our engine; the reward is the share of even token ids in an answer.

    Raises:
        RuntimeError: answers have other lengths than planned.
    """
    engine = make_engine(workload)
    recorder = Recorder(workload, [engine.models.policy_parameters(), engine.models.value_parameters()])
    hook = register_optimizer_step_post_hook(recorder.count_step)
    recorder.start()
    for prompts in workload.batches:
        with recorder.phase("rollout"), keeping_to_plan(engine.models.policy(), ends=workload.ends):
            rollout = engine.rollout(prompts)
        with recorder.phase("reference"):
            reference = engine.reference_pass(rollout.sequences)
        mask_JT = rollout.sequences.mask_JT
        even_JT = ((rollout.sequences.response_JT % 2 == 0) & mask_JT).float()
        engine.update(rollout, reference, even_JT.sum(1) / mask_JT.sum(1))
        recorder.close(mask_JT.sum(1).tolist())
    hook.remove()
    return recorder.measured()


def run_side(python: str, side: str, workload: Workload, *, scratch: Path, environment: dict[str, str]) -> Measured:
    """Measure a workload by `MODULE.FUNCTION` of this package, in a process of that Python.

    Raises:
        UserError: the side failed; its output has been printed.
    """
    module, _, function = side.partition(".")
    code = f"from experiments.benchmarks import sides, {module}; sides.answer({module}.{function})"
    source, result, output = (scratch / f"{side}.{name}" for name in ("workload", "result", "log"))
    run_files.write(source, asdict(workload))
    result.unlink(missing_ok=True)
    given = {**os.environ, **_QUIET, "PYTHONPATH": str(Path(experiments.__file__).parents[1]), **environment}
    with output.open("w") as log:
        command = [python, "-c", code, str(source), str(result)]
        status = subprocess.run(command, env=given, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        print(output.read_text(), file=sys.stderr)
        last = next(reversed(output.read_text().splitlines()), "no output")
        raise UserError(f"{side} ended with status {status}: {last}")
    return TypeAdapter(Measured).validate_json(result.read_bytes())


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
    shared_prefix: bool = True


def grid() -> list[Cell]:
    """The CPU cells: one thing varied at a time around the paper's prompt and a small model."""
    model = small_qwen3()
    cells = [
        Cell("prompt tokens", f"{prefix} + 15 to 70", model, Prompts(prefix, 15, 70)) for prefix in (0, 110, 220, 440)
    ]
    cells += [Cell("prefix", PLAIN, model, shared_prefix=False)]
    cells += [Cell("rollouts", str(rollouts), model, rollouts=rollouts) for rollouts in (12, 48, 96)]
    cells += [Cell("vocabulary", str(size), small_qwen3(vocabulary=size)) for size in (8_192, 32_768)]
    cells += [Cell("hidden size", str(size), small_qwen3(hidden=size)) for size in (64, 256)]
    return cells


def paper_cells(*, small: bool) -> list[Cell]:
    """The paper's models in nf4, with the shared prefix and without."""
    size: dict[str, Any] = {"rollouts": 4, "response_length": 6} if small else {"rollouts": 96}
    prompts = Prompts(prefix=20, shortest=3, longest=8) if small else DPA_PROMPTS
    cells = []
    for name in PAPER_MODELS:
        model = published(name, small=small)
        keys: dict[str, Scalar] = {"policy.tuning": "qlora", "policy.compute-dtype": "bfloat16"}
        # Only the eager implementation caps attention logits as Gemma 2 wants.
        keys["policy.attention"] = "eager" if model.model_type == "gemma2" else "sdpa"
        for value, shared in ((SHARED, True), (PLAIN, False)):
            cells.append(Cell(name, value, model, prompts, config=keys, shared_prefix=shared, **size))
    return cells


def smollm2_cells(*, small: bool) -> list[Cell]:
    """An iteration of 48 answers, 30 tokens each, to compact prompts: by a value model, and as preset `smollm2` does.

    The preset asks 6 questions 8 times and needs no value model.
    """
    size: dict[str, Any] = {"rollouts": 4, "response_length": 6} if small else {"rollouts": 48, "response_length": 30}
    prompts = Prompts(prefix=20, shortest=10, longest=15) if small else Prompts(prefix=30, shortest=40, longest=110)
    answers = 2 if small else 8
    keys: dict[str, Scalar] = {"ppo.epochs": 1, "ppo.num-mini-batches": 2, "ppo.micro-batch-tokens": 600}
    preset = {**keys, "rollout.batch-size": size["rollouts"], "rollout.answers-per-question": answers}
    preset["ppo.baseline"] = "question"
    model, cells = published(SMOLLM2, small=small), []
    for number, dtype, config in ((1, "bfloat16", keys), (answers, "bfloat16", preset), (answers, "float32", preset)):
        name = f"{'value model' if number == 1 else f'{number} answers a question'}, {dtype}"
        given = {**config, "policy.compute-dtype": dtype}
        cells.append(Cell(SMOLLM2, name, model, prompts, answers=number, config=given, **size))
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
    epochs = int(cell.config.get("ppo.epochs", sides.PPO_EPOCHS))
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


Result = tuple[Cell, Measured, float]
"""A cell, what was measured, and its matrix products' seconds at this machine's best rate."""


def measure(cells: Iterable[Cell], *, updates: int, seed: int, threads: int = 1) -> Iterable[Result]:
    """Run the cells one after another; `updates` are counted, one before them warms up; `threads` on a CPU."""
    environment = {} if torch.cuda.is_available() else {**CPU_ONE_THREAD, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        for cell in cells:
            dtype = torch.bfloat16 if cell.config.get("policy.compute-dtype") == "bfloat16" else torch.float32
            save_random(cell.model, model, seed=seed, dtype=dtype)
            size, work = cell.model.vocab_size, {"rollouts": cell.rollouts, "answers": cell.answers}
            batches = draw_batches(cell.prompts, vocabulary=size, updates=updates, seed=seed, **work)
            workload = Workload(
                str(model),
                batches,
                cell.response_length,
                ends=False,
                config=cell.config,
                shared_prefix=cell.shared_prefix,
                seed=seed,
            )
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            found = run_side(sys.executable, "engine.ours", workload, scratch=Path(scratch), environment=environment)
            shutil.rmtree(model)
            yield cell, found, matmul_flops(cell, batches[-1]) / matmul_rate(dtype)


def table(results: Sequence[Result]) -> str:
    """Markdown: medians over updates."""
    unit = "s" if torch.cuda.is_available() else "CPU s"
    head = ["varied", "to", *(f"{phase}, {unit}" for phase in PHASES), "matmul floor, s"]
    head += ["wall, s", "MiB before", "MiB added"]
    rows = []
    for cell, found, floor in results:
        cells = [f"{median(getattr(u, name) for u in found.updates):.2f}" for name in PHASES.values()]
        cells += [f"{floor:.2f}", f"{median(u.wall for u in found.updates):.2f}"]
        cells += [f"{found.baseline_mib:.0f}", f"{found.added_mib:.0f}"]
        rows.append([cell.axis, cell.value, *cells])
    return markdown.table(head, rows) + "\n"


def save(out: Path, numbers: object, text: str) -> None:
    """Write a benchmark's numbers and table."""
    out.mkdir(parents=True, exist_ok=True)
    run_files.write(out / "results.json", numbers)
    replace_file(out / "results.md", text.encode())


def federation_wait(run: Path) -> tuple[float, float]:
    """Seconds a run's server waited for the groups, and seconds of all its PPO iterations.

    Raises:
        UserError: the folder holds no iterations, or something else.
    """
    lines = run_files.METRICS.read(run)
    if not lines:
        raise UserError(f"--run {run}: {run_files.METRICS.name} is not there, or holds no iteration yet")
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
    for cell, found, floor in measure(cells, updates=updates, seed=seed, threads=threads):
        results.append((cell, found, floor))
        total = median(update.seconds for update in found.updates)
        print(f"{len(results)} of {len(cells)}: {cell.axis} {cell.value}: {total:.2f} s an update", flush=True)
    numbers = [
        {"axis": c.axis, "value": c.value, "measured": asdict(found), "floor": floor} for c, found, floor in results
    ]
    save(out, numbers, table(results))
    print(f"{table(results)}\nresults: {out}")


if __name__ == "__main__":
    entry.run(main)
