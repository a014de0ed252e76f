"""From the groups' scores to each answer's reward: the one path, for PPO and for the trainers of the service.

Axis letters: G groups, J answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis.aggregation import Result, Rule, State
from appa_flwr.protocol import wire
from appa_flwr.protocol.rewards import training_reward
from server_app.federation.answers import Answers

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class AggregatedReward:
    """Result of the groups' scores.

    Attributes:
        reward_GJ: alignment rewards, a row of NaN for a missing group.
        result: the rule's: the reward of each answer, the next state, fairness and weights.
    """

    reward_GJ: FloatArray
    result: Result


def aggregated_reward(
    rule: Rule,
    state: State,
    answers: Answers,
    rewards: Mapping[tuple[str, str], FloatArray],
    *,
    metric: str,
    alignment_weight: float,
) -> AggregatedReward:
    """From the groups' rewards to the reward of each answer: mix in the format score, aggregate (Algorithm appa).

    Args:
        rule: how group rewards become one.
        state: the rule's, from `rule.init` or the previous result.
        answers: J parsed answers.
        rewards: of the answers, see `server_app.federation.groups.Federation.score`.
        metric: the reward metric.
        alignment_weight: omega of Equation final-reward, in [0, 1].
    """
    reward_GJ = rewards[metric, wire.TARGET_SIDE]
    training_GJ = training_reward(
        reward_GJ, answers.format_score_J, answers.parsed_J, alignment_weight=alignment_weight
    )
    return AggregatedReward(reward_GJ, rule.apply(state, reward_GJ, training_GJ))


def group_means(names: Sequence[str], reward_GJ: FloatArray) -> dict[str, float | None]:
    """Each group's mean reward over the answers (G, J); None for a group that is missing."""
    means_G = reward_GJ.mean(axis=1)
    return {name: None if np.isnan(mean) else float(mean) for name, mean in zip(names, means_G, strict=True)}
