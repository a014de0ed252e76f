"""All that a run's folder holds, read and put in order for the report.

A run that stopped midway lacks files: what is absent is listed in `RunArtifacts.missing` and everything else is read.
A file that is there but broken is the user's to know about: `UserError` names file, line or row, and key.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeGuard

import pandas as pd

from appa_flwr.config import Config
from appa_flwr.config.ranges import TASK_METRICS
from appa_flwr.core.errors import UserError
from appa_flwr.run import cards, pair_scores, predictions, records, run_files
from appa_flwr.run.records import CEILINGS, LOOK_UPS, ScoreRecord, SummaryRow
from appa_flwr.run.run_files import read_config
from appa_flwr.run.served import read_rounds
from appa_flwr.survey.store import read_about

DASH = "–"
METRIC_ORDER = (*TASK_METRICS["dpa"], *TASK_METRICS["opa"])


@dataclass(frozen=True)
class RunArtifacts:
    """All that a run folder holds.

    Attributes:
        settings: the run's keys.
        pair_scores: the groups' scores for single answers, None in runs that kept none.
        served: trainer's run -> rounds that were served to it.
        auto: what keys that leave a choice to the machine came to.
        predictions: for each group and held-out question, None in runs that kept none.
        made_by: version and machine; empty where the run has not said.
        survey: where its survey comes from, and how it was read; empty where the run has not said.
        missing: one sentence for each thing a complete run has and this one lacks.
    """

    folder: Path
    settings: Config
    iterations: tuple[records.Iteration, ...]
    summary: tuple[SummaryRow, ...]
    phases: tuple[records.Phase, ...]
    pluralllm: cards.Card | None
    examples: tuple[records.Example, ...]
    differences: records.Differences | None = None
    questions: records.QuestionCounts | None = None
    pair_scores: pd.DataFrame | None = None
    served: Mapping[str, tuple[records.ServedRound, ...]] = field(default_factory=dict)
    auto: Mapping[str, str] = field(default_factory=dict)
    predictions: pd.DataFrame | None = None
    made_by: str = ""
    survey: str = ""
    missing: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """Group names in the order in which the run first names them."""
        named: list[Iterable[str]] = [row.per_group for row in self.summary]
        named += [names for line in self.iterations for names in (line.history, line.rewards)]
        return tuple(dict.fromkeys(itertools.chain.from_iterable(named)))

    @property
    def models(self) -> tuple[str, ...]:
        """Methods of `appa eval`, in the order in which they were scored."""
        return tuple(dict.fromkeys(row.method for row in self.summary if row.method.startswith(records.MODEL)))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that have at least one row, in the paper's order, unknown ones last."""
        present = dict.fromkeys(row.metric for row in self.summary)
        return tuple(metric for metric in dict.fromkeys((*METRIC_ORDER, *present)) if metric in present)

    @property
    def training_metric(self) -> str:
        """The metric PPO was trained on; the first that has rows where that has none."""
        wanted = self.settings.reward_metric
        return wanted if wanted in self.metrics or not self.metrics else self.metrics[0]

    def row(self, method: str, metric: str | None) -> SummaryRow | None:
        """The row of that method and metric, None where there is none."""
        return next((row for row in self.summary if (row.method, row.metric) == (method, metric)), None)

    def scores(self, method: str, metric: str | None, *, survey: bool) -> ScoreRecord | None:
        """That row's scores against the survey answers or predictions, None where there are none."""
        row = self.row(method, metric)
        return row.survey if row is not None and survey else row


def _missing(run: RunArtifacts) -> Iterator[str]:
    """A sentence for each thing that a complete run of its phases has and this one lacks."""
    until = run.settings.run.phases
    if until == "all" and not run.iterations:
        yield f"{run_files.METRICS.name}: no PPO iteration was logged, so there are no training curves."
    if until not in ("pluralllm", "serve") and not run.summary:
        yield f"{run_files.SUMMARY.name}: the run was not evaluated, so there are no scores and no verdict."
    if not run.phases:
        yield f"{run_files.PHASES.name}: the time per phase is unknown."
    if run.pluralllm is None:
        yield f"{run_files.CARD.name}: nothing is known of the preference predictor's pretraining."
    if until == "all" and not run.examples:
        yield f"{run_files.EXAMPLES.name}: there are no example answers."
    last = run.iterations[-1] if run.iterations else None
    if last is not None and last.iteration < last.num_iterations:
        yield f"The run stopped after iteration {last.iteration} of {last.num_iterations}."
    expected = (*records.TRAINED_METHODS, *records.TRIVIAL_BASELINES, *CEILINGS)
    elsewhere = ["base"] * bool(run.settings.sft.checkpoint)  # its scores stand in the SFT model's run
    elsewhere += records.TRAINED_METHODS if until == "serve" else ()
    elsewhere += ["ppo"] * (until == "sft") + [*CEILINGS, records.MEAN_PREDICTION] * (not run.settings.eval.ceilings)
    present = {row.method for row in run.summary}
    if "uniform" in present:  # written together with these, so groups have refused what is not there
        if run.settings.eval.ceilings and not present.intersection(CEILINGS):
            elsewhere += [*CEILINGS, records.MEAN_PREDICTION]
            yield f"There are no ceilings: some owners keep their groups' predictions (see {run_files.LOG_FILE})."
        if not present.intersection(LOOK_UPS):
            elsewhere += LOOK_UPS
            yield "There are no look-ups: some groups let nobody know their training answers (mean, in their policies)."
        if "majority" not in present:
            elsewhere.append("majority")
            yield f"There is no majority's answer: too few groups voted ({run_files.LOG_FILE} says why)."
    absent = [method for method in expected if method not in present and method not in elsewhere]
    if run.summary and absent:
        yield f"{run_files.SUMMARY.name} has no row for {', '.join(absent)}."


def read_run(run_folder: Path) -> RunArtifacts:
    """Reads whatever a run has written so far; absent files leave their part empty and add a line to `missing`.

    Raises:
        UserError: see `appa_flwr.run.run_files.read_config` and `read`; or a method has two rows under a metric.
    """
    settings = read_config(run_folder)
    # A resumed run may repeat an iteration: the later line is what training went on from.
    by_number = {line.iteration: line for line in run_files.METRICS.read(run_folder) or ()}
    run = RunArtifacts(
        folder=run_folder,
        settings=settings,
        iterations=tuple(by_number[number] for number in sorted(by_number)),
        summary=run_files.SUMMARY.read(run_folder) or (),
        phases=run_files.PHASES.read(run_folder) or (),
        pluralllm=run_files.CARD.read(run_folder),
        examples=run_files.EXAMPLES.read(run_folder) or (),
        differences=run_files.DIFFERENCES.read(run_folder),
        questions=run_files.QUESTIONS.read(run_folder),
        pair_scores=pair_scores.read(run_folder),
        served=read_rounds(run_folder),
        auto=run_files.AUTO.read(run_folder) or {},
        predictions=predictions.read(run_folder),
        made_by=_made_by(run_folder),
        survey=read_about(run_folder / run_files.SURVEY_FILE).sentence(),
    )
    seen: dict[tuple[str, str], int] = {}
    for number, row in enumerate(run.summary, start=1):
        if (first := seen.setdefault((row.method, row.metric), number)) != number:
            both = f"rows {first} and {number} are both method '{row.method}', metric '{row.metric}'"
            raise UserError(f"{run_folder / run_files.SUMMARY.name}: {both}")
    return replace(run, missing=tuple(_missing(run)))


def _made_by(run_folder: Path) -> str:
    """What the run's latest session says of itself; a torn line of its progress costs no report."""
    try:
        said = [line.message for line in run_files.PROGRESS.read(run_folder) or () if line.phase == run_files.MACHINE]
    except UserError:
        return ""
    return said[-1] if said else ""


def is_known(value: float | None) -> TypeGuard[float]:
    """True if a number was measured: neither absent nor NaN nor infinite."""
    return value is not None and math.isfinite(value)


def number(value: float | None, decimals: int = 3) -> str:
    """A number as the report's tables show it."""
    return f"{value:z.{decimals}f}" if is_known(value) else DASH  # z: no negative zero
