"""From the groups' numbers to each answer's reward: by a rule on single rewards, or by its half on sums.

Axis letters: G groups, J answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis import aggregation
from appa_flwr.analysis.aggregation import State
from appa_flwr.config import Config
from appa_flwr.protocol import asks
from appa_flwr.protocol.asks import Ask
from appa_flwr.protocol.rewards import training_reward
from appa_flwr.secure import rule_sums
from appa_flwr.secure.rule_sums import SumState
from server_app.federation.answers import Answers
from server_app.federation.ask import Answer
from server_app.federation.groups import Groups

FloatArray = npt.NDArray[np.float64]
RuleState = State | SumState

_STATE = ("history", "answered", "lead")
"""Of a rule on single rewards, by group; False or 0 for one that has never answered."""


@dataclass(frozen=True, eq=False)
class Aggregated:
    """One iteration's outcome.

    Attributes:
        aggregate_J: the reward of each answer.
        state: for the next iteration.
        fairness_index: of this iteration, in [0, 1].
        fell_back: whether the fairness threshold made the rule a plain mean; None for rules without one.
        group_reward: mean alignment reward over the groups that answered.
        missing: groups that did not answer.
        weights: group -> its weight; empty where only sums are known, as the two after it.
        history: group -> the moving average of its rewards.
        rewards: group -> its mean reward, None for a missing group.
    """

    aggregate_J: FloatArray
    state: RuleState
    fairness_index: float
    fell_back: bool | None
    group_reward: float
    missing: tuple[str, ...]
    weights: dict[str, float]
    history: dict[str, float]
    rewards: dict[str, float | None]


@dataclass(frozen=True)
class PlainRule:
    """A rule of `appa_flwr.analysis.aggregation`, on every group's rewards."""

    names: tuple[str, ...]
    config: Config

    @property
    def _rule(self) -> aggregation.Rule:
        return aggregation.configured(self.config.rule, self.config.appa)

    def first(self) -> RuleState:
        """The state before any iteration."""
        return self._rule.init(len(self.names))

    def ask(self, state: RuleState, answers: Answers, draw: int) -> Ask:
        """The request for what the rule needs of the groups; `draw` as in `asks.ScoreRequest`."""
        return answers.request([self.config.reward_metric], draw=draw).ask(asks.REWARDS)

    def result(self, state: RuleState, answers: Answers, answer: Answer) -> Aggregated:
        """Mix in the format score, and aggregate (Algorithm appa)."""
        assert isinstance(state, State)
        reward_GJ = answer.rows(f"{self.config.reward_metric} {asks.TARGET_SIDE} reward", self.names)
        training_GJ = training_reward(
            reward_GJ,
            answers.format_score_J,
            answers.parsed_J,
            alignment_weight=self.config.appa.alignment_weight,
        )
        result = self._rule.apply(state, reward_GJ, training_GJ)
        means = group_means(self.names, reward_GJ)
        known = [mean for mean in means.values() if mean is not None]
        return Aggregated(
            result.aggregate_J,
            result.state,
            result.fairness_index,
            result.fell_back,
            group_reward=float(np.mean(known)),
            missing=tuple(name for name, mean in means.items() if mean is None),
            weights=dict(zip(self.names, result.weight_G.tolist(), strict=True)),
            history=dict(zip(self.names, result.state.history_G.tolist(), strict=True)),
            rewards=means,
        )

    def saved(self, state: RuleState) -> dict[str, Any]:
        """A state as a checkpoint holds it, by the groups' names."""
        arrays = {name: getattr(state, f"{name}_G").tolist() for name in _STATE}
        return {name: dict(zip(self.names, values, strict=True)) for name, values in arrays.items()}

    def restored(self, saved: Mapping[str, Any]) -> RuleState:
        """The state again: a group that is new has never answered."""
        arrays = {f"{name}_G": np.array([saved[name].get(group, 0) for group in self.names]) for name in _STATE}
        return State(**arrays)


@dataclass(frozen=True)
class SumRule:
    """The server's half of a rule on sums, see `appa_flwr.secure.rule_sums`."""

    names: tuple[str, ...]
    config: Config

    def first(self) -> RuleState:
        """See `PlainRule`."""
        rule_sums.check_rule(self.config.rule, self.config.appa)
        return rule_sums.first(self.config.rule, self.config.appa, len(self.names))

    def ask(self, state: RuleState, answers: Answers, draw: int) -> Ask:
        """See `PlainRule`."""
        assert isinstance(state, SumState)
        return answers.request([self.config.reward_metric], draw=draw).ask(
            asks.TERMS,
            arrays={"format": answers.format_score_J, "parsed": answers.parsed_J},
            rule=self.config.rule,
            iteration=state.iteration + 1,
            reference=state.reference,
            completed=list(state.completed),
        )

    def result(self, state: RuleState, answers: Answers, answer: Answer) -> Aggregated:
        """See `PlainRule`."""
        assert isinstance(state, SumState)
        sums = {name: answer.sum(name) for name in answer.numbers}
        number, rule = len(answer.groups), self.config.rule
        outcome = rule_sums.combine(rule, self.config.appa, state, sums, groups=number, task=answer.task)
        return Aggregated(
            outcome.aggregate_J,
            outcome.state,
            outcome.fairness_index,
            outcome.fell_back,
            group_reward=float(sums["reward"].mean()) / number,
            missing=tuple(name for name in self.names if name not in answer.groups),
            weights={},
            history={},
            rewards={},
        )

    def saved(self, state: RuleState) -> dict[str, Any]:
        """See `PlainRule`."""
        return {**vars(state)}

    def restored(self, saved: Mapping[str, Any]) -> RuleState:
        """See `PlainRule`."""
        return SumState(saved["iteration"], saved["reference"], tuple(saved["completed"]))


RewardRule = PlainRule | SumRule


def reward_rule(groups: Groups, config: Config) -> RewardRule:
    """The rule of a config over a run's groups."""
    return PlainRule(groups.names, config) if groups.plain else SumRule(groups.names, config)


def group_means(names: tuple[str, ...], reward_GJ: FloatArray) -> dict[str, float | None]:
    """Each group's mean reward over the answers (G, J); None for a group that is missing."""
    means_G = reward_GJ.mean(axis=1)
    return {name: None if np.isnan(mean) else float(mean) for name, mean in zip(names, means_G, strict=True)}
