"""Comparison of runs: `appa report RUN RUN...`. Policies' scores minus those of the first, on the same answers.

Against survey answers if the runs have one survey; against predictions if these are the same too, for else each would
be scored by targets of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from appa_flwr.config import GENERATED_SURVEY
from appa_flwr.core.errors import UserError
from appa_flwr.report.frames import intervals, spans
from appa_flwr.run.pair_scores import PREDICTIONS, SURVEY
from appa_flwr.run.read import RunFiles, read_run
from appa_flwr.run.records import PPO
from appa_flwr.run.run_files import SURVEY_FILE
from appa_flwr.survey.generate import population
from appa_flwr.survey.store import read_about


def compare(folders: Sequence[Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two runs or more, on the groups and held-out questions that all have; the first is compared with the others.

    Returns:
        Two frames of `Interval`s, survey answers first: a row a run, with its rule, seed and scores; and a row each run
        but the first, whose scores are subtracted.

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
    if not all(_same_predictions(run, first) for run in runs.values()):
        scores = scores[scores["against"] == SURVEY]
    scores = scores[scores.groupby("against")["method"].transform("nunique") == len(runs)]
    if scores.empty:
        raise UserError(
            f"{first.folder} and the others: have neither scores against survey answers nor the same predictions; give "
            "later runs the first one's pluralllm.checkpoint, and leave eval.ceilings on, with which runs keep them"
        )
    scores = scores[scores.groupby(["against", "group", "question"])["method"].transform("size") == len(runs)]
    if scores.empty:
        raise UserError(f"{first.folder} and the others: have no group and held-out question in common")
    scores = scores.sort_values("against", key=lambda kinds: kinds == PREDICTIONS, kind="stable")
    rows, (base, *others) = scores.drop_duplicates(["method", "against"]), runs
    differences = intervals(rows, scores, metric=first.metric, pairs=[(name, base) for name in others])
    levels, minus = (spans(differences[differences["less"] == less], "method") for less in ("", base))
    levels.insert(0, ("", "Rule"), [run.config.rule for run in runs.values()])
    levels.insert(1, ("", "Seed"), [run.config.seed for run in runs.values()])
    return levels.rename_axis("Run").reset_index(), minus.rename_axis(f"Minus {base}").reset_index()


def _scored(run: RunFiles) -> dict[str, object]:
    """What a score of this run is a score of: the survey's contents, the keys by which it was read, and the metric."""
    config, keys = run.config, ("refusals", "min_respondents", "group_by", "weight", "missing")
    # The folder of a second rule's policy lies in that of the run, which has kept the survey.
    kept = (read_about(folder / SURVEY_FILE).sha256 for folder in (run.folder, run.folder.resolve().parent))
    contents: object = next(filter(None, kept), config.survey)
    if config.survey == GENERATED_SURVEY:
        contents = population(config.data, config.seed)
    return {"metric": run.metric, "survey": contents, **{key: getattr(config.data, key) for key in keys}}


def _same_predictions(run: RunFiles, other: RunFiles) -> bool:
    """Do groups predict the same in both, wherever both keep a prediction? False where they have none in common."""
    keys = ["question", "text", "group", "option"]
    both = run.predictions.merge(other.predictions, on=keys)
    return len(both) > 0 and bool(np.allclose(both["share_x"], both["share_y"], rtol=0.0, atol=1e-6))


def _names(folders: Sequence[Path]) -> list[str]:
    """The runs' names, or the folder as it was given where two have one name."""
    own = [folder.resolve().name for folder in folders]
    return [name if own.count(name) == 1 else str(folder) for name, folder in zip(own, folders, strict=True)]
