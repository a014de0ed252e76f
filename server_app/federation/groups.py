"""Requests for numbers to all groups of a run.

Axis letters: G groups, J answers, N numbers.
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from appa_flwr.config import Config
from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.text import NAMES
from appa_flwr.protocol import asks, messages
from appa_flwr.protocol.asks import Ask, Catalogue
from server_app.federation.foreign import listed, plain
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import GroupKeys
from server_app.federation.members import Members
from server_app.federation.replies import Replies, keep_replies, kept_replies

log = logging.getLogger("appa.server")


class Groups:
    """All groups of a run, and their numbers; `replies` is the folder of stored replies."""

    def __init__(
        self,
        grid: OverlapGrid,
        config: Config,
        *,
        keys: GroupKeys | None = None,
        survey: str = "",
        replies: Path | None = None,
    ) -> None:
        self.grid, self.config, self._folder = grid, config, replies
        self.members = Members(grid, config, keys=keys, survey=survey)
        self._catalogue: Catalogue | None = None
        self._digests = {messages.CATALOGUE: "", messages.TARGETS: ""}  # of the setup messages

    @property
    def names(self) -> tuple[str, ...]:
        """The groups of the run, whether or not they have joined."""
        return self.members.names

    def send_catalogue(self, catalogue: Catalogue) -> dict[str, int]:
        """Send the public questions to all groups; return how many training questions each group has answered.

        Raises TooFew if too few groups take part.
        """
        self._catalogue, self.members.num_questions = catalogue, len(catalogue.questions)
        self._hand_out(messages.CATALOGUE, messages.pack_catalogue(catalogue), "take the catalogue of questions")
        return self.members.answered()

    def send_targets(self, weights: ArrayRecord) -> None:
        """Send the frozen PluralLLM to all groups, which compute their target tables with it; TooFew if too few do."""
        self._hand_out(messages.TARGETS, messages.pack_weights(weights), "write a target table")

    def _hand_out(self, kind: str, content: RecordDict, what: str) -> None:
        self._digests[kind] = messages.digest(content)
        self.members.setup[kind] = content
        self.members.prepare()
        self.members.require(self.members.hosts(), what)

    def ask(self, ask: Ask) -> Replies:
        """Send a request for numbers and read the replies; raises the errors of `Request.read`."""
        request = self.request(ask)
        timeout = self.config.run.reply_timeout
        return request.read(self.grid.send_and_receive(request.messages, timeout=timeout))

    def request(self, ask: Ask) -> "Request":
        """Prepare a request to all groups; first sets up nodes that joined late or have restarted, which may wait."""
        assert self._catalogue is not None
        self.grid.seconds_waited = 0.0
        self.grid.traffic.clear()
        digest = asks.request_digest(ask, asks.world_of(self.config, *self._digests.values()))
        path = None
        # Updates of PluralLLM are large, and the run's folder holds PluralLLM's weights anyway.
        if self._folder is not None and ask.kind not in (asks.UPDATE, asks.VALIDATION):
            path = self._folder / f"{digest}.npz"
        if path is not None and path.exists():
            return Request([], self.members, ask, self._catalogue, path)
        before = self.members.hosts().items()
        self.members.prepare()
        if back := sorted(name for name, _ in self.members.hosts().items() - before):
            log.warning("back: %s", listed(back, NAMES))
        nodes = {*self.members.hosts().values()}
        numbers = sum(math.prod(layout.shape) for layout in asks.layouts_of(ask, self._catalogue).values())
        sent = self.members.messages(messages.ASK, messages.pack_ask(ask, digest), nodes, numbers=numbers)
        return Request(sent, self.members, ask, self._catalogue, path)


@dataclass(frozen=True, eq=False)
class Request:
    """A request for numbers to all groups."""

    messages: list[Message]  # to each node that hosts groups; none if the replies are stored already
    members: Members
    ask: Ask
    catalogue: Catalogue
    path: Path | None  # file that stores the replies; None = they are not stored

    def read(self, replies: Iterable[Message]) -> Replies:
        """Read the groups' numbers, and keep them; a group with faulty numbers counts as missing.

        Raises:
            TooFew: fewer groups answered than `run.min-groups`.
            UserError: the replies cannot be saved, or saved replies cannot be read.
        """
        layouts, names = asks.layouts_of(self.ask, self.catalogue), self.members.names
        if self.path is not None and self.path.exists():
            return kept_replies(self.path, layouts)
        row_of: dict[str, FloatArray] = {}
        reasons: dict[str, str | None] = dict.fromkeys(names, "no answer")
        for node, reply in self.members.read(replies):
            assert reply.numbers is not None
            for place, name in self.members.own(node, reply):
                row_of[name] = reply.numbers[place]
                reasons[name] = asks.fault(self.ask, row_of[name], self.catalogue, task=self.members.config.task)
        for reason in filter(None, dict.fromkeys(reasons.values())):  # one line for each
            missing = [name for name in names if reasons[name] == reason]
            some = "group %s counts" if len(missing) == 1 else "groups %s count"
            log.warning(f"{some} as missing: %s", listed(missing), plain(reason))
        row_of = {name: row_of[name] for name in names if reasons[name] is None}
        self.members.require(row_of, f"give {self.ask.kind}")
        read = Replies(tuple(row_of), layouts, np.stack([*row_of.values()]))
        if self.path is not None:
            keep_replies(self.path, read)
        return read
