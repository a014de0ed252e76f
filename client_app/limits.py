"""What an owner lets leave: kinds of numbers, how many rest on a question, and how exact they are.

Axis letters: Q public questions, J scored answers, K options.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from appa_flwr.owner.ledger import digest
from appa_flwr.owner.owner_policy import SUM_ROUNDING
from appa_flwr.protocol import asks, refusals
from appa_flwr.protocol.asks import Ask, ScoreRequest, Task
from appa_flwr.protocol.refusals import Refused
from appa_flwr.secure.roster import LEAST_GROUPS
from client_app.party import Group, Party

FloatArray = npt.NDArray[np.float64]

KEY_OF_KIND: Mapping[str, str] = {
    asks.VOTES: "votes",
    asks.PREDICTIONS: "predictions",
    asks.ANSWERS: "answers",
    **dict.fromkeys((asks.UPDATE, asks.VALIDATION, asks.SCORES), "training"),
    **dict.fromkeys((asks.REWARDS, asks.TERMS, asks.OWN_SCORES), "rewards"),
}
"""Kind of numbers -> the word in the owner's `may-leave` that lets them leave."""

LEAST_STEPS = 16
"""Optimizer steps of a training round, below which a plain step is nearly a sum of single answers."""

TENTH = 10
"""PluralLLM's validations and scores, which rest on an answer more directly, get a tenth of the limit of rounds."""

OWN_DECIMALS = 2
"""Of an own score: what one question adds to a mean over many is less."""


def check_run(party: Party) -> None:
    """Refuse a run whose config asks for what the owner's policy lets not leave, before it starts."""
    policy, target = party.policy, party.config.sft.target
    if not policy.allows(party.config.reward_metric):
        raise Refused(refusals.METRIC)
    if target == "mean" and not policy.may("answers"):
        raise Refused(refusals.MAY_NOT_LEAVE["answers"])
    if target == "predicted-mean" and not (policy.may("predictions") or policy.roster):
        raise Refused(refusals.MAY_NOT_LEAVE["predictions"])


def check_catalogue(party: Party, catalogue: str, group: str, parts: Mapping[str, Collection[str]]) -> None:
    """Refuse a catalogue, by its digest, for a group; `parts` as in `appa_flwr.owner.ledger.Ledger.enter`."""
    if party.ledger is None:
        return
    least = party.policy.least_answers
    if len(parts["training"]) < least:
        raise Refused(refusals.FEW_ANSWERS)
    if why := party.ledger.enter(party.run_id, catalogue, group, parts, least=least):
        raise Refused({"other": refusals.OTHER_CATALOGUE, "near": refusals.NEARLY_SAME}[why])


def check(ask: Ask, task: Task, party: Party) -> None:
    """Refuse a request that the owner's policy forbids, whatever the run's config says, or that is of another world."""
    policy, masked, deployed = party.policy, bool(task.cohort), party.ledger is not None
    if policy.roster and not masked and ask.kind != asks.OWN_SCORES:
        raise Refused(refusals.ONLY_SUMS)  # a server that is refused a sum could ask for its parts
    if not policy.roster and (masked or (ask.kind == asks.TERMS and deployed)):
        raise Refused(refusals.NO_ROSTER)
    key = KEY_OF_KIND[ask.kind]
    # Within a sum over groups that the owner knows a prediction tells no more than a vote.
    if not policy.may(key) and not (masked and key == "predictions" and policy.may("votes")):
        raise Refused(refusals.MAY_NOT_LEAVE[key])
    if "metrics" in ask.settings and not all(map(policy.allows, ask.texts("metrics"))):
        raise Refused(refusals.METRIC)
    appa = ask.kind == asks.TERMS and ask.text("rule") == "appa"
    if appa and party.config.appa.temperature < policy.least_temperature:
        raise Refused(refusals.LOW_TEMPERATURE)
    trains = set(task.cohort) - set(party.config.unseen_group_names)
    if masked and ask.kind in (asks.UPDATE, asks.VALIDATION) and len(trains) < LEAST_GROUPS:
        raise Refused(refusals.FEW_OWN)
    if task.request != asks.request_digest(ask, party.world):
        raise Refused(refusals.OTHER_WORLD)
    if key == "training" and deployed:
        for group in party.groups:
            _check_training(group, ask, task)


def _check_training(group: Group, ask: Ask, task: Task) -> None:
    """Refuse a step that would be nearly a sum of single answers, and more replies than the owner allows."""
    party, settings = group.party, group.party.config.pluralllm
    weak = settings.local_optimizer == "sgd" or settings.local_steps < LEAST_STEPS
    if ask.kind == asks.UPDATE and weak and not task.cohort and not group.unseen:
        raise Refused(refusals.WEAK_TRAINING)
    public, limit = party.public, party.policy.training_replies
    limit = limit if ask.kind == asks.UPDATE else -(-limit // TENTH)
    asked_Q = {asks.UPDATE: public.train_Q, asks.VALIDATION: public.held_out_Q}.get(ask.kind, ~public.unanswered_Q)
    rows = np.flatnonzero(asked_Q & ~np.isnan(group.truth_QK).any(axis=1))
    marks = [(public.questions[q].question_id, bytes.fromhex(task.request)) for q in rows]
    if not all(group.spend(ask.kind, marks, limit=limit)):
        raise Refused(refusals.REPLIES_SPENT)


def released(
    group: Group, request: ScoreRequest, side: str, side_QK: FloatArray, scored: Mapping[str, FloatArray]
) -> Mapping[str, FloatArray]:
    """The rewards (J,) by metric that may leave, written down in the ledger; `side_QK` is what they compare with.

    Against the group's own answers NaN stands for what may not; against predictions there is all or nothing.

    Raises:
        Refused: more scores against the prediction of a question than the owner's policy allows.
    """
    party, kind = group.party, f"scores by {side}"
    if party.ledger is None:
        return scored
    # An answer that nobody can read, or to a question the group has no answer to, tells nothing.
    answer_JK = np.where(party.public.option_QK[request.question_J], request.prediction_JK, 0.0)
    side_JK, secret = side_QK[request.question_J], party.ledger.secret()
    telling_J = np.flatnonzero(~np.isnan(answer_JK).any(1) & ~np.isnan(side_JK).any(1))
    places = [(metric, int(j)) for metric in scored for j in telling_J]
    marks = []
    for metric, j in places:
        question = party.public.questions[request.question_J[j]].question_id
        # What is compared with belongs to it: the same answer against another table is another score.
        parts = (question.encode(), metric.encode(), answer_JK[j].tobytes(), side_JK[j].tobytes())
        marks.append((question, digest(secret, f"{kind}: {group.name}".encode(), *parts)))
    whole = side == asks.TARGET_SIDE
    allowed = group.spend(kind, marks, limit=party.policy.scores_per_question, whole=whole)
    if whole and not all(allowed):
        raise Refused(refusals.SPENT)
    kept = {metric: reward_J.copy() for metric, reward_J in scored.items()}
    for (metric, j), may in zip(places, allowed, strict=True):
        kept[metric][j] = kept[metric][j] if may else np.nan
    return kept


def own_score(group: Group, question_J: npt.NDArray[np.int64], task: Task) -> bool:
    """True if the group's mean score of readable answers to these questions may leave; it is written down then."""
    policy, question_Q = group.party.policy, np.unique(question_J)
    if not policy.own_score or len(question_Q) < policy.least_answers:
        return False
    marks = [(group.party.public.questions[q].question_id, bytes.fromhex(task.request)) for q in question_Q]
    return all(group.spend("own scores", marks, limit=policy.own_score))


def rounded(sums: FloatArray, party: Party) -> FloatArray:
    """Sums over a deployed group's own answers, to multiples of `SUM_ROUNDING`; a simulation's stay as they are."""
    return sums if party.ledger is None else np.round(sums / SUM_ROUNDING) * SUM_ROUNDING


def own_rounded(score: float, party: Party) -> float:
    """An own score as it leaves."""
    return score if party.ledger is None else round(score, OWN_DECIMALS)
