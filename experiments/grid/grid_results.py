"""The results of a grid: every score with its interval and the paper's value, as CSV and Markdown."""

from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import product
from pathlib import Path

import pandas as pd

from appa_flwr.analysis.intervals import bootstrap
from appa_flwr.core.files import replace_file
from appa_flwr.report.frames import spans
from appa_flwr.report.tables import markdown
from appa_flwr.run.pair_scores import PREDICTIONS, SURVEY, aligned, table
from appa_flwr.run.read import BY, read_run
from appa_flwr.run.records import LOOK_UPS, PPO
from appa_flwr.run.resume import finished
from appa_flwr.run.schema import RULE_VALUES
from experiments.grid import pictures
from experiments.grid.plan import Grid, Trial

SETTING = ["dataset", "task", "model"]
FORMAT = "Format"
PAPER_MEASURES = {"fi": "FI", "avg_as": "Avg AS", "min_as": "Min AS", "format_score": FORMAT}


def write_results(grid: Grid, trials: Sequence[Trial], output: Path) -> Path | None:
    """Write results.csv, results.md (whose path is returned) and plots/ of finished trials; None without any.

    Raises:
        UserError: a run's file cannot be read, or a result cannot be written.
    """
    ended = [trial for trial in trials if finished(trial.folder)]
    if not ended:
        return None
    scores, summary = _frames(ended)
    results = pd.DataFrame([*_lines(scores, grid.rules), *_formats(summary)])
    # With keys from the command line the models differ from the paper's.
    results = results.merge(_paper()[:0] if grid.last else _paper(), how="left")
    replace_file(output / "results.csv", results.to_csv(index=False).encode())
    sections = []
    for setting, rows in results.groupby(SETTING, sort=False):
        names = [*map(str, setting)]
        sections.append(f"## {', '.join(names)}\n\n" + "\n".join(_tables(rows)))
        own = summary[(summary[SETTING] == names).all(axis="columns") & (summary["against"] == PREDICTIONS)]
        metric = own["metric"].iloc[0]
        png = pictures.trade_off(own[own["metric"] == metric], grid.rules, metric=metric, title=", ".join(names))
        replace_file(output / "plots" / f"{'-'.join(names)}-trade-off.png", png, parents=True)
        at = {"metric": metric, "against": SURVEY, "measure": "Min AS", "less": ""}
        levels = rows[(rows[[*at]] == [*at.values()]).all(axis="columns")]
        if not levels.empty:
            png = pictures.worst_group(levels, grid.rules, title=", ".join(names))
            replace_file(output / "plots" / f"{'-'.join(names)}-worst-group.png", png, parents=True)
    if not (used := _parameters(ended)).empty:
        sections.append(f"## Parameters of the rules\n\n{markdown(used)}\n")
    path = output / "results.md"
    replace_file(path, "\n".join(sections).encode())
    return path


def _parameters(trials: Sequence[Trial]) -> pd.DataFrame:
    """A row for each setting and rule: the values of the rule's parameters, which are the same for every seed."""
    rows = [
        (trial.dataset, trial.task, trial.model, name, values.sentence())
        for trial in trials
        for name, values in (RULE_VALUES.read(trial.folder) or {}).items()
    ]
    return pd.DataFrame(rows, columns=[*SETTING, "rule", "parameters"]).drop_duplicates()


def _frames(trials: Sequence[Trial]) -> list[pd.DataFrame]:
    """Scores and summaries of the runs with setting and seed; a rule's policy has the rule's name."""
    parts: dict[str, list[pd.DataFrame]] = {"scores": [], "summary": []}
    for trial in trials:
        own = read_run(trial.folder)
        names = {PPO: own.config.rule, **{PPO + BY + rule: rule for rule in own.config.rules}}
        setting = {name: getattr(trial, name) for name in (*SETTING, "seed")}
        for name, frames in parts.items():
            rows: pd.DataFrame = getattr(own, name)
            frames.append(rows.assign(method=rows["method"].replace(names), **setting))
    return [pd.concat(frames, ignore_index=True) for frames in parts.values()]


def _lines(scores: pd.DataFrame, rules: Sequence[str]) -> Iterator[dict[str, object]]:
    """Yield a line for each method, metric, kind of target and measure.

    Other lines have the differences of each rule, paired by seed, to the first rule, SFT, uniform answer and look-ups.
    """
    by = [*SETTING, "metric", "against"]
    for at, own in scores.groupby(by, sort=False):
        names, of_seeds = dict(zip(by, at, strict=True)), [run for _, run in own.groupby("seed", sort=False)]
        kind = {"metric": str(names["metric"]), "against": str(names["against"])}
        runs = {name: [table(run, name, **kind) for run in of_seeds] for name in own["method"].unique()}
        others = [other for other in (rules[0], "sft", "uniform", *LOOK_UPS) if other in runs]
        compared = [pair for pair in product(filter(runs.__contains__, rules), others) if pair[0] != pair[1]]
        for method, less in (*((name, "") for name in runs), *compared):
            both = [pair for pair in map(aligned, runs[method], runs[less or method]) if pair is not None]
            for measure, result in bootstrap([pair if less else pair[:1] for pair in both]).items() if both else ():
                line = {"less": less, **names, "method": method, "measure": measure, "seeds": len(both)}
                yield {**line, **vars(result)}


def _formats(summary: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Yield a line with the mean format score of each method whose answers a model wrote."""
    known = summary[(summary["against"] == PREDICTIONS) & summary["format_score"].notna()]
    for at, values in known.groupby([*SETTING, "method", "metric"], sort=False)["format_score"]:
        numbers = {"value": values.mean(), "sample": values.mean(), "sd": values.std()}
        names = dict(zip((*SETTING, "method", "metric"), at, strict=True))
        line = {"against": PREDICTIONS, "less": "", "measure": FORMAT, "seeds": len(values)}
        yield {**names, **line, **numbers}


def _paper() -> pd.DataFrame:
    """Read the values of the paper's two tables of results, one per row, in the column `paper`."""
    with (resources.files("experiments.grid") / "paper.csv").open(encoding="utf-8") as file:
        frame = pd.read_csv(file).rename(columns=PAPER_MEASURES)
    rows = frame.melt([*SETTING, "method", "metric"], var_name="measure", value_name="paper")
    return rows.assign(less="", against=PREDICTIONS)


def _tables(rows: pd.DataFrame) -> Iterator[str]:
    """Yield tables of a setting's scores by metric and kind of target, and of differences between its methods."""
    levels, compared = rows[rows["less"] == ""], rows[rows["less"] != ""]
    for (metric, against), known in levels.groupby(["metric", "against"], sort=False):
        wide = spans(known, ["method"], ["measure"]).assign(Seeds=known.groupby("method")["seeds"].max())
        paper = known.pivot(index="method", columns="measure", values="paper").dropna(axis="columns", how="all")
        shown = pd.concat({"": wide, "paper": paper}, axis="columns").reset_index()
        yield f"{metric}, against {against}:\n\n{markdown(shown)}\n"
    if not compared.empty:
        wide = spans(compared, ["method", "less", "metric", "against"], ["measure"])
        yield "Differences, paired by seed and question; bold where the 95 % interval excludes 0.\n"
        yield markdown(wide.reset_index(), sign=True) + "\n"
