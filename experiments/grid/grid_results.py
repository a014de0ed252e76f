"""The results of a grid: every score with its interval and the paper's figure beside it, as CSV, Markdown and LaTeX.

No axis letters: tables have names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from appa_flwr.run.run_files import SUMMARY
from experiments.grid import pictures
from experiments.grid.plan import Grid, Trial
from experiments.grid.runner import done
from experiments.study import interval

FORMAT = "format"
COMMON = "survey, common"
"""Against the survey on questions that all groups answered; in a sparse survey each group is scored on others."""
AGAINST = (PREDICTIONS, SURVEY, COMMON)
PAPER_MEASURES = {"fi": "FI", "avg_as": "Avg AS", "min_as": "Min AS", "format_score": FORMAT}
DECIMALS = {"FI": 4}
OTHER_DECIMALS = 3

Setting = tuple[str, str, str]
"""Dataset, task and model."""


@dataclass(frozen=True)
class MethodRow:
    """A method of a setting: the name it has in tables, and its name and trial by seed in the runs' files."""

    name: str
    method: str
    trials: Mapping[int, Trial]


def write_results(grid: Grid, trials: Sequence[Trial], output: Path) -> Path | None:
    """Write results.csv, results.md, results.tex and the pictures of all that is done; None where nothing is.

    Raises:
        UserError: a run's file cannot be read, or a result cannot be written.
    """
    ended = done(output, trials)
    finished = [trial for trial in trials if trial.name in ended and trial.stage != "predictor"]
    if not finished:
        return None
    paper = {} if grid.scaled else _paper()  # these are other models than the paper's
    frames, sections, tex = [], [], []
    for setting in product(grid.axes["datasets"], grid.axes["tasks"], grid.axes["models"]):
        rows = _rows(grid, [trial for trial in finished if (trial.dataset, trial.task, trial.model) == setting])
        if not rows:
            continue
        found = pd.DataFrame(_levels(setting, rows, paper))
        compared = pd.DataFrame(_differences(setting, rows, grid.baseline))
        frames += [found, compared]
        sections.append(_markdown(setting, found, compared))
        tex.append(_latex(setting, found))
        pictures.write(output, setting, {row.name: (row.method, row.trials) for row in rows})
    replace_file(output / "results.csv", pd.concat(frames).to_csv(index=False).encode())
    replace_file(output / "results.tex", "\n".join(tex).encode())
    path = output / "results.md"
    replace_file(path, ("\n".join(sections)).encode())
    return path


def _rows(grid: Grid, trials: Sequence[Trial]) -> list[MethodRow]:
    sft = {trial.seed: trial for trial in trials if trial.stage == "sft"}
    methods = dict.fromkeys(row.method for trial in sft.values() for row in SUMMARY.read(trial.folder) or ())
    rows = [MethodRow(method, method, sft) for method in methods]
    for rule in grid.axes["rules"]:
        by_seed = {trial.seed: trial for trial in trials if trial.rule == rule}
        if by_seed:
            rows.append(MethodRow(rule, "ppo", by_seed))
    return rows


@cache
def _scores(folder: Path) -> pd.DataFrame | None:
    """The single scores of a run that is done, read once for all tables."""
    return read(folder)


def _tables(row: MethodRow, metric: str, against: str) -> dict[int, pd.DataFrame]:
    """Seed -> rewards of a method, a row a group and a column a question; of seeds that have any."""
    found = {}
    for seed, trial in row.trials.items():
        frame = _scores(trial.folder)
        if frame is not None:
            rewards = table(frame, row.method, metric=metric, against=SURVEY if against == COMMON else against)
            found[seed] = rewards.dropna(axis="columns") if against == COMMON else rewards
    return {seed: rewards for seed, rewards in found.items() if not rewards.empty}


def _levels(
    setting: Setting, rows: Sequence[MethodRow], paper: Mapping[tuple[str, ...], float]
) -> Iterator[dict[str, object]]:
    """A line for each method, metric, kind of target and measure."""
    for row, metric in product(rows, metrics_of(setting[1])):
        at = {**_names(setting), "method": row.name, "metric": metric}
        for against in AGAINST:
            tables = _tables(row, metric, against)
            if tables:
                for measure, found in levels([rewards.to_numpy(float) for rewards in tables.values()]).items():
                    line = {**at, "against": against, "measure": measure, "seeds": len(tables), **vars(found)}
                    if against == PREDICTIONS:
                        line["paper"] = paper.get((*setting, row.name, metric, measure))
                    yield line
        formats = [
            entry.format_score
            for trial in row.trials.values()
            for entry in SUMMARY.read(trial.folder) or ()
            if (entry.method, entry.metric) == (row.method, metric) and entry.format_score is not None
        ]
        if formats:
            score: dict[str, object] = {"measure": FORMAT, "seeds": len(formats), "value": np.mean(formats)}
            score["paper"] = paper.get((*setting, row.name, metric, FORMAT))
            yield {**at, "against": PREDICTIONS, **score}


def _differences(setting: Setting, rows: Sequence[MethodRow], baseline: str) -> Iterator[dict[str, object]]:
    """A line for each rule less the baseline rule, SFT, the uniform answer and the look-ups, paired by seed."""
    named = {row.name: row for row in rows}
    rules = [row for row in rows if row.method == "ppo"]
    others = [named[other] for other in (baseline, "sft", "uniform", *LOOK_UPS) if other in named]
    pairs = product(rules, others)
    for (rule, other), metric, against in product(pairs, metrics_of(setting[1]), AGAINST):
        if rule is other:
            continue
        first, second = _tables(rule, metric, against), _tables(other, metric, against)
        both = [aligned(first[seed], second[seed]) for seed in first if seed in second]
        arrays = [found for found in both if found is not None]
        if arrays:
            at = {**_names(setting), "method": rule.name, "less": other.name, "metric": metric, "against": against}
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
        if of.empty:
            continue
        measures = [name for name in (*MEASURES, FORMAT) if name in set(of["measure"])]
        rows = []
        for method in dict.fromkeys(of["method"]):
            lines = of[of["method"] == method].set_index("measure")
            texts = [_level(lines.loc[name], name) if name in lines.index else "-" for name in measures]
            rows.append([method, str(lines["seeds"].max()), *texts])
        parts.append(f"{metric}, against the {against}:\n\n{markdown.table(['method', 'seeds', *measures], rows)}\n")
    if not compared.empty:
        parts.append("Differences, paired by seed and question; bold where the 95 % interval excludes 0.\n")
        rows = []
        for keys, of in compared.groupby(["metric", "against", "method", "less"], sort=False):
            lines = of.set_index("measure")
            texts = [
                interval(
                    Interval(*lines.loc[name, ["value", "low", "high"]]), decimals=DECIMALS.get(name, OTHER_DECIMALS)
                )
                for name in MEASURES
            ]
            metric, against, method, less = map(str, keys)
            rows.append([f"{method} - {less}", metric, against, *texts])
        parts.append(markdown.table(["difference", "metric", "against", *MEASURES], rows) + "\n")
    return "\n".join(parts)


def _level(line: pd.Series, measure: str) -> str:
    """A value with its interval, and in brackets the paper's."""
    decimals = DECIMALS.get(measure, OTHER_DECIMALS)
    text = f"{line['value']:.{decimals}f}"
    if pd.notna(line.get("low")):
        text += f" ({line['low']:.{decimals}f} to {line['high']:.{decimals}f})"
    if pd.notna(line.get("paper")):
        text += f" [paper {line['paper']:.{decimals}f}, {line['value'] - line['paper']:+.{decimals}f}]"
    return text


def _latex(setting: Setting, found: pd.DataFrame) -> str:
    """A setting in the layout of the paper's tables: FI, Avg AS and Min AS by each metric, and the format score."""
    of = found[found["against"] == PREDICTIONS]
    wide = of.pivot_table(index="method", columns=["measure", "metric"], values="value", sort=False)
    columns = [(name, metric) for name in ("FI", "Avg AS", "Min AS") for metric in dict.fromkeys(of["metric"])]
    if FORMAT in wide:
        columns.append((FORMAT, of["metric"].iloc[0]))
    shown = pd.DataFrame(index=wide.index, columns=pd.MultiIndex.from_tuples(columns), dtype=object)
    for name, metric in columns:
        decimals = DECIMALS.get(name, OTHER_DECIMALS)
        shown[name, metric] = [f"{value:.{decimals}f}" if pd.notna(value) else "-" for value in wide[name, metric]]
    styled = shown.rename_axis(None).style
    return str(styled.to_latex(hrules=True, multicol_align="c", caption=", ".join(setting)))
