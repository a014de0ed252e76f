"""Our PPO engine alone: its phases against prompt length, batch size, vocabulary and model size.

    python -m experiments.benchmarks.engine                               # CPU, one thread, a few minutes
    python -m experiments.benchmarks.engine --paper-models                # CUDA: the paper's models at full size
    python -m experiments.benchmarks.engine --paper-models --scale small  # the same path, anywhere
    python -m experiments.benchmarks.engine --smollm2 --threads 2         # an iteration of preset smollm2
    python -m experiments.benchmarks.engine --run runs/NAME               # a run's wait for its federation

Models have random weights, which change nothing of what a pass costs. Every cell is a process of its own, so that no
memory hides another's.

Axis letters: J rollouts, T tokens of an answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pandas as pd
import torch
import typer
from torch.utils.benchmark import Timer
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PretrainedConfig, Qwen3Config

import experiments
from appa_flwr.config import Config, Scalar
from appa_flwr.core import markdown
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.run import run_files
from experiments import entry
from experiments.benchmarks import sides
from experiments.benchmarks.sides import EOS_ID, PAD_ID, SEED, Recorder, Update, Workload
from server_app.models.base import load_model
from server_app.models.policy import ppo_models
from server_app.ppo.engine import PPOEngine

KEYS: dict[str, Scalar] = {
    "policy.tuning": "lora",
    "policy.lora-rank": sides.LORA_RANK,
    "policy.ppo-targets": ",".join(sides.LORA_TARGETS),
    "ppo.epochs": sides.PPO_EPOCHS,
    "ppo.baseline": "value",
    "ppo.answers-per-question": 1,
    "ppo.num-mini-batches": 1,  # as many optimizer steps as TRL really takes
    "ppo.temperature": sides.TEMPERATURE,
    "ppo.learning-rate": sides.LEARNING_RATE,
}
"""Keys that differ from our run config's defaults."""

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
SMOLLM2 = "SmolLM2-135M"
_PUBLISHED: dict[str, tuple[type[PretrainedConfig], tuple[int, ...], dict[str, int]]] = {
    "gemma-2-2b": (Gemma2Config, (256_000, 2304, 9216, 26, 8, 4, 256), {"sliding_window": 4096}),
    "Llama-3.2-3B": (LlamaConfig, (128_256, 3072, 8192, 28, 24, 8, 128), {"max_position_embeddings": 131_072}),
    "Qwen3-0.6B": (Qwen3Config, (151_936, 1024, 3072, 28, 16, 8, 128), {"max_position_embeddings": 40_960}),
    SMOLLM2: (LlamaConfig, (49_152, 576, 1536, 30, 9, 3, 64), {"max_position_embeddings": 8192}),
}
PAPER_MODELS = [name for name in _PUBLISHED if name != SMOLLM2]

PHASES = ["rollout", "reference", "update", "total"]
_QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1"}

Out = Annotated[Path, typer.Option(help="Folder of the results.")]


def small_qwen3(vocabulary: int, hidden: int = 128) -> PretrainedConfig:
    """Qwen3 with 4 layers and heads of 32."""
    heads = hidden // 32
    sizes = (vocabulary, hidden, 4 * hidden, 4, heads, max(1, heads // 2), 32)
    return _architecture(Qwen3Config, sizes, {"max_position_embeddings": 2048})


def published(name: str, *, small: bool = False) -> PretrainedConfig:
    """A published architecture and its sizes, or scaled down to run anywhere."""
    kind, sizes, more = _PUBLISHED[name]
    return _architecture(kind, (512, 64, 128, 2, 4, 2, 16) if small else sizes, more)


def _architecture(kind: type[PretrainedConfig], sizes: tuple[int, ...], given: dict[str, int]) -> PretrainedConfig:
    more: dict[str, Any] = given | dict(zip(_SIZES, sizes, strict=True))
    if kind is Gemma2Config:
        more["query_pre_attn_scalar"] = more["head_dim"]
    return kind(pad_token_id=PAD_ID, eos_token_id=EOS_ID, bos_token_id=None, tie_word_embeddings=True, **more)


def save_random(config: PretrainedConfig, folder: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write a model with random weights as a folder that Transformers loads."""
    torch.manual_seed(SEED)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)


def make_engine(workload: Workload) -> PPOEngine:
    """The engine as a run with these keys would build it."""
    rollout: dict[str, Scalar] = {
        "ppo.response-length": workload.response_length,
        "ppo.batch-size": workload.rollouts,
        "ppo.answers-per-question": workload.answers,
    }
    config = Config.load({**KEYS, **rollout, **workload.config})
    model = load_model(config, workload.model, quantized=config.policy.tuning == "qlora")
    return PPOEngine(
        ppo_models(config, model),
        config.ppo,
        num_iterations=len(workload.batches),
        stop_ids=(EOS_ID,),
        pad_id=PAD_ID,
        seed=SEED,
        shared_prefix=workload.shared_prefix,
    )


def ours(workload: Workload) -> list[Update]:
    """Run the workload's updates by our engine; the reward is the share of even token ids in an answer."""
    engine = make_engine(workload)
    models = engine.models
    recorder = Recorder(policy=models.policy_parameters(), value=models.value_parameters())
    rolled_out, referred = recorder.timed("rollout", engine.rollout), recorder.timed("reference", engine.reference_pass)
    recorder.start()
    for number, prompts in enumerate(workload.batches):
        with sides.keeping_to_plan(models.policy(), ends=workload.ends):
            rollout = rolled_out(prompts)
        reference = referred(rollout.sequences)
        mask_JT = rollout.sequences.mask_JT
        even_JT = ((rollout.sequences.response_JT % 2 == 0) & mask_JT).float()
        engine.update(rollout, reference, even_JT.sum(1) / mask_JT.sum(1))
        workload.check(number, mask_JT.sum(1).tolist())
        recorder.close()
    return recorder.measured()


def run_side(python: str, side: str, workload: Workload, *, threads: int = 1, gpu: bool = False) -> pd.DataFrame:
    """Measure a workload by `MODULE.FUNCTION` of this package, in a process of that Python; a row an update.

    It has so many threads of the CPU, or the GPU. A side that fails is a UserError, after what it said.
    """
    code = f"from experiments.benchmarks import sides, {side.partition('.')[0]}; sides.answer({side})"
    given = {**os.environ, **_QUIET, "PYTHONPATH": str(Path(experiments.__file__).parents[1])}
    if not gpu:
        given |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    work = json.dumps(asdict(workload))
    done = subprocess.run([python, "-c", code], input=work, env=given, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        last = next(reversed(done.stderr.splitlines()), "no output")
        raise UserError(f"{side} ended with status {done.returncode}: {last}")
    return pd.DataFrame(json.loads(done.stdout.splitlines()[-1]))


class Cell(NamedTuple):
    """One measurement: what is varied, and to what; a model of random weights, and its work."""

    varied: str
    to: str
    model: PretrainedConfig
    work: Workload


def grid() -> list[Cell]:
    """The CPU cells: one thing varied at a time around the paper's prompt and a small model."""

    def cell(varied: str, to: object, *, hidden: int = 128, **given: Any) -> Cell:
        work = Workload(**given)
        return Cell(varied, str(to), small_qwen3(work.vocabulary, hidden), work)

    return [
        *(cell("prompt tokens", f"{size} + 15 to 70", prefix=size) for size in (0, 110, 220, 440)),
        cell("prefix", "plain", shared_prefix=False),
        *(cell("rollouts", size, rollouts=size) for size in (12, 48, 96)),
        *(cell("vocabulary", size, vocabulary=size) for size in (8_192, 32_768)),
        *(cell("hidden size", size, hidden=size) for size in (64, 256)),
    ]


def paper_cells() -> list[Cell]:
    """The paper's models in nf4, with the shared prefix and without."""
    cells = []
    for name, (to, shared) in product(PAPER_MODELS, (("shared prefix", True), ("plain", False))):
        model = published(name)
        keys: dict[str, Scalar] = {"policy.tuning": "qlora", "policy.compute-dtype": "bfloat16"}
        cells.append(Cell(name, to, model, Workload(rollouts=96, config=keys, shared_prefix=shared)))
    return cells


def smollm2_cells() -> list[Cell]:
    """An iteration of 48 answers, 30 tokens each, to compact prompts: by a value model, and as preset `smollm2` does.

    The preset asks 6 questions 8 times and needs no value model.
    """
    work = Workload(prefix=30, shortest=40, longest=110, rollouts=48, response_length=30)
    keys: dict[str, Scalar] = {"ppo.epochs": 1, "ppo.num-mini-batches": 2, "ppo.micro-batch-tokens": 600}

    def cell(name: str, answers: int, baseline: str, dtype: str) -> Cell:
        config = {**keys, "ppo.baseline": baseline, "policy.compute-dtype": dtype}
        return Cell(SMOLLM2, f"{name}, {dtype}", published(SMOLLM2), replace(work, answers=answers, config=config))

    return [
        cell("value model", 1, "value", "bfloat16"),
        cell("8 answers a question", 8, "question", "bfloat16"),
        cell("8 answers a question", 8, "question", "float32"),
    ]


def scaled_down(cell: Cell) -> Cell:
    """The same of a published architecture, small enough to run anywhere."""
    size: dict[str, Any] = {"prefix": 20, "shortest": 3, "longest": 8, "rollouts": 4, "response_length": 6}
    work = replace(cell.work, **size, answers=min(cell.work.answers, 2))
    return cell._replace(model=published(cell.varied, small=True), work=work)


def matmul_parameters(config: PretrainedConfig) -> tuple[int, int]:
    """Weights a token is multiplied with: those of the decoder layers, and those of the output head."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = sum(p.numel() for p in model.base_model.layers.parameters() if p.ndim > 1)
    return layers, int(model.get_output_embeddings().weight.numel())


def matmul_flops(cell: Cell) -> float:
    """Floating-point operations that no implementation of an update can do without, attention not counted.

    Every distinct token passes the layers once for each of rollout, reference and value, and forward and backward for
    policy and value in each epoch; a backward pass through frozen weights costs as much as a forward one. The head sees
    the answers only, in rollout, reference and the policy's epochs. With the baseline `question` there is no value.
    """
    layers, head = matmul_parameters(cell.model)
    work, batch = cell.work, cell.work.batches[-1]
    answers = work.response_length * work.rollouts
    tokens = work.prefix + sum(len(prompt) - work.prefix for prompt in set(map(tuple, batch))) + answers
    epochs = int(work.config.get("ppo.epochs", sides.PPO_EPOCHS))
    passes = 2 + 2 * epochs if work.config.get("ppo.baseline") == "question" else 3 + 4 * epochs
    return 2.0 * (layers * tokens * passes + head * answers * (2 + 2 * epochs))


def matmul_rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of one large matrix product here; on the CPU with one thread."""
    size, device = (8192, "cuda") if torch.cuda.is_available() else (1024, "cpu")
    timer = Timer("matrix @ matrix", globals={"matrix": torch.randn(size, size, device=device, dtype=dtype)})
    return float(2.0 * size**3 / min(timer.blocked_autorange().times))


def measure(cell: Cell, *, threads: int = 1) -> pd.DataFrame:
    """A row for each counted update; the floor is the matrix products' seconds here."""
    dtype = torch.bfloat16 if cell.work.config.get("policy.compute-dtype") == "bfloat16" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        save_random(cell.model, Path(folder), dtype=dtype)
        if gpu := torch.cuda.is_available():
            torch.cuda.empty_cache()
        cell = cell._replace(work=replace(cell.work, model=folder, vocabulary=cell.model.vocab_size))
        found = run_side(sys.executable, "engine.ours", cell.work, threads=threads, gpu=gpu)
    return found.assign(varied=cell.varied, to=cell.to, floor=matmul_flops(cell) / matmul_rate(dtype))


def shown(table: pd.DataFrame) -> str:
    """Markdown: the index and the columns."""
    rows = table.reset_index().round(2).astype(str)
    return markdown.table(rows.columns, rows.to_numpy())


def save(out: Path, numbers: pd.DataFrame, text: str) -> None:
    """Write and print what a benchmark found."""
    replace_file(out / "results.json", numbers.to_json(orient="records", indent=1).encode(), parents=True)
    replace_file(out / "results.md", f"{text}\n".encode())
    print(f"{text}\n\nresults: {out}")


def federation_wait(run: Path) -> tuple[float, float]:
    """Seconds a run's server waited for the groups, and seconds of all its PPO iterations."""
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
    out: Out = Path("runs/engine"),
) -> None:
    """Measure our PPO engine; seconds of CPU, or of the clock where there is a GPU, and MiB that memory added."""
    if run is not None:
        waited, total = federation_wait(run)
        print(f"waited {waited:.1f} s for the federation in {total:.1f} s of iterations: {waited / total:.1%}")
        return
    if paper and scale == "full" and not torch.cuda.is_available():
        raise UserError(
            "--paper-models needs a CUDA GPU and none is visible; --scale small runs the same path on a CPU"
        )
    cells = paper_cells() if paper else smollm2_cells() if real else grid()
    if scale == "small" and (paper or real):
        cells = [scaled_down(cell) for cell in cells]
    found: list[pd.DataFrame] = []
    for cell in cells:
        found.append(measure(cell._replace(work=replace(cell.work, updates=updates)), threads=threads))
        took = found[-1]["total"].median()
        print(f"{len(found)} of {len(cells)}: {cell.varied} {cell.to}: {took:.2f} s an update", flush=True)
    numbers = pd.concat(found)
    medians = numbers.groupby(["varied", "to"], sort=False)[[*PHASES, "floor", "wall", "added"]].median()
    save(out, numbers, shown(medians))


if __name__ == "__main__":
    entry.run(main)
