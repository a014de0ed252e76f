"""The results of a grid: every score with its interval and the paper's figure beside it, as CSV and Markdown.

No axis letters: tables have names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from appa_flwr.analysis.intervals import MEASURES, Interval, levels, paired_differences
from appa_flwr.core import markdown
from appa_flwr.core.files import replace_file
from appa_flwr.protocol.rewards import metrics_of
from appa_flwr.run.pair_scores import PREDICTIONS, SURVEY, aligned, read, table
from appa_flwr.run.records import LOOK_UPS
from appa_flwr.run.resume import finished
from appa_flwr.run.run_files import SUMMARY
from experiments.grid import pictures
from experiments.grid.pictures import PPO, Methods
from experiments.grid.plan import Grid, Trial
from experiments.study import interval

FORMAT = "format"
COMMON = "survey, common"
"""Against the survey on questions that all groups answered; in a sparse survey each group is scored on others."""
AGAINST = (PREDICTIONS, SURVEY, COMMON)
PAPER_MEASURES = {"fi": "FI", "avg_as": "Avg AS", "min_as": "Min AS", "format_score": FORMAT}

Setting = tuple[str, str, str]
"""Dataset, task and model."""


def write_results(grid: Grid, trials: Sequence[Trial], output: Path) -> Path | None:
    """Write results.csv, results.md and the pictures of all that is done; None where nothing is.

    Raises:
        UserError: a run's file cannot be read, or a result cannot be written.
    """
    ended = [trial for trial in trials if trial.stage != "predictor" and finished(trial.folder)]
    if not ended:
        return None
    paper = {} if grid.last else _paper()  # these are other models than the paper's
    frames, sections = [], []
    for setting in product(grid.axes["datasets"], grid.axes["tasks"], grid.axes["models"]):
        methods = _methods(grid, [of for of in ended if (of.dataset, of.task, of.model) == setting])
        if not methods:
            continue
        found = pd.DataFrame(_levels(setting, methods, paper))
        compared = pd.DataFrame(_differences(setting, methods, grid.baseline))
        frames += [found, compared]
        sections.append(_markdown(setting, found, compared))
        pictures.write(output, setting, methods)
    replace_file(output / "results.csv", pd.concat(frames).to_csv(index=False).encode())
    path = output / "results.md"
    replace_file(path, ("\n".join(sections)).encode())
    return path


def _methods(grid: Grid, trials: Sequence[Trial]) -> Methods:
    sft = {trial.seed: trial for trial in trials if trial.stage == "sft"}
    names = dict.fromkeys(row.method for trial in sft.values() for row in SUMMARY.read(trial.folder) or ())
    by_rule = {rule: {of.seed: of for of in trials if of.rule == rule} for rule in grid.axes["rules"]}
    ppo = {rule: (PPO, by_seed) for rule, by_seed in by_rule.items() if by_seed}
    return {name: (name, sft) for name in names} | ppo


@cache
def _scores(folder: Path) -> pd.DataFrame | None:
    """The single scores of a run that is done, read once for all tables."""
    return read(folder)


def _tables(method: str, trials: Mapping[int, Trial], metric: str, against: str) -> dict[int, pd.DataFrame]:
    """Seed -> rewards of a method, a row a group and a column a question; of seeds that have any."""
    found = {}
    for seed, trial in trials.items():
        frame = _scores(trial.folder)
        if frame is not None:
            rewards = table(frame, method, metric=metric, against=SURVEY if against == COMMON else against)
            found[seed] = rewards.dropna(axis="columns") if against == COMMON else rewards
    return {seed: rewards for seed, rewards in found.items() if not rewards.empty}


def _levels(setting: Setting, methods: Methods, paper: Mapping[tuple[str, ...], float]) -> Iterator[dict[str, object]]:
    """A line for each method, metric, kind of target and measure."""
    for (name, (method, trials)), metric in product(methods.items(), metrics_of(setting[1])):
        at = {**_names(setting), "method": name, "metric": metric}
        lines: list[dict[str, object]] = []
        for against in AGAINST:
            tables = _tables(method, trials, metric, against)
            if tables:
                measured = levels([rewards.to_numpy(float) for rewards in tables.values()])
                lines += [
                    {"against": against, "measure": measure, "seeds": len(tables), **vars(found)}
                    for measure, found in measured.items()
                ]
        rows = pictures.summary_rows(method, trials, metric)
        formats = [row.format_score for row in rows if row.format_score is not None]
        if formats:
            score = {"measure": FORMAT, "seeds": len(formats), "value": np.mean(formats)}
            lines.append({"against": PREDICTIONS, **score})
        for line in lines:
            printed = paper.get((*setting, name, metric, str(line["measure"])))
            yield {**at, **line, "paper": printed if line["against"] == PREDICTIONS else None}


def _differences(setting: Setting, methods: Methods, baseline: str) -> Iterator[dict[str, object]]:
    """A line for each rule less the baseline rule, SFT, the uniform answer and the look-ups, paired by seed."""
    rules = [name for name, (method, _) in methods.items() if method == PPO]
    others = [other for other in (baseline, "sft", "uniform", *LOOK_UPS) if other in methods]
    for rule, other, metric, against in product(rules, others, metrics_of(setting[1]), AGAINST):
        if rule == other:
            continue
        first, second = (_tables(*methods[name], metric, against) for name in (rule, other))
        both = [aligned(first[seed], second[seed]) for seed in first if seed in second]
        arrays = [found for found in both if found is not None]
        if arrays:
            at = {**_names(setting), "method": rule, "less": other, "metric": metric, "against": against}
            for measure, found in paired_differences(arrays).items():
                yield {**at, "measure": measure, "seeds": len(arrays), **vars(found)}


def _names(setting: Setting) -> dict[str, str]:
    return dict(zip(("dataset", "task", "model"), setting, strict=True))


def _paper() -> dict[tuple[str, ...], float]:
    """(dataset, task, model, method, metric, measure) -> the paper's figure, from its two tables of results."""
    path = resources.files("experiments.grid") / "paper.csv"
    with path.open(encoding="utf-8") as file:
        frame = pd.read_csv(file)
    return {
        (row["dataset"], row["task"], row["model"], row["method"], row["metric"], measure): row[column]
        for row in frame.to_dict("records")
        for column, measure in PAPER_MEASURES.items()
    }


def _markdown(setting: Setting, found: pd.DataFrame, compared: pd.DataFrame) -> str:
    """A setting's scores by each metric and kind of target, and the differences between its methods."""
    parts = [f"## {', '.join(setting)}\n"]
    for metric, against in product(dict.fromkeys(found["metric"]), AGAINST):
        of = found[(found["metric"] == metric) & (found["against"] == against)]
        if not of.empty:
            wide = _wide(of, ["method"], _level)
            wide.insert(0, "seeds", of.groupby("method")["seeds"].max().astype(str))
            parts.append(f"{metric}, against the {against}:\n\n{_shown(wide)}\n")
    if not compared.empty:
        parts.append("Differences, paired by seed and question; bold where the 95 % interval excludes 0.\n")
        named = compared.assign(difference=compared["method"] + " - " + compared["less"])
        parts.append(_shown(_wide(named, ["difference", "metric", "against"], _difference)) + "\n")
    return "\n".join(parts)


def _wide(lines: pd.DataFrame, index: list[str], text: Callable[[pd.Series], str]) -> pd.DataFrame:
    """Each line's text, with a column a measure."""
    texts = lines.assign(text=lines.apply(text, axis="columns"))
    wide = texts.pivot_table(index=index, columns="measure", values="text", aggfunc="first", sort=False)
    return wide[[name for name in (*MEASURES, FORMAT) if name in wide]].fillna("-")


def _shown(wide: pd.DataFrame) -> str:
    rows = wide.reset_index()
    return markdown.table(rows.columns, rows.to_numpy())


def _decimals(line: pd.Series) -> int:
    return 4 if line["measure"] == "FI" else 3


def _difference(line: pd.Series) -> str:
    return interval(Interval(*line[["value", "low", "high"]]), decimals=_decimals(line))


def _level(line: pd.Series) -> str:
    """A value with its interval, and in brackets the paper's."""
    decimals = _decimals(line)
    text = f"{line['value']:.{decimals}f}"
    if pd.notna(line.get("low")):
        text += f" ({line['low']:.{decimals}f} to {line['high']:.{decimals}f})"
    if pd.notna(line["paper"]):
        text += f" [paper {line['paper']:.{decimals}f}, {line['value'] - line['paper']:+.{decimals}f}]"
    return text
