"""The two smallest runs, as config keys: in this process, and by the command."""

from collections.abc import Mapping
from pathlib import Path

from appa_flwr.config import Config

SMALLEST: dict[str, object] = {
    "data.num-questions": 24,
    "data.num-groups": 3,
    "data.extra-questions": "",  # what every owner allows, on the questions that were answered
    "sft.target": "smoothed-votes",
    "pluralllm.num-context-questions": 4,
    "pluralllm.rounds": 2,
    "pluralllm.local-steps": 2,
    "pluralllm.learning-rate": 3e-3,
    "baseline-rules": "",
    "eval.ceilings": False,
    "sft.steps": 3,
    "sft.batch-size": 4,
    "ppo.num-iterations": 2,
    "ppo.batch-size": 8,
    "ppo.num-mini-batches": 2,
    "ppo.response-length": 24,
}
"""A run as small as all its parts can be; tests change what they are about."""

READABLE: dict[str, object] = {
    "data.num-questions": 60,
    "data.num-groups": 4,
    "run.min-groups": 4,
    "pluralllm.rounds": 4,
    "pluralllm.local-steps": 2,
    "baseline-rules": "",
    "sft.steps": 60,
    "sft.batch-size": 16,
    "ppo.num-iterations": 3,
    "ppo.batch-size": 32,
    "ppo.num-mini-batches": 4,
    "ppo.response-length": 48,
}
"""As small as a run can be that still writes answers which can be read, and whose groups differ."""

VALUE_MODEL = {"ppo.baseline": "value", "ppo.answers-per-question": 1}

CHOSEN = {"sft.learning-rate": 1e-3}
"""Beside a model that is not the tiny one: its step size is chosen, so the config does not refuse it."""


def keys_of(changes: Mapping[str, object]) -> dict[str, object]:
    """Config keys by the names of arguments: `ppo.batch-size` for `ppo__batch_size`."""
    return {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}


def config_in(folder: Path, **keys: object) -> Config:
    """A run named `r` in this folder."""
    return Config.load({"run.output-dir": str(folder), "run-name": "r", **keys})
