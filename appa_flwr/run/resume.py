"""Which run folders a run can be resumed from, and with which config."""

from __future__ import annotations

import json
from pathlib import Path

from appa_flwr.config import Config
from appa_flwr.errors import UserError

CONFIG_FILE, PROGRESS_FILE, WEIGHTS_FILE = "config.json", "progress.jsonl", "pluralllm.safetensors"
LOG_FILE = "run.log"  # locked by the run's server while it lives
LAST_PHASE = "report"
# Where a run lies, how long it waits and how often it saves changes none of its numbers.
FREE_KEYS = (
    "run-name",
    "run.output-dir",
    "run.cache-dir",
    "federation.reply-timeout",
    "federation.join-timeout",
    "run.checkpoint-every",
    "run.resume",
)


def resumable(folder: Path) -> Config:
    """The config of the run in this folder, set to resume it where it lies now.

    Raises:
        UserError: there is no run, or it is finished.
    """
    path = folder / CONFIG_FILE
    try:
        flat = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: no run to resume, it has no {CONFIG_FILE} (a run writes to runs/NAME)") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if not isinstance(flat, dict):
        raise UserError(f"{path}: must hold the keys of a config")
    if _finished(folder / PROGRESS_FILE):
        raise UserError(f"{folder}: the run is finished, there is nothing to resume; appa report {folder} shows it")
    here = folder.resolve()
    return Config.load({**flat, "run.output-dir": str(here.parent), "run-name": here.name, "run.resume": True})


def check_resumable(config: Config) -> None:
    """Whether the run folder of a config that says `resume` holds this very run.

    Raises:
        UserError: see `resumable`; or a key that matters has another value.
    """
    began = resumable(config.run_folder).flat()
    for key, value in config.flat().items():
        if key not in FREE_KEYS and value != began[key]:
            raise UserError(
                f"{key} = {json.dumps(value)}, but the run in {config.run_folder} began with "
                f"{json.dumps(began[key])}; a resumed run keeps its keys, all of them are in {CONFIG_FILE}"
            )


def _finished(progress: Path) -> bool:
    try:
        return bool(json.loads(progress.read_text(encoding="utf-8").splitlines()[-1])["phase"] == LAST_PHASE)
    except (OSError, IndexError, ValueError):
        return False
