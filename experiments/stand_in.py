"""A stand-in for the whole loop, which takes a second: no language model, but a free answer to each question.

The policy is softmax(theta) with noise for every question of the generated population, and follows the aggregated
reward of 96 answers an iteration, whitened and clamped as in PPO. It can reach what no rule could do better, so what it
ends with tells rules apart, and nothing of what a language model learns.

Legend: G groups, Q questions, K options, J answers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from scipy.special import softmax

from appa_flwr.analysis.aggregation import Rule, make
from appa_flwr.analysis.group_differences import NEVER
from appa_flwr.protocol.rewards import js
from appa_flwr.survey import generate
from appa_flwr.survey.arrays import as_arrays

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

Seeds = Annotated[int, typer.Option(help="Populations.")]
Iterations = Annotated[int, typer.Option(help="Updates of the answers.")]
Questions = Annotated[int, typer.Option(help="Questions of a population.")]
Groups = Annotated[int, typer.Option(help="Groups of a population.")]

ANSWERS, NOISE, CLAMP = 96, 0.3, 5.0

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


def trained(
    rule: Rule,
    people: TrueTargets,
    *,
    iterations: int,
    seed: int,
    lie: Callable[[FloatArray], FloatArray] | None = None,
    blur: Callable[[FloatArray], FloatArray] | None = None,
    step: float = 0.02,
) -> FloatArray:
    """Each group's true scores (G, Q) of the answers that a policy ends with.

    Args:
        rule: makes one reward of the groups'.
        people: whose answers are the groups' targets.
        iterations: updates of the policy.
        seed: of questions and noise; two runs with the same one differ by rule and lie alone.
        lie: what the liar sends in place of its rewards (J,), None where it is honest.
        blur: what all groups' owners make of their rewards (G, J); None leaves them as they are.
        step: how far an answer's logits move for a whitened reward of 1.
    """
    rng = np.random.default_rng(seed)
    num_questions, num_options = people.option_QK.shape
    theta_QK = np.zeros((num_questions, num_options))
    state = rule.init(len(people.target_GQK))
    for _ in range(iterations):
        question_J = rng.integers(num_questions, size=ANSWERS)
        noise_JK = NOISE * rng.standard_normal((ANSWERS, num_options))
        answer_JK = _answers(theta_QK[question_J] + noise_JK, people.option_QK[question_J])
        reward_GJ = js(answer_JK, people.target_GQK[:, question_J], people.option_QK[question_J])
        if lie is not None:
            reward_GJ = np.array(reward_GJ)
            reward_GJ[people.liar] = lie(reward_GJ[people.liar])
        if blur is not None:
            reward_GJ = blur(reward_GJ)
        result = rule.apply(state, reward_GJ, reward_GJ)
        state = result.state
        spread = result.aggregate_J.std()
        white_J = (result.aggregate_J - result.aggregate_J.mean()) / spread if spread > 0 else np.zeros(ANSWERS)
        gain_JK = np.clip(white_J, -CLAMP, CLAMP)[:, None] * noise_JK / NOISE
        np.add.at(theta_QK, question_J, step * gain_JK)
    answer_QK = _answers(theta_QK, people.option_QK)
    return np.asarray(js(answer_QK, people.target_GQK, people.option_QK))


def _answers(theta_JK: FloatArray, option_JK: BoolArray) -> FloatArray:
    return np.asarray(softmax(np.where(option_JK, theta_JK, -np.inf), axis=1))
