"""Real groups' nodes in memory: Flower's Grid, contexts and messages, and what a test asks a single node.

No code path of the clients is replaced. Every message and reply crosses as the bytes Flower would send, and a node's
context is stored as bytes between two messages, as where every message meets a fresh process. A group's machine can
import this: what is the server's is imported where it is used.
"""

import copy
import functools
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, Metadata, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.logger import FLOWER_LOGGER as logger
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.proto.message_pb2 import Context as ContextBytes
from flwr.proto.message_pb2 import Message as MessageBytes
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictBytes
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import InMemoryGrid
from small import config_of

from appa_flwr.config import Config
from appa_flwr.protocol import messages, queries
from appa_flwr.protocol.queries import Catalogue, Query, RewardQuery
from appa_flwr.run.schema import SURVEY_FILE
from appa_flwr.survey import store
from appa_flwr.survey.types import Survey
from client_app import node as client
from client_app.main import app
from client_app.memory import Memory, keep_survey_path, memory_of, read_array, survey_path
from pluralllm.data import GroupData
from pluralllm.residual import SHARES, SHARES_KEY
from pluralllm.scores import SUMS

RUN_ID = 1
Node = Callable[[Message], Message | None]


@dataclass(frozen=True)
class Crossed:
    """A message as it crossed between server and node: its bytes, and what they decode to."""

    data: bytes
    message: Message

    @property
    def kind(self) -> str:
        """The action that was asked for."""
        return self.message.metadata.message_type


def cross(message: Message) -> Crossed:
    """Turn a message into bytes and back."""
    data = message_to_proto(message).SerializeToString(deterministic=True)
    return Crossed(data, message_from_proto(MessageBytes.FromString(data)))


def cross_records(content: RecordDict) -> RecordDict:
    """Turn records into bytes and back."""
    data = recorddict_to_proto(content).SerializeToString()
    return recorddict_from_proto(RecordDictBytes.FromString(data))


def request(kind: str, content: RecordDict | None = None, *, node: int = 1, ttl: float = 1e12) -> Message:
    """A message from the server, made without a running Flower task, which Flower's own constructor asks for."""
    metadata = Metadata(
        run_id=RUN_ID,
        message_id=f"{kind} to {node}",
        src_node_id=SUPERLINK_NODE_ID,
        dst_node_id=node,
        reply_to_message_id="",
        group_id="1",
        created_at=0.0,
        ttl=ttl,
        message_type=kind,
    )
    return Message(metadata=metadata, content=content or RecordDict())


def simulated(config: Config, num_nodes: int) -> dict[int, Context]:
    """Contexts of a simulation's nodes, which know the run's survey; their ids are no partition numbers."""
    from server_app.questions import run_survey

    contexts = _contexts(config, 1000, [{"partition-id": n, "num-partitions": num_nodes} for n in range(num_nodes)])
    path = Path(tempfile.mkdtemp()) / SURVEY_FILE
    store.write(run_survey(config), path)
    for context in contexts.values():
        keep_survey_path(context, str(path))
    return contexts


def at_home(survey: Survey, folder: Path, config: Config) -> tuple[Config, Mapping[str, Path]]:
    """The survey split into a public question file and one private file a group, and the run that uses them."""
    written = store.write_split(survey, folder)
    keys = {"survey": str(written.questions), "groups": "; ".join(written.groups)}  # as `appa deploy` has them
    return Config.load({**config.flat(), **keys}), written.groups


def deployed(config: Config, files: Mapping[str, Path], *, owner_policy: str = "") -> dict[int, Context]:
    """Contexts of deployed nodes, one a group, each with the group's own data file and its owner's policy beside it."""
    nodes: list[dict[str, int | str]] = []
    for group, path in files.items():
        written = path.with_suffix(".policy.toml")
        written.write_text(owner_policy)
        nodes.append({"group": group, "data": str(path), "policy": str(written)})
    return _contexts(config, 2000, nodes)


def _contexts(config: Config, first: int, node_configs: Sequence[dict[str, int | str]]) -> dict[int, Context]:
    nodes = {first + 7 * n: node_config for n, node_config in enumerate(node_configs)}
    return {node: Context(RUN_ID, node, own, RecordDict(), dict(config.flat())) for node, own in nodes.items()}


class FakeGrid(Grid):
    """A grid in memory.

    Attributes:
        nodes: node id -> its answer to a message; None is no answer at all.
        polls_to_wait: node id -> how many polls its answer lies back; 0 where absent.
        events: what was called, in order.
        keys: node id -> its public key, as Flower keeps it; none where absent.
    """

    def __init__(self, nodes: Mapping[int, Node], polls_to_wait: Mapping[int, int] | None = None) -> None:
        self.nodes = dict(nodes)
        self.polls_to_wait = dict(polls_to_wait or {})
        self.events: list[str] = []
        self.keys: dict[int, bytes] = {}
        self.pushed: list[Message] = []
        self._waiting: dict[str, tuple[int, Message | None]] = {}
        self._count = 0

    def set_run(self, run: object) -> None:
        self.events.append("set_run")

    @property
    def run(self) -> object:
        return "the run"

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return request(message_type, content, node=dst_node_id, **({} if ttl is None else {"ttl": ttl}))

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys.get(node, b"")) for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.events.append("push")
        ids = []
        for message in messages:
            self._count += 1
            message.metadata.__dict__["_message_id"] = f"message {self._count}"
            ids.append(message.metadata.message_id)
            node = message.metadata.dst_node_id
            self.pushed.append(message)
            self._waiting[ids[-1]] = (self.polls_to_wait.get(node, 0), self.nodes[node](message))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.events.append("pull")
        came = []
        for key in list(message_ids):
            polls, reply = self._waiting.get(key, (0, None))
            if polls:
                self._waiting[key] = (polls - 1, reply)
            elif reply is not None:
                came.append(reply)
                del self._waiting[key]
        return came

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise AssertionError("Flower's own slow loop must not be used")


class InProcessGrid(FakeGrid):
    """A grid whose nodes run the real ClientApp as soon as a message is pushed.

    `contexts` are as the last message left them; `requests` and `replies` are all messages, in their order.
    """

    def __init__(self, contexts: Mapping[int, Context]) -> None:
        super().__init__(dict.fromkeys(contexts, self._answer))
        self.contexts = dict(contexts)
        self.requests: list[Crossed] = []
        self.replies: list[Crossed] = []

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def _answer(self, message: Message) -> Message:
        self.requests.append(cross(message))
        node = message.metadata.dst_node_id
        stored = context_to_proto(self.contexts[node]).SerializeToString()
        context = context_from_proto(ContextBytes.FromString(stored))
        reply = app(self.requests[-1].message, context)
        self.contexts[node] = context
        self.replies.append(cross(reply))
        return cross(reply).message  # the server may change what it gets


class SimulatedGrid(InProcessGrid, InMemoryGrid):
    """One that the server takes for Flower's simulation."""


@contextmanager
def flower_task() -> Iterator[None]:
    """As inside a running ServerApp, whose process identity `Message` requires; without Flower's info logs."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with patch.multiple(TaskIdentity, _run_id=1, _node_id=SUPERLINK_NODE_ID, _task_id=1):
            yield
    finally:
        logger.setLevel(level)


class ClientNode:
    """One node: asks its ClientApp and keeps its context, replies crossed as bytes."""

    def __init__(self, context: Context) -> None:
        self.context = context

    @property
    def config(self) -> Config:
        return client.Node.of(self.context).config

    @property
    def memory(self) -> Memory:
        return memory_of(self.context)

    def send(self, kind: str, content: RecordDict | None = None) -> Message:
        return cross(app(request(kind, content, node=self.context.node_id), self.context)).message

    def ask(self, asked: Query) -> Message:
        """Ask for numbers, in the context that the node knows."""
        context_hash = client.Node.of(self.context).context_hash if "catalogue" in self.memory else ""
        return self.send(messages.ASK, messages.pack_query(asked, queries.query_digest(asked, context_hash)))

    def numbers(self, asked: Query) -> dict[str, dict[str, np.ndarray]]:
        """Group -> its numbers by name."""
        reply = self.ask(asked)
        assert reply.has_content(), reply.error.reason
        rows = messages.unpack_reply(reply.content, numbers=True)
        by_name = queries.split(rows.numbers, queries.layouts_of(asked, self.catalogue))
        return {group: {name: rows_G[g] for name, rows_G in by_name.items()} for g, group in enumerate(rows.groups)}

    @property
    def catalogue(self) -> Catalogue:
        return client.Node.of(self.context).public

    def targets(self, group: str) -> np.ndarray:
        return read_array(self.memory[f"targets {group}"])

    def truth(self, group: str) -> np.ndarray:
        return read_array(self.memory[f"truth {group}"])

    def context_of(self, group: str) -> GroupData:
        """Its training answers."""
        return client.Group(client.Node.of(self.context), group).data

    def prepared(self, catalogue: Catalogue) -> "ClientNode":
        assert self.send(messages.CATALOGUE, messages.pack_catalogue(catalogue)).has_content()
        assert self.send(messages.TARGETS, messages.pack_weights(weights(self.config))).has_content()
        return self


def asked_of(kind: str, catalogue: Catalogue, config: Config, **changes: object) -> Query:
    """What the server would ask for."""
    arrays = {"weights": messages.join_weights(weights(config))}
    if kind == queries.UPDATE:
        return Query(kind, arrays, {"round": 1, "proximal": 0.0})
    if kind == queries.VALIDATION:
        return Query(kind, arrays, {"size": len(SHARES) if config.pluralllm.architecture == "residual" else 1})
    if kind == queries.SCORES:
        return Query(kind, {}, {"size": len(SUMS)})
    if kind in (queries.VOTES, queries.PREDICTIONS, queries.ANSWERS):
        return Query(kind)
    return uniform_request(catalogue, **changes).query()


def weights(config: Config) -> ArrayRecord:
    """A fresh network answers alike whatever question and context; noise on its weights makes them matter.

    The kernel's few numbers, logarithms of which little is much, and the shares of views stay as they are.
    """
    from server_app.predictor.pretraining import initial_weights

    fresh = initial_weights(config).to_torch_state_dict()
    torch.manual_seed(5)
    kept = {name for name in fresh if name.startswith("log_") or name == SHARES_KEY}
    noisy = {name: value + 0.5 * torch.randn_like(value) for name, value in fresh.items() if name not in kept}
    return ArrayRecord({name: noisy.get(name, value) for name, value in fresh.items()})


def uniform_request(catalogue: Catalogue, **changes: object) -> RewardQuery:
    option_QK = catalogue.option_QK
    wanted = RewardQuery(np.arange(len(option_QK)), option_QK / option_QK.sum(1, keepdims=True), ("js",))
    return replace(wanted, **changes)


def one_node(config: Config) -> ClientNode:
    """One that hosts all groups of a simulation."""
    (context,) = simulated(config, 1).values()
    return ClientNode(context)


@functools.cache
def _prepared(**changes: object) -> tuple[Context, Catalogue]:
    from server_app.questions import build_catalogue

    catalogue = build_catalogue(config := config_of(**changes))
    return one_node(config).prepared(catalogue).context, catalogue


def prepared_node(**changes: object) -> tuple[ClientNode, Catalogue]:
    """Such a node with its target tables, and the catalogue."""
    context, catalogue = _prepared(**changes)
    own, survey = copy.deepcopy(context), Path(survey_path(context))
    folder = shutil.copytree(survey.parent, Path(tempfile.mkdtemp()) / "run")
    keep_survey_path(own, str(folder / survey.name))
    return ClientNode(own), catalogue
