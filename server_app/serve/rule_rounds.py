"""Trainers' answers made rounds of the rule: one message to the groups, one step of the rule, one transaction.

Axis letters: G groups, J answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis.aggregation import Rule, State
from appa_flwr.config import Config
from appa_flwr.protocol import wire
from appa_flwr.protocol.rewards import training_reward
from appa_flwr.run.records import ServedRound
from appa_flwr.run.served import Kept, ServedRuns
from server_app.federation.answers import Answers, parse_answers
from server_app.federation.group_rewards import aggregated_reward, group_means
from server_app.federation.groups import Federation
from server_app.serve.requests import Item, Refused

FloatArray = npt.NDArray[np.float64]
Last = tuple[ServedRound, dict[str, dict[str, Any]]] | None
"""The last closed round, and the rule's state after it: kind -> group -> value."""

ROUND_SIZE = 96
"""Answers after which stream mode closes a round of the rule."""

Given = tuple[Item, bytes]
"""An answer and its digest."""


class RuleRounds:
    """The half of the service that waits for nobody: it may be called from one thread at a time.

    Args:
        groups: who score.
        rule: how their rewards become one.
        catalogue: the public questions.
        config: task, metric and alignment weight.
        store: where rounds and answers are kept.
        closed: called with each run's name and round that has closed.

    Attributes:
        position: question_id -> place in the catalogue.
    """

    def __init__(
        self,
        groups: Federation,
        rule: Rule,
        catalogue: wire.Catalogue,
        config: Config,
        store: ServedRuns,
        *,
        closed: Callable[[str, ServedRound], None],
    ) -> None:
        self._groups, self._rule, self._catalogue, self._store = groups, rule, catalogue, store
        self._config, self._closed, self._asked = config, closed, 0  # messages that each group was sent
        self.position = {question.question_id: q for q, question in enumerate(catalogue.questions)}

    def batch(
        self, run: str, attempt: int, number: int, given: Sequence[Given], exact: bool
    ) -> tuple[ServedRound, dict[str, Kept]]:
        """One message a group, one round of the rule, one transaction.

        Raises:
            Refused: the trainer has gone on without this round.
            UserError: too few groups answered.
        """
        last = self._store.last(run)
        if last is not None and (attempt, number) <= (last[0].attempt, last[0].round):
            raise Refused(409, f"round {number} of attempt {attempt} is over: the trainer has gone on without it")
        if last is not None and attempt > last[0].attempt:
            last = self._store.last(run, before=number)
        answers, rewards, seconds = self._ask([item for item, _ in given])
        held_out = bool(self._catalogue.held_out_Q[answers.question_J].any())
        record, state, reward_J = self._by_rule(
            last, answers, rewards, held_out=held_out, attempt=attempt, round=number, exact=exact, seconds=seconds
        )
        reward_GJ = rewards[self._config.reward_metric, wire.TARGET_SIDE]
        kept = [
            Kept(item.id, digest, number, _answer(reward_J[j], reward_GJ[:, j], answers.format_score_J[j]))
            for j, (item, digest) in enumerate(given)
        ]
        self._store.keep(run, attempt, kept, closed=(record, state))
        self._closed(run, record)
        return record, {one.id: one for one in kept}

    def samples(self, run: str, given: Sequence[Given], delivered: set[str]) -> list[Mapping[str, Any]]:
        """One message a group; and the round's end where it has answers enough. Held-out questions are in no round.

        Raises:
            UserError: too few groups answered.
        """
        answers, rewards, seconds = self._ask([item for item, _ in given])
        last, names, config = self._store.last(run), self._groups.groups, self._config
        reward_GJ = rewards[config.reward_metric, wire.TARGET_SIDE]
        if last is None or all(last[0].rewards.get(name) is None for name in names):
            reward_J = self._by_rule(None, answers, rewards)[2]
        else:
            weight, parsed_J = config.appa.alignment_weight, answers.parsed_J
            training_GJ = training_reward(reward_GJ, answers.format_score_J, parsed_J, alignment_weight=weight)
            reward_J = self._rule.between(self._state(last), training_GJ, fairness=last[0].fairness_index)
        kept = list[Kept]()
        for j, (item, digest) in enumerate(given):
            answer, of_round = _answer(reward_J[j], reward_GJ[:, j], answers.format_score_J[j]), None
            if not self._catalogue.held_out_Q[answers.question_J[j]]:
                by_group = {n: None if math.isnan(r) else float(r) for n, r in zip(names, reward_GJ[:, j], strict=True)}
                of_round = {"groups": by_group, "parsed": bool(answers.parsed_J[j])}
            kept.append(Kept(item.id, digest, round_after(last), answer, of_round, delivered=False))
        open_round = [*self._store.open(run), *(one for one in kept if one.rewards is not None)]
        attempt, closed = last[0].attempt if last else 0, None
        if len(open_round) >= ROUND_SIZE and any(one.rewards for one in kept):
            closed = self._of_stream(last, open_round, attempt=attempt, seconds=seconds)
        self._store.keep(run, attempt, kept, closed=closed, delivered=delivered)
        if closed:
            self._closed(run, closed[0])
        return [one.answer for one in kept]

    def _of_stream(self, last: Last, kept: Sequence[Kept], **given: Any) -> tuple[ServedRound, dict[str, Any]]:
        """The round of these answers; a group that missed one of its messages is missing, unless all have."""
        of, names = [one.rewards for one in kept if one.rewards is not None], self._groups.groups
        reward_GJ = np.array([[_number(one["groups"].get(name)) for one in of] for name in names])
        used_J = np.ones(len(of), dtype=bool)
        if (missing_GJ := np.isnan(reward_GJ)).any(axis=1).all():  # the answers that most groups have scored
            fullest = int(np.argmin(missing_GJ.sum(axis=0)))
            used_J = (missing_GJ == missing_GJ[:, [fullest]]).all(axis=0)
        reward_GJ = reward_GJ[:, used_J]
        reward_GJ[np.isnan(reward_GJ).any(axis=1)] = np.nan
        format_J = np.array([one.answer["components"]["format"] for one in kept])[used_J]
        parsed_J, count = np.array([one["parsed"] for one in of])[used_J], int(used_J.sum())
        answers = Answers(np.zeros(count, dtype=np.int64), ("",) * count, np.zeros((count, 1)), format_J, parsed_J)
        rewards = {(self._config.reward_metric, wire.TARGET_SIDE): reward_GJ}
        return self._by_rule(last, answers, rewards, round=round_after(last), **given)[:2]

    def _ask(self, items: Sequence[Item]) -> tuple[Answers, Mapping[tuple[str, str], FloatArray], float]:
        """The answers parsed, the groups' rewards, and how long these took."""
        question_J = np.array([self.position[item.question_id] for item in items], dtype=np.int64)
        answers = parse_answers(self._config.task, [item.completion for item in items], question_J, self._catalogue)
        self._asked, started = self._asked + 1, time.monotonic()
        draw = self._asked if self._config.pluralllm.fresh_contexts else 0
        request = answers.request([self._config.reward_metric], draw=draw)
        return answers, self._groups.score(request, iteration=self._asked), time.monotonic() - started

    def _by_rule(
        self,
        last: Last,
        answers: Answers,
        rewards: Mapping[tuple[str, str], FloatArray],
        *,
        held_out: bool = False,
        attempt: int = 0,
        round: int = 1,
        exact: bool = False,
        seconds: float = 0.0,
    ) -> tuple[ServedRound, dict[str, dict[str, Any]], FloatArray]:
        """A round of the rule: record, the state after it, rewards. Held-out questions leave the state alone."""
        names, state, omega = self._groups.groups, self._state(last), self._config.appa.alignment_weight
        metric = self._config.reward_metric
        scored = aggregated_reward(self._rule, state, answers, rewards, metric=metric, alignment_weight=omega)
        result, means = scored.result, group_means(names, scored.reward_GJ)
        after = state if held_out else result.state
        arrays = {"history": after.history_G, "answered": after.answered_G, "lead": after.lead_G}
        record = ServedRound(
            iteration=round_after(last),
            fairness_index=result.fairness_index,
            fell_back=result.fell_back,
            weights=dict(zip(names, result.weight_G.tolist(), strict=True)),
            history=dict(zip(names, after.history_G.tolist(), strict=True)),
            rewards=means,
            reward=float(result.aggregate_J.mean()),
            format_score=float(answers.format_score_J.mean()),
            missing_groups=tuple(name for name, mean in means.items() if mean is None),
            size=len(answers.texts),
            held_out=held_out,
            attempt=attempt,
            round=round,
            exact=exact,
            seconds=seconds,
            group_seconds=dict(self._groups.seconds),
        )
        kept = {kind: dict(zip(names, values_G.tolist(), strict=True)) for kind, values_G in arrays.items()}
        return record, kept, result.aggregate_J

    def _state(self, last: Last) -> State:
        """The rule's state after a round; a group that is new since has never answered."""
        if last is None:
            return self._rule.init(len(self._groups.groups))
        kinds = ("history", "answered", "lead")
        arrays = {f"{kind}_G": np.array([last[1][kind].get(name, 0) for name in self._groups.groups]) for kind in kinds}
        return State(**arrays)


def round_after(last: Last) -> int:
    """Number of the round after the last."""
    return 1 + (last[0].iteration if last else 0)


def _answer(reward: float, reward_G: FloatArray, format_score: float) -> dict[str, Any]:
    components = {"alignment": float(np.nanmean(reward_G)), "format": float(format_score)}
    return {"reward": float(reward), "valid": True, "failure_reason": None, "components": components}


def _number(value: float | None) -> float:
    return math.nan if value is None else value
