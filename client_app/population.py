"""A node's part in the sums over groups, and what each of its groups makes of the totals.

Sums are made of the answers of groups that train: of training answers for the population prior, of held-out ones for
the mean of the others as a score to compare with. They leave masked (`secure_sum`), each once a run.

Axis letters: Q public questions, K options, N questions a group answered, F directions, W = 1 + F.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from flwr.app import RecordDict

from appa_flwr import secure_sum, wire
from appa_flwr.config import Config
from appa_flwr.errors import UserError
from client_app import state
from pluralllm import population
from pluralllm.data import BoolArray, FloatArray, GroupData

Arrays = Mapping[str, npt.NDArray[np.float64]]

# at home: whoever takes one part out of the sum of three still sees that of two
MIN_NODES = 3
_TOTALS = (wire.KEYS, wire.COUNTS, wire.ANSWERS)


@dataclass(frozen=True)
class Node:
    """What this node has for the sums.

    Attributes:
        memory: the node's state.
        config: the run's.
        train_Q: which questions are for training.
        option_QK: True where a question has that option.
        at_home: whether it runs at the groups' own place, as a party of its own; in a simulation every group counts as
            one, whatever node it is on.
    """

    memory: RecordDict
    config: Config
    train_Q: BoolArray
    option_QK: BoolArray
    at_home: bool

    @property
    def order(self) -> list[str]:
        """The steps of the exchange, each asked for once."""
        rounds = range(1, population.DIRECTION_ROUNDS) if self.config.population_directions else ()
        requests = [wire.SumsRequest(step) for step in _TOTALS] + [wire.SumsRequest(wire.DIRECTIONS, n) for n in rounds]
        return [request.label for request in requests]

    @property
    def seen(self) -> list[str]:
        """Groups of this node that train, and so are within the sums."""
        return [name for name in state.groups(self.memory) if name not in self.config.unseen_group_names]

    def shared(self, group: str, allowed_Q: BoolArray, *, training_only: bool = False) -> GroupData:
        """The answers of a group that enter the sums."""
        truth_QK = state.truth(self.memory, group)
        wanted_Q = self.train_Q & self.config.population_prior
        if not training_only:
            wanted_Q = wanted_Q | (~self.train_Q & self.config.mean_of_others)
        rows = np.flatnonzero(wanted_Q & allowed_Q & ~np.isnan(truth_QK).any(axis=1))
        return GroupData(group, rows, truth_QK[rows].astype(np.float32))


def respond(request: wire.SumsRequest, node: Node) -> wire.SumsReply:
    """Do one step.

    Args:
        request: of the server.
        node: what there is to sum.

    Raises:
        UserError: sums that this run has not switched on, a step out of order or for the second time, other nodes than
            before, or too few of them.
    """
    if not (node.config.population_prior or node.config.mean_of_others):
        raise UserError("sums were asked for, and population-prior and mean-of-others are both false")
    if node.at_home and node.config.population_directions:
        # With public starting positions these sums are as many equations as there are answers.
        raise UserError("sums: population-directions would give every group's answers away; at home it must be 0")
    if request.step == wire.FIT:
        _fit(request.tables, node)
        return wire.SumsReply()
    memory = state.exchange(node.memory)
    expected = dict(enumerate(node.order)).get(memory.steps_done)
    if request.label != expected:
        # Asked twice, with other nodes or questions, the difference of two sums would be one node's answers.
        raise UserError(f"sums: the step {request.label} was asked for, and the next one is {expected or 'none'}")
    done = memory.steps_done + 1
    if request.step == wire.KEYS:
        private = secure_sum.private_key()
        state.remember_exchange(node.memory, state.Exchange(private, (), done))
        return wire.SumsReply(public_key=secure_sum.public_key(private))
    if memory.public_keys not in ((), request.public_keys):
        raise UserError("sums: the nodes that take part have changed since the first step")
    least = max(MIN_NODES, node.config.population_min_groups)
    if node.at_home and len(request.public_keys) < least:
        raise UserError(f"sums: {len(request.public_keys)} nodes take part, and at home they must be {least}")
    part = {wire.COUNTS: _counts, wire.ANSWERS: _answers, wire.DIRECTIONS: _directions}[request.step](
        request.tables, node
    )
    state.remember_exchange(node.memory, state.Exchange(memory.private, request.public_keys, done))
    return wire.SumsReply(
        masked=secure_sum.mask(part, private=memory.private, public_keys=request.public_keys, step=request.label)
    )


def _counts(tables: Arrays, node: Node) -> dict[str, FloatArray]:
    """How many groups, and how many parties, answered each question: which sums may be made.

    Whoever hosts several groups can take all of them out of a sum, so at home they are one party.
    """
    count_Q = np.zeros(len(node.train_Q))
    for name in node.seen:
        count_Q[node.shared(name, np.ones_like(node.train_Q)).question_N] += 1
    return {"count": count_Q, "parties": np.minimum(count_Q, 1.0) if node.at_home else count_Q}


def _answers(tables: Arrays, node: Node) -> dict[str, FloatArray]:
    """The sum of the answers; and for directions, sums over the positions that the groups start from."""
    allowed_Q = tables["allowed"].astype(bool)
    answer_QK = np.zeros(node.option_QK.shape)
    for name in node.seen:
        data = node.shared(name, allowed_Q)
        answer_QK[data.question_N] += data.answer_NK
    sums: dict[str, FloatArray] = {"answers": answer_QK}
    directions = node.config.population_directions
    if not directions:
        return sums
    for name in node.seen:
        start_F = population.starting_position(name, seed=node.config.seed, num_directions=directions)
        state.remember_position(node.memory, name, start_F)
    return sums | _direction_sums(allowed_Q, node)


def _directions(tables: Arrays, node: Node) -> dict[str, FloatArray]:
    """Find the groups' positions on the directions that came, and sum over these."""
    allowed_Q = np.asarray(tables["mean"].any(axis=1))
    for name in node.seen:
        data = node.shared(name, allowed_Q, training_only=True)
        state.remember_position(node.memory, name, population.position(data, tables["mean"], tables["direction"]))
    return _direction_sums(allowed_Q, node)


def _direction_sums(allowed_Q: BoolArray, node: Node) -> dict[str, FloatArray]:
    parts = [
        population.direction_sums(
            node.shared(name, allowed_Q, training_only=True),
            state.position(node.memory, name),
            num_questions=len(allowed_Q),
        )
        for name in node.seen
    ]
    return functools.reduce(operator.add, parts).named()


def _fit(tables: Arrays, node: Node) -> None:
    """Keep what the other groups answered on average, and with the prior, the table that the network takes.

    A group that is within the sums takes its own share out first.
    """
    answer_QK, count_Q = tables["answers"], np.rint(tables["count"]).astype(np.int64)
    allowed_Q = count_Q > 0
    sums = population.DirectionSums.of(tables) if node.config.population_directions else None
    within = node.seen if state.exchange(node.memory).steps_done == len(node.order) else []
    for name in state.groups(node.memory):
        own = node.shared(name, allowed_Q) if name in within else None
        mean_QK = population.prior_from_sums(answer_QK, count_Q, own=own, min_groups=1)
        known_QK = np.where(node.train_Q[:, None], mean_QK, 0.0)
        direction_QKF = None
        if sums is not None:
            others = sums
            if own is not None:
                trained = node.shared(name, allowed_Q, training_only=True)
                others = sums.without(trained, state.position(node.memory, name))
            direction_QKF = population.directions_from_sums(others, known_QK)
        table_QKW = population.with_directions(known_QK, direction_QKF) if node.config.population_prior else None
        state.remember_population(node.memory, name, mean_QK, table_QKW)
