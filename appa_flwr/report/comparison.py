"""Comparison of runs: `appa report RUN RUN...`. Policies' scores less those of the first, on the same answers.

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

from appa_flwr.analysis.intervals import Interval, Measure, levels, paired_differences
from appa_flwr.config import GENERATED_SURVEY
from appa_flwr.core.errors import UserError
from appa_flwr.report.artifacts import RunArtifacts, read_run
from appa_flwr.report.findings import MEASURES
from appa_flwr.report.plots import style
from appa_flwr.run.pair_scores import PREDICTIONS, SURVEY, table
from appa_flwr.run.run_files import SURVEY_FILE, WEIGHTS_FILE
from appa_flwr.survey.generate import population
from appa_flwr.survey.store import read_about

METHOD = "ppo"
NAMES: Mapping[str, str] = {SURVEY: "survey answers", PREDICTIONS: "predictions"}


@dataclass(frozen=True)
class Compared:
    """A run's scores against `SURVEY` or `PREDICTIONS`, and these less the first run's; None for the first.

    On the groups and held-out questions that all runs have; `shape` is their (G, Q).
    """

    run: RunArtifacts
    against: str
    shape: tuple[int, int]
    scores: Mapping[Measure, Interval]
    less_first: Mapping[Measure, Interval] | None


def compare(folders: Sequence[Path]) -> list[Compared]:
    """Two runs or more, the first of which all others are compared with.

    Raises:
        UserError: fewer than two; a run that has no scored policy or cannot be read; or runs whose surveys or metrics
            differ.
    """
    if len(folders) < 2:
        raise UserError("a comparison takes two runs or more, of which the first is compared with the others")
    runs = [read_run(folder) for folder in folders]
    first = runs[0]
    for run in runs:
        if run.scores(METHOD, run.training_metric, survey=False) is None or run.pair_scores is None:
            raise UserError(f"{run.folder}: holds no scores of a policy after PPO; let the run come to its end")
        for (what, mine), others in zip(_frame(run).items(), _frame(first).values(), strict=True):
            if mine != others:
                raise UserError(f"{run.folder} and {first.folder}: have not one {what}: {mine!r} and {others!r}")
    known = [SURVEY] if all(run.scores(METHOD, run.training_metric, survey=True) for run in runs) else []
    known += [PREDICTIONS] if len({_targets(run) for run in runs}) == 1 else []
    if not known:
        raise UserError(
            f"{first.folder} and the others: have neither scores against survey answers nor one predictor; give later "
            "runs the first one's, pluralllm.checkpoint"
        )
    return [one for against in known for one in _against(runs, against)]


def _frame(run: RunArtifacts) -> dict[str, object]:
    """What a score of this run is a score of: the survey's contents, the keys by which it was read, and the metric."""
    config, keys = run.settings, ("refusals", "min_respondents", "group_by", "weight", "missing")
    # The folder of a second rule's policy lies in that of the run, which has kept the survey.
    kept = (read_about(folder / SURVEY_FILE).sha256 for folder in (run.folder, run.folder.resolve().parent))
    contents: object = next(filter(None, kept), config.survey)
    if config.survey == GENERATED_SURVEY:
        contents = population(config.data, config.seed)
    return {"metric": run.training_metric, "survey": contents, **{key: getattr(config.data, key) for key in keys}}


def _targets(run: RunArtifacts) -> tuple[object, ...]:
    """What the predictions depend on: the weights, and which answers each group's context is drawn from."""
    config, path = run.settings, run.folder / WEIGHTS_FILE
    weights = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else str(run.folder)
    drawn = (config.seed, config.data.test_fraction, config.data.max_questions, config.groups)
    asked = config.pluralllm
    return weights, *drawn, asked.num_context_questions, asked.architecture


def _against(runs: Sequence[RunArtifacts], against: str) -> Iterator[Compared]:
    frames = [
        table(run.pair_scores, METHOD, metric=run.training_metric, against=against)
        for run in runs
        if run.pair_scores is not None
    ]
    groups = [name for name in frames[0].index if all(name in frame.index for frame in frames)]
    questions = [name for name in frames[0].columns if all(name in frame.columns for frame in frames)]
    rewards = np.stack([frame.loc[groups, questions].to_numpy(float) for frame in frames])
    rewards[:, np.isnan(rewards).any(0)] = np.nan  # what one run lacks counts in none
    if np.isnan(rewards).all():
        raise UserError(f"{runs[0].folder} and the others: have no group and held-out question in common")
    for run, reward_GQ in zip(runs, rewards, strict=True):
        less = None if run is runs[0] else paired_differences([(reward_GQ, rewards[0])])
        yield Compared(run, against, (len(groups), len(questions)), levels([reward_GQ]), less)


def names(found: Sequence[Compared]) -> dict[Path, str]:
    """Folder -> the run's name, or the folder as it was given where two have one name."""
    folders = dict.fromkeys(one.run.folder for one in found)
    own = {folder: folder.resolve().name for folder in folders}
    return {folder: name if list(own.values()).count(name) == 1 else str(folder) for folder, name in own.items()}


def tables(found: Sequence[Compared]) -> Iterator[Table]:
    """A table for each kind of target."""
    named = names(found)
    first = named[found[0].run.folder]
    for against in dict.fromkeys(one.against for one in found):
        rows = [one for one in found if one.against == against]
        shown = Table(
            "run", "rule", "seed", *(f"{name}{less}" for less in ("", f" less {first}'s") for name in MEASURES)
        )
        groups, questions = rows[0].shape
        shown.title = f"After PPO, against {NAMES[against]} of {groups} groups to {questions} questions"
        shown.title_justify = "left"
        for one in rows:
            settings, differences = one.run.settings, one.less_first or {}
            texts = [
                *(f"{one.scores[name].value:.3f}" for name in MEASURES),
                *(differences[name].signed if differences else "-" for name in MEASURES),
            ]
            shown.add_row(named[one.run.folder], settings.rule, str(settings.seed), *texts)
        yield shown


@style.picture
def draw(found: Sequence[Compared]) -> Figure:
    """The differences with their intervals, a row a run; survey answers where there are any."""
    named = names(found)
    others = [one for one in found if one.against == found[0].against and one.less_first is not None]
    figure = style.figure(1.4 + 0.35 * len(others))
    for axes, measure in zip(figure.subplots(1, len(MEASURES), sharey=True), MEASURES, strict=True):
        spans = [one.less_first[measure] for one in others if one.less_first is not None]
        value, low, high = np.array([(span.value, span.low, span.high) for span in spans]).T
        axes.errorbar(value, range(len(others)), xerr=(value - low, high - value), fmt="o", color=style.BLUE, capsize=3)
        axes.axvline(0.0, color=style.GREY, linestyle="--", linewidth=1)
        axes.set_title(f"{measure} less that of {style.label(named[found[0].run.folder])}")
        style.rows(axes, [style.label(f"{named[one.run.folder]} ({one.run.settings.rule})") for one in others])
    figure.suptitle(f"After PPO, against {NAMES[found[0].against]}; 95 % over questions")
    return figure
