"""Comparison of runs: `appa report RUN RUN...`. Policies' scores minus those of the first.

Against survey answers alone: by predictions each run would be scored by targets of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from appa_flwr.config import GENERATED_SURVEY
from appa_flwr.core.errors import UserError
from appa_flwr.report.frames import intervals, spans
from appa_flwr.run.pair_scores import SURVEY
from appa_flwr.run.read import RunFiles, read_run
from appa_flwr.run.records import PPO
from appa_flwr.run.run_files import SURVEY_FILE
from appa_flwr.survey.generate import population
from appa_flwr.survey.store import read_about


def compare(folders: Sequence[Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compare two runs or more, on the groups and held-out questions that all have, with the first.

    Returns:
        Two frames of `Interval`s: a row a run, with its rule, seed and scores; and a row each run but the first, whose
        scores are subtracted.

    Raises:
        UserError: a run has no policy scored by survey answers or cannot be read; or their surveys or metrics differ.
    """
    runs = dict(zip(_names(folders), map(read_run, folders), strict=True))
    first = next(iter(runs.values()))
    scored: list[pd.DataFrame] = []
    for name, run in runs.items():
        for (what, mine), theirs in zip(_scored(run).items(), _scored(first).values(), strict=True):
            if mine != theirs:
                raise UserError(f"{run.folder} and {first.folder}: have not one {what}: {mine!r} and {theirs!r}")
        at = {"method": PPO, "metric": run.metric, "against": SURVEY}
        scored.append(run.scores[(run.scores[[*at]] == pd.Series(at)).all(axis=1)].assign(method=name))
        if scored[-1].empty:
            raise UserError(f"{run.folder}: holds no scores of a policy after PPO by survey answers")
    scores = pd.concat(scored)
    scores = scores[scores.groupby(["group", "question"])["method"].transform("size") == len(runs)]
    if scores.empty:
        raise UserError(f"{first.folder} and the others: have no group and held-out question in common")
    base, *others = runs
    pairs = [(name, base) for name in others]
    differences = intervals(scores.drop_duplicates("method"), scores, metric=first.metric, pairs=pairs)
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


def _names(folders: Sequence[Path]) -> list[str]:
    """The runs' names, or the folder as it was given where two have one name."""
    own = [folder.resolve().name for folder in folders]
    return [name if own.count(name) == 1 else str(folder) for name, folder in zip(own, folders, strict=True)]
