"""A federation in this process, whose nodes answer immediately."""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.logger import FLOWER_LOGGER as logger
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from appa_flwr.config import Config
from appa_flwr.protocol.asks import Ask, Catalogue, Number, flatten
from appa_flwr.secure import roster
from appa_flwr.survey import store
from appa_flwr.survey.types import Question, Survey
from client_app.main import app
from pluralllm.embedding import embed_questions
from server_app.federation.ask import Replies
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Groups


class LocalGrid(OverlapGrid):
    """A grid whose replies are a function of the message; None means that the node does not answer."""

    def __init__(self, nodes: Collection[int], answer: Callable[[Message], Message | None]) -> None:
        super().__init__(cast(Grid, None))
        self._nodes, self._answer = nodes, answer

    def online(self) -> frozenset[int]:
        """See OverlapGrid."""
        return frozenset(self._nodes)

    def send(self, kind: str, contents: Mapping[int, RecordDict], **_: object) -> dict[int, RecordDict | Error]:
        """See OverlapGrid."""
        replies = {node: self._answer(Message(content, node, kind)) for node, content in contents.items()}
        return {node: reply.error if reply.has_error() else reply.content for node, reply in replies.items() if reply}


class LocalGroups(Groups):
    """Groups whose numbers are a function of the request and the group's name."""

    def __init__(self, config: Config, names: Sequence[str], numbers: Callable[[Ask, str], Mapping[str, Any]]) -> None:
        super().__init__(LocalGrid((), lambda _: None), config)
        self.names, self._numbers = tuple(names), numbers

    def ask(self, ask: Ask, **_: object) -> Replies:
        """See `Groups.ask`."""
        rows = [self._numbers(ask, name) for name in self.names]
        shapes = {name: Number(np.shape(value), -np.inf, np.inf) for name, value in rows[0].items()}
        return Replies(self.names, shapes, np.stack([flatten(row, shapes) for row in rows]), "")


class Deployed:
    """Groups of a survey as deployed nodes in a folder, each with the real ClientApp, and the server's view of them."""

    groups: Groups  # of the current run
    public: Catalogue  # of the current run
    silent: set[int]  # nodes that do not answer, by the index of their group in the survey

    def __init__(self, survey: Survey, folder: Path, policy: Mapping[str, object], config: Config) -> None:
        """Write every group's data, and an owner's policy with these keys; for secure sums also keys and a roster."""
        self.config, self.silent = config, set()  # the config of the next runs
        self._names, self._run, self._contexts = survey.groups, 0, dict[int, Context]()
        files = {name: folder / slug / "group.jsonl" for name, slug in store.slugs(survey.groups).items()}
        for name, path in files.items():
            path.parent.mkdir(parents=True)
            store.write(survey, path, groups=[name])
        if config.run.sums == "secure":
            keys = {name: roster.own_key(path.with_suffix(roster.KEY_SUFFIX)) for name, path in files.items()}
            text = roster.roster_file({name: roster.public_key(key) for name, key in keys.items()})
            policy = {**policy, "roster": roster.read_roster(text.encode()).sha256}
            for path in files.values():
                path.with_name(roster.ROSTER_FILE).write_text(text)
        owner = folder / "policy.toml"
        owner.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in policy.items()))
        self._node_configs = [{"group": name, "data": str(files[name]), "policy": str(owner)} for name in self._names]

    def begin(self, public: Catalogue, weights: ArrayRecord) -> None:
        """Begin a run with this catalogue and these weights of PluralLLM; raises `UserError` if the groups refuse."""
        self._run += 1
        config = Config.load({**self.config.flat(), "run-name": f"run-{self._run}"})
        self._contexts = {
            node: Context(self._run, node, {**own}, RecordDict(), {**config.flat()})
            for node, own in enumerate(self._node_configs)
        }
        self.public = public
        self.groups = Groups(LocalGrid(self._contexts, self._reply), config)
        self.groups.gather(self._names, patience=0.0)
        self.groups.send_catalogue(public)
        self.groups.send_targets(weights)

    def _reply(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        return None if node in self.silent else app(message, self._contexts[node])


def catalogue(questions: Sequence[Question], *, held_out: int) -> Catalogue:
    """Make a catalogue in which the first `held_out` questions are held out and the others train."""
    train_Q = np.arange(len(questions)) >= held_out
    return Catalogue(tuple(questions), train_Q, *embed_questions(questions), unanswered_Q=np.zeros_like(train_Q))


@contextmanager
def flower_task() -> Iterator[None]:
    """Set Flower's process identity to a running ServerApp's, which `Message` requires; hide Flower's info logs."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with patch.multiple(TaskIdentity, _run_id=1, _node_id=SUPERLINK_NODE_ID, _task_id=1):
            yield
    finally:
        logger.setLevel(level)
