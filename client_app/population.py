"""A node's part in the sums over groups, and what each of its groups makes of the totals.

Sums are made of held-out answers of groups that train: the mean of the others is a score to compare with. They leave
masked (`secure_sum`), each once a run.

Axis letters: Q public questions, K options, N questions a group answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import RecordDict

from appa_flwr import secure_sum, wire
from appa_flwr.config import Config
from appa_flwr.errors import UserError
from client_app import state
from pluralllm import population
from pluralllm.data import BoolArray, FloatArray, GroupData

_TOTALS = (wire.KEYS, wire.COUNTS, wire.ANSWERS)


@dataclass(frozen=True)
class Node:
    """What this node has for the sums.

    Attributes:
        memory: the node's state.
        train_Q: which questions are for training.
        option_QK: True where a question has that option.
        min_nodes: fewest nodes in a sum, by the owner's policy; 0 in a simulation, where groups share nodes by chance.
    """

    memory: RecordDict
    config: Config
    train_Q: BoolArray
    option_QK: BoolArray
    min_nodes: int

    @property
    def seen(self) -> list[str]:
        """Groups of this node that train, and so are within the sums."""
        return [name for name in state.groups(self.memory) if name not in self.config.unseen_group_names]

    def shared(self, group: str, allowed_Q: BoolArray) -> GroupData:
        """The answers of a group that enter the sums."""
        truth_QK = state.truth(self.memory, group)
        rows = np.flatnonzero(~self.train_Q & allowed_Q & ~np.isnan(truth_QK).any(axis=1))
        return GroupData(group, rows, truth_QK[rows].astype(np.float32))


def respond(request: wire.SumsRequest, node: Node) -> wire.SumsReply:
    """Do one step.

    Raises:
        UserError: sums that this run has not switched on, a step out of order or for the second time, other nodes than
            before, or too few of them.
    """
    if not node.config.sums.mean_of_others:
        raise UserError("sums were asked for, and sums.mean-of-others is false")
    if request.step == wire.FIT:
        _fit(node, request.tables)
        return wire.SumsReply()
    memory = state.exchange(node.memory)
    expected = dict(enumerate(_TOTALS)).get(memory.steps_done)
    if request.step != expected:
        # Asked twice, with other nodes or questions, the difference of two sums would be one node's answers.
        raise UserError(f"sums: the step {request.step} was asked for, and the next one is {expected or 'none'}")
    done = memory.steps_done + 1
    if request.step == wire.KEYS:
        private = secure_sum.private_key()
        state.remember_exchange(node.memory, state.Exchange(private, (), done))
        return wire.SumsReply(public_key=secure_sum.public_key(private))
    if memory.public_keys not in ((), request.public_keys):
        raise UserError("sums: the nodes that take part have changed since the first step")
    least = max(node.min_nodes, node.config.sums.min_groups)
    if node.min_nodes and len(request.public_keys) < least:
        raise UserError(f"sums: {len(request.public_keys)} nodes take part, and deployed they must be {least}")
    part = _counts(node) if request.step == wire.COUNTS else _answers(node, request.tables["allowed"].astype(bool))
    state.remember_exchange(node.memory, state.Exchange(memory.private, request.public_keys, done))
    return wire.SumsReply(
        masked=secure_sum.mask(part, private=memory.private, public_keys=request.public_keys, step=request.step)
    )


def _counts(node: Node) -> dict[str, FloatArray]:
    """How many groups, and how many parties, answered each question: which sums may be made.

    Whoever hosts several groups can take all of them out of a sum, so deployed they are one party.
    """
    count_Q = np.zeros(len(node.train_Q))
    for name in node.seen:
        count_Q[node.shared(name, np.ones_like(node.train_Q)).question_N] += 1
    return {"count": count_Q, "parties": np.minimum(count_Q, 1.0) if node.min_nodes else count_Q}


def _answers(node: Node, allowed_Q: BoolArray) -> dict[str, FloatArray]:
    """The sum of the answers."""
    answer_QK = np.zeros(node.option_QK.shape)
    for name in node.seen:
        data = node.shared(name, allowed_Q)
        answer_QK[data.question_N] += data.answer_NK
    return {"answers": answer_QK}


def _fit(node: Node, tables: Mapping[str, FloatArray]) -> None:
    """Keep what the other groups answered on average.

    A group that is within the sums takes its own share out first.
    """
    answer_QK, count_Q = tables["answers"], np.rint(tables["count"]).astype(np.int64)
    allowed_Q = count_Q > 0
    within = node.seen if state.exchange(node.memory).steps_done == len(_TOTALS) else []
    for name in state.groups(node.memory):
        own = node.shared(name, allowed_Q) if name in within else None
        mean_QK = population.mean_from_sums(answer_QK, count_Q, own=own, min_groups=1)
        state.remember_mean_of_others(node.memory, name, mean_QK)
