"""Comparison of rules: gain for the worst group and its price, as groups differ more and more.

    python -m experiments.rules
    python -m experiments.rules --liars --seeds 5    # what a lying minority wins for itself and costs the others

Every rule is followed by free answers (`appa_flwr.analysis.destinations`) on the same generated populations, from
groups that hardly differ to groups that do. Rules share questions and noise, so a population is a pair of any two of
them.

A liar is the group that the mean of all serves worst. It lies in training, always in the same way; scores are then by
every group's true answers. Honest and lying runs share questions and noise too, so their difference is the lie's.

Legend: G groups, J answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from appa_flwr.analysis.destinations import VISITS
from appa_flwr.analysis.fairness import fairness_index
from appa_flwr.analysis.group_differences import group_differences
from appa_flwr.report import style
from appa_flwr.report.style import RULE_STYLE
from experiments import entry, study

DISAGREEMENT = (0.15, 0.5, 1.0, 2.0)
"""Distances of the groups from their mean, as a multiple of the default population's distance."""
FEW_TICKS = 3

AGAINST = ("average", "appa")
BEST = "best possible"
COLUMNS = (
    study.StudyColumn("FI", "fi"),
    study.StudyColumn("Avg AS", "avg_as"),
    study.StudyColumn("Min AS", "min_as"),
    *(
        study.StudyColumn(f"{title} less {other}'s", measure, study.difference, less=other)
        for other in AGAINST
        for title, measure in (("Avg AS", "avg_as"), ("Min AS", "min_as"))
    ),
)


STRETCH = 3.0
HONEST = "nobody"
LIES: Mapping[str, Callable[[study.FloatArray], study.FloatArray]] = {
    "half": lambda reward_J: reward_J / 2,
    "zero": np.zeros_like,
    "stretched": lambda reward_J: np.clip(reward_J.mean() + STRETCH * (reward_J - reward_J.mean()), 0.0, 1.0),
}
"""Rewards (J,) that the liar sends: half of its own; nothing; three times their distance from the mean."""
LIAR_COLUMNS = (
    study.StudyColumn("Avg AS", "avg_as", study.spread, case=HONEST),
    study.StudyColumn("Min AS", "min_as", study.spread, case=HONEST),
    *(
        study.StudyColumn(f"{who}, {lie}", who, partial(study.spread, form="+.3f"), case=lie, less=HONEST)
        for lie in LIES
        for who in ("liar", "others")
    ),
)


def ends(setting: study.Setting, seed: int, *, visits: int, num_questions: int, num_groups: int) -> dict[str, float]:
    """A rule's result at this disagreement, or, as `BEST`, that of the best shared answers for the worst group."""
    scale, rule = setting
    people = study.true_targets(seed, num_questions=num_questions, num_groups=num_groups, disagreement=scale)
    if rule == BEST:
        differences = group_differences(people.target_GQK, people.option_QK, metric="js")
        return {"avg_as": np.nan, "min_as": differences.min_of_fairest, "fi": np.nan}
    score_GQ = study.end_scores(study.RULES[rule], people, seed=seed, visits=visits)
    return {**study.average_and_worst(score_GQ), "fi": fairness_index(score_GQ)}


def ends_of_a_lie(
    setting: study.Setting, seed: int, *, visits: int, num_questions: int, num_groups: int
) -> dict[str, float]:
    """A rule's result where the liar lies so: the score of the liar, and of the others on average."""
    rule, lie = setting
    people = study.true_targets(seed, num_questions=num_questions, num_groups=num_groups)

    def sent(reward_GJ: study.FloatArray) -> study.FloatArray:
        changed_GJ = np.array(reward_GJ)
        changed_GJ[people.liar] = LIES[lie](changed_GJ[people.liar])
        return changed_GJ

    score_GQ = study.end_scores(study.RULES[rule], people, seed=seed, visits=visits, sent=sent if lie in LIES else None)
    score_G = score_GQ.mean(axis=1)
    others = float(np.delete(score_G, people.liar).mean())
    return {**study.average_and_worst(score_GQ), "liar": float(score_G[people.liar]), "others": others}


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
        for name in study.RULES:
            (colour, marker), fill = (RULE_STYLE[name], "full") if name in RULE_STYLE else next(others)
            x, y = change.loc[name, ["avg_as", "min_as"]]
            axes.plot(x, y, marker, color=colour, fillstyle=fill, markersize=8, label=name)
        axes.set(title=f"disagreement {scale:g}", xlabel="Avg AS less average's")
    panels[0].set_ylabel("Min AS less average's")
    style.legend(figure, panels[0])
    return figure


def main(
    seeds: study.Seeds = 10,
    visits: study.Visits = VISITS,
    questions: study.Questions = 60,
    groups: study.Groups = 8,
    liars: Annotated[bool, typer.Option("--liars", help="Measure what lies win instead.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of table, picture and single scores.")] = Path("runs/rules"),
) -> None:
    """Measure what every rule ends with, against how far groups differ."""
    given: dict[str, Any] = {"visits": visits, "num_questions": questions, "num_groups": groups}
    if liars:
        settings = itertools.product(study.RULES, (HONEST, *LIES))
        measure = partial(ends_of_a_lie, **given)
        study.study("liars", ("rule", "lie"), settings, range(seeds), measure, LIAR_COLUMNS, output=output)
        return
    study.study(
        "rules",
        ("disagreement", "rule"),
        itertools.product(DISAGREEMENT, (*study.RULES, BEST)),
        range(seeds),
        partial(ends, **given),
        COLUMNS,
        output=output,
        picture=picture,
    )


if __name__ == "__main__":
    entry.run(main)
