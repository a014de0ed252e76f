"""The models of `appa eval` beside trivial answers and ceilings: JSON, tables, and a picture.

Legend: G groups, Q questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table

from appa_flwr.analysis.intervals import Interval, levels, paired_differences
from appa_flwr.report.artifacts import DASH, is_known, number
from appa_flwr.report.comparison import NAMES
from appa_flwr.report.plots import style
from appa_flwr.run import pair_scores, run_files
from appa_flwr.run.records import MODEL, OWN_PREDICTION, SummaryRow

MEASURES = ("Avg AS", "Min AS", "FI")
MARKERS = "o^DPvX<>"


def result(folder: Path, *, differences: bool = True) -> dict[str, Any]:
    """All rows by the training metric, and with intervals each one's scores and each model's less every other's.

    Of a run's folder; `compared` is empty where the groups' scores are known as sums alone.
    """
    config = run_files.read_config(folder)
    shown = [row for row in run_files.SUMMARY.read(folder) or () if row.metric == config.reward_metric]
    found = pair_scores.read(folder)
    return {
        **{"survey": config.survey, "task": config.task, "metric": config.reward_metric},
        "held_out": 0 if found is None else int(found["question"].nunique()),
        "rows": [row.model_dump(mode="json") for row in shown],
        "compared": [] if found is None else list(_compared(found, shown, config.reward_metric, differences)),
    }


def _compared(
    found: pd.DataFrame, shown: Sequence[SummaryRow], metric: str, differences: bool
) -> Iterator[dict[str, Any]]:
    methods = [row.method for row in shown if row.method != OWN_PREDICTION]
    for against in _targets(any(row.survey for row in shown)):
        tables = {name: pair_scores.table(found, name, metric=metric, against=against) for name in methods}
        for name in methods:
            own = {"model": name.removeprefix(MODEL), "against": against}
            yield {**own, "less": None, **_numbers(levels([tables[name].to_numpy(float)]))}
            for other in methods if differences and name.startswith(MODEL) else ():
                both = pair_scores.aligned(tables[name], tables[other]) if other != name else None
                if both is not None:
                    yield {**own, "less": other.removeprefix(MODEL), **_numbers(paired_differences([both]))}


def _targets(survey: bool) -> tuple[str, ...]:
    return (pair_scores.SURVEY, pair_scores.PREDICTIONS) if survey else (pair_scores.PREDICTIONS,)


def _numbers(found: Mapping[Any, Interval]) -> dict[str, list[float]]:
    return {measure: [one.value, one.low, one.high] for measure, one in found.items()}


def tables(found: Mapping[str, Any], name: str) -> Iterator[Table]:
    """All models beside the trivial answers and ceilings, and one's differences from all others."""
    for against in _targets(any(row["survey"] for row in found["rows"])):
        columns = ("Avg AS", "Min AS", "FI", "worst group", "readable", "format")
        shown = Table("method", *columns, title=f"Against {NAMES[against]}; 95 % over questions")
        own = {one["model"]: one for one in found["compared"] if one["less"] is None and one["against"] == against}
        of = [(row, row["survey"] if against == pair_scores.SURVEY else row) for row in found["rows"]]
        for row, scores in sorted(of, key=lambda pair: -pair[1]["avg_as"]):
            method = row["method"].removeprefix(MODEL)
            spans = own.get(method, {measure: [scores[measure.lower().replace(" ", "_")]] for measure in MEASURES})
            worst = min(((v, n) for n, v in scores["per_group"].items() if is_known(v)), default=(0.0, DASH))[1]
            more = [number(row[key], 2) for key in ("readable", "format_score")]
            shown.add_row(method, *(_span(spans[measure]) for measure in MEASURES), worst, *more)
        yield shown
        less = Table("less", *MEASURES, title=f"{name}, against {NAMES[against]}; 95 % over questions")
        for one in found["compared"]:
            if one["model"] == name and one["less"] and one["against"] == against:
                less.add_row(one["less"], *(_span(one[measure], "+") for measure in MEASURES))
        if less.row_count:
            yield less


def _span(numbers: Sequence[float], sign: str = "") -> str:
    value, *rest = (f"{number:{sign}.3f}" for number in numbers)
    return f"{value} ({' to '.join(rest)})" if rest else value


@style.picture
def picture(found: Mapping[str, Any]) -> Figure:
    """Every row's Avg AS against its Min AS, with intervals over questions; `compared` must not be empty."""
    models = [row["method"].removeprefix(MODEL) for row in found["rows"] if row["method"].startswith(MODEL)]
    own = sorted((one for one in found["compared"] if one["less"] is None), key=lambda one: one["model"] not in models)
    targets = list(dict.fromkeys(one["against"] for one in own))
    figure = style.figure(5.0)
    panels = figure.subplots(1, len(targets), squeeze=False)[0]
    looks = {
        name: (style.GROUP_COLOURS[n % len(style.GROUP_COLOURS)], MARKERS[n % len(MARKERS)])
        for n, name in enumerate(models)
    }
    for axes, against in zip(panels, targets, strict=True):
        for one in (one for one in own if one["against"] == against):
            name, ((x, *across), (y, *up)) = one["model"], (one[measure] for measure in MEASURES[:2])
            if name in models:
                (colour, marker), label, size = looks[name], name, 8
            else:
                label, colour, marker, _ = style.METHOD_STYLE[name]
                size = 6
            more: style.Look = {"markersize": size, "markerfacecolor": colour if name in models else "white"}
            more |= {"zorder": 4 if name in models else 3, "alpha": 1.0 if name in models else 0.75}
            arms = {"xerr": np.abs(np.array([across]).T - x), "yerr": np.abs(np.array([up]).T - y), "elinewidth": 0.8}
            axes.errorbar(x, y, fmt=marker, color=colour, label=style.label(label), **arms, **more)
        low = max(axes.get_xlim()[0], axes.get_ylim()[0])
        high = min(axes.get_xlim()[1], axes.get_ylim()[1])
        axes.plot([low, high], [low, high], color=style.LIGHT_GREY, linestyle=":", zorder=1)
        axes.set(xlabel="Avg AS", ylabel="Min AS", title=f"Against {NAMES[against]}")
    figure.suptitle("Dotted: all groups alike; intervals: 95 %, over questions")
    style.legend(figure, panels[0])
    return figure
