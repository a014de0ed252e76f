"""APPA as a Flower Strategy: sample answers, ask the groups for rewards, aggregate them, update the policy by PPO.

Axis letter: J rollouts.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from appa_flwr.analysis.rules import State
from appa_flwr.core.arrays import IntArray
from appa_flwr.protocol.queries import Query, RewardQuery
from appa_flwr.run.records import Iteration
from appa_flwr.run.schema import rule_folder
from server_app import evaluation, log
from server_app.federation.groups import PendingQuery
from server_app.federation.replies import TooFew
from server_app.federation.responses import Responses, parse_responses
from server_app.inputs import PolicyInputs, RunInputs
from server_app.policy.ppo import PPOEngine
from server_app.policy.sample import Rollout
from server_app.reward_rule import RewardRule


@dataclass
class Round:
    """One iteration of Algorithm 1, between Flower's calls."""

    rollout: Rollout
    answers: Responses
    pending: PendingQuery  # for the rewards of the answers
    seconds: dict[str, float]  # of each part
    line: Iteration | None = None  # the round's line of metrics.jsonl, after the update
    held_out: tuple[RewardQuery, PendingQuery] | None = None  # of the answers to held-out questions


@dataclass(eq=False)
class AppaStrategy(Strategy):
    """Federated PPO: the policy stays on the server, the data stays with the groups, and groups send only rewards.

    A round is an iteration of Algorithm 1. Flower's `start` drives the rounds, with empty arrays, as no weights travel.
    If fewer groups than `run.min-groups` give rewards, the run ends; resumed, it goes on from its checkpoint.
    """

    run: RunInputs
    inputs: PolicyInputs
    engine: PPOEngine
    rule: RewardRule
    batches: Iterator[IntArray]  # questions of the next rollouts, by round
    num_iterations: int  # of the whole run
    finished: Callable[[Iteration, State], None]  # takes each round's line for metrics.jsonl, and the rule's state
    done: int  # iterations before `start`, whose rounds count from 1 again
    state: State  # of the rule
    _round: Round = field(init=False)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample answers to the next questions; return the messages that ask the groups for their rewards."""
        seconds, settings = dict[str, float](), self.run.config
        question_J = next(self.batches)
        with self.run.computing(), timed(seconds, "rollout"):
            rollout = self.engine.rollout([self.inputs.prompts[q] for q in question_J])
            texts = self.inputs.base.texts(rollout.sequences.response_JT, rollout.sequences.mask_JT)
            answers = parse_responses(settings.task, texts, question_J, self.run.catalogue)
        pending = self._pending(self.rule.query(answers, self.done + server_round), server_round)
        self._round = Round(rollout, answers, pending, seconds)
        return pending.messages

    def _pending(self, query: Query, server_round: int) -> PendingQuery:
        """A request of an iteration, which has the same replies, perhaps without some groups, if it is repeated.

        All rules begin with the same model, so the first iteration's replies are for the next rules too.
        """
        passing = rule_folder(self.run.config.rule) if self.done + server_round > 1 else ""
        return self.run.groups.pending(query, history=True, passing=passing)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, None]:
        """Combine the groups' rewards into one reward per answer by the rule, and update the policy.

        The grid waits for the replies when they are read, so the reference pass runs while the groups score.
        """
        now = self._round
        with timed(now.seconds, "reference"):
            reference = self.engine.reference_pass(now.rollout.sequences)
        rewards = now.pending.read(replies)
        grid = self.run.groups.grid  # it may count another rule's messages from the update on
        now.seconds["federation_wait"], traffic = grid.seconds_waited, dict(grid.traffic)
        reward_J, state, fields = self.rule.result(self.state, now.answers, rewards)
        with self.run.computing(), timed(now.seconds, "update"):
            score_J = torch.tensor(reward_J, dtype=torch.float32, device=now.rollout.logprob_JT.device)
            learned = self.engine.update(now.rollout, reference, score_J)
        self.state = state
        now.line = Iteration(
            iteration=self.done + server_round,
            num_iterations=self.num_iterations,
            seconds={name: round(value, 4) for name, value in now.seconds.items()},
            traffic=traffic,
            **(fields | learned),
        )
        return None, None  # no arrays and no metrics for Flower to keep

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Answer the held-out questions every `eval.every` rounds; return the messages that ask for the scores."""
        every = self.run.config.eval.every
        if not every or (self.done + server_round) % every:
            return []
        answers = evaluation.greedy_answers(self.run, self.engine.models.policy, self.inputs)
        reward_query = evaluation.reward_query(answers, [self.run.config.reward_metric])
        pending = self._pending(reward_query.query(), server_round)
        self._round.held_out = reward_query, pending
        return pending.messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Compute FI, Avg AS and Min AS on held-out questions, if the round has them, and finish the round."""
        line = self._round.line
        assert line is not None
        if self._round.held_out is not None:
            reward_query, pending = self._round.held_out
            try:
                curve = evaluation.curve_points(pending.read(replies), reward_query, self.run.groups.names)
            except TooFew as error:  # the step has been taken; only a point of the curve is missing
                log.warning("iteration %d is not scored: %s", line.iteration, error)
            else:
                line = line.model_copy(update={"held_out": curve})
        self.finished(line, self.state)

    def summary(self) -> None:
        """Called by Flower's `start`; empty, as the run's log has everything."""


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Store the duration of the block in `seconds[name]`."""
    started = time.monotonic()
    yield
    seconds[name] = time.monotonic() - started
