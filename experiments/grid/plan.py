"""A grid file and its trials: the runs, with their keys.

A grid is datasets x tasks x models x seeds; each trial is a run that trains a policy by every rule. The first trial of
a dataset and seed trains PluralLLM; the other trials with the same keys of PluralLLM use its weights.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from string import Template
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appa_flwr.analysis.rule_choice import check_rules
from appa_flwr.config import Config, Scalar
from appa_flwr.config.sources import assemble, flatten, on_its_preset
from appa_flwr.core.code_version import code_version
from appa_flwr.core.errors import UserError, first_problem, unknown_name
from appa_flwr.core.text import parse_toml
from appa_flwr.run.resume import FREE_KEYS
from appa_flwr.run.schema import WEIGHTS_FILE

AXES = ("datasets", "tasks", "models")
HASH_DIGITS = 8
TRIALS = "trials"
CHECKPOINT = "pluralllm.checkpoint"

Keys = Mapping[str, Scalar]
_Tables = Annotated[dict[str, dict[str, Any]], Field(min_length=1)]


@dataclass(frozen=True)
class Trial:
    """A run of the grid: names in the grid file, the seed, and the complete config, with the run's folder.

    `needs` is the trial whose PluralLLM this trial uses; None if it trains its own.
    """

    dataset: str
    task: str
    model: str
    seed: int
    config: Config
    needs: "Trial | None" = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        """Dataset, task, model and seed, with a hash of the keys, of the trial that is needed, and of the code."""
        return self.config.run_name

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.config.run_folder


class Grid(BaseModel):
    """A grid file, and its path; `last` are keys from the command line, which override all others.

    Each run trains one policy per rule; the others are compared with the first. Without rules they are those of the
    keys, `rule` and `baseline-rules`. `flatten` validates the tables' keys.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    seeds: Annotated[list[int], Field(min_length=1)] = [0]
    keys: dict[str, Any] = {}
    datasets: _Tables = {"generated": {}}
    tasks: _Tables = {"dpa": {"task": "dpa"}}
    models: _Tables = {"tiny": {"model": "tiny"}}
    rules: list[str] = []
    path: Path = Path()
    last: dict[str, Any] = {}

    @property
    def axes(self) -> dict[str, _Tables]:
        """Axis -> name -> keys."""
        return {axis: getattr(self, axis) for axis in AXES}


def read_grid(path: Path, *, last: Keys | None = None) -> Grid:
    """Read a grid file, whose keys those of `last` override.

    Raises:
        UserError: no such file, no TOML, a table or key that does not exist, or a value of the wrong kind.
    """
    content = parse_toml(path)
    try:
        tables = [name for name in Grid.model_fields if name not in ("path", "last")]
        for name in content:
            if name not in tables:
                raise unknown_name("table", name, valid=tables)
        grid = Grid.model_validate(content)
        for axis, table in grid.axes.items():
            table.update({name: _keys(f"{axis}.{name}", keys) for name, keys in table.items()})
        grid.keys, grid.path = _keys("keys", grid.keys), path
    except ValidationError as error:
        raise UserError(f"{path}: {first_problem(error)}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    grid.last = on_its_preset(last or {})
    if not grid.rules:
        keys = {key: value for key, value in {**grid.keys, **grid.last}.items() if key in ("rule", "baseline-rules")}
        rule, *baselines = Config.load(keys).rules
        grid.rules = [*baselines, rule]
    return grid


def _keys(name: str, table: Mapping[str, object]) -> dict[str, Scalar]:
    """A table's keys with those of its preset, and with environment variables replaced in the survey's path."""
    keys = on_its_preset(flatten(table, source=f"[{name}]"))
    if isinstance(survey := keys.get("survey"), str):
        try:
            keys["survey"] = Template(survey).substitute(os.environ)
        except (KeyError, ValueError) as error:
            raise UserError(f"[{name}]: survey = {survey!r} names {error}, which is not set") from None
    return keys


def trials(grid: Grid, output: Path, *, here: Path) -> list[Trial]:
    """List the trials, each after the trial that it needs; all trials of a seed come before those of the next seed.

    All runs are written to `output`; relative paths start at `here`.

    Raises:
        UserError: the keys of a trial are invalid; the message names the trial.
    """
    rule = (grid.rules[1:] or grid.rules)[0]  # the first is the baseline
    baselines = dict.fromkeys(name for name in grid.rules if name != rule)
    rules: dict[str, Scalar] = {"rule": rule, "baseline-rules": ",".join(baselines)}
    planned: list[Trial] = []
    for seed in grid.seeds:
        first: dict[object, Trial] = {}
        for names in product(grid.datasets, grid.tasks, grid.models):
            label = "-".join([*names, f"s{seed}"])
            own = {"run.output-dir": str(output.absolute() / TRIALS), "seed": seed, **rules}
            keys = [grid.keys, *(grid.axes[axis][name] for axis, name in zip(AXES, names, strict=True)), grid.last, own]
            try:
                config = assemble(
                    [], folder=here, beneath={key: value for table in keys for key, value in table.items()}
                )
                check_rules(config)
                needs = first.get(predictor := (names[0], config.pluralllm))
                made = {"run-name": f"{label}-{_hash(config, needs)}"}
                if needs is not None:
                    made[CHECKPOINT] = str(needs.folder / WEIGHTS_FILE)
                config = Config.load({**config.flat(), **made})
            except UserError as error:
                raise UserError(f"{grid.path}: trial {label}: {error}") from None
            planned.append(Trial(*names, seed, config, needs=needs))
            first.setdefault(predictor, planned[-1])
    return planned


def _hash(config: Config, needs: Trial | None) -> str:
    keys = {key: value for key, value in config.flat().items() if key not in (*FREE_KEYS, CHECKPOINT)}
    content = json.dumps([keys, needs.name if needs else "", code_version()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:HASH_DIGITS]
