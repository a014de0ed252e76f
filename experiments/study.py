"""A study: settings x seeds -> single scores -> means and paired differences with intervals -> table and files.

Every setting is measured with the same seeds, so that any two of them are pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import track
from scipy import stats

from appa_flwr.analysis.intervals import LEVEL
from appa_flwr.core import markdown
from appa_flwr.core.files import replace_file

Setting = tuple[Any, ...]
"""A setting, by names and numbers: a rule and a lie, say."""
Show = Callable[["pd.Series[float]"], str]
"""The numbers of all seeds as text."""
Columns = Mapping[str, tuple["pd.Series[float]", Show]]
"""Title -> numbers, indexed by what the table's rows are called and by seed, and how they are shown."""


def spread(values: pd.Series[float], *, form: str = ".3f", absent: str = "nan") -> str:
    """The mean over seeds and their standard deviation, which takes two; `absent` where a seed has none."""
    if values.isna().any():
        return absent
    around = f" ± {values.std():.3f}" if len(values) > 1 else ""
    return f"{values.mean():{form}}{around}"


def extremes(values: pd.Series[float]) -> str:
    """The mean over seeds, the lowest and the highest; empty where a seed has none."""
    return "" if values.isna().any() else f"{values.mean():.3f} ({values.min():.3f} to {values.max():.3f})"


def difference(pairs: pd.Series[float]) -> str:
    """Mean of paired differences with its interval by Student's t, bold where that excludes 0; empty without pairs."""
    if pairs.isna().any() or len(pairs) < 2:
        return ""
    low, high = stats.ttest_1samp(pairs, 0.0).confidence_interval(LEVEL)
    text = f"{pairs.mean():+.3f} ({low:+.3f} to {high:+.3f})"
    return f"**{text}**" if low > 0 or high < 0 else text


def less(values: pd.Series[float], level: str, other: str) -> pd.Series[float]:
    """The numbers less those of `other` in a level of the index, pair by pair; without those of `other` themselves."""
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

    Args:
        name: of the files.
        names: what the parts of a setting are called.
        settings: in the table's order.
        seeds: of all settings alike.
        measure: a setting's numbers with a seed.
        columns: of the table, from the numbers, which are indexed by `names` and "seed".
        output: folder of the files.
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
    """Markdown: the rows of the first column in their order, but for those without text."""
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
