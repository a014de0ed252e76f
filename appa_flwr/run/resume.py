"""Conditions on run folders: those a run can begin in or be resumed from, and with which config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from appa_flwr.config import Config, Scalar
from appa_flwr.core.errors import UserError
from appa_flwr.run import run_files as files
from appa_flwr.run.records import Progress
from appa_flwr.run.run_files import CONFIG_FILE, PROGRESS, read_config

LAST_PHASE = "report"
# How long a run waits and who hears of it changes none of its numbers.
CHANGEABLE_KEYS = ("run.reply-timeout", "serve.host", "serve.port")
FREE_KEYS = ("run-name", "run.output-dir", "run.resume", *CHANGEABLE_KEYS)


def resumable(folder: Path, changes: Mapping[str, Scalar] = {}) -> Config:
    """The config of the run in this folder, set to resume it where it lies now.

    Args:
        folder: of the run.
        changes: keys that get another value; of `CHANGEABLE_KEYS` alone.

    Raises:
        UserError: there is no run that this version can read, it is finished, or a change is of another key.
    """
    config = read_config(folder)
    if finished(folder):
        raise UserError(f"{folder}: the run is finished, there is nothing to resume; appa report {folder} shows it")
    for key in changes:
        if key not in CHANGEABLE_KEYS:
            raise UserError(f"{key}: a resumed run keeps its keys; it may change {', '.join(CHANGEABLE_KEYS)}")
    here = folder.resolve()
    place: dict[str, Scalar] = {"run.output-dir": str(here.parent), "run-name": here.name, "run.resume": True}
    return Config.load({**config.flat(), **changes, **place})


def check_resumable(config: Config) -> None:
    """Check that the run folder of a config with `resume` holds this very run.

    Raises:
        UserError: see `resumable`; or a key that matters has another value.
    """
    for key, value, began in _changed(config, resumable(config.run_folder)):
        raise UserError(
            f"{key} = {json.dumps(value)}, but the run in {config.run_folder} began with {json.dumps(began)}; "
            f"a resumed run keeps its keys, all of them are in {CONFIG_FILE}"
        )


def check_new(config: Config) -> None:
    """Check that the run folder of a config without `resume` is free for it.

    It is where nothing was begun there; the launcher may have left this very config.

    Raises:
        UserError: it holds a run.
    """
    folder = config.run_folder
    begun = (folder / files.METRICS.name).exists()  # the server makes it first
    if begun or ((folder / CONFIG_FILE).exists() and any(_changed(config, read_config(folder)))):
        raise UserError(
            f'run-name = "{config.run_name}": {folder} holds a run already; choose another run-name, or go on with it: '
            "run.resume=true"
        )


def _changed(config: Config, began: Config) -> Iterator[tuple[str, object, object]]:
    before = began.flat()
    return (
        (key, value, before[key])
        for key, value in config.flat().items()
        if key not in FREE_KEYS and value != before[key]
    )


def finished(folder: Path) -> bool:
    """True if the run in this folder has come to its end."""
    try:
        return Progress.model_validate_json((folder / PROGRESS.name).read_bytes().splitlines()[-1]).phase == LAST_PHASE
    except (OSError, IndexError, ValueError):
        return False
