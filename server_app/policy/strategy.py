"""APPA as a Flower Strategy: sample rollouts, collect the groups' rewards, aggregate them, update by PPO.

Axis letters: G groups, J rollouts.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from appa_flwr.config import Config
from appa_flwr.config.sections import PPOSection
from appa_flwr.protocol.asks import Ask, Catalogue
from appa_flwr.protocol.messages import ASK
from appa_flwr.run.records import Iteration
from server_app.federation.answers import Answers, parse_answers
from server_app.federation.ask import LostSum, Replies
from server_app.federation.groups import Groups
from server_app.federation.reward_rule import RewardRule, RuleState
from server_app.policy.base import Base
from server_app.policy.ppo import PPOEngine, ReferencePass
from server_app.policy.sample import Rollout

IntArray = npt.NDArray[np.int64]

TRIES = 3
"""Batches of rollouts that an iteration samples at most when secure sums are lost; then the run ends."""

log = logging.getLogger("appa.server")


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


class AskMessage(Message):
    """A request for numbers, which `Groups` sends to all groups."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(RecordDict(), 1, ASK)
        self.ask = ask


class RepliesMessage(Message):
    """The groups' replies to an `AskMessage`."""

    def __init__(self, replies: Replies, request: AskMessage) -> None:
        super().__init__(RecordDict(), reply_to=request)
        self.replies = replies


@dataclass
class _Round:
    """Rollouts and answers of a round, kept while the groups score them."""

    rollout: Rollout
    answers: Answers
    seconds: dict[str, float]
    reference: ReferencePass | None = None


class AppaStrategy(Strategy):
    """Federated PPO: the policy stays on the server, the data stays with the groups, and groups send only rewards.

    A round is an iteration of Algorithm 1. `configure_train` samples answers and builds the request for rewards.
    `aggregate_train` combines the groups' numbers into one reward per answer and updates the policy. No weights travel,
    so all Flower arrays are empty.

    Args:
        groups: score the answers.
        engine: samples answers and updates the policy.
        rule: combines the groups' rewards.
        config: config of the run.
        base: turns token ids into text.
        catalogue: the public questions.
        prompts: token ids of every question's prompt, by catalogue position.
        order: order of the training questions.
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
        finished: Callable[[Iteration, RuleState], None],
        done: int = 0,
        state: RuleState | None = None,
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
        """Run `num_rounds` more rounds.

        Args:
            grid: unused: `Groups` has its own grid, which lets the server compute while the groups score.
            initial_arrays: unused.
            num_rounds: iterations of Algorithm 1.

        Raises:
            UserError: fewer groups answered than `run.min-groups`, or the rewards of `TRIES` batches were lost. Policy
                and state stay those of the previous iteration.
        """
        result = Result()
        for _number in range(num_rounds):
            server_round = self._done + 1
            replies = self._replies(server_round)
            result.train_metrics_clientapp[server_round] = self.aggregate_train(server_round, replies)[1]
        return result

    def _replies(self, server_round: int) -> Iterable[Message]:
        """Replies of a round. When a secure sum is lost, tries again with the next questions."""
        for tries_left in reversed(range(TRIES)):
            (request,) = self.configure_train(server_round)
            try:
                replies = self._groups.ask(request.ask, meanwhile=self._reference_pass)
            except LostSum as error:
                if not tries_left:
                    raise
                log.warning("iteration %d: %s; the next questions are answered instead", server_round, error)
            else:
                self._round.seconds["federation_wait"] = self._groups.seconds_waited
                return [RepliesMessage(replies, request)]
        raise AssertionError

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord | None = None,
        config: ConfigRecord | None = None,
        grid: Grid | None = None,
    ) -> list[AskMessage]:
        """Sample answers to the next questions and build the request for their rewards."""
        seconds = dict[str, float]()
        with timed(seconds, "rollout"):
            question_J = next_questions(self._order, self._config.ppo)
            rollout = self._engine.rollout([self._prompts[q] for q in question_J])
            texts = self._base.texts(rollout.sequences.response_JT, rollout.sequences.mask_JT)
            answers = parse_answers(self._config.task, texts, question_J, self._catalogue)
        draw = server_round if self._config.pluralllm.fresh_contexts else 0
        self._round = _Round(rollout, answers, seconds)
        return [AskMessage(self._rule.ask(self._state, answers, draw))]

    def _reference_pass(self) -> None:
        """Compute reference log-probs and values while the groups score."""
        with timed(self._round.seconds, "reference"):
            self._round.reference = self._engine.reference_pass(self._round.rollout.sequences)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Combine the groups' numbers into one reward per answer by the rule, and update the policy."""
        now = self._round
        assert now.reference is not None
        (reply,) = replies
        assert isinstance(reply, RepliesMessage)
        reward_J, state, fields = self._rule.result(self._state, now.answers, reply.replies)
        with timed(now.seconds, "update"):
            device = now.rollout.logprob_JT.device
            score_J = torch.tensor(reward_J, dtype=torch.float32, device=device)
            learned = self._engine.update(now.rollout, now.reference, score_J)
        self._done, self._state = server_round, state
        line = Iteration(
            iteration=server_round,
            num_iterations=self._num_iterations,
            **(fields | learned),
            seconds={name: round(value, 4) for name, value in now.seconds.items()},
        )
        self._finished(line, self._state)
        return None, MetricRecord({"reward": line.reward, "fairness-index": line.fairness_index})

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
