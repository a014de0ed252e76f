"""Runs in memory: groups that answer as a test says, a service over two of them, and the whole loop with real ones.

Axis letters: G groups, Q questions, K options, J answers.
"""

import asyncio
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import CATALOGUE, GOOD, KEY, WEIGHTS, catalogue_of, failing, random_tables
from fastapi import HTTPException
from flwr.app import Context, Message, RecordDict
from nodes import FakeGrid, Node, SimulatedGrid, flower_task, simulated
from small import SMALLEST, keys_of

from appa_flwr.config import Config
from appa_flwr.core.files import keep_lines
from appa_flwr.protocol import formats, messages, queries, refusals, votes
from appa_flwr.protocol.queries import Catalogue, Query, RewardQuery
from appa_flwr.reward_client import client
from appa_flwr.run.schema import SERVED
from appa_flwr.run.served import read_runs
from client_app.numbers import score
from server_app import main
from server_app import run as server
from server_app.federation import responses
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import GroupKeys
from server_app.federation.groups import Groups
from server_app.run_writer import RunWriter
from server_app.serve import app
from server_app.serve.rounds import Item, Rounds, ScoreBody

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


def replying(*names: str, reward_J: np.ndarray = GOOD, key: tuple[str, str] = KEY) -> FakeGroups:
    """A node whose groups all give these rewards, and the first option's vote."""

    def numbers(query: Query, name: str) -> dict[str, np.ndarray]:
        if query.kind == queries.VOTES:
            return {"votes": np.eye(1, 3)}
        return rewards_of(key, np.asarray(reward_J, dtype=float))

    return FakeGroups(names, numbers)


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


# --- three groups that score five questions, three of them held out ---

GROUPS = ("A", "B", "C")
THREE_CATALOGUE = catalogue_of([2, 3, 4, 3, 5], train=[True, False, False, True, False])
TEST_J = np.array([1, 2, 4])
TABLES = random_tables(THREE_CATALOGUE.option_QK, GROUPS, seed=1)
"""Group -> its targets."""
TRUTHS = random_tables(THREE_CATALOGUE.option_QK, GROUPS, seed=2)
"""Group -> its survey answers."""
NODES = {g: scoring_node({name: TABLES[name]}, {name: TRUTHS[name]}) for g, name in enumerate(GROUPS)}


# --- a service over two groups, and answers whose rewards are worked out by hand ---

SERVED_CATALOGUE = catalogue_of([2, 2, 3], train=[True, True, False])
SERVED_TABLES = {
    "A": np.array([[0.6, 0.4, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]),
    "B": np.array([[0.4, 0.6, 0.0], [0.8, 0.2, 0.0], [0.5, 0.3, 0.2]]),
}


class Folder:
    """Of a run's folder what the service needs."""

    append, _append = RunWriter.append, RunWriter._append

    def __init__(self, path):
        self.path = path
        keep_lines(path / SERVED.name)


class Served:
    """A service over the groups on one node, with its folder."""

    def __init__(self, folder, rule="average"):
        self.folder, self.node = folder, scoring_node(SERVED_TABLES)
        self.config = Config.load({"metric": "wasserstein", "rule": rule})
        self.open()

    def open(self):
        """The service, anew where there was one: what a restart does."""
        groups = federated({1: self.node}, SERVED_CATALOGUE)
        run = SimpleNamespace(config=self.config, folder=Folder(self.folder), groups=groups, catalogue=SERVED_CATALOGUE)
        self.rounds = Rounds(run, closed=lambda name, record: None)

    async def score(self, *answers, number=None, **fields):
        """The rewards of answers, which are triples of id, question and text."""
        items = [Item(id=name, question_id=question, completion=text) for name, question, text in answers]
        found = await self.rounds.score(ScoreBody(run=fields.pop("run", "r"), round=number, items=items, **fields))
        return [item["reward"] for item in found["items"]]

    def lines(self, run="r"):
        return rounds_of(self.folder, run)

    def history(self, run="r"):
        return list(self.lines(run)[-1].history.values())


def rounds_of(folder, run):
    """The rounds that a folder's served.jsonl keeps of a trainer's run."""
    runs = read_runs(folder)
    return runs[run].rounds if run in runs else []


@contextmanager
def serving(folder):
    """A service that answers over HTTP from a thread of this process, where its clients look for it; gives it."""
    served, end = Served(folder), threading.Event()
    with app.listening("127.0.0.1", 0) as listener, pytest.MonkeyPatch.context() as patched:
        patched.setenv(client.URL, f"http://127.0.0.1:{listener.getsockname()[1]}")
        patched.setenv(client.TOKEN, "a-token")
        answers = app.until(end.is_set, served.rounds, None, "a-token", listener)
        thread = threading.Thread(target=asyncio.run, args=(answers,))
        thread.start()
        try:
            yield served
        finally:
            end.set()
            thread.join()


# With two options Wasserstein is 1 - |p1 - t1|. "0.70,0.30" to Q0: A (.6, .4) gives 0.9, B (.4, .6) gives 0.7.
# "0.90,0.10" to Q1: A (.5, .5) gives 0.6, B (.8, .2) gives 0.9. Both are written as asked for, format 1, so
# the training rewards are 0.85 r + 0.15: A 0.915 and 0.66, B 0.745 and 0.915.
TWO, TWO_QUESTIONS = ["0.70,0.30", "0.90,0.10"], ["Q0", "Q1"]
MEAN_OF_TWO, LEAST_OF_TWO = [0.83, 0.7875], [0.745, 0.66]
HISTORY = [0.2 * 0.75, 0.2 * 0.8]  # of A's mean reward (0.9 + 0.6) / 2 and B's (0.7 + 0.9) / 2


def two(number=1, texts=TWO, questions=TWO_QUESTIONS):
    """Answers of a round, by the ids that a trainer gives."""
    return [(f"{number}/{n}", question, text) for n, (question, text) in enumerate(zip(questions, texts, strict=True))]


async def refused(awaitable):
    with pytest.raises(HTTPException) as found:
        await awaitable
    return found.value


# --- the whole loop in this process, with what is smallest of everything ---


def read_every_answer(patched, module=responses):
    """Let each text mean a random answer, so that rewards differ whatever the policy happens to write."""

    def parse(task, text, num_options):
        rng = np.random.default_rng(zlib.crc32(text.encode()))
        meant_K = rng.permutation(num_options) + 1.0 if task == "opa" else rng.dirichlet(np.ones(num_options))
        return formats.Parsed(meant_K, 1.0, parsed=True)

    patched.setattr(module, "formats", SimpleNamespace(**vars(formats) | {"parse": parse}))


class Killed(BaseException):
    """Nothing that a run could catch or write about."""


class InLine(Executor):
    """Does at once what would run beside.

    A model loaded in bfloat16 changes the default dtype of the whole process, and here groups train in the same one.
    """

    def __init__(self, **_) -> None:
        pass

    def submit(self, task, *args, **keys):
        done = Future()
        done.set_result(task(*args, **keys))
        return done


def run_server(grid, config):
    """A run's server app before this grid."""
    with flower_task():
        main.app(grid, Context(17, 1, {}, RecordDict(), dict(config.flat())))


def looped(config, nodes, *, reported=False):
    """The loop of this config with the groups' real ClientApp on so many nodes, or in a grid; the grid between them."""
    grid = SimulatedGrid(simulated(config, nodes)) if isinstance(nodes, int) else nodes
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "ThreadPoolExecutor", InLine)
        if not reported:  # seconds of plots
            patched.setattr(server.report, "build", lambda path: path / "report.html")
        try:
            run_server(grid, config)
        finally:
            torch.set_num_threads(threads)
    return grid


def run_of(folder, **keys):
    """The whole loop on two nodes; its config."""
    places = {"run.output-dir": str(folder / "runs"), "run-name": "r"}
    config = Config.load({**SMALLEST, **places, **keys})
    looped(config, 2)
    return config
