"""PluralLLM's federated pretraining: FedAvg over the groups' numbers.

Axis letters: G groups that trained, P weights.
"""

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from statistics import median_low

import numpy as np
import torch
from flwr.app import Array, ArrayRecord

from appa_flwr.config import Config
from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.errors import UserError
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import asks
from appa_flwr.protocol.asks import Ask
from appa_flwr.protocol.messages import join_weights, split_weights
from pluralllm.residual import SHARES_KEY
from pluralllm.training import build, choices
from server_app.federation.ask import Replies
from server_app.federation.groups import Groups

LARGEST_STEP = 10.0  # longest step of a group, in units of the round's median

Progress = Callable[[int, int, float], None]

log = logging.getLogger("appa.server")


def initial_weights(config: Config) -> ArrayRecord:
    """PluralLLM before any training, by the run's seed."""
    torch.manual_seed(child_seed(config.seed, "pluralllm"))
    return ArrayRecord(build(config.pluralllm.architecture).state_dict())


def pretrain(
    groups: Groups, config: Config, start: ArrayRecord, *, progress: Progress
) -> tuple[ArrayRecord, list[float]]:
    """Train PluralLLM over the groups; only weights travel (appendix "PluralLLM Preference Probability Modeling").

    After the last round the shares of the views are chosen by the groups' errors on held-out questions. `progress` is
    called with (round, rounds, mean loss). Returns the weights, and the groups' mean loss in every round.

    Raises:
        UserError: a round in which no group trained, or fewer answered than `run.min-groups`.
    """
    rounds = config.pluralllm.rounds
    weights, losses = start, list[float]()
    for number in range(1, rounds + 1):
        replies = groups.ask(Ask(asks.UPDATE, {"weights": join_weights(weights)}, {"round": number}))
        names, rows = _training_rows(replies)
        if not names:
            raise UserError(f"PluralLLM round {number}: no group trained; the groups' own logs say why")
        weights, loss = federated_average(weights, names, rows)
        losses.append(loss)
        progress(number, rounds, loss)
    if rounds:
        mixes = choices(config.pluralllm.architecture)
        replies = groups.ask(Ask(asks.VALIDATION, {"weights": join_weights(weights)}, {"size": len(mixes)}))
        names, rows = _training_rows(replies)
        if names and (shares := mixes[int(rows["error"].sum(axis=0).argmin())]) is not None:
            weights[SHARES_KEY] = Array(np.array(shares, np.float32))
    return weights, losses


def _training_rows(replies: Replies) -> tuple[list[str], dict[str, FloatArray]]:
    """Names and arrays (G, ...) of groups that have answers."""
    kept = np.flatnonzero(replies.each("answers")[:, 0] > 0)
    return [replies.groups[g] for g in kept], {name: replies.each(name)[kept] for name in replies.numbers}


def federated_average(
    sent: ArrayRecord, names: Sequence[str], rows: Mapping[str, FloatArray]
) -> tuple[ArrayRecord, float]:
    """Average the groups' weights and losses after a round, weighted by their numbers of answers (FedAvg).

    The arithmetic is that of Flower's FedAvg: float32, added in the order of the groups. `SHARES_KEY` is not trained,
    and groups cannot change it. `rows` has "answers" (G, 1), all above 0; "step" (G, P), the change of the weights that
    were `sent` times "answers"; "loss" (G, 1), the mean loss times "answers".
    """
    count_G1 = rows["answers"]
    step_GP = bounded(rows["step"] / count_G1, names)
    weight_GP = (join_weights(sent) + step_GP).astype(np.float32)
    share_G = (count_G1[:, 0] / count_G1.sum()).tolist()
    weight_P, loss_1 = (
        reduce(operator.add, [share * row for share, row in zip(share_G, of_groups, strict=True)])
        for of_groups in (weight_GP, rows["loss"] / count_G1)
    )
    after = split_weights(weight_P, {name: array.shape for name, array in sent.items()})
    if SHARES_KEY in sent:
        after[SHARES_KEY] = sent[SHARES_KEY]
    return after, float(loss_1[0])


def bounded(step_GP: FloatArray, names: Sequence[str]) -> FloatArray:
    """Shorten steps to at most `LARGEST_STEP` times the (lower) median length, so that no group decides the round."""
    length_G = np.linalg.norm(step_GP, axis=1)
    longest = LARGEST_STEP * median_low(length_G)
    factor_G = np.ones(len(names))
    for g, length in enumerate(length_G):
        if length > longest > 0:
            log.warning(
                "group %s: its step is %.0f times as long as the round's median, and counts for %.0f times",
                *(names[g], length / longest * LARGEST_STEP, LARGEST_STEP),
            )
            factor_G[g] = longest / length
    return step_GP * factor_G[:, None]
