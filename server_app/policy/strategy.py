"""APPA as a Flower Strategy: sample rollouts, collect the groups' rewards, aggregate them, update by PPO.

Axis letters: G groups, J rollouts.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from appa_flwr.analysis.rules import State
from appa_flwr.config import Config
from appa_flwr.config.sections import PPOSection
from appa_flwr.core.arrays import IntArray
from appa_flwr.protocol.asks import Catalogue
from appa_flwr.run.records import Iteration
from server_app.federation.answers import parse_answers
from server_app.federation.groups import Groups
from server_app.federation.reward_rule import RewardRule
from server_app.policy.base import Base
from server_app.policy.ppo import PPOEngine


class QuestionOrder:
    """Endless shuffled passes over the training questions; `num_taken` counts the questions taken so far."""

    def __init__(self, questions: IntArray, seed: int) -> None:
        self._questions, self._rng = questions, np.random.default_rng(seed)
        self._left: list[int] = []
        self.num_taken = 0

    def take(self, count: int) -> IntArray:
        """The next `count` questions."""
        self.num_taken += count
        questions: list[int] = []
        while len(questions) < count:
            if not self._left:
                self._left = self._rng.permutation(self._questions).tolist()
            questions.append(self._left.pop())
        return np.array(questions)


def next_questions(order: QuestionOrder, settings: PPOSection) -> IntArray:
    """Take the questions of the next batch, one per rollout; rollouts of the same question are adjacent."""
    number = settings.answers_per_question
    return np.repeat(order.take(settings.batch_size // number), number)


class AppaStrategy(Strategy):
    """Federated PPO: the policy stays on the server, the data stays with the groups, and groups send only rewards.

    A round is an iteration of Algorithm 1. `configure_train` samples answers and makes the request for their rewards,
    which `Groups` sends; `aggregate_train` combines the replies into one reward per answer and updates the policy. So
    neither weights nor messages pass through Flower's arguments.

    Args:
        prompts: token ids of every question's prompt, by catalogue position.
        num_iterations: PPO iterations of the whole run.
        finished: called after each iteration with its line for metrics.jsonl and the rule's state.
        done: iterations completed before this process started.
        state: the rule's state after `done` iterations; None = the state before any iteration.
    """

    def __init__(
        self,
        groups: Groups,
        engine: PPOEngine,
        rule: RewardRule,
        config: Config,
        *,
        base: Base,
        catalogue: Catalogue,
        prompts: Sequence[Sequence[int]],
        order: QuestionOrder,
        num_iterations: int,
        finished: Callable[[Iteration, State], None],
        done: int = 0,
        state: State | None = None,
    ) -> None:
        self._groups, self._engine, self._rule, self._config = groups, engine, rule, config
        self._base, self._catalogue, self._prompts, self._order = base, catalogue, prompts, order
        self._num_iterations, self._finished, self._done = num_iterations, finished, done
        self._state = rule.first() if state is None else state

    def start(
        self,
        grid: Grid | None = None,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        *_: Any,
        **__: Any,
    ) -> Result:
        """Run `num_rounds` more iterations of Algorithm 1; the result is empty.

        Raises:
            UserError: fewer groups answered than `run.min-groups`; policy and state stay those of the previous
                iteration.
        """
        for server_round in range(self._done + 1, self._done + 1 + num_rounds):
            self.configure_train(server_round)
            self._replies = self._groups.ask(self._request, meanwhile=self._reference_pass)
            self._seconds["federation_wait"] = self._groups.seconds_waited
            self.aggregate_train(server_round, ())
        return Result()

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord | None = None,
        config: ConfigRecord | None = None,
        grid: Grid | None = None,
    ) -> list[Message]:
        """Sample answers to the next questions and make the request for their rewards."""
        self._seconds = dict[str, float]()
        with timed(self._seconds, "rollout"):
            question_J = next_questions(self._order, self._config.ppo)
            self._rollout = self._engine.rollout([self._prompts[q] for q in question_J])
            sequences = self._rollout.sequences
            texts = self._base.texts(sequences.response_JT, sequences.mask_JT)
            self._answers = parse_answers(self._config.task, texts, question_J, self._catalogue)
        draw = server_round if self._config.pluralllm.fresh_contexts else 0
        self._request = self._rule.ask(self._answers, draw)
        return []

    def _reference_pass(self) -> None:
        """Compute reference log-probs and values while the groups score."""
        with timed(self._seconds, "reference"):
            self._reference = self._engine.reference_pass(self._rollout.sequences)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord | None]:
        """Combine the groups' numbers into one reward per answer by the rule, and update the policy."""
        reward_J, state, fields = self._rule.result(self._state, self._answers, self._replies)
        with timed(self._seconds, "update"):
            score_J = torch.tensor(reward_J, dtype=torch.float32, device=self._rollout.logprob_JT.device)
            learned = self._engine.update(self._rollout, self._reference, score_J)
        self._done, self._state = server_round, state
        line = Iteration(
            iteration=server_round,
            num_iterations=self._num_iterations,
            **(fields | learned),
            seconds={name: round(value, 4) for name, value in self._seconds.items()},
        )
        self._finished(line, self._state)
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Unused: the policy is scored after its last iteration (`server_app.evaluation`)."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Unused."""

    def summary(self) -> None:
        """Unused: the run's log has everything."""


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Store the duration of the block in `seconds[name]`."""
    started = time.monotonic()
    yield
    seconds[name] = time.monotonic() - started
