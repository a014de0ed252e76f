"""A study: settings x seeds -> single scores -> means and paired differences with intervals -> table, picture, files.

Every setting is measured with the same seeds, so that any two of them are pairs. Below it, what the studies that need
no language model measure: where a rule ends on a population's true answers by free answers to each question
(`appa_flwr.analysis.destinations`). These can reach the best shared answers, so what they end with tells rules apart,
and nothing of what a language model learns.

Legend: G groups, Q questions, K options.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import typer
from rich.console import Console
from rich.progress import track
from scipy import stats

from appa_flwr.analysis.aggregation import Rule, make
from appa_flwr.analysis.alignment import as_arrays
from appa_flwr.analysis.destinations import destination
from appa_flwr.analysis.intervals import LEVEL, Interval
from appa_flwr.config.ranges import PAPER_FAIRNESS_THRESHOLD, PAPER_TEMPERATURE
from appa_flwr.core import markdown
from appa_flwr.core.files import replace_file
from appa_flwr.protocol.rewards import js
from appa_flwr.survey import generate

Setting = tuple[Any, ...]
"""A setting, by names and numbers: a rule and a lie, say."""


def mean(values: pd.Series[float]) -> str:
    """The mean over seeds; empty where one has none."""
    return "" if values.isna().any() else f"{values.mean():.3f}"


def spread(values: pd.Series[float], *, form: str = ".3f", absent: str = "nan") -> str:
    """The mean over seeds and their standard deviation, which takes two; `absent` where a seed has none."""
    if values.isna().any():
        return absent
    around = f" ± {values.std():.3f}" if len(values) > 1 else ""
    return f"{values.mean():{form}}{around}"


def difference(pairs: pd.Series[float]) -> str:
    """Mean of paired differences with its interval by Student's t; empty where there are none."""
    if pairs.isna().any() or len(pairs) < 2:
        return ""
    low, high = stats.ttest_1samp(pairs, 0.0).confidence_interval(LEVEL)
    return interval(Interval(float(pairs.mean()), low, high))


def interval(found: Interval, *, decimals: int = 3) -> str:
    """A difference with its interval, bold where that excludes 0."""
    text = f"{found.value:+.{decimals}f} ({found.low:+.{decimals}f} to {found.high:+.{decimals}f})"
    return f"**{text}**" if found.excludes_zero else text


@dataclass(frozen=True)
class StudyColumn:
    """A column of a study's table.

    Attributes:
        title: at its head.
        measure: which of a setting's numbers.
        show: the numbers of all seeds as text.
        case: the last name of the number's setting, where the row does not say it.
        less: the last name of the setting whose numbers are subtracted, seed by seed; that setting's own text is empty.
    """

    title: str
    measure: str
    show: Callable[[pd.Series[float]], str] = mean
    case: object = None
    less: object = None

    def text(self, row: Setting, by_setting: Mapping[Setting, pd.DataFrame]) -> str:
        """The text in a row; empty where its setting was not measured."""
        setting = row if self.case is None else (*row, self.case)
        if setting not in by_setting or setting[-1] == self.less:
            return ""
        values = by_setting[setting][self.measure]
        if self.less is not None:
            values = values - by_setting[(*setting[:-1], self.less)][self.measure]
        return self.show(values)


def study(
    name: str,
    names: Sequence[str],
    settings: Iterable[Setting],
    seeds: Sequence[int],
    measure: Callable[[Setting, int], Mapping[str, float]],
    columns: Sequence[StudyColumn],
    *,
    output: Path,
    picture: Callable[[pd.DataFrame], bytes] | None = None,
) -> pd.DataFrame:
    """Measure every setting with every seed; write NAME.csv, NAME.md and NAME.png, print the table, return the numbers.

    Args:
        name: of the files.
        names: what the parts of a setting are called.
        settings: in the table's order; a row holds all that differ by the columns' cases.
        seeds: of all settings alike.
        measure: a setting's numbers with a seed.
        columns: of the table.
        output: folder of the files.
        picture: of the numbers, a row a setting and seed.
    """
    places = track([*itertools.product(settings, seeds)], name, console=Console(stderr=True))
    found = pd.DataFrame(
        [{**dict(zip(names, at, strict=True)), "seed": seed, **measure(at, seed)} for at, seed in places]
    )
    text = table(found, names, columns) + "\n"
    replace_file(output / f"{name}.csv", found.to_csv(index=False).encode(), parents=True)
    replace_file(output / f"{name}.md", text.encode())
    if picture is not None:
        replace_file(output / f"{name}.png", picture(found))
    print(text)
    return found


def table(found: pd.DataFrame, names: Sequence[str], columns: Sequence[StudyColumn]) -> str:
    """Markdown: a row a setting, or all settings that differ by the columns' cases; no row without text."""
    by_setting = {key: part.set_index("seed") for key, part in found.groupby([*names], sort=False)}
    in_row = len(names) - any(column.case is not None for column in columns)
    rows = dict.fromkeys(setting[:in_row] for setting in by_setting)
    texts = {row: [column.text(row, by_setting) for column in columns] for row in rows}
    lines = [
        [*(part if isinstance(part, str) else f"{part:g}" for part in row), *shown]
        for row, shown in texts.items()
        if any(shown)
    ]
    return markdown.table([*names[:in_row], *(column.title for column in columns)], lines)


FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

Seeds = Annotated[int, typer.Option(help="Populations.")]
Visits = Annotated[int, typer.Option(min=1, help="Noisy answers to each question.")]
Questions = Annotated[int, typer.Option(help="Questions of a population.")]
Groups = Annotated[int, typer.Option(help="Groups of a population.")]

RULES: Mapping[str, Rule] = {
    "average": make("average"),
    "min": make("min"),
    "appa": make("appa", temperature=PAPER_TEMPERATURE, fairness_threshold=PAPER_FAIRNESS_THRESHOLD),
    "appa-open": make("appa", temperature=PAPER_TEMPERATURE),
    "appa-open, T = .02": make("appa"),
    "mix": make("mix"),
    "mix, worst-share 1": make("mix", worst_share=1.0),
}


@dataclass(frozen=True, eq=False)
class TrueTargets:
    """True answers (G, Q, K), the real options (Q, K), and which group lies."""

    target_GQK: FloatArray
    option_QK: BoolArray
    liar: int


@functools.cache
def true_targets(seed: int, *, num_questions: int, num_groups: int, disagreement: float = 1.0) -> TrueTargets:
    """The generated population; the liar is the group that the mean of all serves worst."""
    drawn = generate.ground_truth(
        num_questions=num_questions, num_groups=num_groups, disagreement=disagreement, seed=seed
    )
    target_GQK, option_QK = as_arrays(*drawn)
    scores_G = js(target_GQK.mean(0), target_GQK, option_QK).mean(axis=1)
    return TrueTargets(target_GQK, option_QK, int(np.argmin(scores_G)))


def end_scores(
    rule: Rule,
    people: TrueTargets,
    *,
    seed: int,
    visits: int,
    sent: Callable[[FloatArray], FloatArray] | None = None,
) -> FloatArray:
    """Each group's true scores (G, Q) of the answers that a rule ends with; arguments as for `destination`."""
    answer_QK = destination(
        rule, people.target_GQK, people.option_QK, metric="js", seed=seed, visits=visits, sent=sent
    ).answer_QK
    return np.asarray(js(answer_QK, people.target_GQK, people.option_QK))


def average_and_worst(score_GQ: FloatArray) -> dict[str, float]:
    """Avg AS and Min AS."""
    score_G = score_GQ.mean(axis=1)
    return {"avg_as": float(score_G.mean()), "min_as": float(score_G.min())}
