"""Comparison of rules: gain for the worst group and its price, as groups differ more and more.

    python -m experiments.rules
    python -m experiments.rules --liars --seeds 5    # what a lying minority wins for itself and costs the others

Every rule is followed by free answers to each question (`appa_flwr.analysis.destinations`) on the same generated
populations, from groups that hardly differ to groups that do. Free answers can reach the best shared ones, so what they
end with tells rules apart, and nothing of what a language model learns. Rules share questions and noise, so a
population is a pair of any two of them.

A liar is the group that the mean of all serves worst. It lies in training, always in the same way; scores are then by
every group's true answers. Honest and lying runs share questions and noise too, so their difference is the lie's.

Legend: G groups, Q questions, K options, J answers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pandas as pd
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from appa_flwr.analysis.aggregation import Rule, make
from appa_flwr.analysis.alignment import as_arrays
from appa_flwr.analysis.ceilings import shared_answer
from appa_flwr.analysis.destinations import VISITS, destination
from appa_flwr.analysis.fairness import fairness_index
from appa_flwr.config.ranges import PAPER_FAIRNESS_THRESHOLD, PAPER_TEMPERATURE
from appa_flwr.protocol.rewards import js
from appa_flwr.report import style
from appa_flwr.report.style import RULE_STYLE
from appa_flwr.survey.generate import ground_truth
from experiments import entry, study

FloatArray = npt.NDArray[np.float64]

DISAGREEMENT = (0.15, 0.5, 1.0, 2.0)
"""Distances of the groups from their mean, as a multiple of the default population's distance."""
FEW_TICKS = 3
RULES: Mapping[str, Rule] = {
    "average": make("average"),
    "min": make("min"),
    "appa": make("appa", temperature=PAPER_TEMPERATURE, fairness_threshold=PAPER_FAIRNESS_THRESHOLD),
    "appa-open": make("appa", temperature=PAPER_TEMPERATURE),
    "appa-open, T = .02": make("appa"),
    "mix": make("mix"),
    "mix, worst-share 1": make("mix", worst_share=1.0),
}
BEST = "best possible"

STRETCH = 3.0
HONEST = "nobody"
LIES: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "half": lambda reward_J: reward_J / 2,
    "zero": np.zeros_like,
    "stretched": lambda reward_J: np.clip(reward_J.mean() + STRETCH * (reward_J - reward_J.mean()), 0.0, 1.0),
}
"""Rewards (J,) that the liar sends: half of its own; nothing; three times their distance from the mean."""


@functools.cache
def population(scale: float, seed: int, *, questions: int, groups: int) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """True answers (G, Q, K) of a generated population with this disagreement, and the real options (Q, K)."""
    return as_arrays(*ground_truth(num_questions=questions, num_groups=groups, disagreement=scale, seed=seed))


def ends(
    disagreement: float, rule: str, seed: int, *, lie: str = HONEST, visits: int, questions: int, groups: int
) -> dict[str, float]:
    """True scores of the answers that a rule ends with, the liar's and the others' among them.

    As rule `BEST` it is Min AS of the best shared answers for the worst group.
    """
    target_GQK, option_QK = population(disagreement, seed, questions=questions, groups=groups)
    if rule == BEST:
        best_QK = shared_answer(target_GQK, option_QK, metric="js", objective="min")
        return {"min_as": js(best_QK, target_GQK, option_QK).mean(axis=1).min()}
    liar = int(np.argmin(js(target_GQK.mean(0), target_GQK, option_QK).mean(axis=1)))

    def sent(reward_GJ: FloatArray) -> FloatArray:
        changed_GJ = np.array(reward_GJ)
        changed_GJ[liar] = LIES[lie](changed_GJ[liar])
        return changed_GJ

    lies = sent if lie in LIES else None
    end = destination(RULES[rule], target_GQK, option_QK, metric="js", seed=seed, visits=visits, sent=lies)
    score_GQ = js(end.answer_QK, target_GQK, option_QK)
    score_G = score_GQ.mean(axis=1)
    scores = {"avg_as": score_G.mean(), "min_as": score_G.min(), "fi": fairness_index(score_GQ)}
    return scores | {"liar": score_G[liar], "others": np.delete(score_G, liar).mean()}


def rule_columns(numbers: pd.DataFrame) -> study.Columns:
    """Each rule's scores, and how far they are from rule `average` and from `appa`."""
    titles = {"fi": "FI", "avg_as": "Avg AS", "min_as": "Min AS"}
    return {titles[name]: (numbers[name], study.mean) for name in titles} | {
        f"{titles[name]} less {other}'s": (study.less(numbers[name], "rule", other), study.difference)
        for other in ("average", "appa")
        for name in ("avg_as", "min_as")
    }


def lie_columns(numbers: pd.DataFrame) -> study.Columns:
    """Each rule's scores without a lie, and what every lie wins for the liar and for the others."""
    scores = {"Avg AS": "avg_as", "Min AS": "min_as"}
    return {title: (numbers[name].xs(HONEST, level="lie"), study.spread) for title, name in scores.items()} | {
        f"{who}, {lie}": (
            study.less(numbers[who], "lie", HONEST).xs(lie, level="lie"),
            partial(study.spread, form="+.3f"),
        )
        for lie in LIES
        for who in ("liar", "others")
    }


@style.picture
def picture(numbers: pd.DataFrame) -> Figure:
    """For each disagreement, what each rule wins for the worst group and pays on average, next to rule `average`."""
    figure = style.figure(3.4, width=12.0)
    panels = figure.subplots(1, len(DISAGREEMENT), squeeze=False)[0]
    for axes, scale in zip(panels, DISAGREEMENT, strict=True):
        means = numbers[numbers["disagreement"] == scale].groupby("rule")[["avg_as", "min_as"]].mean()
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
    seeds: Annotated[int, typer.Option(help="Populations.")] = 10,
    visits: Annotated[int, typer.Option(min=1, help="Noisy answers to each question.")] = VISITS,
    questions: Annotated[int, typer.Option(help="Questions of a population.")] = 60,
    groups: Annotated[int, typer.Option(help="Groups of a population.")] = 8,
    liars: Annotated[bool, typer.Option("--liars", help="Measure what lies win instead.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of table, picture and single scores.")] = Path("runs/rules"),
) -> None:
    """Measure what every rule ends with, against how far groups differ."""
    at = partial(ends, visits=visits, questions=questions, groups=groups)
    name, parts = ("liars", ("rule", "lie")) if liars else ("rules", ("disagreement", "rule"))
    both: tuple[Iterable[object], ...] = (RULES, (HONEST, *LIES)) if liars else (DISAGREEMENT, (*RULES, BEST))

    def measure(setting: study.Setting, seed: int) -> dict[str, float]:
        return at(seed=seed, **{"disagreement": 1.0, **dict(zip(parts, setting, strict=True))})

    columns, drawn = (lie_columns, None) if liars else (rule_columns, picture)
    study.study(name, parts, itertools.product(*both), range(seeds), measure, columns, output=output, picture=drawn)


if __name__ == "__main__":
    entry.run(main)
