"""Groups behind their real ClientApp that give nothing but secure sums, and ways for them to be silent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from flwr.app import Context, Message
from in_process import FEW, InProcessGrid, SimulatedGrid, deployed, simulated
from small import AS_OWNERS_ASK, SMALL_PREDICTOR, VOTES

from appa_flwr.config import Config
from appa_flwr.secure.primitives import public_key
from appa_flwr.secure.roster import KEY_SUFFIX, ROSTER_FILE, own_key, read_roster, roster_file
from server_app.federation.catalogue import build_catalogue
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Federation
from server_app.federation.secure_sums import SecureSums
from server_app.predictor.pretraining import initial_weights

SMALL_SUMS = {
    "run.sums": "secure",
    "data.num-groups": 6,
    "data.num-questions": 24,
    "data.disagreement": 3.0,
    **SMALL_PREDICTOR,
    "pluralllm.rounds": 2,
    **AS_OWNERS_ASK,
    **VOTES,
    "pluralllm.local-steps": 4,
    "run-name": "r",
}


class Silencing(SimulatedGrid):
    """A simulation in which some nodes do not answer some kinds of messages."""

    def __init__(self, contexts: Mapping[int, Context]) -> None:
        super().__init__(contexts)
        self.silent: dict[str, set[int]] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """An empty key is a message that was not taken, for which nobody waits."""
        keys: list[str] = []
        for message in messages:
            silent = message.metadata.dst_node_id in self.silent.get(message.metadata.message_type, ())
            keys += [""] if silent else super().push_messages([message])
        return keys


class Sums:
    """A simulated federation with target tables, ready for sums; a node a group."""

    def __init__(self, **changes: object) -> None:
        self.config = Config.load({**SMALL_SUMS, **changes})
        self.grid = Silencing(simulated(self.config, self.config.data.num_groups))
        self.federation = Federation(OverlapGrid(self.grid), min_groups=2, timeout=5.0)
        self.federation.gather((), patience=0.0)
        self.catalogue = build_catalogue(self.config)
        self.federation.send_catalogue(self.catalogue)
        self.secure = self.federation.secure = SecureSums(self.federation, self.config)
        self.secure.start()

    def targets(self) -> None:
        """Give the groups tables by an untrained PluralLLM."""
        self.federation.send_targets(initial_weights(self.config), fault=lambda reply: None)

    def set(self, **keys: object) -> None:
        """Change the run's config."""
        self.config = self.secure._config = Config.load({**self.config.flat(), **keys})
        for context in self.grid.contexts.values():
            context.run_config = dict(self.config.flat())

    def node(self, name: str) -> int:
        """Where a group is."""
        (node,) = self.federation.nodes_of([name])
        return node

    def answers(self, number: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Questions and answers, the last of which nobody can read."""
        question_J = rng.choice(np.flatnonzero(self.catalogue.train_Q), number)
        option_JK = self.catalogue.option_QK[question_J]
        answer_JK = np.where(option_JK, rng.random(option_JK.shape), 0.0)
        answer_JK /= answer_JK.sum(axis=1, keepdims=True)
        answer_JK[-1] = np.nan
        return question_J, answer_JK


def pinned(config: Config, files: Mapping[str, Path], *, policy: str = FEW) -> InProcessGrid:
    """Deployed nodes whose owners have pinned the roster of them all; `policy` is the rest of what they decide."""
    key_of = {name: public_key(own_key(path.with_suffix(KEY_SUFFIX))) for name, path in files.items()}
    roster = roster_file(key_of).encode()
    for path in files.values():
        path.with_name(ROSTER_FILE).write_bytes(roster)
    sha256 = read_roster(roster).sha256
    return InProcessGrid(deployed(config, files, owner_policy=f'{policy}\nroster = "{sha256}"\n'))
