"""The one path on which groups score answers: PPO, evaluation and the trainers of the service all take it.

Axis letters: G groups, J answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis.aggregation import Result, Rule, State
from appa_flwr.protocol import wire
from appa_flwr.protocol.rewards import training_reward
from server_app.federation.answers import Answers

FloatArray = npt.NDArray[np.float64]


class Groups(Protocol):
    """Whoever scores answers: `server_app.federation.groups.Federation`, or groups in this process."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Names, in the order of the rows of `score`."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Group -> how long it took to answer the last question; those that did not answer are not there."""

    def score(
        self, request: wire.ScoreRequest, *, iteration: int = 0, meanwhile: Callable[[], None] | None = None
    ) -> Mapping[tuple[str, str], FloatArray]:
        """Let the groups score answers.

        Args:
            request: the answers, and by which metrics.
            iteration: a label of the messages.
            meanwhile: computed here while the groups score.

        Returns:
            (metric, side) -> rewards (G, J) in [0, 1], a row of NaN for a group that did not answer.

        Raises:
            UserError: too few groups answered.
        """


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
        rewards: of the answers, see `Groups.score`.
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
