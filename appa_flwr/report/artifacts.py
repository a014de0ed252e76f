"""Reads the files of a run folder into typed values, and checks them on the way in.

A run that stopped midway lacks files: what is absent is listed in `Run.missing` and everything else is read.
A file that is there but broken is the user's to know about: `UserError` names file, line or row, and key.

Axis letters: none; everything here is per iteration, per row or per named group.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from appa_flwr.errors import UserError

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
PHASES_FILE = "phases.json"
PLURALLLM_FILE = "pluralllm.json"
EXAMPLES_FILE = "examples.json"

TRAINED_POLICIES = ("base", "sft", "ppo")
REFERENCE_POLICIES = ("uniform", "majority", "ceiling-average", "ceiling-min")
POLICIES = TRAINED_POLICIES + REFERENCE_POLICIES
METRIC_ORDER = ("js", "js-distance", "wasserstein", "cosine", "borda")


Scalar = str | int | float | bool | None
PartScores = Mapping[str, Mapping[str, Mapping[str, float]]]
T = TypeVar("T")


@dataclass(frozen=True)
class Scores:
    """One policy under one metric, against one kind of target.

    Source: Appendix "Group, Average, and Minimum Alignment Scores".

    Attributes:
        fi: fairness index in [0, 1].
        avg_as: mean over groups of the per-group alignment score, in [0, 1].
        min_as: minimum over groups, in [0, 1].
        per_group: group name -> alignment score in [0, 1].
    """

    fi: float
    avg_as: float
    min_as: float
    per_group: Mapping[str, float]


@dataclass(frozen=True)
class SummaryRow:
    """One row of summary.json.

    Attributes:
        policy: one of `POLICIES`.
        metric: name of the metric.
        targets: scores against PluralLLM's predictions.
        survey: scores against the groups' real survey answers, or None where no group has any.
        format_score: mean format score in [0, 1], None for answers that no model wrote.
    """

    policy: str
    metric: str
    targets: Scores
    survey: Scores | None
    format_score: float | None


@dataclass(frozen=True)
class Iteration:
    """One line of metrics.jsonl: one PPO iteration.

    Attributes:
        fell_back: True where the rule took the plain mean, False where it weighted, None where it has no
            threshold.
        weights: weight per group, as the rule reported it.
        history: smoothed past alignment reward per group.
        rewards: mean alignment reward per group; None for a group that did not answer.
        seconds: seconds per part of the iteration.
        The remaining fields are means over the iteration's rollouts, named as in the file.
    """

    iteration: int
    num_iterations: int
    fairness_index: float
    fell_back: bool | None
    weights: Mapping[str, float]
    history: Mapping[str, float]
    rewards: Mapping[str, float | None]
    reward: float
    format_score: float
    kl: float
    policy_loss: float
    value_loss: float
    clip_fraction: float
    entropy: float
    response_length: float
    missing_groups: tuple[str, ...]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Phase:
    """Seconds one phase of the run took."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Round:
    """A federated round of the preference predictor's pretraining.

    Attributes:
        round: its number, from 1.
        loss: the groups' mean.
        validation: error on the training groups' held-out questions, a natural Jensen-Shannon distance in
            [0, 0.833]; None in a round that was not validated.
    """

    round: int
    loss: float
    validation: float | None


@dataclass(frozen=True)
class Population:
    """Which questions' answers were summed over the groups.

    Attributes:
        prior: whether the predictor was given the sums.
        min_groups: a sum is of the answers of so many groups at least.
        training: training questions that have a sum.
        held_out: held-out questions that have one.
    """

    prior: bool
    min_groups: int
    training: int
    held_out: int


@dataclass(frozen=True)
class PluralLLM:
    """Pretraining of the preference predictor.

    Attributes:
        rounds: in order.
        chosen: the round whose weights were kept, 0 without training.
        population: the sums over the groups, None where none were made.
        scores: part, such as "seen/held-out" (groups/questions) -> predictor -> measure -> mean agreement with the
            groups' own survey answers, in [0, 1], and "cells", the number of answers.
        groups: group -> the same for it alone.
        calibration: part -> "spread" over context draws and its "rank_correlation" with the error.
        by_context: part -> number of context answers, ascending -> measure -> mean agreement, and "cells".
    """

    rounds: tuple[Round, ...]
    chosen: int
    population: Population | None
    scores: PartScores
    groups: Mapping[str, PartScores]
    calibration: Mapping[str, Mapping[str, float]]
    by_context: Mapping[str, Mapping[int, Mapping[str, float]]]


@dataclass(frozen=True)
class Example:
    """A held-out question with the answers of two policies."""

    question: str
    options: tuple[str, ...]
    sft: str
    ppo: str
    mean_reward: float


@dataclass(frozen=True)
class Run:
    """All that a run folder holds.

    Attributes:
        missing: one sentence for each thing a complete run has and this one lacks.
    """

    folder: Path
    config: Mapping[str, Scalar]
    iterations: tuple[Iteration, ...]
    summary: tuple[SummaryRow, ...]
    phases: tuple[Phase, ...]
    pluralllm: PluralLLM | None
    examples: tuple[Example, ...]
    missing: tuple[str, ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """Group names in the order in which the run first names them."""
        seen: dict[str, None] = {}
        for row in self.summary:
            seen.update(dict.fromkeys(row.targets.per_group))
        for line in self.iterations:
            seen.update(dict.fromkeys(line.history))
            seen.update(dict.fromkeys(line.rewards))
        return tuple(seen)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that have at least one row, in the paper's order, unknown ones last."""
        present = dict.fromkeys(row.metric for row in self.summary)
        known = [metric for metric in METRIC_ORDER if metric in present]
        return tuple(known + [metric for metric in present if metric not in METRIC_ORDER])

    @property
    def training_metric(self) -> str | None:
        """The metric of the config; the first that has rows where the config's has none; None without any."""
        wanted = self.config.get("metric")
        if isinstance(wanted, str) and (wanted in self.metrics or not self.metrics):
            return wanted
        return self.metrics[0] if self.metrics else None

    def row(self, policy: str, metric: str | None) -> SummaryRow | None:
        """The row of that policy and metric, None where there is none."""
        return next((row for row in self.summary if (row.policy, row.metric) == (policy, metric)), None)

    def scores(self, policy: str, metric: str | None, *, survey: bool) -> Scores | None:
        """That row's scores against the survey truth or PluralLLM's targets, None where there are none."""
        row = self.row(policy, metric)
        if row is None:
            return None
        return row.survey if survey else row.targets


class _Record:
    """A JSON object with the place it came from, so that a wrong value is reported with its address."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise UserError(f"{where}: must be a JSON object, found {_shown(value)}")
        self._value: dict[str, object] = value
        self._where = where

    def has(self, key: str) -> bool:
        return self._value.get(key) is not None

    def get(self, key: str, kind: Callable[[object, str], T]) -> T:
        """The checked value of a key that must be there."""
        if key not in self._value:
            raise UserError(f"{self._where}: key '{key}' is missing")
        return kind(self._value[key], f"{self._where}, key '{key}'")


def _shown(value: object) -> str:
    """A value for an error message, short."""
    limit = 40
    text = json.dumps(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{where}: must be a number, found {_shown(value)}")
    return float(value)


def _integer(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{where}: must be a whole number, found {_shown(value)}")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: must be a text, found {_shown(value)}")
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{where}: must be true or false, found {_shown(value)}")
    return value


def _optional(kind: Callable[[object, str], T]) -> Callable[[object, str], T | None]:
    def read(value: object, where: str) -> T | None:
        return None if value is None else kind(value, where)

    return read


def _list(kind: Callable[[object, str], T], item: str = "item") -> Callable[[object, str], tuple[T, ...]]:
    def read(value: object, where: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise UserError(f"{where}: must be a list, found {_shown(value)}")
        return tuple(kind(entry, f"{where}, {item} {number}") for number, entry in enumerate(value, start=1))

    return read


def _mapping(kind: Callable[[object, str], T]) -> Callable[[object, str], dict[str, T]]:
    def read(value: object, where: str) -> dict[str, T]:
        if not isinstance(value, dict):
            raise UserError(f"{where}: must be a JSON object, found {_shown(value)}")
        return {name: kind(entry, f"{where}, '{name}'") for name, entry in value.items()}

    return read


def _scalar(value: object, where: str) -> Scalar:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise UserError(f"{where}: must be a single value, found {_shown(value)}")


def _scores(value: object, where: str) -> Scores:
    record = _Record(value, where)
    return Scores(
        fi=record.get("fi", _number),
        avg_as=record.get("avg_as", _number),
        min_as=record.get("min_as", _number),
        per_group=record.get("per_group", _mapping(_number)),
    )


def _summary_row(value: object, where: str) -> SummaryRow:
    record = _Record(value, where)
    policy = record.get("policy", _text)
    if policy not in POLICIES:
        raise UserError(f"{where}, key 'policy': '{policy}' is not one of {', '.join(POLICIES)}")
    return SummaryRow(
        policy=policy,
        metric=record.get("metric", _text),
        targets=_scores(value, where),
        survey=record.get("survey", _scores) if record.has("survey") else None,
        format_score=record.get("format_score", _number) if record.has("format_score") else None,
    )


def _iteration(value: object, where: str) -> Iteration:
    record = _Record(value, where)
    return Iteration(
        iteration=record.get("iteration", _integer),
        num_iterations=record.get("num_iterations", _integer),
        fairness_index=record.get("fairness_index", _number),
        fell_back=record.get("fell_back", _optional(_flag)),
        weights=record.get("weights", _mapping(_number)),
        history=record.get("history", _mapping(_number)),
        rewards=record.get("rewards", _mapping(_optional(_number))),
        reward=record.get("reward", _number),
        format_score=record.get("format_score", _number),
        kl=record.get("kl", _number),
        policy_loss=record.get("policy_loss", _number),
        value_loss=record.get("value_loss", _number),
        clip_fraction=record.get("clip_fraction", _number),
        entropy=record.get("entropy", _number),
        response_length=record.get("response_length", _number),
        missing_groups=record.get("missing_groups", _list(_text)),
        seconds=record.get("seconds", _mapping(_number)),
    )


def _phase(value: object, where: str) -> Phase:
    record = _Record(value, where)
    return Phase(name=record.get("phase", _text), seconds=record.get("seconds", _number))


def _round(value: object, where: str) -> Round:
    record = _Record(value, where)
    return Round(
        round=record.get("round", _integer),
        loss=record.get("loss", _number),
        validation=record.get("validation", _optional(_number)),
    )


def _population(value: object, where: str) -> Population:
    record = _Record(value, where)
    return Population(
        prior=record.get("prior", _flag),
        min_groups=record.get("min_groups", _integer),
        training=record.get("training", _integer),
        held_out=record.get("held_out", _integer),
    )


def _by_size(value: object, where: str) -> dict[int, Mapping[str, float]]:
    """Size of the context -> measure -> mean, by size."""
    sizes = _mapping(_mapping(_number))(value, where)
    for size in sizes:
        if not size.isdecimal() or int(size) < 1:
            raise UserError(f"{where}: a number of context answers must be 1 or more, found {_shown(size)}")
    return {int(size): sizes[size] for size in sorted(sizes, key=int)}


def _pluralllm(value: object, where: str) -> PluralLLM:
    record = _Record(value, where)
    parts = _mapping(_mapping(_mapping(_number)))
    return PluralLLM(
        rounds=record.get("rounds", _list(_round)),
        chosen=record.get("chosen", _integer),
        population=record.get("population", _optional(_population)),
        scores=record.get("scores", parts),
        groups=record.get("groups", _mapping(parts)),
        calibration=record.get("calibration", _mapping(_mapping(_number))),
        by_context=record.get("by_context", _mapping(_by_size)),
    )


def _example(value: object, where: str) -> Example:
    record = _Record(value, where)
    return Example(
        question=record.get("question", _text),
        options=record.get("options", _list(_text)),
        sft=record.get("sft", _text),
        ppo=record.get("ppo", _text),
        mean_reward=record.get("mean_reward", _number),
    )


def _parse(text: str, where: str, *, first_line: int = 1) -> object:
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise UserError(f"{where}: line {line} is not JSON ({error.msg}, column {error.colno})") from None
    return value


def _read_text(path: Path) -> str | None:
    """The file's text, None where there is no file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        # The line is what the user can act on; the bytes before the bad one are valid and may be counted.
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}: line {line} is not UTF-8 text") from None


def _read_json(path: Path, kind: Callable[[object, str], T]) -> T | None:
    text = _read_text(path)
    return None if text is None else kind(_parse(text, str(path)), str(path))


def _read_iterations(path: Path) -> tuple[Iteration, ...] | None:
    """Lines by iteration. A resumed run may repeat one: the later line is what training went on from."""
    text = _read_text(path)
    if text is None:
        return None
    lines: dict[int, Iteration] = {}
    # split("\n"), not splitlines(): a group name may hold U+2028 and the like, which JSON leaves unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            entry = _iteration(_parse(line, str(path), first_line=number), f"{path}: line {number}")
            lines[entry.iteration] = entry
    return tuple(lines[number] for number in sorted(lines))


def _check_unique(rows: tuple[SummaryRow, ...], path: Path) -> None:
    seen: dict[tuple[str, str], int] = {}
    for number, row in enumerate(rows, start=1):
        first = seen.setdefault((row.policy, row.metric), number)
        if first != number:
            raise UserError(f"{path}: rows {first} and {number} are both policy '{row.policy}', metric '{row.metric}'")


def _missing_in_results(summary: tuple[SummaryRow, ...]) -> list[str]:
    absent = [policy for policy in POLICIES if all(row.policy != policy for row in summary)]
    return [f"{SUMMARY_FILE} has no row for {', '.join(absent)}."] if absent and summary else []


def _missing_in_training(iterations: tuple[Iteration, ...]) -> list[str]:
    if not iterations:
        return []
    last, planned = iterations[-1].iteration, iterations[-1].num_iterations
    return [f"The run stopped after iteration {last} of {planned}."] if last < planned else []


def read_run(run_folder: Path) -> Run:
    """Reads whatever a run has written so far.

    Args:
        run_folder: the folder the server writes to.

    Returns:
        The run; absent files leave their part empty and add a line to `missing`.

    Raises:
        UserError: the folder has no config.json and so is no run; a file is not JSON, or a value in it has
            the wrong type (the message names file, line or row, and key).
    """
    config = _read_json(run_folder / CONFIG_FILE, _mapping(_scalar))
    if config is None:
        raise UserError(f"{run_folder}: not a run folder, it has no {CONFIG_FILE} (a run writes to runs/NAME)")

    iterations = _read_iterations(run_folder / METRICS_FILE)
    summary = _read_json(run_folder / SUMMARY_FILE, _list(_summary_row, "row"))
    phases = _read_json(run_folder / PHASES_FILE, _list(_phase, "row"))
    pluralllm = _read_json(run_folder / PLURALLLM_FILE, _pluralllm)
    examples = _read_json(run_folder / EXAMPLES_FILE, _list(_example, "row"))
    _check_unique(summary or (), run_folder / SUMMARY_FILE)

    missing: list[str] = []
    whole = config.get("run.phases") != "pluralllm"
    if whole and not iterations:
        missing.append(f"{METRICS_FILE}: no PPO iteration was logged, so there are no training curves.")
    if whole and not summary:
        missing.append(f"{SUMMARY_FILE}: the run was not evaluated, so there are no scores and no verdict.")
    if not phases:
        missing.append(f"{PHASES_FILE}: the time per phase is unknown.")
    if pluralllm is None:
        missing.append(f"{PLURALLLM_FILE}: nothing is known of the preference predictor's pretraining.")
    if whole and not examples:
        missing.append(f"{EXAMPLES_FILE}: there are no sample answers.")
    missing += _missing_in_training(iterations or ()) + _missing_in_results(summary or ())

    return Run(
        folder=run_folder,
        config=config,
        iterations=iterations or (),
        summary=summary or (),
        phases=phases or (),
        pluralllm=pluralllm,
        examples=examples or (),
        missing=tuple(missing),
    )


def write_atomically(path: Path, data: bytes) -> Path:
    """Writes beside the file and renames, so that a reader never sees half of it.

    Args:
        path: the file; missing parent folders are made.
        data: its content.

    Returns:
        The path.

    Raises:
        OSError: the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def is_known(value: float | None) -> bool:
    """Whether a number was measured: neither absent nor NaN nor infinite."""
    return value is not None and math.isfinite(value)
