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
from experiments import entry, stand_in
from experiments.stand_in import FloatArray, Groups, Questions, Seeds, TrueTargets, Visits, end_scores, true_targets
from experiments.study import Setting, StudyColumn, spread, study

STRETCH = 3.0
CAP = 2.0

CAPPED: Mapping[str, Rule] = {
    f"{name}, cap {CAP:g}": stand_in.RULES[name].model_copy(update={"weight_cap": CAP})
    for name in ("appa-open, T = .02", "mix", "group-dro")
}
RULES = {**stand_in.RULES, **CAPPED}


def _stretched(reward_J: FloatArray) -> FloatArray:
    return np.asarray(np.clip(reward_J.mean() + STRETCH * (reward_J - reward_J.mean()), 0.0, 1.0))


LIES: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "half": lambda reward_J: reward_J / 2,
    "zero": np.zeros_like,
    "stretched": _stretched,
}
"""Rewards (J,) that the liar sends: half of its own; nothing; three times their distance from the mean."""


HONEST = "nobody"
COLUMNS = (
    StudyColumn("Avg AS", "avg_as", spread, case=HONEST),
    StudyColumn("Min AS", "min_as", spread, case=HONEST),
    *(
        StudyColumn(f"{who}, {lie}", who, partial(spread, form="+.3f"), case=lie, less=HONEST)
        for lie in LIES
        for who in ("liar", "others")
    ),
)


def lying(people: TrueTargets, lie: str) -> Callable[[FloatArray], FloatArray] | None:
    """Rewards (G, J) as the groups send them where the liar lies so; None where nobody does."""
    if lie not in LIES:
        return None

    def sent(reward_GJ: FloatArray) -> FloatArray:
        changed_GJ = np.array(reward_GJ)
        changed_GJ[people.liar] = LIES[lie](changed_GJ[people.liar])
        return changed_GJ

    return sent


def scores(setting: Setting, seed: int, *, visits: int, num_questions: int, num_groups: int) -> dict[str, float]:
    """A rule's result where the liar lies so: the score of the liar, and of the others on average."""
    rule, lie = setting
    people = true_targets(seed, num_questions=num_questions, num_groups=num_groups)
    score_G = end_scores(RULES[rule], people, seed=seed, visits=visits, sent=lying(people, lie)).mean(axis=1)
    others_G = np.delete(score_G, people.liar)
    found = {"avg_as": score_G.mean(), "min_as": score_G.min(), "liar": score_G[people.liar], "others": others_G.mean()}
    return {name: float(value) for name, value in found.items()}


def main(
    seeds: Seeds = 5,
    visits: Visits = VISITS,
    questions: Questions = 60,
    groups: Groups = 8,
    output: Annotated[Path, typer.Option(help="Folder of table and single scores.")] = Path("runs/liars"),
) -> None:
    """Measure what lies win under every rule."""
    study(
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
