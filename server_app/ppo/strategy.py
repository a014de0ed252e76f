"""APPA as a Flower Strategy: rollouts out, rewards back, aggregation, PPO (Algorithm appa).

A round of Flower is an iteration of PPO: `configure_train` samples answers, `aggregate_train` turns rewards into an
update. While the groups score, the server computes reference log-probabilities and values. Flower counts rounds from 1;
a resumed run goes on counting iterations where it was stopped.

Axis letters: G groups, J rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from appa_flwr import wire
from appa_flwr.aggregation import Rule, State
from server_app.federation.answers import Answers, parse_answers
from server_app.federation.groups import Federation
from server_app.models.base import Base
from server_app.ppo.engine import PPOEngine, ReferencePass
from server_app.ppo.rollouts import Rollout
from server_app.trl_rewards import aggregate, group_means

IntArray = npt.NDArray[np.int64]


@dataclass
class _Iteration:
    """What is carried from `configure_train` to `aggregate_train`."""

    rollout: Rollout
    answers: Answers
    request: wire.ScoreRequest
    seconds: dict[str, float]
    reference: ReferencePass | None = None


@dataclass(frozen=True)
class RewardSettings:
    """How rewards are asked for and mixed.

    Attributes:
        task: "dpa" or "opa".
        metric: the reward metric.
        alignment_weight: omega of Eq. final-reward.
        fresh_context: whether every iteration draws new few-shot contexts.
    """

    task: str
    metric: str
    alignment_weight: float
    fresh_context: bool


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


class AppaStrategy(Strategy):
    """Federated PPO: the policy stays on the server, the groups' data with the groups, only rewards travel.

    Args:
        federation: who scores.
        engine: who samples and learns.
        rule: who turns the groups' rewards into one.
        base: tokenizer.
        catalogue: the public questions.
        prompts: token ids of every question's prompt, by catalogue position.
        order: which questions come next.
        batch_size: rollouts an iteration.
        num_iterations: of the whole run.
        settings: how rewards are made.
        report: called with each iteration's line for metrics.jsonl.
        checkpoint: called after that with the number of iterations done and the rule's state.
        done: iterations that were done before; the first round is the one after.
        state: the rule's state after these; None starts anew.
    """

    def __init__(
        self,
        federation: Federation,
        engine: PPOEngine,
        rule: Rule,
        *,
        base: Base,
        catalogue: wire.Catalogue,
        prompts: Sequence[Sequence[int]],
        order: QuestionOrder,
        batch_size: int,
        num_iterations: int,
        settings: RewardSettings,
        report: Callable[[dict[str, Any]], None],
        checkpoint: Callable[[int, State], None],
        done: int = 0,
        state: State | None = None,
    ) -> None:
        self._federation, self._engine, self._rule = federation, engine, rule
        self._base, self._catalogue, self._prompts, self._order = base, catalogue, prompts, order
        self._batch_size, self._num_iterations = batch_size, num_iterations
        self._settings, self._report, self._checkpoint = settings, report, checkpoint
        self._done = done
        self._state = rule.init(len(federation.groups)) if state is None else state
        self._now: _Iteration | None = None

    def summary(self) -> None:
        """Nothing beside the run's own log."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample this iteration's answers and ask every group to score them."""
        started = time.monotonic()
        iteration = self._done + server_round
        question_J = self._order.take(self._batch_size)
        rollout = self._engine.rollout([self._prompts[q] for q in question_J])
        texts = self._base.texts(rollout.sequences.response_JT, rollout.sequences.mask_JT)
        answers = parse_answers(self._settings.task, texts, question_J, self._catalogue)
        draw = iteration if self._settings.fresh_context else 0
        request = answers.request([self._settings.metric], draw=draw)
        self._now = _Iteration(rollout, answers, request, {"rollout": time.monotonic() - started})
        self._federation.grid.meanwhile = self._reference_pass
        return self._federation.messages(wire.SCORE, wire.pack_score_request(request), round_number=iteration)

    def _reference_pass(self) -> None:
        if self._now is None:
            raise RuntimeError("no rollouts for a reference pass: configure_train comes first")
        started = time.monotonic()
        self._now.reference = self._engine.reference_pass(self._now.rollout.sequences)
        self._now.seconds["reference"] = time.monotonic() - started

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the rewards and update the policy.

        Raises:
            UserError: fewer groups answered than `federation.min-groups`; the policy is left as it was.
        """
        now, self._now = self._now, None
        if now is None or now.reference is None:
            raise RuntimeError("no rollouts to update on: configure_train and the grid's meanwhile come first")
        now.seconds["federation_wait"] = self._federation.grid.seconds_waited
        reward_GJ = self._federation.rewards(replies, now.request)[self._settings.metric, wire.TARGET_SIDE]
        result = aggregate(
            self._rule, self._state, reward_GJ, now.answers, alignment_weight=self._settings.alignment_weight
        )
        started = time.monotonic()
        score_J = torch.tensor(result.aggregate_J, dtype=torch.float32, device=now.rollout.logprob_JT.device)
        learned = self._engine.update(now.rollout, now.reference, score_J)
        now.seconds["update"] = time.monotonic() - started
        self._state, iteration = result.state, self._done + server_round
        present_G: npt.NDArray[np.bool_] = np.logical_not(np.isnan(reward_GJ).any(axis=1))
        names = self._federation.groups
        self._report(
            {
                "iteration": iteration,
                "num_iterations": self._num_iterations,
                "fairness_index": result.fairness_index,
                "fell_back": result.fell_back,
                "weights": dict(zip(names, result.weight_G.tolist(), strict=True)),
                "history": dict(zip(names, result.state.history_G.tolist(), strict=True)),
                "rewards": group_means(names, reward_GJ),
                "reward": float(result.aggregate_J.mean()),
                "format_score": float(now.answers.format_score_J.mean()),
                **learned,
                "missing_groups": [name for g, name in enumerate(names) if not present_G[g]],
                "seconds": {name: round(value, 4) for name, value in now.seconds.items()},
            }
        )
        self._checkpoint(iteration, result.state)
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: evaluation is a phase of its own."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing: evaluation is a phase of its own."""
        return None
