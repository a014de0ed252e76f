"""Comparison of runs: `appa report RUN RUN...`. Policies' scores minus those of the first, on the same answers.

Against survey answers if the runs have one survey; against predictions if they have one predictor too, for else each
would be scored by targets of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from appa_flwr.config import GENERATED_SURVEY
from appa_flwr.core.errors import UserError
from appa_flwr.report.frames import intervals, spans
from appa_flwr.run.pair_scores import PREDICTIONS, SURVEY
from appa_flwr.run.read import RunFiles, read_run
from appa_flwr.run.records import PPO
from appa_flwr.run.run_files import SURVEY_FILE, WEIGHTS_FILE
from appa_flwr.survey.generate import population
from appa_flwr.survey.store import read_about


@dataclass(frozen=True)
class Comparison:
    """Runs by name; their policies' scores, with the run's name as method; and the intervals of these."""

    runs: Mapping[str, RunFiles]
    scores: pd.DataFrame
    intervals: pd.DataFrame


def compare(folders: Sequence[Path]) -> Comparison:
    """Two runs or more, on the groups and held-out questions that all have; the first is compared with the others.

    Raises:
        UserError: fewer than two; a run that has no scored policy or cannot be read; or runs whose surveys or metrics
            differ.
    """
    if len(folders) < 2:
        raise UserError("a comparison takes two runs or more, of which the first is compared with the others")
    runs = dict(zip(_names(folders), map(read_run, folders), strict=True))
    first = next(iter(runs.values()))
    for run in runs.values():
        if not (run.scores["method"] == PPO).any():
            raise UserError(f"{run.folder}: holds no scores of a policy after PPO; let the run come to its end")
        for (what, mine), theirs in zip(_scored(run).items(), _scored(first).values(), strict=True):
            if mine != theirs:
                raise UserError(f"{run.folder} and {first.folder}: have not one {what}: {mine!r} and {theirs!r}")
    scores = pd.concat(
        run.scores[(run.scores["method"] == PPO) & (run.scores["metric"] == first.metric)].assign(method=name)
        for name, run in runs.items()
    )
    if len({_targets(run) for run in runs.values()}) > 1:
        scores = scores[scores["against"] == SURVEY]
    scores = scores[scores.groupby("against")["method"].transform("nunique") == len(runs)]
    if scores.empty:
        raise UserError(
            f"{first.folder} and the others: have neither scores against survey answers nor one predictor; give later "
            "runs the first one's, pluralllm.checkpoint"
        )
    scores = scores[scores.groupby(["against", "group", "question"])["method"].transform("size") == len(runs)]
    if scores.empty:
        raise UserError(f"{first.folder} and the others: have no group and held-out question in common")
    scores = scores.sort_values("against", key=lambda kinds: kinds == PREDICTIONS, kind="stable")
    rows, (base, *others) = scores.drop_duplicates(["method", "against"]), runs
    pairs = [(name, base) for name in others]
    return Comparison(runs, scores, intervals(rows, scores, metric=first.metric, pairs=pairs))


def levels(compared: Comparison) -> pd.DataFrame:
    """A row a run: its rule, seed and scores."""
    rows = compared.intervals[compared.intervals["less"] == ""]
    wide = spans(rows, "method").map(lambda span: span.value)
    configs = [run.config for run in compared.runs.values()]
    wide.insert(0, ("", "Rule"), [config.rule for config in configs])
    wide.insert(1, ("", "Seed"), [config.seed for config in configs])
    return wide.rename_axis("Run").reset_index()


def minus_first(compared: Comparison) -> pd.DataFrame:
    """A row each run but the first, which its scores are compared with; survey answers first."""
    wide = spans(compared.intervals[compared.intervals["less"] != ""], "method")
    return wide.rename_axis(f"Minus {next(iter(compared.runs))}").reset_index()


def _scored(run: RunFiles) -> dict[str, object]:
    """What a score of this run is a score of: the survey's contents, the keys by which it was read, and the metric."""
    config, keys = run.config, ("refusals", "min_respondents", "group_by", "weight", "missing")
    # The folder of a second rule's policy lies in that of the run, which has kept the survey.
    kept = (read_about(folder / SURVEY_FILE).sha256 for folder in (run.folder, run.folder.resolve().parent))
    contents: object = next(filter(None, kept), config.survey)
    if config.survey == GENERATED_SURVEY:
        contents = population(config.data, config.seed)
    return {"metric": run.metric, "survey": contents, **{key: getattr(config.data, key) for key in keys}}


def _targets(run: RunFiles) -> tuple[object, ...]:
    """What the predictions depend on: the weights, and which answers each group's context is drawn from."""
    config, path = run.config, run.folder / WEIGHTS_FILE
    weights = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else str(run.folder)
    drawn = (config.seed, config.data.test_fraction, config.data.max_questions, config.groups)
    return weights, *drawn, config.pluralllm.num_context_questions, config.pluralllm.architecture


def _names(folders: Sequence[Path]) -> list[str]:
    """The runs' names, or the folder as it was given where two have one name."""
    own = [folder.resolve().name for folder in folders]
    return [name if own.count(name) == 1 else str(folder) for name, folder in zip(own, folders, strict=True)]
