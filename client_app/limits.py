"""What an owner lets leave: kinds of numbers, how many rest on a question, and how exact they are.

Axis letters: Q public questions, J scored answers, K options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from appa_flwr.config import Config
from appa_flwr.owner.ledger import digest
from appa_flwr.owner.owner_policy import SUM_ROUNDING
from appa_flwr.protocol import asks, refusals
from appa_flwr.protocol.asks import Ask, Catalogue, ScoreRequest
from appa_flwr.protocol.refusals import Refused
from appa_flwr.secure.roster import LEAST_GROUPS
from client_app.memory import read_arrays
from client_app.party import Party

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


def check(ask: Ask, party: Party, *, cohort: tuple[str, ...]) -> None:
    """Refuse a request that the owner's policy forbids, whatever the run's config says.

    Args:
        ask: the request.
        party: the node.
        cohort: the groups of the masked sum; none where the reply would be plain.

    Raises:
        Refused: see `appa_flwr.protocol.refusals`.
    """
    policy, masked = party.policy, bool(cohort)
    if policy.roster and not masked and ask.kind != asks.OWN_SCORES:
        raise Refused(refusals.ONLY_SUMS)  # a server that is refused a sum could ask for its parts
    if masked and not policy.roster:
        raise Refused(refusals.NO_ROSTER)
    if ask.kind == asks.TERMS and not masked and party.ledger is not None:
        raise Refused(refusals.NO_ROSTER)
    key = KEY_OF_KIND[ask.kind]
    # Within a sum over groups that the owner knows a prediction tells no more than a vote.
    if not policy.may(key) and not (masked and key == "predictions" and policy.may("votes")):
        raise Refused(refusals.MAY_NOT_LEAVE[key])
    if "metrics" in ask.settings and not all(map(policy.allows, ask.texts("metrics"))):
        raise Refused(refusals.METRIC)
    if (
        ask.kind == asks.TERMS
        and ask.text("rule") == "appa"
        and party.config.appa.temperature < policy.least_temperature
    ):
        raise Refused(refusals.LOW_TEMPERATURE)
    trains = set(cohort) - set(party.config.unseen_group_names)
    if masked and ask.kind in (asks.UPDATE, asks.VALIDATION) and len(trains) < LEAST_GROUPS:
        raise Refused(refusals.FEW_OWN)


def check_run(party: Party) -> None:
    """Refuse a run whose config asks for what the owner's policy lets not leave, before it starts.

    Raises:
        Refused: `metric` is foreign, or `sft.target` is a mean.
    """
    policy, target = party.policy, party.config.sft.target
    if not policy.allows(party.config.reward_metric):
        raise Refused(refusals.METRIC)
    if target == "mean" and not policy.may("answers"):
        raise Refused(refusals.MAY_NOT_LEAVE["answers"])
    if target == "predicted-mean" and not (policy.may("predictions") or policy.roster):
        raise Refused(refusals.MAY_NOT_LEAVE["predictions"])


def check_training(config: Config, *, masked: bool, party: Party) -> None:
    """Refuse a plain step of a deployed group that would be nearly a sum of single answers.

    Raises:
        Refused: plain SGD, or fewer than `LEAST_STEPS` steps.
    """
    weak = config.pluralllm.local_optimizer == "sgd" or config.pluralllm.local_steps < LEAST_STEPS
    if weak and not masked and party.ledger is not None:
        raise Refused(refusals.WEAK_TRAINING)


def count_training(ask: Ask, world: str, public: Catalogue, party: Party, groups: Iterable[str]) -> None:
    """Write down that a reply about PluralLLM is about to rest on the answers of these groups.

    Raises:
        Refused: as many replies rest on a question as the owner allows.
    """
    if party.ledger is None or KEY_OF_KIND[ask.kind] != "training":
        return
    limit = party.policy.training_replies
    limit = limit if ask.kind == asks.UPDATE else -(-limit // TENTH)
    asked_Q = {asks.UPDATE: public.train_Q, asks.VALIDATION: public.held_out_Q}.get(ask.kind, ~public.unanswered_Q)
    mark = bytes.fromhex(asks.request_digest(ask, world))
    for group in groups:
        known_Q = ~np.isnan(read_arrays(party.memory, f"data {group}")["truth"]).any(axis=1)
        marks = [(public.questions[q].question_id, mark) for q in np.flatnonzero(asked_Q & known_Q)]
        if not all(party.ledger.spend(f"{ask.kind}: {group}", marks, limit=limit, whole=True)):
            raise Refused(refusals.REPLIES_SPENT)


def released(
    request: ScoreRequest,
    scored: Mapping[str, FloatArray],
    side_QK: FloatArray,
    public: Catalogue,
    *,
    party: Party,
    group: str,
    side: str,
) -> Mapping[str, FloatArray]:
    """The rewards (J,) by metric that may leave, written down in the ledger; `side_QK` is what they compare with.

    Against the group's own answers NaN stands for what may not; against predictions there is all or nothing.

    Raises:
        Refused: more scores against the prediction of a question than the owner's policy allows.
    """
    if party.ledger is None:
        return scored
    # An answer that nobody can read, or to a question the group has no answer to, tells nothing.
    answer_JK = np.where(public.option_QK[request.question_J], request.prediction_JK, 0.0)
    side_JK, secret, kind = side_QK[request.question_J], party.ledger.secret(), f"scores by {side}: {group}"
    telling_J = np.flatnonzero(~np.isnan(answer_JK).any(1) & ~np.isnan(side_JK).any(1))
    places = [(metric, int(j)) for metric in scored for j in telling_J]
    marks = []
    for metric, j in places:
        question = public.questions[request.question_J[j]].question_id
        # What is compared with belongs to it: the same answer against another table is another score.
        parts = (kind.encode(), question.encode(), metric.encode(), answer_JK[j].tobytes(), side_JK[j].tobytes())
        marks.append((question, digest(secret, *parts)))
    whole = side == asks.TARGET_SIDE
    allowed = party.ledger.spend(kind, marks, limit=party.policy.scores_per_question, whole=whole)
    if whole and not all(allowed):
        raise Refused(refusals.SPENT)
    kept = {metric: reward_J.copy() for metric, reward_J in scored.items()}
    for (metric, j), may in zip(places, allowed, strict=True):
        kept[metric][j] = kept[metric][j] if may else np.nan
    return kept


def own_score(public: Catalogue, question_J: npt.NDArray[np.int64], request: str, party: Party, group: str) -> bool:
    """True if the group's mean score of readable answers to these questions may leave; it is written down then."""
    if party.ledger is None:
        return bool(len(question_J))
    ids = [public.questions[q].question_id for q in np.unique(question_J)]
    if not party.policy.own_score or len(ids) < party.policy.least_answers:
        return False
    marks = [(question, bytes.fromhex(request)) for question in ids]
    return all(party.ledger.spend(f"own scores: {group}", marks, limit=party.policy.own_score, whole=True))


def rounded(sums: FloatArray, party: Party) -> FloatArray:
    """Sums over a deployed group's own answers, to multiples of `SUM_ROUNDING`; a simulation's stay as they are."""
    return sums if party.ledger is None else np.round(sums / SUM_ROUNDING) * SUM_ROUNDING


def own_rounded(score: float, party: Party) -> float:
    """An own score as it leaves."""
    return score if party.ledger is None else round(score, OWN_DECIMALS)
