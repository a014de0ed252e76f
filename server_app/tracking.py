"""Iterations to an experiment tracker, by accelerate's interface; local, and off unless `run.tracker` names one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.run.records import Iteration

NONE, TENSORBOARD, WANDB = "none", "tensorboard", "wandb"
PROJECT = "appa-flwr"


def check(config: Config) -> None:
    """Tell before a run starts that its tracker is not installed.

    Raises:
        UserError: see above.
    """
    name = config.run.tracker
    if name != NONE and name not in map(str, get_available_trackers()):
        package = "tensorboardX" if name == TENSORBOARD else name
        raise UserError(f'run.tracker = "{name}" needs its package: pip install {package}')


@contextmanager
def tracked(config: Config, folder: Path) -> Iterator[Callable[[Iteration], None]]:
    """Receivers of each iteration; TensorBoard's and wandb's files go to the run's folder.

    wandb stays offline unless WANDB_MODE says otherwise; trackio is local by itself.
    """
    name = config.run.tracker
    if name == NONE:
        yield lambda line: None
        return
    settings: dict[str, Any] = {"run_name": PROJECT, "name": config.run_name, "config": config.flat()}
    if name == TENSORBOARD:
        settings = {"run_name": TENSORBOARD, "logging_dir": str(folder)}
    elif name == WANDB:
        settings |= {"dir": str(folder), "mode": os.environ.get("WANDB_MODE", "offline")}
    tracker = LOGGER_TYPE_TO_CLASS[name](**settings)
    tracker.start()
    try:
        yield lambda line: tracker.log(numbers(line), step=line.iteration)
    finally:
        tracker.finish()


def numbers(line: Iteration) -> dict[str, float]:
    """An iteration as names and numbers: those by group or part as "weights/NAME"; what is unknown is left out."""
    known: dict[str, float] = {}
    for name, value in line.model_dump(exclude={"iteration", "num_iterations", "missing_groups"}).items():
        values = {f"{name}/{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        known |= {key: float(item) for key, item in values.items() if item is not None}
    return known | {"missing_groups": float(len(line.missing_groups))}
