"""A group's numbers: one function per kind of request. The same numbers leave plain or masked.

The functions that need PluralLLM's network import it, and so torch, themselves: on a deployed node every message starts
a fresh process, and scoring does not need torch.

Axis letters: Q public questions, K options, J scored answers, P weights, L measures.
"""

from collections.abc import Callable, Mapping

import numpy as np

from appa_flwr.core.arrays import BoolArray, FloatArray, IntArray
from appa_flwr.core.errors import UserError
from appa_flwr.owner.ledger import digest
from appa_flwr.owner.owner_policy import SUM_ROUNDING
from appa_flwr.protocol import asks, refusals, rewards, votes
from appa_flwr.protocol.asks import Ask, ScoreRequest, Task
from appa_flwr.protocol.refusals import Refused
from appa_flwr.secure import rule_sums
from client_app.party import Group, Party
from pluralllm.scores import COUNT, local_sums, summed

Numbers = Mapping[str, FloatArray]

MOST_ITERATIONS = 10_000  # earlier iterations that a request for terms may name: each is looked up
OWN_DECIMALS = 2
"""Decimals of an own score that leaves a deployed node: the share of one question in a mean over many is smaller."""


def score(request: ScoreRequest, side_QK: FloatArray, option_QK: BoolArray) -> dict[str, FloatArray]:
    """Score answers against one side's distributions (Q, K), whose rows are NaN where the side has none.

    Returns:
        Metric -> rewards (J,): 0 for an unreadable answer, NaN where the side has no distribution.

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


def _votes(group: Group, ask: Ask, task: Task) -> Numbers:
    public, config = group.party.public, group.party.config
    ballot = votes.BALLOTS[config.task] if ask.kind == asks.VOTES else votes.DISTRIBUTION
    predicted = ask.kind == asks.PREDICTIONS or (ask.kind == asks.VOTES and config.sft.target == "predicted-mean")
    truth_QK = group.truth_QK
    own_Q1 = (public.train_Q & ~np.isnan(truth_QK).any(1))[:, None] & (not predicted)
    opinion_QK = np.where(own_Q1, truth_QK, group.targets())
    return {"votes": votes.cast(opinion_QK, public.option_QK, kind=ballot)}


def _update(group: Group, ask: Ask, task: Task) -> Numbers:
    from client_app import predictor

    party, weight_P = group.party, ask.array("weights", np.float32, axes=1)
    data = group.data
    if not len(data):
        return {"step": np.zeros(len(weight_P)), "answers": np.zeros(1), "loss": np.zeros(1)}
    number, secret = ask.count("round"), "" if party.ledger is None else party.ledger.secret().hex()
    after_P, loss = predictor.train(party.config, weight_P, data, party.public, round_number=number, secret=secret)
    step_P = after_P.astype(np.float64) - weight_P
    total = _rounded(np.array([loss * len(data)]), party)
    return {"step": len(data) * step_P, "answers": np.array([float(len(data))]), "loss": total}


def _validation(group: Group, ask: Ask, task: Task) -> Numbers:
    from client_app import predictor

    party, weight_P, truth = group.party, ask.array("weights", np.float32, axes=1), group.held_out
    ours = predictor.load(party.config, weight_P, party.public)
    error_V = _rounded(predictor.errors(ours, group.data, truth, party.config.pluralllm.architecture), party)
    return {"answers": np.array([float(len(truth))]), "error": np.minimum(error_V, len(truth) * asks.LARGEST_ERROR)}


def _scores(group: Group, ask: Ask, task: Task) -> Numbers:
    """PluralLLM's scores, see `pluralllm.scores.local_sums`."""
    party, truth = group.party, group.held_out
    sums = local_sums(group.targets(), truth=truth, known=group.data, public=party.public)
    score_L = np.array([sums[name][measure] for name, measure in summed()])
    most_L = np.array([sums[name][COUNT] for name, _ in summed()])
    # Counts are multiples of `SUM_ROUNDING`. Rounding can make them slightly too large; the minimum corrects this.
    return {"scores": np.minimum(_rounded(score_L, party), most_L)}


def _rewards(group: Group, ask: Ask, task: Task) -> Numbers:
    request = ScoreRequest.of(ask)
    numbers: dict[str, FloatArray] = {}
    for side in request.sides:
        for metric, reward_J in _scored(group, request, side).items():
            known_J, name = ~np.isnan(reward_J), f"{metric} {side}"
            numbers |= {
                f"{name} reward": np.nan_to_num(reward_J),
                f"{name} square": np.nan_to_num(reward_J) ** 2,
                f"{name} known": known_J.astype(np.float64),
                f"{name} own": np.array([reward_J[known_J].mean() if known_J.any() else 0.0]),
                f"{name} groups": np.array([float(known_J.any())]),
            }
    return numbers


def _scored(group: Group, request: ScoreRequest, side: str) -> Mapping[str, FloatArray]:
    """Metric -> rewards (J,) that may leave, which the ledger records.

    Rewards against own answers that may not leave are NaN; rewards against predictions leave all or not at all.

    Raises:
        Refused: more scores against the prediction of a question than the owner's policy allows.
    """
    party, kind = group.party, f"scores by {side}"
    side_QK = group.side(side, request.draw)
    by_metric = score(request, side_QK, party.public.option_QK)
    if party.ledger is None:
        return by_metric
    # An unreadable answer, or an answer to a question without a distribution, tells nothing.
    answer_JK = np.where(party.public.option_QK[request.question_J], request.prediction_JK, 0.0)
    side_JK, secret = side_QK[request.question_J], party.ledger.secret()
    telling_J = np.flatnonzero(~np.isnan(answer_JK).any(1) & ~np.isnan(side_JK).any(1))
    places = [(metric, int(j)) for metric in by_metric for j in telling_J]
    marks = []
    for metric, j in places:
        question = party.public.questions[request.question_J[j]].question_id
        # The mark includes the distribution: the same answer against another table is another score.
        parts = (question.encode(), metric.encode(), answer_JK[j].tobytes(), side_JK[j].tobytes())
        marks.append((question, digest(secret, f"{kind}: {group.name}".encode(), *parts)))
    whole = side == asks.TARGET_SIDE
    allowed = group.spend(kind, marks, limit=party.policy.scores_per_question, whole=whole)
    if whole and not all(allowed):
        raise Refused(refusals.SPENT)
    for (metric, j), may in zip(places, allowed, strict=True):
        if not may:
            by_metric[metric][j] = np.nan
    return by_metric


def _terms(group: Group, ask: Ask, task: Task) -> Numbers:
    config, request = group.party.config, ScoreRequest.of(ask)
    rule, reference = ask.setting("rule", str), ask.setting("reference", float)
    completed = ask.setting("completed", (str,))
    format_J = ask.array("format", np.float64, axes=1)
    usual = (request.metrics, request.sides) == ((config.reward_metric,), (asks.TARGET_SIDE,))
    # Rewards are cut to [0, 1], so sums of format scores outside would bend at each group's reward.
    fits = ((format_J >= 0) & (format_J <= 1)).all() and len(completed) < MOST_ITERATIONS
    if not usual or not fits or rule not in config.rules:
        raise Refused(refusals.BAD_REQUEST)
    rule_sums.check_rule(rule, config.appa)
    reward_J = _scored(group, request, asks.TARGET_SIDE)[config.reward_metric]
    parsed_J, weight = ask.array("parsed", np.bool_, axes=1), config.appa.alignment_weight
    (training_J,) = rewards.training_reward(reward_J[None], format_J, parsed_J, alignment_weight=weight)
    run = f"{task.run}\n{group.name}"
    with group.party.facts() as facts:
        history = rule_sums.before(facts, run=run, rule=rule, reference=reference, completed=completed)
        terms, after = rule_sums.terms(
            rule,
            config.appa,
            reference=reference,
            iteration=len(completed) + 1,
            history=history,
            reward_J=reward_J,
            training_J=training_J,
        )
        name = task.digest.hex() if task.cohort else task.request
        rule_sums.remember(facts, run=run, rule=rule, completed=completed, task=name, history=after)
    return terms


def _own_scores(group: Group, ask: Ask, task: Task) -> Numbers:
    """The group's score of an evaluation: the mean over questions of their answers' mean reward.

    The score of a single question would tell the group's answer to the question. So there must be readable answers to
    as many questions as the owner's policy asks for, and every question counts once.
    """
    request, party = ScoreRequest.of(ask), group.party
    numbers = {}
    for side in request.sides:
        for metric, reward_J in score(request, group.side(side, request.draw), party.public.option_QK).items():
            known_J = ~np.isnan(reward_J)
            answer_JK = np.where(party.public.option_QK[request.question_J], request.prediction_JK, 0.0)
            readable_J = known_J & ~np.isnan(answer_JK).any(axis=1)
            numbers[f"{metric} {side}"] = np.zeros(2)
            if _may_give_own_score(group, request.question_J[readable_J], task):
                questions = np.unique(request.question_J[known_J])
                by_question = [reward_J[known_J & (request.question_J == q)].mean() for q in questions]
                own = float(np.mean(by_question))
                own = own if party.ledger is None else round(own, OWN_DECIMALS)
                numbers[f"{metric} {side}"] = np.array([own, 1.0])
    return numbers


def _may_give_own_score(group: Group, question_J: IntArray, task: Task) -> bool:
    """True if the group's mean score of readable answers to these questions may leave; the ledger then records it."""
    policy, question_Q = group.party.policy, np.unique(question_J)
    if not policy.own_score or len(question_Q) < policy.least_answers:
        return False
    marks = [(group.party.public.questions[q].question_id, bytes.fromhex(task.request)) for q in question_Q]
    return all(group.spend("own scores", marks, limit=policy.own_score))


def _rounded(sums: FloatArray, party: Party) -> FloatArray:
    """Round a deployed group's sums over own answers to multiples of `SUM_ROUNDING`; simulations keep exact sums."""
    return sums if party.ledger is None else np.round(sums / SUM_ROUNDING) * SUM_ROUNDING


KINDS: Mapping[str, tuple[str, Callable[[Group, Ask, Task], Numbers]]] = {
    asks.VOTES: ("votes", _votes),
    asks.PREDICTIONS: ("predictions", _votes),
    asks.ANSWERS: ("answers", _votes),
    asks.UPDATE: ("training", _update),
    asks.VALIDATION: ("training", _validation),
    asks.SCORES: ("training", _scores),
    asks.REWARDS: ("rewards", _rewards),
    asks.TERMS: ("rewards", _terms),
    asks.OWN_SCORES: ("rewards", _own_scores),
}
"""Kind of numbers -> the word in the owner's `may-leave` that lets them leave, and the function that makes them."""
