"""Noise that adds up: what it costs if the sums of rewards have to hide all of a group's rewards.

    python -m experiments.noise

Each group adds its share of a Gaussian to its rewards, so that an iteration's sum over all of them is differentially
private and no single share is large. By free answers (`appa_flwr.analysis.destinations`), from the groups' mean on;
scores are by every group's true answers. For the mean of the groups this is what noise on secure sums would do; the
other rules take their weights from the noisy rewards, where sums would need noise of their own for them.

Legend: G groups, J answers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from scipy.optimize import brentq

from appa_flwr.analysis.destinations import BATCH, VISITS
from appa_flwr.protocol.rewards import js
from experiments import entry, study
from server_app.predictor.strategies import epsilon

GROUPS = (8, 64, 256)
RULES = {"average": "average", "mix": "mix", "appa, default": "appa-open, T = .02"}
START = "start"
NONE = math.inf
EPSILONS = (NONE, 100.0, 30.0, 8.0)
"""Privacy loss of a group over the whole training, at the delta of `epsilon`."""
COLUMNS = tuple(
    study.StudyColumn(f"{title}, {'no noise' if loss == NONE else f'epsilon = {loss:g}'}", measure, case=loss)
    for loss in EPSILONS
    for title, measure in (("Avg AS", "avg_as"), ("Min AS", "min_as"))
)


def multiplier(loss: float, iterations: int) -> float:
    """The noise of each iteration's sum, as a multiple of the norm of a group's part, that gives this epsilon.

    Raises:
        ValueError: the epsilon is not one that noise between .01 and 1e6 gives.
    """
    return float(brentq(lambda noise: epsilon(noise, iterations) - loss, 1e-2, 1e6))


def noisy(loss: float, *, iterations: int, seed: int) -> Callable[[study.FloatArray], study.FloatArray] | None:
    """Rewards (G, J) with each group's share of the noise; None without noise.

    Rewards are in [0, 1]; less a half, J of them have a norm of at most sqrt(J) / 2.
    """
    if loss == NONE:
        return None
    noise, rng = multiplier(loss, iterations), np.random.default_rng([seed, 1])

    def sent(reward_GJ: study.FloatArray) -> study.FloatArray:
        num_groups, num_answers = reward_GJ.shape
        of_sum = noise * math.sqrt(num_answers) / 2
        return reward_GJ + rng.normal(0.0, of_sum / math.sqrt(num_groups), reward_GJ.shape)

    return sent


def scores(setting: study.Setting, seed: int, *, visits: int, num_questions: int) -> dict[str, float]:
    """Avg AS and Min AS where a rule ends with so much noise, or of the answers from which all rules start."""
    num_groups, rule, loss = setting
    people = study.true_targets(seed, num_questions=num_questions, num_groups=num_groups)
    if rule == START:
        return study.average_and_worst(np.asarray(js(people.target_GQK.mean(0), people.target_GQK, people.option_QK)))
    iterations = -(-visits * num_questions // BATCH)
    sent = noisy(loss, iterations=iterations, seed=seed)
    score_GQ = study.end_scores(study.RULES[RULES[rule]], people, seed=seed, visits=visits, sent=sent)
    return study.average_and_worst(score_GQ)


def main(
    seeds: study.Seeds = 5,
    visits: study.Visits = VISITS,
    questions: study.Questions = 60,
    output: Annotated[Path, typer.Option(help="Folder of table and single scores.")] = Path("runs/noise"),
) -> None:
    """Measure what differentially private sums of rewards cost."""
    settings = itertools.product(GROUPS, (START, *RULES), EPSILONS)
    study.study(
        "noise",
        ("groups", "rule", "epsilon"),
        [(groups, rule, loss) for groups, rule, loss in settings if rule != START or loss == NONE],
        range(seeds),
        partial(scores, visits=visits, num_questions=questions),
        COLUMNS,
        output=output,
    )


if __name__ == "__main__":
    entry.run(main)
