"""A group's numbers: one maker for each kind of request. The same numbers leave plainly or under masks.

PluralLLM's network, and torch with it, is imported inside the makers that need it: deployed, every message starts a
fresh process, and scoring does without.

Axis letters: Q public questions, K options, J scored answers, P weights, L measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import asks, messages, refusals, rewards, votes
from appa_flwr.protocol.asks import Ask, Catalogue, ScoreRequest
from appa_flwr.protocol.refusals import Refused
from appa_flwr.secure import rule_sums
from appa_flwr.secure.masks import Task
from appa_flwr.secure.roster import LEAST_GROUPS
from client_app import limits
from client_app.memory import read_arrays
from client_app.party import Party
from pluralllm.data import GroupData, OptionEmbedding, group_data, option_embedding
from pluralllm.scores import PREDICTOR, group_sums, local_sums, mean_from_sums, summed

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Numbers = Mapping[str, FloatArray]

MIN_TRAINING_ANSWERS = 10
"""Sums over fewer training answers would tell what these answers are."""

COUNT = "answers"  # of a sum, among its measures


@dataclass(frozen=True, eq=False)
class Asked:
    """A request as it meets a node."""

    request: Ask
    head: messages.Head
    party: Party
    public: Catalogue

    @property
    def config(self) -> Config:
        """The run's."""
        return self.party.config

    @property
    def masked(self) -> bool:
        """True if the numbers leave under masks."""
        return bool(self.head.cohort)

    @property
    def task(self) -> Task:
        """The masked sum that the numbers go into."""
        head, roster = self.head, self.party.roster.sha256
        return Task(head.run, head.round, head.cohort, asks.request_digest(self.request, head.world), roster)

    @cached_property
    def embedding(self) -> OptionEmbedding:
        """The public options as PluralLLM takes them."""
        return option_embedding(self.public)

    @cached_property
    def mean_sums(self) -> tuple[FloatArray, npt.NDArray[np.int64]]:
        """Sums of the held-out answers of all groups that train, which a simulation's nodes can read."""
        seen = [name for name in self.config.group_names or self.party.survey.groups if not self.unseen(name)]
        held_out = [q for q, out in zip(self.public.questions, self.public.held_out_Q, strict=True) if out]
        by_group = self.party.answers(seen, held_out)
        usable = {name: answers for name, answers in by_group.items() if not isinstance(answers, UserError)}
        return group_sums(
            (group_data(name, mine, embedding=self.embedding) for name, mine in usable.items()), self.embedding
        )

    def unseen(self, group: str) -> bool:
        """True if the group does not train PluralLLM."""
        return group in self.config.unseen_group_names

    def data(self, group: str) -> GroupData:
        """The group's training answers."""
        kept = read_arrays(self.party.memory, f"data {group}")
        return GroupData(group, kept["question"], kept["answer"])

    def truth(self, group: str) -> FloatArray:
        """All of the group's own answers (Q, K), rows of NaN where it has none."""
        truth_QK: FloatArray = read_arrays(self.party.memory, f"data {group}")["truth"]
        return truth_QK

    def held_out(self, group: str) -> GroupData:
        """The group's answers to held-out questions; none where they are fewer than its owner asks for."""
        truth_QK = self.truth(group)
        rows = np.flatnonzero(~self.public.train_Q & ~np.isnan(truth_QK).any(axis=1))
        answers = GroupData(group, rows, truth_QK[rows].astype(np.float32))
        return answers if len(answers) >= self.party.policy.least_answers else answers.first(0)

    def targets(self, group: str, *, draw: int = 0) -> FloatArray:
        """The group's target table (Q, K), or one of fresh contexts where `draw` is not 0.

        Raises:
            Refused: PluralLLM's final weights have not arrived.
        """
        self.party.remembered("targets")
        if not draw:
            target_QK: FloatArray = read_arrays(self.party.memory, f"targets {group}")["target"]
            return target_QK
        from client_app import predictor

        weight_P = np.frombuffer(self.party.remembered("weights"), dtype=np.float32)
        ours = predictor.load(self.config, weight_P, self.embedding, self.public.train_Q)
        return ours.table(self.data(group), draw=draw)

    def side(self, group: str, side: str, *, draw: int) -> FloatArray:
        """What answers are compared with, (Q, K), rows of NaN where there is nothing."""
        if side == asks.TARGET_SIDE:
            return self.targets(group, draw=draw)
        if not self.party.policy.may(asks.TRUTH_SIDE):
            return np.full(self.public.option_QK.shape, np.nan)
        # Only held-out answers are ever compared with: training answers are D_g, and enough rewards tell them.
        return np.where(self.public.train_Q[:, None], np.nan, self.truth(group))


def score(request: ScoreRequest, side_QK: FloatArray, option_QK: BoolArray) -> dict[str, FloatArray]:
    """Rewards of answers against one side's distributions, rows of NaN where it has none: a look-up and a metric.

    Returns:
        Metric -> rewards (J,): 0 for an answer nobody could read, NaN where this side has no distribution.

    Raises:
        UserError: a question outside the catalogue or an unknown metric.
    """
    if request.question_J.size and not 0 <= request.question_J.min() <= request.question_J.max() < len(side_QK):
        raise UserError("an answer's question is not in the catalogue")
    metrics = {name: rewards.find(name) for name in request.metrics}
    target_JK, option_JK = side_QK[request.question_J], option_QK[request.question_J]
    known_J = ~np.isnan(target_JK).any(1)
    usable_J = known_J & ~np.isnan(np.where(option_JK, request.prediction_JK, 0.0)).any(1)
    result = {}
    for metric, scored in metrics.items():
        reward_J = np.where(known_J, 0.0, np.nan)
        reward_J[usable_J] = scored(request.prediction_JK[usable_J], target_JK[usable_J], option_JK[usable_J])
        result[metric] = reward_J
    return result


def _votes(asked: Asked, group: str) -> Numbers:
    kind, public, config = asked.request.kind, asked.public, asked.config
    ballot = votes.BALLOTS[config.task] if kind == asks.VOTES else votes.DISTRIBUTION
    predicted = kind == asks.PREDICTIONS or (kind == asks.VOTES and config.sft.target == "predicted-mean")
    truth_QK = asked.truth(group)
    own_Q1 = (public.train_Q & ~np.isnan(truth_QK).any(1))[:, None] & (not predicted)
    opinion_QK = np.where(own_Q1, truth_QK, asked.targets(group))
    return {"votes": votes.cast(opinion_QK, public.option_QK, kind=ballot)}


def _update(asked: Asked, group: str) -> Numbers:
    from client_app import predictor

    weight_P = asked.request.array("weights", np.float32, axes=1)
    data = asked.data(group).first(0) if asked.unseen(group) else asked.data(group)
    if not len(data):
        return {"step": np.zeros(len(weight_P)), "answers": np.zeros(1), "loss": np.zeros(1)}
    limits.check_training(asked.config, masked=asked.masked, party=asked.party)
    ledger = asked.party.ledger
    after_P, loss = predictor.train(
        asked.config,
        weight_P,
        data,
        asked.embedding,
        round_number=asked.request.count("round"),
        proximal=asked.request.number("proximal"),
        secret="" if ledger is None else ledger.secret().hex(),
    )
    step_P = after_P.astype(np.float64) - weight_P
    total = limits.rounded(np.array([loss * len(data)]), asked.party)
    return {"step": len(data) * step_P, "answers": np.array([float(len(data))]), "loss": total}


def _validation(asked: Asked, group: str) -> Numbers:
    from client_app import predictor

    weight_P = asked.request.array("weights", np.float32, axes=1)
    truth = asked.held_out(group).first(0) if asked.unseen(group) else asked.held_out(group)
    ours = predictor.load(asked.config, weight_P, asked.embedding, asked.public.train_Q)
    error_V = limits.rounded(ours.errors(asked.data(group), truth), asked.party)
    return {"answers": np.array([float(len(truth))]), "error": np.minimum(error_V, len(truth) * asks.LARGEST_ERROR)}


def _scores(asked: Asked, group: str) -> Numbers:
    """PluralLLM's scores, see `pluralllm.scores.local_sums`: a row of groups that train it, and a row of others."""
    data, truth, least = asked.data(group), asked.held_out(group), asked.party.policy.least_answers
    others_QK = None
    if asked.party.ledger is None:
        others_QK = mean_from_sums(*asked.mean_sums, own=None if asked.unseen(group) else truth)
    parts = {asks.HELD_OUT_PART: (truth, least)}
    if len(data) >= (fewest := max(MIN_TRAINING_ANSWERS, least)):
        parts[asks.TRAINING_PART] = (data, fewest)
    sums = {
        part: local_sums(
            asked.targets(group), truth=answers, known=data, embedding=asked.embedding, mean_of_others=others_QK
        )
        for part, (answers, _) in parts.items()
    }
    score_2L = np.zeros((2, len(summed())))
    for place, (part, name, measure) in enumerate(summed()):
        measures = sums.get(part, {}).get(name)
        if measures is not None and _is_large(measures[COUNT], sums[part][PREDICTOR][COUNT], parts[part][1]):
            value = np.array(measures[measure])
            rounded = value if measure == COUNT else np.minimum(limits.rounded(value, asked.party), measures[COUNT])
            score_2L[int(asked.unseen(group)), place] = rounded
    if asked.masked:
        unseen = set(asked.head.cohort) & set(asked.config.unseen_group_names)
        few_2 = np.array([len(asked.head.cohort) - len(unseen), len(unseen)]) < LEAST_GROUPS
        score_2L[few_2] = 0.0
    return {"scores": score_2L}


def _is_large(count: float, every: float, least: int) -> bool:
    """False for a sum over a part of the answers where it, or what is missing from it, are few answers."""
    return count == every or least <= count <= every - least


def _rewards(asked: Asked, group: str) -> Numbers:
    numbers: dict[str, FloatArray] = {}
    for metric, side, reward_J in _scored(asked, group, ScoreRequest.of(asked.request)):
        known_J, name = ~np.isnan(reward_J), f"{metric} {side}"
        numbers |= {
            f"{name} reward": np.nan_to_num(reward_J),
            f"{name} square": np.nan_to_num(reward_J) ** 2,
            f"{name} known": known_J.astype(np.float64),
            f"{name} own": np.array([reward_J[known_J].mean() if known_J.any() else 0.0]),
            f"{name} groups": np.array([float(known_J.any())]),
        }
    return numbers


def _scored(asked: Asked, group: str, request: ScoreRequest) -> list[tuple[str, str, FloatArray]]:
    """Metric, side and rewards (J,), NaN where there is none that may leave."""
    scored = []
    for side in request.sides:
        side_QK = asked.side(group, side, draw=request.draw)
        by_metric: Mapping[str, FloatArray] = score(request, side_QK, asked.public.option_QK)
        by_metric = limits.released(
            request, by_metric, side_QK, asked.public, party=asked.party, group=group, side=side
        )
        scored += [(metric, side, reward_J) for metric, reward_J in by_metric.items()]
    return scored


def _terms(asked: Asked, group: str) -> Numbers:
    ask, config, request = asked.request, asked.config, ScoreRequest.of(asked.request)
    rule, iteration, reference = ask.text("rule"), ask.count("iteration"), ask.number("reference")
    if rule not in (config.rule, config.baseline_rule) or request.sides != (asks.TARGET_SIDE,):
        raise Refused(refusals.BAD_REQUEST)
    if request.metrics != (config.reward_metric,):
        raise Refused(refusals.BAD_REQUEST)
    rule_sums.check_rule(rule, config.appa)
    ((_, _, reward_J),) = _scored(asked, group, request)
    training_1J = rewards.training_reward(
        reward_J[None],
        ask.array("format", np.float64, axes=1),
        ask.array("parsed", np.bool_, axes=1),
        alignment_weight=config.appa.alignment_weight,
    )
    run = f"{asked.head.run}\n{group}"
    task = asked.task.digest.hex() if asked.masked else asks.request_digest(ask, asked.head.world)
    with asked.party.facts() as facts:
        history = rule_sums.before(
            facts, run=run, rule=rule, iteration=iteration, reference=reference, completed=ask.texts("completed")
        )
        terms, after = rule_sums.terms(
            rule,
            config.appa,
            reference=reference,
            iteration=iteration,
            history=history,
            reward_J=reward_J,
            training_J=training_1J[0],
        )
        rule_sums.remember(facts, run=run, rule=rule, task=task, history=after)
    return terms


def _own_scores(asked: Asked, group: str) -> Numbers:
    """The group's score of an evaluation: the mean over questions of their answers' mean reward.

    One of a single question would tell what was answered there, so it takes answers that can be read to as many
    questions as the owner asks for, and every answer to a question counts once.
    """
    request = ScoreRequest.of(asked.request)
    numbers = {}
    for side in request.sides:
        side_QK = asked.side(group, side, draw=request.draw)
        for metric, reward_J in score(request, side_QK, asked.public.option_QK).items():
            known_J = ~np.isnan(reward_J)
            by_question = [
                reward_J[known_J & (request.question_J == q)].mean() for q in np.unique(request.question_J[known_J])
            ]
            readable_J = known_J & ~np.isnan(request.prediction_JK).all(axis=1)
            may = limits.own_score(
                asked.public, request.question_J[readable_J], asked.request.digest, asked.party, group
            )
            numbers[f"{metric} {side}"] = (
                np.array([limits.own_rounded(float(np.mean(by_question)), asked.party), 1.0]) if may else np.zeros(2)
            )
    return numbers


MAKERS: Mapping[str, Callable[[Asked, str], Numbers]] = {
    asks.VOTES: _votes,
    asks.PREDICTIONS: _votes,
    asks.ANSWERS: _votes,
    asks.UPDATE: _update,
    asks.VALIDATION: _validation,
    asks.SCORES: _scores,
    asks.REWARDS: _rewards,
    asks.TERMS: _terms,
    asks.OWN_SCORES: _own_scores,
}
