"""All that a run's folder holds, read and put in order for the report.

A run that stopped midway lacks files: what is absent is listed in `Run.missing` and everything else is read.
A file that is there but broken is the user's to know about: `UserError` names file, line or row, and key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from appa_flwr.config import Config, Scalar
from appa_flwr.errors import UserError
from appa_flwr.run.files import CARD, EXAMPLES, METRICS, PHASES, SUMMARY, read_config
from appa_flwr.run.records import POLICIES, Card, Example, Iteration, Phase, Scores, SummaryRow

METRIC_ORDER = ("js", "js-distance", "wasserstein", "cosine", "borda")


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
    missing: tuple[str, ...] = ()

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
        return row.survey if survey else row


def _check_unique(rows: tuple[SummaryRow, ...], path: Path) -> None:
    seen: dict[tuple[str, str], int] = {}
    for number, row in enumerate(rows, start=1):
        first = seen.setdefault((row.policy, row.metric), number)
        if first != number:
            raise UserError(f"{path}: rows {first} and {number} are both policy '{row.policy}', metric '{row.metric}'")


def _missing(run: Run) -> Iterator[str]:
    """A sentence for each thing that a complete run of its phases has and this one lacks."""
    whole = run.settings.run.phases != "pluralllm"
    if whole and not run.iterations:
        yield f"{METRICS.name}: no PPO iteration was logged, so there are no training curves."
    if whole and not run.summary:
        yield f"{SUMMARY.name}: the run was not evaluated, so there are no scores and no verdict."
    if not run.phases:
        yield f"{PHASES.name}: the time per phase is unknown."
    if run.pluralllm is None:
        yield f"{CARD.name}: nothing is known of the preference predictor's pretraining."
    if whole and not run.examples:
        yield f"{EXAMPLES.name}: there are no sample answers."
    last = run.iterations[-1] if run.iterations else None
    if last is not None and last.iteration < last.num_iterations:
        yield f"The run stopped after iteration {last.iteration} of {last.num_iterations}."
    absent = [policy for policy in POLICIES if all(row.policy != policy for row in run.summary)]
    if run.summary and absent:
        yield f"{SUMMARY.name} has no row for {', '.join(absent)}."


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
    run = Run(
        folder=run_folder,
        settings=settings,
        iterations=tuple(by_number[number] for number in sorted(by_number)),
        summary=SUMMARY.read(run_folder) or (),
        phases=PHASES.read(run_folder) or (),
        pluralllm=CARD.read(run_folder),
        examples=EXAMPLES.read(run_folder) or (),
    )
    _check_unique(run.summary, run_folder / SUMMARY.name)
    return replace(run, missing=tuple(_missing(run)))


def is_known(value: float | None) -> bool:
    """Whether a number was measured: neither absent nor NaN nor infinite."""
    return value is not None and math.isfinite(value)
