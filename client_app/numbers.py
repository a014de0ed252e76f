"""A group's numbers: one function per kind of request.

The functions that need PluralLLM's network import it, and so torch, themselves (see `client_app.predictor`).

Axis letters: Q public questions, K options, J scored answers, P weights or predictors, M measures.
"""

from collections.abc import Callable, Mapping

import numpy as np

from appa_flwr.core.arrays import BoolArray, FloatArray
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import queries, rewards, votes
from appa_flwr.protocol.queries import Query, RewardQuery
from client_app.node import Group
from pluralllm.scores import local_sums

Numbers = Mapping[str, FloatArray]


def score(request: RewardQuery, reference_QK: FloatArray, option_QK: BoolArray) -> dict[str, FloatArray]:
    """Score answers against one reference's distributions (Q, K), whose rows are NaN where the reference has none.

    Returns:
        Metric -> rewards (J,): 0 for an unreadable answer, NaN where the reference has no distribution.

    Raises:
        UserError: a question outside the catalogue or an unknown metric.
    """
    if request.question_J.size and not 0 <= request.question_J.min() <= request.question_J.max() < len(reference_QK):
        raise UserError("an answer's question is not in the catalogue")
    metrics = {name: rewards.find(name) for name in request.metrics}
    target_JK, option_JK = reference_QK[request.question_J], option_QK[request.question_J]
    known_J = ~np.isnan(target_JK).any(1)
    usable_J = known_J & ~np.isnan(np.where(option_JK, request.prediction_JK, 0.0)).any(1)
    result = {}
    for metric, scored in metrics.items():
        reward_J = np.where(known_J, 0.0, np.nan)
        reward_J[usable_J] = scored(request.prediction_JK[usable_J], target_JK[usable_J], option_JK[usable_J])
        result[metric] = reward_J
    return result


def _votes(group: Group, query: Query) -> Numbers:
    masks, truth_QK = group.node.masks, group.truth_QK
    own_Q1 = (masks.train_Q & ~np.isnan(truth_QK).any(1))[:, None] & (query.kind != queries.PREDICTIONS)
    opinion_QK = np.where(own_Q1, truth_QK, group.targets())
    return {"votes": votes.cast(opinion_QK, masks.option_QK, kind=queries.ballot_of(query, group.node.config.task))}


def _update(group: Group, query: Query) -> Numbers:
    from client_app import predictor

    node, weight_P = group.node, query.array("weights", np.float32, axes=1)
    number, proximal = query.count("round", least=1), query.number("proximal", most=1.0)
    after_P, loss, count = predictor.train(
        node.config, weight_P, group.data, node.public, round_number=number, proximal=proximal
    )
    step_P = after_P.astype(np.float64) - weight_P
    return {"step": count * step_P, "answers": np.array([float(count)]), "loss": np.array([loss * count])}


def _validation(group: Group, query: Query) -> Numbers:
    from client_app import predictor

    node, weight_P = group.node, query.array("weights", np.float32, axes=1)
    count, gain_V, square_V = predictor.validation_gains(node.config, weight_P, group.data, node.public)
    return {"answers": np.array([float(count)]), "gain": gain_V, "square": square_V}


def _scores(group: Group, query: Query) -> Numbers:
    """PluralLLM's scores, see `pluralllm.scores.local_sums`."""
    sum_PM = local_sums(group.targets(), truth=group.held_out, known=group.data, public=group.node.public)
    return {"scores": np.minimum(sum_PM, sum_PM[:, :1]).ravel()}  # a sum of scores that are all 1 may be rounded up


def _rewards(group: Group, query: Query) -> Numbers:
    request, option_QK = RewardQuery.of(query), group.node.masks.option_QK
    numbers: dict[str, FloatArray] = {}
    for reference in request.references:
        for metric, reward_J in score(request, group.reference(reference, request.context_seed), option_QK).items():
            if reference == queries.TRUTH_REFERENCE:
                numbers[f"{metric} {reference} known"] = (~np.isnan(reward_J)).astype(np.float64)
                reward_J = np.nan_to_num(reward_J)
            numbers[f"{metric} {reference} reward"] = reward_J
    return numbers


MAKERS: Mapping[str, tuple[str, Callable[[Group, Query], Numbers]]] = {
    queries.VOTES: ("votes", _votes),
    queries.PREDICTIONS: ("predictions", _votes),
    queries.ANSWERS: ("answers", _votes),
    queries.UPDATE: ("training", _update),
    queries.VALIDATION: ("training", _validation),
    queries.SCORES: ("training", _scores),
    queries.REWARDS: ("rewards", _rewards),
}
"""Kind of numbers -> the word in the owner's `may-leave` that lets them leave, and the function that makes them."""
