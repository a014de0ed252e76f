"""A grid file, and the trials it asks for: which runs, with which keys, and what each begins with.

A grid is datasets x tasks x models x rules x seeds. Three kinds of trials share what they can: PluralLLM is trained
once for a dataset and seed, SFT once for a dataset, task, model and seed, and every rule begins with both.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path
from string import Template
from typing import Any, Literal, get_args

from appa_flwr.config import Config, Scalar, assemble, to_toml
from appa_flwr.config.sources import flatten, on_its_preset
from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.run.resume import FREE_KEYS
from appa_flwr.run.run_files import SFT_MODEL, WEIGHTS_FILE

Stage = Literal["predictor", "sft", "rule"]
STAGES: tuple[Stage, ...] = get_args(Stage)
AXES = ("datasets", "tasks", "models", "rules")
OTHERS = ("seeds", "baseline", "keys", "hours", "scale")
CODE = ("appa_flwr", "client_app", "server_app", "pluralllm")
SHOWING = ("report", "launch")
HASH_DIGITS = 8
TRIALS = "trials"
CHECKPOINTS = ("pluralllm.checkpoint", "sft.checkpoint")

Keys = Mapping[str, Scalar]


@dataclass(frozen=True)
class Trial:
    """A run of the grid.

    Attributes:
        stage: which of a run's parts it makes.
        dataset: its name in the file; task, model and rule too, "" where it is made for all of them.
        config: complete, with the folder it runs in.
        needs: the trial whose result it begins with.
    """

    stage: Stage
    dataset: str
    task: str
    model: str
    rule: str
    seed: int
    config: Config
    needs: Trial | None = None

    @property
    def name(self) -> str:
        """Name made of what was asked for, and a hash of its keys, of what it begins with and of the code."""
        return self.config.run_name

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.config.run_folder


@dataclass(frozen=True)
class Grid:
    """A grid file.

    Attributes:
        axes: axis -> name -> keys.
        baseline: the rule that others are compared with.
        hours: model, or "all" -> hours of a trial of each stage, for the estimate.
        last: keys that come after all others: those of [scale.NAME].
    """

    path: Path
    keys: Keys
    axes: Mapping[str, Mapping[str, Keys]]
    seeds: tuple[int, ...]
    baseline: str
    hours: Mapping[str, Mapping[str, float]]
    last: Keys = field(default_factory=dict)

    @property
    def scaled(self) -> bool:
        """True if a [scale.NAME] changes what runs."""
        return bool(self.last)


def read_grid(path: Path, *, scale: str = "", only: Collection[str] = ()) -> Grid:
    """Read a grid file.

    Args:
        path: of the file.
        scale: names one of its [scale.NAME] tables, whose keys come last.
        only: names of datasets, tasks, models and rules; an axis that is named in it keeps these alone.

    Raises:
        UserError: no such file, no TOML, a table or key that does not exist, or a value of the wrong kind.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a grid file ({error})") from None
    for name in content:
        if name not in (*AXES, *OTHERS):
            raise UserError(f"{path}: {unknown_name('table', name, valid=(*AXES, *OTHERS))}")
    axes = {
        axis: {name: _keys(path, f"{axis}.{name}", keys) for name, keys in _table(path, axis, content).items()}
        for axis in AXES
    }
    rules, names = axes["rules"], [name for table in axes.values() for name in table]
    for name in only:
        if name not in names:
            raise UserError(f"{path}: {unknown_name('name', name, valid=names)}")
    axes = {
        axis: {name: keys for name, keys in table.items() if name in only or not table.keys() & set(only)}
        for axis, table in axes.items()
    }
    for rule, keys in axes["rules"].items():
        axes["rules"][rule] = {"rule": rule, **keys}
    seeds = content.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int for seed in seeds):
        raise UserError(f"{path}: seeds must be whole numbers, such as seeds = [0, 1, 2]")
    baseline = content.get("baseline", next(iter(rules)))
    if baseline not in rules:
        raise UserError(f"{path}: baseline = {baseline!r} is no rule of the grid; it has {', '.join(rules)}")
    scales = content.get("scale", {})
    if scale and scale not in scales:
        raise UserError(f"{path}: {unknown_name('scale', scale, valid=scales)}")
    return Grid(
        path=path,
        keys=_keys(path, "keys", content.get("keys", {})),
        axes=axes,
        seeds=tuple(seeds),
        baseline=baseline if baseline in axes["rules"] else next(iter(axes["rules"])),
        hours=_hours(path, content.get("hours", {})),
        last=_keys(path, f"scale.{scale}", scales[scale]) if scale else {},
    )


def _table(path: Path, axis: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    table = content.get(axis)
    if not isinstance(table, dict) or not table or not all(isinstance(keys, dict) for keys in table.values()):
        raise UserError(f"{path}: [{axis}.NAME] is missing: a table of keys for each of the {axis}")
    return table


def _keys(path: Path, name: str, table: Mapping[str, object]) -> dict[str, Scalar]:
    keys = flatten(table, source=f"{path}: [{name}]")
    found = on_its_preset(keys)
    if isinstance(survey := found.get("survey"), str):
        try:
            found["survey"] = Template(survey).substitute(os.environ)
        except (KeyError, ValueError) as error:
            raise UserError(f"{path}: [{name}]: survey = {survey!r} names {error}, which is not set") from None
    return found


def _hours(path: Path, table: Mapping[str, object]) -> dict[str, dict[str, float]]:
    found = {}
    for model, hours in table.items():
        if not isinstance(hours, dict) or not all(
            name in STAGES and isinstance(hour, int | float) for name, hour in hours.items()
        ):
            raise UserError(f"{path}: [hours.{model}] must give hours for {', '.join(STAGES)}")
        found[model] = {name: float(hour) for name, hour in hours.items()}
    return found


def trials(grid: Grid, output: Path, *, here: Path) -> list[Trial]:
    """The trials in an order in which each comes after what it needs; a seed is complete before the next one begins.

    Args:
        grid: the file.
        output: folder of all runs.
        here: folder that relative paths count from.

    Raises:
        UserError: keys that make no config; the message names the trial.
    """
    return list(_trials(grid, output.absolute(), here))


def _trials(grid: Grid, output: Path, here: Path) -> Iterator[Trial]:
    axes = grid.axes
    for seed in grid.seeds:
        predictors = {}
        for dataset, keys in axes["datasets"].items():
            predictors[dataset] = _trial(
                grid, ("predictor", dataset, "", "", ""), seed, [keys], output=output, here=here
            )
            yield predictors[dataset]
        for dataset, task, model in product(axes["datasets"], axes["tasks"], axes["models"]):
            tables = [axes[axis][name] for axis, name in zip(AXES, (dataset, task, model), strict=False)]
            sft = _trial(
                grid,
                ("sft", dataset, task, model, ""),
                seed,
                tables,
                needs=predictors[dataset],
                output=output,
                here=here,
            )
            yield sft
            for rule, keys in axes["rules"].items():
                names: Names = ("rule", dataset, task, model, rule)
                yield _trial(grid, names, seed, [*tables, keys], needs=sft, output=output, here=here)


Names = tuple[Stage, str, str, str, str]
PHASES: Mapping[Stage, str] = {"predictor": "pluralllm", "sft": "sft", "rule": "all"}


def _trial(
    grid: Grid,
    names: Names,
    seed: int,
    tables: list[Keys],
    *,
    needs: Trial | None = None,
    output: Path,
    here: Path,
) -> Trial:
    stage, dataset, task, model, rule = names
    keys: dict[str, Scalar] = {}
    for table in (grid.keys, *tables, grid.last):
        keys |= table
    keys |= {"baseline-rule": "", "seed": seed, "run.phases": PHASES[stage], "run.output-dir": str(output / TRIALS)}
    if stage == "rule":  # the ceilings stand in SFT's trial
        keys["eval.ceilings"] = False
    label = "-".join([name for name in names[1:] if name] + ([stage] if stage != "rule" else []) + [f"s{seed}"])
    try:
        config = assemble(None, [f"{key}={to_toml(value)}" for key, value in keys.items()], folder=here)
        name = f"{label}-{_hash(config, needs)}"
        changed: dict[str, Scalar] = {"run-name": name}
        if needs is not None:
            weights = needs if needs.needs is None else needs.needs
            changed["pluralllm.checkpoint"] = str(weights.folder / WEIGHTS_FILE)
        if stage == "rule" and needs is not None:
            changed["sft.checkpoint"] = str(needs.folder / SFT_MODEL)
        config = Config.load({**config.flat(), **changed})
    except UserError as error:
        raise UserError(f"{grid.path}: trial {label}: {error}") from None
    return Trial(stage, dataset, task, model, rule, seed, config, needs)


def _hash(config: Config, needs: Trial | None) -> str:
    keys = {key: value for key, value in config.flat().items() if key not in (*FREE_KEYS, *CHECKPOINTS)}
    content = json.dumps([keys, needs.name if needs else "", code_version()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:HASH_DIGITS]


@cache
def code_version() -> str:
    """Hash of all that decides numbers: the Python files and presets of the four packages but for report and launch."""
    found = hashlib.sha256()
    for package in CODE:
        root = Path(str(resources.files(package)))
        for path in sorted(path for ending in ("*.py", "*.toml") for path in root.rglob(ending)):
            if path.relative_to(root).parts[0] in SHOWING:
                continue
            found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:HASH_DIGITS]
