"""A group's node as a test asks it: its real ClientApp with Flower's own messages and contexts."""

import copy
import functools
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from in_process import at_home, cross, deployed, request, simulated
from small import SMALLEST, keys_of

from appa_flwr.config import Config
from appa_flwr.owner.ledger import Ledger
from appa_flwr.protocol import messages, queries
from appa_flwr.protocol.queries import Catalogue, Query, RewardQuery
from appa_flwr.survey.generate import generate
from client_app.main import app
from client_app.memory import Memory, keep_survey_path, memory_of, read_array, survey_path
from client_app.node import Group, Node
from pluralllm.data import GroupData
from pluralllm.residual import SHARES, SHARES_KEY
from pluralllm.scores import SUMS
from server_app.predictor.pretraining import initial_weights
from server_app.questions import build_catalogue


def config_of(**changes: object) -> Config:
    return Config.load({**SMALLEST, **keys_of(changes)})


class ClientNode:
    """One node: asks its ClientApp and keeps its context, replies crossed as bytes."""

    def __init__(self, context: Context) -> None:
        self.context = context

    @property
    def config(self) -> Config:
        return Node.of(self.context).config

    @property
    def memory(self) -> Memory:
        return memory_of(self.context)

    def send(self, kind: str, content: RecordDict | None = None) -> Message:
        return cross(app(request(kind, content, node=self.context.node_id), self.context)).message

    def hello(self, survey: str = "") -> messages.Reply:
        reply = self.send(messages.HELLO, messages.pack_hello(survey))
        return messages.unpack_reply(reply.content)

    def ask(self, asked: Query) -> Message:
        """Ask for numbers, in the context that the node knows."""
        context_hash = Node.of(self.context).context_hash if "catalogue" in self.memory else ""
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
        return Node.of(self.context).public

    def targets(self, group: str) -> np.ndarray:
        return read_array(self.memory[f"targets {group}"])

    def truth(self, group: str) -> np.ndarray:
        return read_array(self.memory[f"truth {group}"])

    def context_of(self, group: str) -> GroupData:
        """Its training answers."""
        return Group(Node.of(self.context), group).data

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
    config = config_of(**changes)
    catalogue = build_catalogue(config)
    return one_node(config).prepared(catalogue).context, catalogue


def prepared_node(**changes: object) -> tuple[ClientNode, Catalogue]:
    """Such a node with its target tables, and the catalogue."""
    context, catalogue = _prepared(**changes)
    own, survey = copy.deepcopy(context), Path(survey_path(context))
    folder = shutil.copytree(survey.parent, Path(tempfile.mkdtemp()) / "run")
    keep_survey_path(own, str(folder / survey.name))
    return ClientNode(own), catalogue


CATALOGUES: dict[str, Catalogue] = {}


def catalogue_once(config: Config) -> Catalogue:
    """The catalogue of a run, made once for the same public questions: most of a node's test would wait for it."""
    key = Path(config.survey).read_text()
    if key not in CATALOGUES:
        CATALOGUES[key] = build_catalogue(config)
    return CATALOGUES[key]


SURVEY = generate(num_questions=160, num_groups=2, seed=3)
GROUP = SURVEY.groups[0]


class Owned(ClientNode):
    """A deployed node of the first group, in its first run."""

    def __init__(self, folder, owner_policy="", *, survey=SURVEY, **changes):
        config, files = at_home(survey, folder, config_of())
        config = Config.load({**config.flat(), **changes})
        super().__init__(next(iter(deployed(config, {GROUP: files[GROUP]}, owner_policy=owner_policy).values())))
        self.ledger = Ledger(files[GROUP].with_suffix(".ledger.sqlite"))
        self.public = catalogue_once(config)
        self.answered = [q.question_id in SURVEY.answers[GROUP] for q in self.public.questions]

    def run(self, number):
        self.context = Context(number, 2, self.context.node_config, RecordDict(), self.context.run_config)

    def cut(self, *, training, held_out):
        """A catalogue with so many of the answered questions, and all that nobody answered."""
        train_Q, kept = self.public.train_Q, ~np.array(self.answered)
        for part_Q, count in ((train_Q, training), (~train_Q, held_out)):
            kept[np.flatnonzero(part_Q & self.answered)[:count]] = True
        rows = np.flatnonzero(kept)
        questions = tuple(self.public.questions[row] for row in rows)
        public = self.public
        names = ("train_Q", "option_QK", "embedding_QKE", "unanswered_Q")
        return Catalogue(questions=questions, **{name: getattr(public, name)[rows] for name in names})

    def take(self, catalogue):
        """Code of the refusal; 0 for an answer."""
        return refused(self.send(messages.CATALOGUE, messages.pack_catalogue(catalogue)))

    def ready(self, **counts):
        """The node with its target tables."""
        assert self.take(self.cut(**counts)) == 0
        assert self.send(messages.TARGETS, messages.pack_weights(weights(self.config))).has_content()
        return self

    def code(self, kind, **changes):
        return refused(self.ask(asked_of(kind, self.catalogue, self.config, **changes)))


def refused(reply: Message) -> int:
    """Code of a refusal; 0 for an answer."""
    return reply.error.code if reply.has_error() else 0
