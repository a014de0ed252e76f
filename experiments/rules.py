"""Which rule lifts the worst group, and at what price, as groups differ more and more?

    python -m experiments.rules

Every rule trains the policy of `experiments.stand_in` on the same generated populations, from groups that hardly differ
to groups that do. Rules share questions and noise, so a population is a pair of any two of them.

Legend: G groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.progress import track
from scipy import stats

from appa_flwr import markdown
from appa_flwr.disagreement import disagreement
from appa_flwr.fairness import fairness_index
from appa_flwr.files import replace_file
from appa_flwr.report.plots import style
from appa_flwr.report.plots.results import RULE_STYLE
from experiments import entry
from experiments.stand_in import RULES, Groups, Iterations, Questions, Seeds, population, trained

DISAGREEMENT = (0.15, 0.5, 1.0, 2.0)
"""How far groups lie from their mean, as a multiple of the default population's distance."""
LEVEL = 0.95
FEW_TICKS = 3

AGAINST = ("average", "appa")
BEST = "best possible"


def study(seeds: Sequence[int], *, iterations: int, num_questions: int, num_groups: int) -> pd.DataFrame:
    """A row for each disagreement, seed and rule, and for the best shared answers: `avg_as`, `min_as` and `fi`.

    Of `BEST`, `avg_as` is that of the best answers for the average, `min_as` that of the best for the worst group.
    """
    rows: list[dict[str, object]] = []
    places = list(itertools.product(DISAGREEMENT, seeds))
    for scale, seed in track(places, "populations", console=Console(stderr=True)):
        people = population(seed, num_questions=num_questions, num_groups=num_groups, disagreement=scale)
        place = {"disagreement": scale, "seed": seed}
        stakes = disagreement(people.target_GQK, people.option_QK, metric="js")
        rows.append({**place, "rule": BEST, "avg_as": np.nan, "min_as": stakes.min_of_fairest, "fi": np.nan})
        for name, rule in RULES.items():
            score_GQ = trained(rule, people, iterations=iterations, seed=seed)
            score_G = score_GQ.mean(axis=1)
            scores = {"avg_as": score_G.mean(), "min_as": score_G.min(), "fi": fairness_index(score_GQ)}
            rows.append({**place, "rule": name, **scores})
    return pd.DataFrame(rows)


def table(found: pd.DataFrame) -> str:
    """Markdown: means over populations, and paired differences with intervals, bold where they exclude 0."""
    head = ["disagreement", "rule", "FI", "Avg AS", "Min AS"]
    head += [f"{measure} less {other}'s" for other in AGAINST for measure in ("Avg AS", "Min AS")]
    rows = []
    for scale, of_scale in found.groupby("disagreement"):
        by_rule = {str(name): rows_of.set_index("seed") for name, rows_of in of_scale.groupby("rule")}
        for name in (*RULES, BEST):
            mine = by_rule[name]
            row = [f"{scale:g}", name, *(_mean(mine[key]) for key in ("fi", "avg_as", "min_as"))]
            for other, key in itertools.product(AGAINST, ("avg_as", "min_as")):
                row.append("" if name == other else difference(mine[key] - by_rule[other][key]))
            rows.append(row)
    return markdown.table(head, rows)


def difference(pairs: pd.Series[float]) -> str:
    """Mean of paired differences with its interval by Student's t; empty where there are none."""
    if pairs.isna().any() or len(pairs) < 2:
        return ""
    low, high = stats.ttest_1samp(pairs, 0.0).confidence_interval(LEVEL)
    text = f"{pairs.mean():+.3f} ({low:+.3f} to {high:+.3f})"
    return f"**{text}**" if low > 0.0 or high < 0.0 else text


def _mean(values: pd.Series[float]) -> str:
    return "" if values.isna().any() else f"{values.mean():.3f}"


@style.picture
def picture(found: pd.DataFrame) -> Figure:
    """For each disagreement, what each rule wins for the worst group and pays on average, next to rule `average`."""
    figure = style.figure(3.4, width=12.0)
    panels = figure.subplots(1, len(DISAGREEMENT), squeeze=False)[0]
    for axes, scale in zip(panels, DISAGREEMENT, strict=True):
        means = found[found["disagreement"] == scale].groupby("rule")[["avg_as", "min_as"]].mean()
        change = means - means.loc["average"]
        # Filled once through the styles, then empty: there are more rules than styles.
        others = itertools.chain(
            zip(style.OTHER_STYLES, itertools.repeat("full")), zip(style.OTHER_STYLES, itertools.repeat("none"))
        )
        axes.xaxis.set_major_locator(MaxNLocator(FEW_TICKS))
        axes.axhline(change.loc[BEST, "min_as"], color=style.DARK_GREY, linestyle=":", label="best for the worst group")
        for name in RULES:
            (colour, marker), fill = (RULE_STYLE[name], "full") if name in RULE_STYLE else next(others)
            x, y = change.loc[name, ["avg_as", "min_as"]]
            axes.plot(x, y, marker, color=colour, fillstyle=fill, markersize=8, label=name)
        axes.set(title=f"disagreement {scale:g}", xlabel="Avg AS less average's")
    panels[0].set_ylabel("Min AS less average's")
    style.legend(figure, panels[0])
    return figure


def main(
    seeds: Seeds = 10,
    iterations: Iterations = 1500,
    questions: Questions = 60,
    groups: Groups = 8,
    output: Annotated[Path, typer.Option(help="Folder of table, picture and single scores.")] = Path("runs/rules"),
) -> None:
    """Measure what every rule ends with, against how far groups differ."""
    found = study(range(seeds), iterations=iterations, num_questions=questions, num_groups=groups)
    text = table(found) + "\n"
    replace_file(output / "rules.csv", found.to_csv(index=False).encode(), parents=True)
    replace_file(output / "rules.md", text.encode())
    replace_file(output / "rules.png", picture(found))
    print(text)


if __name__ == "__main__":
    entry.run(main)
