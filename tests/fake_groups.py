"""Groups' nodes in memory that answer as a test says, for tests of the server's federation."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fakes import CATALOGUE, GOOD, KEY, REQUEST, FakeGrid, Node, catalogue_of, random_tables
from flwr.app import Array, ArrayRecord, Error, Message
from small import keys_of

from appa_flwr.config import Config
from appa_flwr.protocol import messages, queries, refusals, votes
from appa_flwr.protocol.queries import Catalogue, Query, RewardQuery
from client_app.numbers import score
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import GroupKeys
from server_app.federation.groups import Groups

WEIGHTS = ArrayRecord({"w": Array(np.ones(1, np.float32))})
MAY = ("votes", "training", "rewards", "predictions", "answers", "truth")


class FakeGroups:
    """A node in memory that hosts groups, and answers as a group would: setup, and requests for numbers by its maker.

    Attributes:
        numbers: gives a group's arrays for a request.
        asked: the requests for numbers, in their order.
        kinds: the kinds of all its messages.
        silent: groups that give no numbers.
        gate: closed, they take their time.
    """

    def __init__(
        self,
        names: Sequence[str],
        numbers: Callable[[Query, str], Mapping[str, np.ndarray]],
        *,
        may: Sequence[str] = MAY,
    ) -> None:
        self.names, self.numbers, self.may = tuple(names), numbers, list(may)
        self.catalogue: Catalogue | None = None
        self.asked, self.kinds = list[Query](), list[str]()
        self.silent, self.gate = set[str](), threading.Event()
        self.gate.set()

    def __call__(self, message: Message) -> Message:
        kind = message.metadata.message_type
        self.kinds.append(kind)
        if kind == messages.HELLO:
            return self._reply(message)
        if kind == messages.CATALOGUE:
            self.catalogue = messages.unpack_catalogue(message.content)
            return self._reply(message, answered=[2] * len(self.names), may=self.may, noise=[])
        if kind == messages.TARGETS:
            return self._reply(message, by_mean=[0] * len(self.names))
        if self.catalogue is None:
            return failing(refusals.FORGOTTEN)(message)
        query, _ = messages.unpack_query(message.content)
        self.asked.append(query)
        assert self.gate.wait(10)
        if not (names := [name for name in self.names if name not in self.silent]):
            return failing(refusals.FAILED, "silent")(message)
        shapes = queries.layouts_of(query, self.catalogue)
        rows = [flat(self.numbers(query, name), shapes) for name in names]
        return Message(messages.pack_reply(names, np.stack(rows)), reply_to=message)

    def _reply(self, message: Message, **fields: object) -> Message:
        return Message(messages.pack_reply(self.names, **fields), reply_to=message)


def failing(code: int, text: str = "") -> Node:
    """A node that answers by this error, in a refusal's own words where none are given."""
    return lambda message: Message(Error(code, text or refusals.REFUSALS[code]), reply_to=message)


GONE = failing(5, "node is gone")


def flat(arrays: Mapping[str, np.ndarray], shapes: Mapping[str, queries.Layout]) -> np.ndarray:
    """A row, whatever stands in it; 0 for arrays that are not there."""
    parts = [np.broadcast_to(arrays.get(name, 0.0), number.shape).ravel() for name, number in shapes.items()]
    return np.concatenate(parts).astype(np.float64)


def rewards_of(key: tuple[str, str], reward_J: np.ndarray) -> dict[str, np.ndarray]:
    """The numbers of a request for rewards; NaN where there is nothing to compare with."""
    name = " ".join(key)
    if key[1] == queries.TARGET_REFERENCE:
        return {f"{name} reward": reward_J}
    return {f"{name} reward": np.nan_to_num(reward_J), f"{name} known": (~np.isnan(reward_J)).astype(float)}


def replying(*names: str, rewards: Mapping[tuple[str, str], np.ndarray] | None = None) -> FakeGroups:
    """A node whose groups all give the same rewards, and the first option's vote."""

    def numbers(query: Query, name: str) -> dict[str, np.ndarray]:
        if query.kind == queries.VOTES:
            return {"votes": np.eye(1, 3)}
        return {
            k: v for key, reward_J in (rewards or {KEY: GOOD}).items() for k, v in rewards_of(key, reward_J).items()
        }

    return FakeGroups(names, numbers)


def scorer(name: str, reward_J: np.ndarray = GOOD, key: tuple[str, str] = KEY) -> FakeGroups:
    """A group's node that gives these rewards."""
    return replying(name, rewards={key: np.asarray(reward_J, dtype=float)})


def scoring_node(
    table_by_group: Mapping[str, np.ndarray],
    truth_by_group: Mapping[str, np.ndarray] | None = None,
    *,
    may: Sequence[str] = MAY,
) -> FakeGroups:
    """A node whose groups vote and score by the clients' own code.

    Args:
        table_by_group: group -> target distributions (Q, K), 0 on padding.
        truth_by_group: the same for the groups' own answers; the targets where absent.
        may: what its owner lets leave.
    """

    def numbers(query: Query, name: str) -> dict[str, np.ndarray]:
        option_QK, table_QK = node.catalogue.option_QK, table_by_group[name]
        if query.kind in (queries.VOTES, queries.PREDICTIONS, queries.ANSWERS):
            ballot = "mode" if query.kind == queries.VOTES else votes.DISTRIBUTION
            return {"votes": votes.cast(table_QK, option_QK, kind=ballot)}
        request = RewardQuery.of(query)
        references = {
            queries.TARGET_REFERENCE: table_QK,
            queries.TRUTH_REFERENCE: (truth_by_group or table_by_group)[name],
        }
        scored = {reference: score(request, references[reference], option_QK) for reference in request.references}
        arrays = {}
        for metric, reference in request.keys:
            arrays |= rewards_of((metric, reference), scored[reference][metric])
        return arrays

    node = FakeGroups([*table_by_group], numbers, may=may)
    return node


def gathered(
    nodes: FakeGrid | Mapping[int, Node],
    expected: Sequence[str] = (),
    *,
    patience: float = 0.0,
    keys: GroupKeys | None = None,
    replies: Path | None = None,
    **changes: object,
) -> Groups:
    """The expected groups, or all at these nodes, which have joined a run with these `changes` of its config."""
    config = Config.load({"run.min-groups": 1, "run.reply-timeout": 0.02, **keys_of(changes)})
    grid = nodes if isinstance(nodes, FakeGrid) else FakeGrid(nodes)
    hosted = {name for node in grid.nodes.values() for name in getattr(node, "names", ())}
    groups = Groups(OverlapGrid(grid), config, keys=keys, replies=replies)
    groups.members.gather(expected or sorted(hosted), patience=patience)
    return groups


def federated(
    nodes: FakeGrid | Mapping[int, Node], catalogue: Catalogue = CATALOGUE, *given: Any, **keys: Any
) -> Groups:
    """Gathered groups with the catalogue."""
    groups = gathered(nodes, *given, **keys)
    groups.send_catalogue(catalogue)
    return groups


def at_work(nodes: FakeGrid | Mapping[int, Node], *given: Any, **keys: Any) -> Groups:
    """Gathered groups with catalogue and PluralLLM."""
    groups = federated(nodes, CATALOGUE, *given, **keys)
    groups.send_targets(WEIGHTS)
    return groups


_numbers = itertools.count()


def new_request() -> Query:
    """A request that nobody has been asked."""
    return replace(REQUEST, context_seed=next(_numbers)).query()


# --- three groups that score five questions, three of them held out ---

GROUPS = ("A", "B", "C")
THREE_CATALOGUE = catalogue_of([2, 3, 4, 3, 5], train=[True, False, False, True, False])
TEST_J = np.array([1, 2, 4])
TABLES = random_tables(THREE_CATALOGUE.option_QK, GROUPS, seed=1)
"""Group -> its targets."""
TRUTHS = random_tables(THREE_CATALOGUE.option_QK, GROUPS, seed=2)
"""Group -> its survey answers."""
NODES = {g: scoring_node({name: TABLES[name]}, {name: TRUTHS[name]}) for g, name in enumerate(GROUPS)}
