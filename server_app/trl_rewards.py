"""The groups' aggregated reward for trainers other than ours: an async reward function for TRL's GRPO and RLOO.

Axis letters: G groups, J completions.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from appa_flwr.analysis.aggregation import Rule
from appa_flwr.config.ranges import ALIGNMENT_WEIGHT
from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.protocol import wire
from appa_flwr.protocol.rewards import metrics_of
from server_app.federation.answers import Answers, parse_answers
from server_app.federation.group_rewards import AggregatedReward, Groups, aggregated_reward, group_means

FloatArray = npt.NDArray[np.float64]

Completion = str | Sequence[Mapping[str, Any]]
"""Plain text, or the messages of a conversation."""

LocalScorer = Callable[[wire.ScoreRequest], Mapping[str, npt.ArrayLike] | None]
"""One group in this process: metric -> rewards (J,) in [0, 1], or None where it does not answer this time."""


class LocalGroups:
    """Groups in this process, without Flower.

    Args:
        scorers: group -> its scorer. `functools.partial(client_app.scoring.score, side_QK=..., option_QK=...)` is one
            that compares with a table of distributions.
    """

    def __init__(self, scorers: Mapping[str, LocalScorer]) -> None:
        self._scorers = dict(scorers)

    @property
    def groups(self) -> tuple[str, ...]:
        """Names, in the order given."""
        return tuple(self._scorers)

    def score(
        self, request: wire.ScoreRequest, *, iteration: int = 0, meanwhile: Callable[[], None] | None = None
    ) -> Mapping[tuple[str, str], FloatArray]:
        """Ask every scorer; see `server_app.federation.group_rewards.Groups`.

        Raises:
            UserError: nobody answered, or rewards that are not one number in [0, 1] an answer.
        """
        if meanwhile is not None:
            meanwhile()
        replies = {name: scorer(request) for name, scorer in self._scorers.items()}
        if all(reply is None for reply in replies.values()):
            raise UserError(f"none of the groups {', '.join(replies)} scored the answers")
        size = len(request.question_J)
        return {
            (metric, side): np.stack([_checked(name, reply, metric, size) for name, reply in replies.items()])
            for metric in request.metrics
            for side in request.sides
        }


def _checked(name: str, reply: Mapping[str, npt.ArrayLike] | None, metric: str, size: int) -> FloatArray:
    if reply is None:
        return np.full(size, np.nan)
    reward_J = np.asarray(reply.get(metric, ()), dtype=np.float64)
    if reward_J.shape != (size,) or not ((reward_J >= 0) & (reward_J <= 1)).all():
        raise UserError(f"group '{name}': its scorer must give {size} {metric} rewards in [0, 1], one an answer")
    return reward_J


class GroupRewards:
    """Turns groups and an aggregation rule into a reward function for `trl.GRPOTrainer` and `trl.RLOOTrainer`.

    Every call of `group_reward` is one round of the rule: the completions are parsed, all groups score them, and the
    aggregated rewards (Algorithm appa) come back; nothing is whitened, since GRPO and RLOO take out their own baseline.
    The data set names each row's question in a column `question_id`:

        catalogue = build_catalogue(config)                      # server_app.federation.catalogue
        groups = federation                                      # or LocalGroups({"Avaria": scorer, ...})
        rewards = GroupRewards(groups, make("appa"), catalogue=catalogue)
        rows = [
            {"prompt": base.prompt_text(config, question), "question_id": question.question_id}
            for question, held_out in zip(catalogue.questions, catalogue.held_out_Q) if not held_out
        ]
        GRPOTrainer(model, rewards.group_reward, GRPOConfig(...), Dataset.from_list(rows)).train()
        # RLOOTrainer(model, rewards.group_reward, RLOOConfig(...), Dataset.from_list(rows)).train()

    A federation must have been through `gather`, `send_catalogue` and `send_targets` with the same catalogue. Rounds in
    which a question is held out, as of an `eval_dataset`, are scored alike and leave the history alone.

    Attributes:
        state: of the rule, after the last round; may be set, to go on from an earlier run.
        rounds: how many rounds have been scored.

    Args:
        groups: who scores.
        rule: how their rewards become one; see `appa_flwr.analysis.aggregation.make`.
        catalogue: the public questions.
        task: "dpa" or "opa".
        metric: the reward metric; left out, the task's first one.
        alignment_weight: omega of Equation final-reward, in [0, 1].
        fresh_context: whether the groups draw new few-shot contexts in every round.

    Raises:
        UserError: no group, or a metric that the task does not have.
    """

    def __init__(
        self,
        groups: Groups,
        rule: Rule,
        *,
        catalogue: wire.Catalogue,
        task: str = "dpa",
        metric: str | None = None,
        alignment_weight: float = ALIGNMENT_WEIGHT,
        fresh_context: bool = False,
    ) -> None:
        if not groups.groups:
            raise UserError("there are no groups to score: gather the federation first, or give a scorer a group")
        metrics = metrics_of(task)
        if metric is not None and metric not in metrics:
            raise unknown_name(f"metric of task {task!r}", metric, valid=metrics)
        self._groups, self._rule, self._catalogue = groups, rule, catalogue
        self._task, self._metric = task, metric or metrics[0]
        self._alignment_weight, self._fresh_context = alignment_weight, fresh_context
        self._position = {question.question_id: q for q, question in enumerate(catalogue.questions)}
        self._one_at_a_time = threading.Lock()  # not asyncio's: two trainers have two event loops
        self.state = rule.init(len(groups.groups))
        self.rounds = 0

    # A method and not `__call__`: before 1.16, TRL did not see that an object's `__call__` is async.
    async def group_reward(
        self,
        prompts: Sequence[object],
        completions: Sequence[Completion],
        question_id: Sequence[str] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: object,
    ) -> list[float]:
        """The aggregated reward of every completion, as TRL's trainers call for it.

        The groups are waited for in a thread, so that other reward functions go on; rounds come one after the other.

        Args:
            prompts: not looked at.
            completions: J texts or conversations, of which the last message counts.
            question_id: the question of each completion, a column of the data set.
            log_metric: TRL's; gets the fairness index, the format score and every group's mean reward.
            **columns: whatever else the trainer hands over.

        Returns:
            J numbers in [0, 1].

        Raises:
            UserError: no column `question_id`, an unknown question, several training processes, or a round that failed
                because too few groups answered. The state is then as before.
        """
        question_J = self._questions(question_id)
        texts = [_text(completion) for completion in completions]
        answers = parse_answers(self._task, texts, question_J, self._catalogue)
        scored = await asyncio.to_thread(self._round, answers)
        if log_metric is not None:
            log_metric("group_reward/fairness_index", scored.result.fairness_index)
            log_metric("group_reward/format_score", float(answers.format_score_J.mean()))
            for name, mean in group_means(self._groups.groups, scored.reward_GJ).items():
                if mean is not None:
                    log_metric(f"group_reward/{name}", mean)
        return [float(reward) for reward in scored.result.aggregate_J]

    def _round(self, answers: Answers) -> AggregatedReward:
        with self._one_at_a_time:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                processes = torch.distributed.get_world_size()
                if processes > 1:  # each would keep a history of its own part of the batch
                    raise UserError(f"the groups' rewards need one training process; there are {processes}")
            number = self.rounds + 1
            request = answers.request([self._metric], draw=number if self._fresh_context else 0)
            scored = aggregated_reward(
                self._rule,
                self.state,
                answers,
                self._groups.score(request, iteration=number),
                metric=self._metric,
                alignment_weight=self._alignment_weight,
            )
            if not self._catalogue.held_out_Q[answers.question_J].any():
                self.state = scored.result.state
            self.rounds = number
            return scored

    def _questions(self, question_id: Sequence[str] | None) -> npt.NDArray[np.int64]:
        if question_id is None:
            raise UserError("the data set has no column question_id, which says which question each prompt asks")
        for name in question_id:
            if name not in self._position:
                example = self._catalogue.questions[0].question_id
                raise UserError(
                    f"question_id '{name}' is not one of the {len(self._position)} questions of the catalogue "
                    f"(such as '{example}')"
                )
        return np.array([self._position[name] for name in question_id], dtype=np.int64)


def _text(completion: Completion) -> str:
    """Text of a completion: the text, or the last message's content, whose parts may be given apart."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
