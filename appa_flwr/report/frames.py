"""The frames behind every table and picture of a report: intervals of scores, and selections of them.

A frame of intervals has one row per method, subtracted method (`less`, "" for the method's own level), metric, kind of
target (`against`) and measure, with the numbers of an `Interval`, a 95 % bootstrap over held-out questions. If the
folder has no single scores, values are from summary.json, without bounds.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from appa_flwr.analysis.intervals import MEASURES, NUMBERS, Interval, bootstrap
from appa_flwr.config import GENERATED_SURVEY
from appa_flwr.core.errors import UserError
from appa_flwr.run.pair_scores import PREDICTIONS, SURVEY, TARGETS, aligned, table
from appa_flwr.run.read import BY, RunReader, read_run
from appa_flwr.run.records import MODEL, PPO
from appa_flwr.run.schema import SURVEY_FILE
from appa_flwr.survey.generate import population
from appa_flwr.survey.store import read_about

COLUMNS = ("method", "less", "metric", "against", "measure", *NUMBERS)
FIELDS = {"avg_as": "Avg AS", "min_as": "Min AS", "fi": "FI", "fi_readable": "FI readable"}
"""Column of a run's summary -> measure."""
METRIC_LABELS = {"js": "JS", "js-distance": "JS dist.", "wasserstein": "Was.", "cosine": "Cos.", "borda": "Bor."}
METHOD = "Method"
MOST_PANELS = 3
MOST_GROUPS, FIRST = 30, 10
"""Most groups of which each has a row in tables, and rows of more groups."""
QUANTILES = {"Least": 0.0, "5 %": 0.05, "Median": 0.5, "95 %": 0.95, "Most": 1.0}
METHOD_NAMES: Mapping[str, str] = {
    "base": "Base",
    "sft": "SFT",
    PPO: "PPO",
    "uniform": "Uniform answer",
    "majority": "Majority answer",
    "option-list": "Look-up, same options",
    "nearest-questions": "Look-up, 3 nearest",
    "mean-prediction": "Mean of predictions",
    "ceiling-average": "Ceiling (average)",
    "ceiling-min": "Ceiling (worst group)",
}


def intervals(
    summary: pd.DataFrame, scores: pd.DataFrame, *, metric: str, pairs: Collection[tuple[str, str]] = ()
) -> pd.DataFrame:
    """Levels of all methods of a summary by a metric, and the differences of `pairs` (method, less)."""
    rows = []
    for against, known in summary[summary["metric"] == metric].groupby("against", sort=False):
        value_of = known.set_index("method").rename(columns=FIELDS).reindex(columns=[*MEASURES]).astype(float)
        rewards = {name: table(scores, name, metric=metric, against=str(against)) for name in value_of.index}
        wanted = [*((name, "") for name in rewards), *(pair for pair in pairs if rewards.keys() >= {*pair})]
        for name, less in wanted:
            at = {"method": name, "less": less, "metric": metric, "against": against}
            both = aligned(rewards[name], rewards[less or name])
            if both is None:  # single scores are not known
                values = value_of.loc[name] - (value_of.loc[less] if less else 0.0)
                measured = {
                    measure: Interval(own, np.nan, np.nan, own) for measure, own in zip(MEASURES, values, strict=True)
                }
            else:
                measured = bootstrap([both if less else both[:1]])
            rows += [{**at, "measure": measure, **vars(measured[measure])} for measure in MEASURES]
    return pd.DataFrame(rows, columns=[*COLUMNS])


def of_run(run: RunReader) -> pd.DataFrame:
    """Intervals of a run by its training metric; PPO and the models of `appa eval` are compared with all others."""
    names = dict.fromkeys(run.summary["method"])
    compared = [name for name in names if name == PPO or name.startswith(MODEL)]
    pairs = [(name, less) for name in compared for less in names if less != name]
    return intervals(run.summary, run.scores, metric=run.metric, pairs=pairs)


def as_json(folder: Any) -> dict[str, Any]:
    """A run's summary and intervals by the training metric, as JSON for `appa eval`; None stands for NaN."""
    run = read_run(folder)
    own = {"survey": run.config.survey, "task": run.config.task, "metric": run.metric, "rule": run.config.rule}
    summary = run.summary[run.summary["metric"] == run.metric]
    frames = {"rows": summary, "intervals": of_run(run)}
    plain = {name: frame.astype(object).where(frame.notna(), None) for name, frame in frames.items()}
    held_out = int(run.scores["question"].nunique())
    return {**own, "held_out": held_out, **{name: frame.to_dict("records") for name, frame in plain.items()}}


def method_name(method: str, rule: str = "") -> str:
    """Name of a method in tables; `rule` is the run's rule."""
    policy, _, other = method.partition(BY)
    if policy == PPO and (rule or other):
        return f"{METHOD_NAMES[PPO]} by {other or rule}"
    return METHOD_NAMES.get(method) or method.removeprefix(MODEL)


def _names(summary: pd.DataFrame, rule: str) -> dict[str, str]:
    """Names of a summary's methods, with the number of questions where scores are of a sample."""
    sizes = summary.reindex(columns=["method", "sampled"]).itertuples(index=False)
    return {
        name: method_name(name, rule) + (f", {size:.0f} questions" if pd.notna(size) else "") for name, size in sizes
    }


def spans(intervals: pd.DataFrame, index: list[str], columns: Sequence[str] = ("against", "measure")) -> pd.DataFrame:
    """`Interval`s with one row and one column per value of these columns, in their order."""
    cells: list[Any] = [Interval(*row) for row in intervals[[*NUMBERS]].astype(float).to_numpy()]
    wide = intervals.assign(cell=cells).pivot(index=index, columns=[*columns], values="cell")
    order = [[*dict.fromkeys(intervals.set_index([*names]).index)] for names in (index, columns)]
    return wide.loc[order[0], order[1]]


def methods(intervals: pd.DataFrame, summary: pd.DataFrame, *, rule: str = "") -> pd.DataFrame:
    """Every method's `Interval`s of Avg AS, Min AS and FI, format score and share of readable answers."""
    shown = spans(intervals[intervals["less"] == ""], ["method"])
    own = summary[summary["metric"].isin(intervals["metric"])].drop_duplicates("method").set_index("method")
    for column in ("format_score", "readable"):
        shown["", column.partition("_")[0].capitalize()] = own[column].reindex(shown.index).astype(float)
    return shown.rename(index=_names(summary, rule)).rename_axis(METHOD).reset_index()


def differences(intervals: pd.DataFrame, summary: pd.DataFrame, *, rule: str = "") -> Iterator[pd.DataFrame]:
    """Yield, for PPO and each model of `appa eval`, a frame of its scores minus those of every other method."""
    for method, of_method in intervals[intervals["less"] != ""].groupby("method", sort=False):
        wide = spans(of_method, ["less"]).rename(index=_names(summary, rule))
        yield wide.rename_axis(f"{method_name(str(method), rule)} minus").reset_index()


def all_metrics(run: RunReader) -> pd.DataFrame:
    """Every measure by every metric, in the layout of the paper's tables."""
    rows = run.summary.sort_values("against", key=lambda kinds: kinds == PREDICTIONS, kind="stable")
    wide = rows.pivot(index=["against", "method"], columns="metric", values=[*FIELDS]).astype(float)
    order = dict.fromkeys((*METRIC_LABELS, *run.summary["metric"]))
    columns = [(field, metric) for field in FIELDS for metric in order if (field, metric) in wide]
    shown = wide.reindex(index=pd.MultiIndex.from_frame(rows[["against", "method"]].drop_duplicates()), columns=columns)
    shown = shown.rename(index=_names(run.summary, run.config.rule), level="method")
    shown = shown.rename(columns={**FIELDS, **METRIC_LABELS})
    return shown.rename_axis(index=["Against", METHOD]).reset_index()


def groups(run: RunReader) -> pd.DataFrame:
    """Groups' scores by the training metric, last weights and missed iterations; lowest scores of PPO first.

    One row per group; one column per kind of target and policy, and for the uniform answer.
    """
    scores = run.group_scores
    policies = [at for at in scores.index if at[1] in ("base", "sft", "uniform") or at[1].startswith((PPO, MODEL))]
    policies.sort(key=lambda at: TARGETS.index(at[0]))
    wide = scores.loc[policies].T
    first = next((at for at in policies if at[1] == PPO), None)
    if not run.iterations.empty:
        weights = run.iterations.iloc[-1].reindex([f"weights/{group}" for group in run.groups])
        missed = run.iterations["missing_groups"].explode().value_counts().reindex(run.groups).fillna(0)
        wide["", "Last weight"] = weights.astype(float).set_axis(run.groups)
        wide["", "Iterations missed"] = missed.astype(int)
    ordered = wide if first is None else wide.loc[wide[first].sort_values(kind="stable").index]
    named = ordered.rename(columns=lambda method: method_name(method, run.config.rule), level=-1)
    return named.rename_axis("Group").reset_index()


def before_and_after(run: RunReader) -> pd.DataFrame:
    """Groups' scores after SFT and after PPO by each rule, by the first kind of target; quantiles of many groups."""
    scores = run.group_scores
    first = scores.loc[scores.index.get_level_values("against")[:1]].droplevel("against")
    policies = first[(first.index == "sft") | first.index.str.startswith(PPO)]
    if "sft" not in policies.index:
        return pd.DataFrame()
    wide = policies.T.dropna().rename(columns=lambda method: method_name(method, run.config.rule))
    wide = wide.iloc[:, : MOST_PANELS + 1]
    if len(wide) > MOST_GROUPS:
        wide = wide.quantile([*QUANTILES.values()]).set_axis([*QUANTILES])
    return wide


def in_short(groups: pd.DataFrame) -> pd.DataFrame:
    """A frame with a row a group, in its first column; of more than `MOST_GROUPS` quantiles, and the first `FIRST`."""
    if len(groups) <= MOST_GROUPS:
        return groups
    numbers = groups.iloc[:, 1:].select_dtypes("number").astype(float).quantile([*QUANTILES.values()])
    numbers.insert(0, groups.columns[0], [f"{name} of {len(groups):,} groups" for name in QUANTILES])
    return pd.concat([numbers.reindex(columns=groups.columns), groups.head(FIRST)])


def served_facts(rounds: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """Numbers of served rounds and answers, their mean reward, and the last fairness index."""
    yield "Rounds", f"{len(rounds)}, of {rounds['size'].sum()} answers"
    yield "Mean reward", f"{rounds['group_reward'].mean():.3f}, in the last round {rounds['group_reward'].iloc[-1]:.3f}"
    yield "Fairness index of the last round", f"{rounds['fairness_index'].iloc[-1]:.4f}"


def compare(folders: Sequence[Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Compare each run with the first, on the groups and held-out questions that all have (`appa report RUN RUN...`).

    Only scores against survey answers are compared: the runs' predictions are different targets.
    The result is two frames of `Interval`s: one row per run with its rule, seed, numbers of common groups and
    questions, and scores; and one row for each run but the first, with its scores minus those of the first.

    Raises:
        UserError: a run has no policy scored by survey answers or cannot be read; or their surveys or metrics differ.
    """
    names = [folder.resolve().name for folder in folders]
    names = names if len({*names}) == len(names) else [*map(str, folders)]
    runs = dict(zip(names, map(read_run, folders), strict=True))
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError(f"{', '.join(map(str, folders))}: name a run twice; each run can be compared once")
    first = next(iter(runs.values()))
    scored: list[pd.DataFrame] = []
    for name, run in runs.items():
        for (what, mine), theirs in zip(_scored(run).items(), _scored(first).values(), strict=True):
            if mine != theirs:
                raise UserError(f"{run.folder} and {first.folder}: differ in {what}: {mine!r} and {theirs!r}")
        at = {"method": PPO, "metric": run.metric, "against": SURVEY}
        scored.append(run.scores[(run.scores[[*at]] == pd.Series(at)).all(axis=1)].assign(method=name))
        if scored[-1].empty or PPO not in {*run.summary["method"]}:
            raise UserError(f"{run.folder}: holds no scores of a policy after PPO against survey answers")
    scores = pd.concat(scored)
    scores = scores[scores.groupby(["group", "question"])["method"].transform("size") == len(runs)]
    if scores.empty:
        raise UserError(f"{first.folder} and the others: have no group and held-out question in common")
    base, *others = runs
    pairs = [(name, base) for name in others]
    differences = intervals(scores.drop_duplicates("method"), scores, metric=first.metric, pairs=pairs)
    levels, minus = (spans(differences[differences["less"] == less], ["method"]) for less in ("", base))
    levels.insert(0, ("", "Rule"), [run.config.rule for run in runs.values()])
    levels.insert(1, ("", "Seed"), [run.config.seed for run in runs.values()])
    levels.insert(2, ("", "Groups"), scores["group"].nunique())
    levels.insert(3, ("", "Questions"), scores["question"].nunique())
    return levels.rename_axis("Run").reset_index(), minus.rename_axis(f"Minus {base}").reset_index()


def _scored(run: RunReader) -> dict[str, object]:
    """What scores of this run depend on: the survey's contents, the keys by which it was read, and the metric."""
    config, keys = run.config, ("refusals", "min_respondents")
    # The folder of a baseline rule's policy is inside the run's folder, which has the survey.
    kept = (read_about(folder / SURVEY_FILE).sha256 for folder in (run.folder, run.folder.resolve().parent))
    contents: object = next(filter(None, kept), config.survey)
    if config.survey == GENERATED_SURVEY:
        contents = population(config.data, config.seed)
    return {"metric": run.metric, "survey": contents, **{key: getattr(config.data, key) for key in keys}}
