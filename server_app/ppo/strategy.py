"""APPA as a Flower Strategy: rollouts out, rewards back, aggregation, PPO.

Axis letters: G groups, J rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from appa_flwr import aggregation, wire
from appa_flwr.aggregation import Rule, State
from appa_flwr.config import Config
from appa_flwr.config.sections import RolloutSection
from appa_flwr.diagnosis import rollout_agreement
from appa_flwr.run.records import Iteration
from server_app.federation.answers import Answers, parse_answers
from server_app.federation.groups import Federation
from server_app.federation.rewards import AggregatedReward, aggregated_reward, group_means
from server_app.models.base import Base
from server_app.ppo.engine import PPOEngine, ReferencePass
from server_app.ppo.rollouts import Rollout

IntArray = npt.NDArray[np.int64]


def make_rule(config: Config) -> Rule:
    """The aggregation rule with the parameters the config has for it."""
    params = {name: getattr(config.appa, name) for name in aggregation.parameters(config.rule)}
    return aggregation.make(config.rule, **params)


class QuestionOrder:
    """Endless shuffled passes over the training questions."""

    def __init__(self, questions: IntArray, seed: int) -> None:
        self._questions, self._rng = questions, np.random.default_rng(seed)
        self._left: list[int] = []

    def take(self, count: int) -> IntArray:
        """The next `count` questions."""
        taken: list[int] = []
        while len(taken) < count:
            if not self._left:
                self._left = self._rng.permutation(self._questions).tolist()
            taken.append(self._left.pop())
        return np.array(taken)


def questions_of(order: QuestionOrder, rollout: RolloutSection) -> IntArray:
    """The next batch's question for each rollout: the answers to one question side by side."""
    return np.repeat(order.take(rollout.batch_size // rollout.answers_per_question), rollout.answers_per_question)


class _WithoutWeights(Strategy):
    """Flower's hooks for rounds in which weights travel, which they do not here."""

    def configure_train(self, *_: Any, **__: Any) -> Iterable[Message]:
        return []

    def aggregate_train(self, *_: Any, **__: Any) -> tuple[None, None]:
        return None, None

    def configure_evaluate(self, *_: Any, **__: Any) -> Iterable[Message]:
        return []

    def aggregate_evaluate(self, *_: Any, **__: Any) -> None:
        """Nothing is reported."""

    def summary(self) -> None:
        """Nothing that the run's own log lacks."""


class AppaStrategy(_WithoutWeights):
    """Federated PPO: the policy stays on the server, the groups' data with the groups, only rewards travel.

    `start` is Algorithm appa from top to bottom.

    Args:
        federation: who scores.
        engine: who samples and learns.
        rule: how the groups' rewards become one.
        config: `task`, `metric`, the weight of alignment, the batch size and whether contexts are drawn anew.
        base: tokenizer.
        catalogue: the public questions.
        prompts: token ids of every question's prompt, by catalogue position.
        order: which questions come next.
        num_iterations: of the whole run.
        finished: called after each iteration with its line for metrics.jsonl and the rule's state.
        done: iterations that an earlier session has done.
        state: the rule's state after these; None starts anew.
    """

    def __init__(
        self,
        federation: Federation,
        engine: PPOEngine,
        rule: Rule,
        config: Config,
        *,
        base: Base,
        catalogue: wire.Catalogue,
        prompts: Sequence[Sequence[int]],
        order: QuestionOrder,
        num_iterations: int,
        finished: Callable[[Iteration, State], None],
        done: int = 0,
        state: State | None = None,
    ) -> None:
        self._federation, self._engine, self._rule, self._config = federation, engine, rule, config
        self._base, self._catalogue, self._prompts, self._order = base, catalogue, prompts, order
        self._num_iterations, self._finished, self._done = num_iterations, finished, done
        self._state = rule.init(len(federation.groups)) if state is None else state

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600, *_: Any, **__: Any
    ) -> Result:
        """Run `num_rounds` iterations of Algorithm appa after those done before.

        The other arguments are not used: no weights travel, the federation asks the groups over a grid that computes
        while it waits, and `federation.reply-timeout` holds.

        Raises:
            UserError: fewer groups answered than `federation.min-groups`; policy and state are those of the iteration
                before.
        """
        for _number in range(num_rounds):
            iteration, seconds = self._done + 1, dict[str, float]()
            with _timed(seconds, "rollout"):
                rollout, answers = self._sample()
            scored, reference = self._ask(iteration, rollout, answers, seconds)
            with _timed(seconds, "update"):
                learned = self._update(rollout, reference, scored)
            self._done, self._state = iteration, scored.result.state
            self._finished(self._line(iteration, answers, scored, learned, seconds), self._state)
        return Result()

    def _sample(self) -> tuple[Rollout, Answers]:
        """Rollouts of the next questions, and what can be read in them."""
        question_J = questions_of(self._order, self._config.rollout)
        rollout = self._engine.rollout([self._prompts[q] for q in question_J])
        texts = self._base.texts(rollout.sequences.response_JT, rollout.sequences.mask_JT)
        return rollout, parse_answers(self._config.task, texts, question_J, self._catalogue)

    def _ask(
        self, iteration: int, rollout: Rollout, answers: Answers, seconds: dict[str, float]
    ) -> tuple[AggregatedReward, ReferencePass]:
        """The groups score and the rule aggregates; reference log-probs and values are computed meanwhile."""
        passes: list[ReferencePass] = []

        def reference_pass() -> None:
            with _timed(seconds, "reference"):
                passes.append(self._engine.reference_pass(rollout.sequences))

        scored = aggregated_reward(
            self._federation,
            self._rule,
            self._state,
            answers,
            metric=self._config.reward_metric,
            alignment_weight=self._config.appa.alignment_weight,
            iteration=iteration,
            fresh_context=self._config.pluralllm.context_resampling == "every-iteration",
            meanwhile=reference_pass,
        )
        seconds["federation_wait"] = self._federation.grid.seconds_waited
        return scored, passes[0]

    def _update(self, rollout: Rollout, reference: ReferencePass, scored: AggregatedReward) -> dict[str, float]:
        device = rollout.logprob_JT.device
        score_J = torch.tensor(scored.result.aggregate_J, dtype=torch.float32, device=device)
        return self._engine.update(rollout, reference, score_J)

    def _line(
        self,
        iteration: int,
        answers: Answers,
        scored: AggregatedReward,
        learned: dict[str, float],
        seconds: dict[str, float],
    ) -> Iteration:
        names, result = self._federation.groups, scored.result
        means = group_means(names, scored.reward_GJ)
        return Iteration(
            iteration=iteration,
            num_iterations=self._num_iterations,
            fairness_index=result.fairness_index,
            fell_back=result.fell_back,
            agreement=result.agreement,
            agreements=rollout_agreement(self._config.appa, scored.reward_GJ) if iteration == 1 else None,
            weights=dict(zip(names, result.weight_G.tolist(), strict=True)),
            history=dict(zip(names, result.state.history_G.tolist(), strict=True)),
            rewards=means,
            reward=float(result.aggregate_J.mean()),
            format_score=float(answers.format_score_J.mean()),
            **learned,
            missing_groups=tuple(name for name, mean in means.items() if mean is None),
            seconds={name: round(value, 4) for name, value in seconds.items()},
        )


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[name] = time.monotonic() - started
