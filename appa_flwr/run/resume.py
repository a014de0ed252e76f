"""Checks of run folders before a run begins or is resumed, and the config of a resumed run."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock
from pydantic import BaseModel

from appa_flwr.config import Config, Scalar
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import lock, make_folder, writing
from appa_flwr.run import schema as files
from appa_flwr.run.records import RuleValues
from appa_flwr.run.schema import CONFIG_FILE, PROGRESS, read_config

LAST_PHASE = "report"
# These keys change no number of a run.
CHANGEABLE_KEYS = ("run.reply-timeout", "run.tracker", "run.rules-at-once", "serve.host", "serve.port")
FREE_KEYS = ("run-name", "run.output-dir", "run.resume", *CHANGEABLE_KEYS)


def resumable(folder: Path, changes: Mapping[str, Scalar] = {}) -> Config:
    """Config that resumes the run in this folder, which may have been moved; `changes` are new values of keys.

    Raises:
        UserError: this version cannot read a run in the folder, the run is finished, or another key is changed.
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


def claim(config: Config, *, launcher: bool = False) -> FileLock:
    """Lock a run's folder, created for a new run, until the lock's `release` or the end of the process.

    Called by the launcher, which holds Flower's log, and then by the server, which holds the run's log. So a second
    launcher is refused although the first one's server has not begun. From here on the run can be resumed.

    Raises:
        UserError: the folder holds another run, or `run.resume` is set and it holds none that can be resumed with these
            keys; another process is writing there, or the folder cannot be written.
    """
    folder = config.run_folder
    if config.run.resume:
        for key, value, began in _changed(config, resumable(folder)):
            raise UserError(
                f"{key} = {json.dumps(value)}, but the run in {folder} began with {json.dumps(began)}; a resumed run "
                f"keeps its keys, all of them are in {CONFIG_FILE}"
            )
    # The server creates the metrics first; the launcher may have written this same config.
    elif (folder / files.METRICS_FILE.name).exists() or (
        (folder / CONFIG_FILE).exists() and any(_changed(config, read_config(folder)))
    ):
        raise UserError(
            f'run-name = "{config.run_name}": {folder} holds a run already; choose another run-name, or go on with it '
            f"(run.resume=true): appa run --resume {folder}"
        )
    make_folder(folder)
    launching = lock(folder / files.FLOWER_LOG) if launcher else None
    held = lock(folder / files.LOG_FILE)
    if not config.run.resume:
        files.write_config(folder, config)
    with writing(folder):
        for name in (files.ERROR_FILE, files.SUPERLINK_LOG, *([files.FLOWER_LOG] if launcher else ())):
            (folder / name).unlink(missing_ok=True)
    if launching is not None:
        held.release()
    return launching or held


def rule_values(config: Config, rules: Mapping[str, BaseModel]) -> dict[str, RuleValues]:
    """Content of rules.json for a run's rules.

    Raises:
        UserError: the run is resumed, and a user's rule has changed since it began.
    """
    from appa_flwr.analysis import rule_choice  # it needs NumPy and SciPy, and a command line starts without them

    values = {
        name: RuleValues(parameters={key: str(value) for key, value in rule}, text=rule_choice.text_hash(name))
        for name, rule in rules.items()
    }
    first = (files.RULE_VALUES.read(config.run_folder) if config.run.resume else None) or values
    for name, now in values.items():
        if now.text and first[name] != now:
            raise UserError(
                f'rule "{name}": has changed since the run began; take the change back, or begin another run'
            )
    return values


def _changed(config: Config, began: Config) -> Iterator[tuple[str, object, object]]:
    for (key, value), before in zip(config.flat().items(), began.flat().values(), strict=True):
        if key not in FREE_KEYS and value != before:
            yield key, value, before


def finished(folder: Path) -> bool:
    """True if the run in this folder is finished; raises UserError if its progress cannot be read."""
    progress = PROGRESS.read(folder)
    return bool(progress) and progress[-1].phase == LAST_PHASE
