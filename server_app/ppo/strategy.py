"""APPA as a Flower Strategy: rollouts out, rewards back, aggregation, PPO.

Axis letters: G groups, J rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from appa_flwr.analysis import aggregation
from appa_flwr.analysis.aggregation import Rule, State
from appa_flwr.analysis.aggregation.sums import FromSums
from appa_flwr.analysis.alignment import alignment_scores
from appa_flwr.config import Config
from appa_flwr.config.sections import PPOSection
from appa_flwr.protocol import wire
from appa_flwr.run.records import CurvePoint, Iteration
from server_app.federation.answers import Answers, parse_answers
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_rewards import aggregated_reward, group_means
from server_app.federation.groups import Federation
from server_app.federation.summed_rewards import SummedState
from server_app.models.base import Base
from server_app.ppo.engine import PPOEngine, ReferencePass
from server_app.ppo.rollouts import Rollout

IntArray = npt.NDArray[np.int64]


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


def questions_of(order: QuestionOrder, settings: PPOSection) -> IntArray:
    """The next batch's question for each rollout: the answers to one question side by side."""
    number = settings.answers_per_question
    return np.repeat(order.take(settings.batch_size // number), number)


@dataclass
class _Round:
    """State of a round that the server keeps while the groups score its rollouts."""

    rollout: Rollout
    answers: Answers
    request: wire.ScoreRequest
    seconds: dict[str, float]
    reference: ReferencePass | None = None
    curve: Answers | None = None
    line: Iteration = field(init=False)


class AppaStrategy(Strategy):
    """Federated PPO: the policy stays on the server, the groups' data with the groups, only rewards travel.

    A round is an iteration of Algorithm appa: `configure_train` samples answers and makes the messages,
    `aggregate_train` makes the groups' replies one reward and updates the policy. `configure_evaluate` and
    `aggregate_evaluate` score it on a few held-out questions, which teaches it nothing. No weights travel, so all
    arrays are empty.

    Args:
        federation: the groups.
        engine: who samples and learns.
        rule: how the groups' rewards become one.
        config: `task`, `metric`, the weight of alignment, the batch size and whether contexts are drawn anew.
        base: tokenizer.
        catalogue: the public questions.
        prompts: token ids of every question's prompt, by catalogue position.
        order: which questions come next.
        num_iterations: of the whole run.
        curve: gives the policy's answers to the learning curve's questions.
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
        curve: Callable[[], Answers],
        finished: Callable[[Iteration, State | SummedState], None],
        done: int = 0,
        state: State | SummedState | None = None,
    ) -> None:
        self._federation, self._engine, self._rule, self._config = federation, engine, rule, config
        self._base, self._catalogue, self._prompts, self._order = base, catalogue, prompts, order
        self._num_iterations, self._curve, self._finished, self._done = num_iterations, curve, finished, done
        self._state: State | SummedState = rule.init(len(federation.groups)) if state is None else state

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600, *_: Any, **__: Any
    ) -> Result:
        """Run `num_rounds` rounds after those done before.

        Args:
            grid: an `OverlapGrid`, which lets the server compute while the groups score.
            initial_arrays: none.
            num_rounds: iterations of Algorithm appa.
            timeout: seconds for which replies are waited for.

        Raises:
            UserError: fewer groups answered than `run.min-groups`; policy and state are those of the iteration
                before.
        """
        assert isinstance(grid, OverlapGrid)
        result = Result()
        for _number in range(num_rounds):
            server_round = self._done + 1
            messages = self.configure_train(server_round, initial_arrays, ConfigRecord(), grid)
            replies = grid.send_and_receive(messages, timeout=timeout, meanwhile=self._reference_pass)
            self._round.seconds["federation_wait"] = grid.seconds_waited
            result.train_metrics_clientapp[server_round] = self.aggregate_train(server_round, replies)[1]
            if messages := self.configure_evaluate(server_round, initial_arrays, ConfigRecord(), grid):
                replies = grid.send_and_receive(messages, timeout=timeout)
                result.evaluate_metrics_clientapp[server_round] = self.aggregate_evaluate(server_round, replies)
            self._finished(self._round.line, self._state)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample answers to the next questions; ask every group to score them."""
        return self._federation.score_messages(self._sample(server_round).request, iteration=server_round)

    def _sample(self, server_round: int) -> _Round:
        """A round's answers to the next questions, as the groups are asked to score them."""
        seconds = dict[str, float]()
        with timed(seconds, "rollout"):
            question_J = questions_of(self._order, self._config.ppo)
            rollout = self._engine.rollout([self._prompts[q] for q in question_J])
            texts = self._base.texts(rollout.sequences.response_JT, rollout.sequences.mask_JT)
            answers = parse_answers(self._config.task, texts, question_J, self._catalogue)
        draw = server_round if self._config.pluralllm.fresh_contexts else 0
        request = answers.request([self._config.reward_metric], draw=draw)
        self._round = _Round(rollout, answers, request, seconds)
        return self._round

    def _reference_pass(self) -> None:
        """Reference log-probs and values, while the groups score."""
        with timed(self._round.seconds, "reference"):
            self._round.reference = self._engine.reference_pass(self._round.rollout.sequences)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, MetricRecord]:
        """Aggregate the groups' rewards by the rule, and update the policy on what they come to."""
        now = self._round
        assert now.reference is not None
        assert isinstance(self._state, State)
        scored = aggregated_reward(
            self._rule,
            self._state,
            now.answers,
            self._federation.rewards(now.request, replies),
            metric=self._config.reward_metric,
            alignment_weight=self._config.appa.alignment_weight,
        )
        with timed(now.seconds, "update"):
            device = now.rollout.logprob_JT.device
            score_J = torch.tensor(scored.result.aggregate_J, dtype=torch.float32, device=device)
            learned = self._engine.update(now.rollout, now.reference, score_J)
        self._done, self._state = server_round, scored.result.state
        names, result = self._federation.groups, scored.result
        means = group_means(names, scored.reward_GJ)
        given = [mean for mean in means.values() if mean is not None]
        missing = tuple(name for name, mean in means.items() if mean is None)
        line = self._line(server_round, result, learned, group_reward=float(np.mean(given)), missing=missing)
        now.line = line.model_copy(
            update={
                "weights": dict(zip(names, result.weight_G.tolist(), strict=True)),
                "history": dict(zip(names, result.state.history_G.tolist(), strict=True)),
                "rewards": means,
            }
        )
        return None, MetricRecord({"reward": now.line.reward, "fairness-index": now.line.fairness_index})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Every `eval.every` rounds and after the last, ask every group to score answers to held-out questions."""
        if not self._is_evaluated(server_round):
            return []
        self._round.curve = self._curve()
        sides = (wire.TARGET_SIDE, wire.TRUTH_SIDE)
        self._round.request = self._round.curve.request([self._config.reward_metric], sides=sides)
        return self._federation.score_messages(self._round.request, iteration=server_round)

    def _is_evaluated(self, server_round: int) -> bool:
        every = self._config.eval.every
        return bool(every) and (server_round % every == 0 or server_round == self._num_iterations)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord:
        """A point of the learning curve."""
        now = self._round
        assert now.curve is not None
        rewards = self._federation.rewards(now.request, replies)
        metric = self._config.reward_metric
        predicted, truth_GJ = alignment_scores(rewards[metric, wire.TARGET_SIDE]), rewards[metric, wire.TRUTH_SIDE]
        survey = None if np.isnan(truth_GJ).all() else alignment_scores(truth_GJ)
        point = CurvePoint(
            avg_as=predicted.avg_as,
            min_as=predicted.min_as,
            survey_avg_as=None if survey is None else survey.avg_as,
            survey_min_as=None if survey is None else survey.min_as,
            format_score=float(now.curve.format_score_J.mean()),
        )
        now.line = now.line.model_copy(update={"held_out": point})
        return MetricRecord({"avg-as": point.avg_as, "min-as": point.min_as})

    def summary(self) -> None:
        """Nothing that the run's own log lacks."""

    def _line(
        self,
        iteration: int,
        result: aggregation.Result | FromSums,
        learned: dict[str, Any],
        *,
        group_reward: float,
        missing: tuple[str, ...],
    ) -> Iteration:
        """What is known whether or not the groups' own numbers are."""
        now = self._round
        return Iteration(
            iteration=iteration,
            num_iterations=self._num_iterations,
            fairness_index=result.fairness_index,
            fell_back=result.fell_back,
            weights={},
            history={},
            rewards={},
            group_reward=group_reward,
            reward=float(result.aggregate_J.mean()),
            format_score=float(now.answers.format_score_J.mean()),
            **learned,
            missing_groups=missing,
            seconds={name: round(value, 4) for name, value in now.seconds.items()},
        )


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add how long something took, by its name."""
    started = time.monotonic()
    yield
    seconds[name] = time.monotonic() - started
