"""A study: settings x seeds -> single scores -> means and paired differences with intervals -> table and files.

Every setting is measured with the same seeds, so that any two settings are paired by seed.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import track

from appa_flwr.core import markdown
from appa_flwr.core.files import replace_file

Setting = tuple[Any, ...]
"""A setting as names and numbers, such as a rule and a lie."""
Show = Callable[["pd.Series[float]"], str]
"""Formats the numbers of all seeds as text."""
Columns = Mapping[str, tuple["pd.Series[float]", Show]]
"""Title -> numbers, indexed by the names of the table's rows and by seed, and the function that formats them."""


def every(numbers: pd.DataFrame, *, show: Show) -> Columns:
    """All numbers as columns, formatted alike."""
    return {str(name): (numbers[name], show) for name in numbers}


def spread(values: "pd.Series[float]", *, form: str = ".3f") -> str:
    """Format the mean over seeds and, with two seeds or more, the standard deviation; empty if a number is NaN."""
    if values.isna().any():
        return ""
    around = f" ± {values.std():.3f}" if len(values) > 1 else ""
    return f"{values.mean():{form}}{around}"


def extremes(values: "pd.Series[float]") -> str:
    """Format the mean over seeds, the lowest and the highest number; empty if a number is NaN."""
    return "" if values.isna().any() else f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})"


def interval(value: float, low: float, high: float) -> str:
    """Format a difference and its interval, bold if the interval excludes 0."""
    text = f"{value:+.3f} ({low:+.3f} to {high:+.3f})"
    return f"**{text}**" if low > 0 or high < 0 else text


def less(values: "pd.Series[float]", level: str, other: str) -> "pd.Series[float]":
    """Subtract the numbers of `other` in a level of the index, pair by pair; the rows of `other` are dropped."""
    wide = values.unstack(level)
    return pd.Series(wide.sub(wide.pop(other), axis="index").stack())


def study(
    name: str,
    names: Sequence[str],
    settings: Iterable[Setting],
    seeds: Sequence[int],
    measure: Callable[[Setting, int], Mapping[str, float]],
    columns: Callable[[pd.DataFrame], Columns],
    *,
    output: Path,
) -> None:
    """Measure every setting with every seed; write NAME.csv and NAME.md, and print the table.

    `settings` are in the table's order, `names` names their parts; `measure` computes a setting's numbers with a seed,
    and `columns` makes the table's columns from all numbers, which are indexed by `names` and "seed".
    """
    places = track([*itertools.product(settings, seeds)], name, console=Console(stderr=True))
    numbers = pd.DataFrame(
        [{**dict(zip(names, at, strict=True)), "seed": seed, **measure(at, seed)} for at, seed in places]
    )
    text = table(columns(numbers.set_index([*names, "seed"]))) + "\n"
    replace_file(output / f"{name}.csv", numbers.to_csv(index=False).encode(), parents=True)
    replace_file(output / f"{name}.md", text.encode())
    print(text)


def table(columns: Columns) -> str:
    """Make a Markdown table with the rows of the first column, in their order; rows without text are left out."""
    texts = {
        title: values.groupby([str(name) for name in values.index.names if name != "seed"], sort=False).agg(show)
        for title, (values, show) in columns.items()
    }
    order = next(iter(texts.values())).index
    shown = pd.DataFrame({title: text.reindex(order) for title, text in texts.items()}).fillna("")
    lines = shown[(shown != "").any(axis="columns")].reset_index()
    return markdown.table(
        lines.columns, lines.map(lambda part: part if isinstance(part, str) else f"{part:g}").to_numpy()
    )
