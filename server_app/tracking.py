"""Live metrics: the lines of metrics.jsonl in TensorBoard, wandb or trackio, by accelerate's trackers."""

import os
from pathlib import Path
from typing import Any

import pandas as pd
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError


def check(name: str) -> None:
    """Raise a UserError if the package of the tracker, empty = none, is not installed."""
    if name and name not in map(str, get_available_trackers()):
        raise UserError(f'run.tracker = "{name}" needs its package: pip install {name}')


def start(config: Config, folder: Path) -> GeneralTracker:
    """Start the run's tracker; TensorBoard and wandb write to the run's folder."""
    name = f"{folder.parent.name}/{folder.name}"  # each of `baseline-rules` has a folder in the run's
    settings: dict[str, Any] = {"run_name": "appa-flwr", "name": name, "config": config.flat()}
    if config.run.tracker == "tensorboard":
        settings = {"run_name": "tensorboard", "logging_dir": folder}
    elif config.run.tracker == "wandb":
        settings |= {"dir": folder, "mode": os.environ.get("WANDB_MODE", "offline"), "reinit": "create_new"}
    PartialState()  # without it, accelerate's trackers raise an error
    tracker = LOGGER_TYPE_TO_CLASS[config.run.tracker](**settings)
    tracker.start()
    return tracker


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Numbers of a record by name, those of a table as TABLE/NAME; None and texts are left out."""
    (flat,) = pd.json_normalize(record, sep="/").to_dict("records")
    return {str(name): float(value) for name, value in flat.items() if isinstance(value, int | float)}
