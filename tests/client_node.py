"""A group's node as a test asks it: its real ClientApp with Flower's own messages and contexts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from in_process import cross, request, simulated
from small import SMALL_PREDICTOR, VOTES

from appa_flwr.config import Config
from appa_flwr.protocol import wire
from appa_flwr.survey.store import write_split
from appa_flwr.survey.types import Survey
from client_app import state, survey_answers
from client_app.main import app
from pluralllm.residual import SHARES_KEY
from server_app.federation.catalogue import build_catalogue
from server_app.predictor.pretraining import initial_weights

SMALL = {
    "data.num-questions": 24,
    "data.num-groups": 4,
    **SMALL_PREDICTOR,
    **VOTES,
    "pluralllm.local-steps": 1,
}
TRAIN = "train"
ACTIONS = (wire.ROLL_CALL, wire.CATALOGUE, TRAIN, wire.TARGETS, wire.VOTE, wire.SCORE)


def config_of(**changes: object) -> Config:
    return Config.load({**SMALL, **{key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}})


class Node:
    """One node: asks its ClientApp and keeps its context, replies crossed as bytes."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.config = survey_answers.context_config(context)

    def ask(self, kind: str, content: RecordDict | None = None) -> Message:
        return cross(app(request(kind, content, node=self.context.node_id), self.context)).message

    def groups(self, kind: str, content: RecordDict | None = None) -> dict[str, wire.GroupReply]:
        reply = self.ask(kind, content)
        assert reply.has_content(), reply.error.reason
        return {group.group: group for group in wire.unpack_replies(reply.content)}

    def content(self, kind: str, catalogue: wire.Catalogue) -> RecordDict:
        """What the server would send with this action."""
        if kind == wire.CATALOGUE:
            return wire.pack_catalogue(catalogue)
        if kind == TRAIN:
            config = ConfigRecord({"server-round": 1})
            return RecordDict({"arrays": wire.join_weights(weights(self.config)), "config": config})
        if kind == wire.TARGETS:
            return wire.pack_weights(weights(self.config))
        if kind == wire.SCORE:
            return wire.pack_score_request(uniform_request(catalogue))
        return RecordDict()

    def owned(self, node_config: Mapping[str, str]) -> Node:
        """The same node, deployed, with what it remembers."""
        kept = dict(self.context.state)
        self.context.node_config, self.context.state = dict(node_config), RecordDict()
        if node_config.keys() & {"ledger", "data"}:
            memory = state.memory_of(self.context)
            for key, record in kept.items():
                memory.keep(key, record)
        return self

    def prepared(self, catalogue: wire.Catalogue) -> Node:
        for kind in (wire.CATALOGUE, wire.TARGETS):
            assert self.ask(kind, self.content(kind, catalogue)).has_content()
        return self


def weights(config: Config) -> ArrayRecord:
    """A fresh network answers alike whatever question and context; noise on its weights makes them matter.

    The kernel's few numbers, logarithms of which little is much, and the shares of views stay as they are.
    """
    fresh = initial_weights(config).to_torch_state_dict()
    torch.manual_seed(5)
    kept = {name for name in fresh if name.startswith("log_") or name == SHARES_KEY}
    noisy = {name: value + 0.5 * torch.randn_like(value) for name, value in fresh.items() if name not in kept}
    return ArrayRecord({name: noisy.get(name, value) for name, value in fresh.items()})


def uniform_request(catalogue: wire.Catalogue, **changes: object) -> wire.ScoreRequest:
    option_QK = catalogue.option_QK
    wanted = wire.ScoreRequest(
        np.arange(len(option_QK)), option_QK / option_QK.sum(1, keepdims=True), ("js",), (wire.TARGET_SIDE,)
    )
    return replace(wanted, **changes)


def one_node(config: Config) -> Node:
    """One that hosts all groups of a simulation."""
    (context,) = simulated(config, 1).values()
    return Node(context)


@functools.cache
def _prepared(**changes: object) -> tuple[Context, wire.Catalogue]:
    config = config_of(**changes)
    catalogue = build_catalogue(config)
    return one_node(config).prepared(catalogue).context, catalogue


def prepared_node(**changes: object) -> tuple[Node, wire.Catalogue]:
    """Such a node with its target tables, and the catalogue."""
    context, catalogue = _prepared(**changes)
    return Node(copy.deepcopy(context)), catalogue


def home_files(survey: Survey, folder: Path, config: Config) -> tuple[Config, Mapping[str, Path]]:
    """The survey split into a public question file and one private file a group, and the run that uses them."""
    written = write_split(survey, folder)
    keys = {"survey": str(written.questions), "groups": "; ".join(written.groups)}  # as `appa deploy` has them
    return Config.load({**config.flat(), **keys}), written.groups
