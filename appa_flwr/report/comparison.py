"""Comparison of runs: `appa compare`. Every run's policy less that of the first, on the same held-out answers.

Against survey answers if the runs have one survey; against predictions if they have one predictor too, for else each
would be scored by targets of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from appa_flwr.analysis.intervals import Interval, Measure, paired_differences
from appa_flwr.config import GENERATED_SURVEY, Config
from appa_flwr.core.errors import UserError
from appa_flwr.report.artifacts import RunArtifacts, read_run
from appa_flwr.report.findings import MEASURES
from appa_flwr.report.plots import style
from appa_flwr.run.pair_scores import PREDICTIONS, SURVEY, aligned, table
from appa_flwr.run.records import ScoreRecord
from appa_flwr.run.run_files import WEIGHTS_FILE
from appa_flwr.survey.generate import population

METHOD = "ppo"
NAMES: Mapping[str, str] = {SURVEY: "survey answers", PREDICTIONS: "predictions"}


@dataclass(frozen=True)
class Compared:
    """A run beside the first.

    Attributes:
        run: what it wrote.
        against: `SURVEY` or `PREDICTIONS`.
        scores: its policy's.
        less_first: its Avg AS and Min AS less the first run's, over the answers both have; None for the first.
    """

    run: RunArtifacts
    against: str
    scores: ScoreRecord
    less_first: Mapping[Measure, Interval] | None


def compare(folders: Sequence[Path]) -> list[Compared]:
    """Two runs or more, the first of which all others are compared with.

    Raises:
        UserError: fewer than two; a run that has no scored policy or cannot be read; or runs whose surveys or metrics
            differ.
    """
    if len(folders) < 2:
        raise UserError("appa compare takes two runs or more, of which the first is compared with the others")
    runs = [read_run(folder) for folder in folders]
    first = runs[0]
    for run in runs:
        if run.scores(METHOD, run.training_metric, survey=False) is None or run.pair_scores is None:
            raise UserError(f"{run.folder}: holds no scores of a policy after PPO; let the run come to its end")
        for what, mine, others in zip(("survey", "metric"), _frame(run), _frame(first), strict=True):
            if mine != others:
                raise UserError(f"{run.folder} and {first.folder}: have not one {what}: {mine} and {others}")
    known = [SURVEY] if all(_scores(run, SURVEY) is not None for run in runs) else []
    known += [PREDICTIONS] if len({_predictor(run) for run in runs}) == 1 else []
    if not known:
        raise UserError(
            f"{first.folder} and the others: have neither scores against survey answers nor one predictor; give later "
            "runs the first one's, pluralllm.checkpoint"
        )
    return [one for against in known for one in _against(runs, against)]


def _frame(run: RunArtifacts) -> tuple[str, str]:
    """What a score of this run is a score of: its survey, and for a generated one its population; its metric."""
    config: Config = run.settings
    generated = config.survey == GENERATED_SURVEY
    return f"{config.survey} {population(config.data, config.seed) if generated else ''}".strip(), run.training_metric


def _predictor(run: RunArtifacts) -> str:
    path = run.folder / WEIGHTS_FILE
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else str(run.folder)


def _scores(run: RunArtifacts, against: str) -> ScoreRecord | None:
    return run.scores(METHOD, run.training_metric, survey=against == SURVEY)


def _against(runs: Sequence[RunArtifacts], against: str) -> Iterator[Compared]:
    frames = [
        table(run.pair_scores, METHOD, metric=run.training_metric, against=against)
        for run in runs
        if run.pair_scores is not None
    ]
    for run, frame in zip(runs, frames, strict=True):
        scores, both = _scores(run, against), aligned(frame, frames[0])
        assert scores is not None  # `compare` has looked
        if both is None:
            raise UserError(f"{run.folder} and {runs[0].folder}: have no group and held-out question in common")
        yield Compared(run, against, scores, None if run is runs[0] else paired_differences([both]))


def tables(found: Sequence[Compared]) -> Iterator[Table]:
    """A table for each kind of target."""
    for against in dict.fromkeys(one.against for one in found):
        first = found[0].run.folder.resolve().name
        shown = Table(
            "run", "rule", "seed", *(f"{name}{less}" for less in ("", f" less {first}'s") for name in MEASURES)
        )
        shown.title, shown.title_justify = f"After PPO, against {NAMES[against]}", "left"
        for one in (one for one in found if one.against == against):
            settings, differences = one.run.settings, one.less_first or {}
            texts = [
                f"{one.scores.avg_as:.3f}",
                f"{one.scores.min_as:.3f}",
                *map(_text, map(differences.get, MEASURES)),
            ]
            shown.add_row(one.run.folder.resolve().name, settings.rule, str(settings.seed), *texts)
        yield shown


def _text(found: Interval | None) -> str:
    return "-" if found is None else f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


@style.picture
def draw(found: Sequence[Compared]) -> Figure:
    """The differences with their intervals, a row a run; survey answers where there are any."""
    others = [one for one in found if one.against == found[0].against and one.less_first is not None]
    figure = style.figure(1.4 + 0.35 * len(others))
    for axes, measure in zip(figure.subplots(1, len(MEASURES), sharey=True), MEASURES, strict=True):
        spans = [one.less_first[measure] for one in others if one.less_first is not None]
        value, low, high = np.array([(span.value, span.low, span.high) for span in spans]).T
        axes.errorbar(value, range(len(others)), xerr=(value - low, high - value), fmt="o", color=style.BLUE, capsize=3)
        axes.axvline(0.0, color=style.GREY, linestyle="--", linewidth=1)
        axes.set_title(f"{measure} less that of {style.label(found[0].run.folder.resolve().name)}")
        style.rows(axes, [style.label(f"{one.run.folder.resolve().name} ({one.run.settings.rule})") for one in others])
    figure.suptitle(f"After PPO, against {NAMES[found[0].against]}; 95 % over questions")
    return figure
