"""The two smallest runs, as config keys: in this process, and by the command."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appa_flwr.config import Config

CASES = Path(__file__).parent / "cases"


def cases(name: str) -> Any:
    """The table NAME.toml or NAME.json of the cases."""
    if (path := CASES / f"{name}.toml").exists():
        return tomllib.loads(path.read_text())
    return json.loads(path.with_suffix(".json").read_text())


SMALLEST: dict[str, object] = cases("small_runs")["smallest"]
READABLE: dict[str, object] = cases("small_runs")["readable"]

VALUE_MODEL = {"ppo.baseline": "value", "ppo.answers-per-question": 1}

CHOSEN = {"sft.learning-rate": 1e-3}
"""Beside a model that is not the tiny one: its step size is chosen, so the config does not refuse it."""


def keys_of(changes: Mapping[str, object]) -> dict[str, object]:
    """Config keys by the names of arguments: `ppo.batch-size` for `ppo__batch_size`."""
    return {name.replace("__", ".").replace("_", "-"): value for name, value in changes.items()}


def config_in(folder: Path, **keys: object) -> Config:
    """A run named `r` in this folder."""
    return Config.load({"run.output-dir": str(folder), "run-name": "r", **keys})


def config_of(**changes: object) -> Config:
    """The smallest run with these changes."""
    return Config.load({**SMALLEST, **keys_of(changes)})


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """A run's metrics, a line an iteration."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def spoil(folder: Path, how: Mapping[str, Any]) -> None:
    """Change a model's folder: texts of `files`, keys of its `config`, what to `remove`, `cut` or have `moved`."""
    for name, content in how.get("files", {}).items():
        (folder / name).write_text(content)
    for path in [path for pattern in how.get("remove", ()) for path in folder.glob(pattern)]:
        path.unlink()
    if "cut" in how:
        (folder / how["cut"]).write_bytes((folder / how["cut"]).read_bytes()[:-100])
    if "config" in how:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | how["config"]))
    if "moved" in how:
        folder.rename(folder.with_name(how["moved"]))
