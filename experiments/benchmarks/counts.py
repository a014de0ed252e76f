"""What a GPU would have to be told: kernels and waits of the host, counted on a pretended one.

Launching a kernel takes the host some ten microseconds, however small the work, and while the host waits for a number
the GPU has nothing to do. Both follow from the code alone, so that they can be counted without a GPU.

Counted at the paper models' architectures with two layers and with four, and small matrices; an iteration's work is
linear in the layers, and sampling's in the tokens, which gives the published depth.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pandas as pd
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import experiments
from appa_flwr.core.errors import UserError
from experiments.benchmarks import engine, sides

LAYERS, TOKENS = (2, 4), (8, 24)
STOP_ID = 10**6  # outside the vocabulary: every answer is as long as planned
KEYS = {"ppo.epochs": 1, "ppo.micro-batch-tokens": 10_000}  # an update of one chunk
WORK = sides.Workload(prefix=20, shortest=9, longest=14, rollouts=8, updates=1)
ALL_TARGETS = (*sides.LORA_TARGETS, "gate_proj", "up_proj", "down_proj")  # SFT's


class Work(NamedTuple):
    """Kernels, and waits of the host for the device."""

    kernels: float
    waits: float

    def __add__(self, other: Any) -> Work:
        return Work(self.kernels + other.kernels, self.waits + other.waits)

    def __sub__(self, other: Work) -> Work:
        return self + -1 * other

    def __rmul__(self, factor: Any) -> Work:
        return Work(factor * self.kernels, factor * self.waits)


@cache
def _device() -> ModuleType:
    path = Path(experiments.__file__).parents[1] / "tests" / "pretended_cuda.py"
    spec = importlib.util.spec_from_file_location("pretended_cuda", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"counting needs the pretended GPU of a clone's tests, and {path} is not there")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _iteration(cell: engine.Cell, *, layers: int, tokens: int) -> dict[str, Work]:
    """Work of an iteration, by phase."""
    model = engine.published(cell.varied, small=True, layers=layers)
    with tempfile.TemporaryDirectory() as folder:
        engine.save_random(model, Path(folder) / "model", dtype=torch.bfloat16)
        plain = AutoModelForCausalLM.from_pretrained(Path(folder) / "model")
        sft = LoraConfig(r=sides.LORA_RANK, target_modules=list(ALL_TARGETS), task_type="CAUSAL_LM")
        get_peft_model(plain, sft).save_pretrained(Path(folder) / "sft", save_embedding_layers=False)
        work = replace(
            WORK,
            model=f"{folder}/model",
            vocabulary=model.vocab_size,
            response_length=tokens,
            config={**cell.work.config, **KEYS},
        )
        with _device().pretended_cuda() as gpu:
            ppo = engine.make_engine(work, stop_ids=(STOP_ID,), sft_adapter=Path(folder) / "sft")
            with gpu.counting() as sampled:
                rollout = ppo.rollout(work.batches[0])
            with gpu.counting() as referred:
                reference = ppo.reference_pass(rollout.sequences)
            reward_J = torch.arange(work.rollouts, device="cuda") / work.rollouts
            with gpu.counting() as updated:
                ppo.update(rollout, reference, reward_J)
    phases = {"rollout": sampled, "reference": referred, "update": updated}
    return {name: Work(found.kernels.total(), found.waits.total()) for name, found in phases.items()}


def count(cell: engine.Cell) -> pd.DataFrame:
    """Kernels and waits of a decoded token, a reference pass and an update of one chunk, at the published depth."""
    (few, many), (short, long) = LAYERS, TOKENS
    base = _iteration(cell, layers=few, tokens=short)
    deeper, longer = _iteration(cell, layers=many, tokens=short), _iteration(cell, layers=few, tokens=long)
    both = _iteration(cell, layers=many, tokens=long)["rollout"]
    more = (cell.model.num_hidden_layers - few) / (many - few)
    token = 1 / (long - short) * (longer["rollout"] - base["rollout"])
    token_deeper = 1 / (long - short) * (both - deeper["rollout"])
    rows = {"a token": token + more * (token_deeper - token)}
    for name in ("reference", "update"):
        rows[name] = base[name] + more * (deeper[name] - base[name])
    return pd.DataFrame(rows, index=["kernels", "waits"]).T.rename_axis("of").reset_index().assign(model=cell.varied)


def table() -> pd.DataFrame:
    """The paper's models in nf4, by what is counted."""
    cells = [cell for cell in engine.paper_cells() if cell.work.shared_prefix]
    return pd.concat(map(count, cells)).set_index(["model", "of"])
