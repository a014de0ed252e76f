"""Conditions on run folders: those a run can begin in or be resumed from, and with which config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock

from appa_flwr.config import Config, Scalar
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import lock, writing
from appa_flwr.run import run_files as files
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


def claim(config: Config) -> FileLock:
    """Make a run's folder, or take that of the run which is resumed, for this process alone.

    The launcher does so, and then the server. From here on the run can be resumed.

    Returns:
        The lock, which ends with the process.

    Raises:
        UserError: the folder holds another run, or `run.resume` is set and it holds none that can be resumed with these
            keys; another process is writing there, or nothing can be written.
    """
    folder = config.run_folder
    if config.run.resume:
        _check_resumable(config)
    else:
        _check_new(config)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    held = lock(folder / files.LOG_FILE)
    if not config.run.resume:
        files.write_config(folder, config)
    with writing(folder):
        for name in (files.ERROR_FILE, files.SUPERLINK_LOG):
            (folder / name).unlink(missing_ok=True)
    return held


def _check_resumable(config: Config) -> None:
    for key, value, began in _changed(config, resumable(config.run_folder)):
        raise UserError(
            f"{key} = {json.dumps(value)}, but the run in {config.run_folder} began with {json.dumps(began)}; "
            f"a resumed run keeps its keys, all of them are in {CONFIG_FILE}"
        )


def _check_new(config: Config) -> None:
    """See that nothing was begun in the run's folder, where the launcher may have left this very config."""
    folder = config.run_folder
    begun = (folder / files.METRICS.name).exists()  # the server makes it first
    if begun or ((folder / CONFIG_FILE).exists() and any(_changed(config, read_config(folder)))):
        raise UserError(
            f'run-name = "{config.run_name}": {folder} holds a run already; choose another run-name, or go on with it '
            f"(run.resume=true): appa run --resume {folder}"
        )


def _changed(config: Config, began: Config) -> Iterator[tuple[str, object, object]]:
    before = began.flat()
    return (
        (key, value, before[key])
        for key, value in config.flat().items()
        if key not in FREE_KEYS and value != before[key]
    )


def finished(folder: Path) -> bool:
    """True if the run in this folder has come to its end; UserError if its progress cannot be read."""
    progress = PROGRESS.read(folder)
    return bool(progress) and progress[-1].phase == LAST_PHASE
