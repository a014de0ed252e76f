"""Combine the groups' numbers into one reward per answer, by an aggregation rule.

Axis letters: G groups, J answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from appa_flwr.analysis.equations import training_reward
from appa_flwr.analysis.rule_choice import configured
from appa_flwr.analysis.rules import Rule, State
from appa_flwr.config import Config
from appa_flwr.core.arrays import FloatArray
from appa_flwr.protocol import queries
from appa_flwr.protocol.queries import Query, RewardQuery
from server_app.federation.replies import Replies
from server_app.federation.responses import Responses

_STATE = {"history": np.float64, "answered": np.bool_, "log_weight": np.float64}
"""Names of `State`'s fields in files, in their order; each is False or 0 for a group that has never answered."""


@dataclass(frozen=True)
class RewardRule:
    """The aggregation rule of a config, one of `appa_flwr.analysis.rules`, over the groups `names`."""

    names: tuple[str, ...]
    config: Config

    @property
    def _rule(self) -> Rule:
        return configured(self.config.rule, self.config.appa)

    def first(self) -> State:
        """The state before any iteration."""
        return self._rule.init(len(self.names))

    def query(self, answers: Responses, context_seed: int) -> Query:
        """Build the query of rewards; `context_seed` numbers the groups' contexts, if each query has its own."""
        metrics, seed = (self.config.reward_metric,), context_seed if self.config.pluralllm.fresh_contexts else 0
        return RewardQuery(answers.question_J, answers.prediction_JK, metrics, context_seed=seed).query()

    def result(self, state: State, answers: Responses, replies: Replies) -> tuple[FloatArray, State, dict[str, Any]]:
        """Compute each answer's reward from the groups' replies (Algorithm 1).

        Alignment rewards compare the answer with the predictions of each group's PluralLLM. A group's training reward
        for an answer is 0.85 times its alignment reward plus 0.15 times the answer's format score (Equation 20, with
        `appa.alignment-weight`), and 0 for an answer that cannot be parsed. The rule combines the training rewards;
        Fairness Index and histories are computed from the alignment rewards.

        Returns:
            The rewards (J,), the state for the next iteration, and the fields of `appa_flwr.run.records.RuleRound`
            except the number of the iteration.
        """
        reward_GJ = replies.rows(f"{self.config.reward_metric} {queries.TARGET_REFERENCE} reward", self.names)
        weight, format_J, parsed_J = self.config.appa.alignment_weight, answers.format_score_J, answers.parsed_J
        training_GJ = training_reward(reward_GJ, format_J, parsed_J, alignment_weight=weight)
        result = self._rule.apply(state, reward_GJ, training_GJ)
        mean_G = reward_GJ.mean(axis=1)
        columns = {
            "weights": result.weight_G.tolist(),
            "history": result.state.history_G.tolist(),
            "rewards": [None if np.isnan(mean) else mean for mean in mean_G.tolist()],
        }
        fields = {
            "fairness_index": result.fairness_index,
            "fell_back": result.fell_back,
            "group_reward": float(mean_G[~np.isnan(mean_G)].mean()),
            "reward": float(result.aggregate_J.mean()),
            "format_score": float(answers.format_score_J.mean()),
            "missing_groups": tuple(name for name in self.names if name not in replies.groups),
            **{column: dict(zip(self.names, values, strict=True)) for column, values in columns.items()},
        }
        return result.aggregate_J, result.state, fields

    def saved(self, state: State) -> dict[str, Any]:
        """Convert a state for a checkpoint, with the values of groups by name."""
        arrays = zip(_STATE, vars(state).values(), strict=True)
        return {name: dict(zip(self.names, array_G.tolist(), strict=True)) for name, array_G in arrays}

    def restored(self, saved: Mapping[str, Any]) -> State:
        """Restore a state from the result of `saved`; a group that is not named there has never answered."""
        columns = {name: [saved[name].get(group, 0) for group in self.names] for name in _STATE}
        return State(*(np.array(column, dtype=_STATE[name]) for name, column in columns.items()))
