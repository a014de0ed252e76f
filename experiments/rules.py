"""Comparison of rules: gain for the worst group and loss for the average group, at growing distances of groups.

    python -m experiments.rules
    python -m experiments.rules --liars --seeds 5    # what a lie gains for the liar and costs the others

Free answers to each question are optimised under every rule (`appa_flwr.analysis.free_answers`), on the same generated
populations, from nearly equal to very different groups. Free answers can reach the best shared answers, so their end
points distinguish rules, but they do not show what a language model learns. Rules share questions and noise, so their
scores on a population are paired.

The liar is the group that the mean of all groups' answers serves worst. It lies in training, always in the same way;
scores use every group's true answers. Honest and lying runs share questions and noise, so they are paired too.

Legend: G groups, Q questions, K options, J answers.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from appa_flwr.analysis.alignment import as_arrays
from appa_flwr.analysis.ceilings import shared_answer
from appa_flwr.analysis.free_answers import destination
from appa_flwr.analysis.intervals import Measure, bootstrap
from appa_flwr.analysis.rule_choice import make
from appa_flwr.analysis.rules import Rule
from appa_flwr.core.arrays import FloatArray
from appa_flwr.protocol.rewards import js
from appa_flwr.survey.generate import ground_truth
from experiments import entry, study

Rewards = Mapping[study.Setting, FloatArray]
"""Setting and seed -> rewards (G, Q)."""
QUESTIONS, GROUPS = 60, 8  # of a population

DISAGREEMENT = (0.15, 0.5, 1.0, 2.0)
"""Distances of the groups from their mean, as a multiple of the default population's distance."""
RULES: Mapping[str, Rule] = {name: make(name) for name in ("average", "min", "appa-printed", "appa", "mix")}
BEST = "best possible"
TITLES: Mapping[str, Measure] = {"avg_as": "Avg AS", "min_as": "Min AS"}

STRETCH = 3.0
HONEST = "nobody"
LIES: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    HONEST: lambda reward_J: reward_J,
    "half": lambda reward_J: reward_J / 2,
    "stretched": lambda reward_J: np.clip(reward_J.mean() + STRETCH * (reward_J - reward_J.mean()), 0.0, 1.0),
}
"""Rewards (J,) that the liar sends: its true rewards; half of them; their distance from the mean times three."""


def ends(disagreement: float, rule: str, seed: int, *, lie: str = HONEST) -> tuple[dict[str, float], FloatArray]:
    """True scores of a rule's destination, including the liar's score and the mean of the others; and rewards (G, Q).

    Rule `BEST` gives Min AS of the shared answers that are best for the worst group.
    """
    size = {"num_questions": QUESTIONS, "num_groups": GROUPS}
    target_GQK, option_QK = as_arrays(*ground_truth(**size, disagreement=disagreement, seed=seed))
    if rule == BEST:
        best_QK = shared_answer(target_GQK, option_QK, metric="js", objective="min")
        reward_GQ = js(best_QK, target_GQK, option_QK)
        return {"min_as": reward_GQ.mean(axis=1).min()}, reward_GQ
    liar = int(np.argmin(js(target_GQK.mean(0), target_GQK, option_QK).mean(axis=1)))

    def sent(reward_GJ: FloatArray) -> FloatArray:
        changed_GJ = np.array(reward_GJ)
        changed_GJ[liar] = LIES[lie](changed_GJ[liar])
        return changed_GJ

    end = destination(RULES[rule], target_GQK, option_QK, metric="js", seed=seed, sent=sent)
    reward_GQ = js(end.answer_QK, target_GQK, option_QK)
    score_G = reward_GQ.mean(axis=1)
    scores = {"avg_as": score_G.mean(), "min_as": score_G.min()}
    return scores | {"liar": score_G[liar], "others": np.delete(score_G, liar).mean()}, reward_GQ


def gain(rewards: Rewards, measure: Measure, pairs: "pd.Series[float]") -> str:
    """Format a rule's mean difference to `average` with its interval, empty if a number is NaN."""
    if pairs.isna().any():
        return ""
    at = pairs.index.to_frame()[["disagreement", "rule", "seed"]].itertuples(index=False, name=None)
    pairs_of_runs = [(rewards[far, rule, seed], rewards[far, "average", seed]) for far, rule, seed in at]
    over = bootstrap(pairs_of_runs)[measure].uncorrected()
    return study.interval(over.value, over.low, over.high)


def rule_columns(numbers: pd.DataFrame, *, rewards: Rewards) -> study.Columns:
    """Each rule's scores, and their differences to those of rule `average`."""
    return {title: (numbers[name], study.spread) for name, title in TITLES.items()} | {
        f"{title} less average's": (study.less(numbers[name], "rule", "average"), partial(gain, rewards, title))
        for name, title in TITLES.items()
    }


def lie_columns(numbers: pd.DataFrame) -> study.Columns:
    """Each rule's scores without a lie, and the gain of every lie for the liar and for the others."""
    gained = partial(study.spread, form="+.3f")
    return {title: (numbers[name].xs(HONEST, level="lie"), study.spread) for name, title in TITLES.items()} | {
        f"{who}, {lie}": (study.less(numbers[who], "lie", HONEST).xs(lie, level="lie"), gained)
        for lie in [*LIES][1:]
        for who in ("liar", "others")
    }


def main(
    seeds: Annotated[int, typer.Option(help="Populations.")] = 10,
    liars: Annotated[bool, typer.Option("--liars", help="Measure what lies win instead.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of table and single scores.")] = Path("runs/rules"),
) -> None:
    """Measure the destinations of every rule at several distances of the groups."""
    name, parts = ("liars", ("rule", "lie")) if liars else ("rules", ("disagreement", "rule"))
    both: tuple[Iterable[object], ...] = (RULES, LIES) if liars else (DISAGREEMENT, (*RULES, BEST))

    rewards: dict[study.Setting, FloatArray] = {}

    def measure(setting: study.Setting, seed: int) -> dict[str, float]:
        keys = {"disagreement": 1.0, **dict(zip(parts, setting, strict=True))}
        scores, rewards[*setting, seed] = ends(seed=seed, **keys)
        return scores

    columns = lie_columns if liars else partial(rule_columns, rewards=rewards)
    study.study(name, parts, itertools.product(*both), range(seeds), measure, columns, output=output)


if __name__ == "__main__":
    entry.run(main)
