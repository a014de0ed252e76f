"""All that a run's folder holds, read and put in order for the report.

A run that stopped midway lacks files: what is absent is listed in `Run.missing` and everything else is read.
A file that is there but broken is the user's to know about: `UserError` names file, line or row, and key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appa_flwr.config import Config, Scalar
from appa_flwr.errors import UserError
from appa_flwr.run.files import CARD, EXAMPLES, METRICS, PHASES, SUMMARY, read_config
from appa_flwr.run.records import (
    POLICIES,
    TRAINED_POLICIES,
    Card,
    Example,
    Iteration,
    Phase,
    Round,
    Scores,
    SummaryRow,
)

__all__ = [
    "POLICIES",
    "TRAINED_POLICIES",
    "Example",
    "Iteration",
    "Phase",
    "PluralLLM",
    "Round",
    "Run",
    "Scalar",
    "Scores",
    "SummaryRow",
    "is_known",
    "read_run",
]

METRIC_ORDER = ("js", "js-distance", "wasserstein", "cosine", "borda")

PluralLLM = Card


@dataclass(frozen=True)
class Run:
    """All that a run folder holds.

    Attributes:
        settings: the run's keys.
        missing: one sentence for each thing a complete run has and this one lacks.
    """

    folder: Path
    settings: Config
    iterations: tuple[Iteration, ...]
    summary: tuple[SummaryRow, ...]
    phases: tuple[Phase, ...]
    pluralllm: Card | None
    examples: tuple[Example, ...]
    missing: tuple[str, ...]

    @property
    def config(self) -> Mapping[str, Scalar]:
        """The run's keys and values, sections dotted."""
        return self.settings.flat()

    @property
    def groups(self) -> tuple[str, ...]:
        """Group names in the order in which the run first names them."""
        seen: dict[str, None] = {}
        for row in self.summary:
            seen.update(dict.fromkeys(row.per_group))
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
    def training_metric(self) -> str:
        """The metric PPO was trained on; the first that has rows where that has none."""
        wanted = self.settings.reward_metric
        return wanted if wanted in self.metrics or not self.metrics else self.metrics[0]

    def row(self, policy: str, metric: str | None) -> SummaryRow | None:
        """The row of that policy and metric, None where there is none."""
        return next((row for row in self.summary if (row.policy, row.metric) == (policy, metric)), None)

    def scores(self, policy: str, metric: str | None, *, survey: bool) -> Scores | None:
        """That row's scores against the survey truth or PluralLLM's targets, None where there are none."""
        row = self.row(policy, metric)
        if row is None:
            return None
        return row.survey if survey else row.targets


def _check_unique(rows: tuple[SummaryRow, ...], path: Path) -> None:
    seen: dict[tuple[str, str], int] = {}
    for number, row in enumerate(rows, start=1):
        first = seen.setdefault((row.policy, row.metric), number)
        if first != number:
            raise UserError(f"{path}: rows {first} and {number} are both policy '{row.policy}', metric '{row.metric}'")


def _missing_in_results(summary: tuple[SummaryRow, ...]) -> list[str]:
    absent = [policy for policy in POLICIES if all(row.policy != policy for row in summary)]
    return [f"{SUMMARY.name} has no row for {', '.join(absent)}."] if absent and summary else []


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
        UserError: see `appa_flwr.run.files.read_config` and `read`; or a policy has two rows under a metric.
    """
    settings = read_config(run_folder)
    # A resumed run may repeat an iteration: the later line is what training went on from.
    by_number = {line.iteration: line for line in METRICS.read(run_folder) or ()}
    iterations = tuple(by_number[number] for number in sorted(by_number))
    summary = SUMMARY.read(run_folder) or ()
    phases, pluralllm, examples = PHASES.read(run_folder), CARD.read(run_folder), EXAMPLES.read(run_folder)
    _check_unique(summary, run_folder / SUMMARY.name)

    missing: list[str] = []
    whole = settings.run.phases != "pluralllm"
    if whole and not iterations:
        missing.append(f"{METRICS.name}: no PPO iteration was logged, so there are no training curves.")
    if whole and not summary:
        missing.append(f"{SUMMARY.name}: the run was not evaluated, so there are no scores and no verdict.")
    if not phases:
        missing.append(f"{PHASES.name}: the time per phase is unknown.")
    if pluralllm is None:
        missing.append(f"{CARD.name}: nothing is known of the preference predictor's pretraining.")
    if whole and not examples:
        missing.append(f"{EXAMPLES.name}: there are no sample answers.")
    missing += _missing_in_training(iterations) + _missing_in_results(summary)
    return Run(
        folder=run_folder,
        settings=settings,
        iterations=iterations,
        summary=summary,
        phases=phases or (),
        pluralllm=pluralllm,
        examples=examples or (),
        missing=tuple(missing),
    )


def is_known(value: float | None) -> bool:
    """Whether a number was measured: neither absent nor NaN nor infinite."""
    return value is not None and math.isfinite(value)
