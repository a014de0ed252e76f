"""The population and the rules of the studies that need no language model: each rule's destination on true answers.

The policy is `appa_flwr.analysis.destinations`: a free answer to each question. It can reach the best
shared answers, so what it ends with tells rules apart, and nothing of what a language model learns.

Legend: G groups, Q questions, K options.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from appa_flwr.analysis.aggregation import Rule, make
from appa_flwr.analysis.destinations import NEVER, STEP, VISITS, destination
from appa_flwr.protocol.rewards import js
from appa_flwr.survey import generate
from appa_flwr.survey.arrays import as_arrays

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

Seeds = Annotated[int, typer.Option(help="Populations.")]
Visits = Annotated[int, typer.Option(min=1, help="Noisy answers to each question.")]
Questions = Annotated[int, typer.Option(help="Questions of a population.")]
Groups = Annotated[int, typer.Option(help="Groups of a population.")]

RULES: Mapping[str, Rule] = {
    "average": make("average"),
    "min": make("min"),
    "nash": make("nash"),
    "worst": make("worst"),
    "appa": make("appa"),
    "appa-open": make("appa", fairness_threshold=NEVER),
    "appa-open, T = .02": make("appa", fairness_threshold=NEVER, temperature=0.02),
    "mix": make("mix"),
    "group-dro": make("group-dro"),
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
    drawn: generate.Population = {
        "num_questions": num_questions,
        "num_groups": num_groups,
        "disagreement": disagreement,
        "seed": seed,
    }
    target_GQK, option_QK = as_arrays(*generate.ground_truth(**drawn))
    scores_G = js(target_GQK.mean(0), target_GQK, option_QK).mean(axis=1)
    return TrueTargets(target_GQK, option_QK, int(np.argmin(scores_G)))


def end_scores(
    rule: Rule,
    people: TrueTargets,
    *,
    seed: int,
    visits: int = VISITS,
    step: float = STEP,
    sent: Callable[[FloatArray], FloatArray] | None = None,
) -> FloatArray:
    """Each group's true scores (G, Q) of the answers that a rule ends with; arguments as for `destination`."""
    answer_QK = destination(
        rule, people.target_GQK, people.option_QK, metric="js", seed=seed, visits=visits, step=step, sent=sent
    ).answer_QK
    return np.asarray(js(answer_QK, people.target_GQK, people.option_QK))
