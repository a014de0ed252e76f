"""Do lies pay? For every rule, what a lying minority wins for itself and costs the others.

    python -m experiments.liars

By free answers (`appa_flwr.analysis.destinations`). The group that the mean of all serves worst lies in training,
always in the same way; scores are then by every group's true answers. Honest and lying runs share questions and noise,
so their difference is the lie's.

Legend: G groups, J answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from appa_flwr.analysis.aggregation import Rule
from appa_flwr.analysis.destinations import VISITS
from experiments import entry, study

STRETCH = 3.0
CAP = 2.0

CAPPED: Mapping[str, Rule] = {
    f"{name}, cap {CAP:g}": study.RULES[name].model_copy(update={"weight_cap": CAP})
    for name in ("appa-open, T = .02", "mix", "group-dro")
}
RULES = {**study.RULES, **CAPPED}


LIES: Mapping[str, Callable[[study.FloatArray], study.FloatArray]] = {
    "half": lambda reward_J: reward_J / 2,
    "zero": np.zeros_like,
    "stretched": lambda reward_J: np.clip(reward_J.mean() + STRETCH * (reward_J - reward_J.mean()), 0.0, 1.0),
}
"""Rewards (J,) that the liar sends: half of its own; nothing; three times their distance from the mean."""


HONEST = "nobody"
COLUMNS = (
    study.StudyColumn("Avg AS", "avg_as", study.spread, case=HONEST),
    study.StudyColumn("Min AS", "min_as", study.spread, case=HONEST),
    *(
        study.StudyColumn(f"{who}, {lie}", who, partial(study.spread, form="+.3f"), case=lie, less=HONEST)
        for lie in LIES
        for who in ("liar", "others")
    ),
)


def lying(people: study.TrueTargets, lie: str) -> Callable[[study.FloatArray], study.FloatArray] | None:
    """Rewards (G, J) as the groups send them where the liar lies so; None where nobody does."""
    if lie not in LIES:
        return None

    def sent(reward_GJ: study.FloatArray) -> study.FloatArray:
        changed_GJ = np.array(reward_GJ)
        changed_GJ[people.liar] = LIES[lie](changed_GJ[people.liar])
        return changed_GJ

    return sent


def scores(setting: study.Setting, seed: int, *, visits: int, num_questions: int, num_groups: int) -> dict[str, float]:
    """A rule's result where the liar lies so: the score of the liar, and of the others on average."""
    rule, lie = setting
    people = study.true_targets(seed, num_questions=num_questions, num_groups=num_groups)
    score_GQ = study.end_scores(RULES[rule], people, seed=seed, visits=visits, sent=lying(people, lie))
    score_G = score_GQ.mean(axis=1)
    others = float(np.delete(score_G, people.liar).mean())
    return {**study.average_and_worst(score_GQ), "liar": float(score_G[people.liar]), "others": others}


def main(
    seeds: study.Seeds = 5,
    visits: study.Visits = VISITS,
    questions: study.Questions = 60,
    groups: study.Groups = 8,
    output: Annotated[Path, typer.Option(help="Folder of table and single scores.")] = Path("runs/liars"),
) -> None:
    """Measure what lies win under every rule."""
    study.study(
        "liars",
        ("rule", "lie"),
        itertools.product(RULES, (HONEST, *LIES)),
        range(seeds),
        partial(scores, visits=visits, num_questions=questions, num_groups=groups),
        COLUMNS,
        output=output,
    )


if __name__ == "__main__":
    entry.run(main)
