"""Requests for numbers to all groups of a run.

Axis letters: G groups, J answers, N numbers.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from appa_flwr.config import Config
from appa_flwr.core.arrays import FloatArray
from appa_flwr.protocol import asks, messages
from appa_flwr.protocol.asks import Ask, Catalogue
from server_app.federation.foreign import listed, plain
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import GroupKeys
from server_app.federation.members import Members
from server_app.federation.replies import Replies, keep_replies, kept_replies

log = logging.getLogger("appa.server")


class Groups:
    """All groups of a run, and their numbers; `replies` is the folder of stored replies.

    Attributes:
        grid: sends messages and waits for replies.
        config: the run's config.
        members: who hosts the groups.
    """

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
        self._catalogue = catalogue
        self._hand_out(messages.CATALOGUE, messages.pack_catalogue(catalogue), "take the catalogue of questions")
        return self.members.answered()

    def send_targets(self, weights: ArrayRecord) -> None:
        """Send the frozen PluralLLM to all groups, which compute their target tables with it; TooFew if too few do."""
        self._hand_out(messages.TARGETS, messages.pack_weights(weights), "write a target table")

    def _hand_out(self, kind: str, content: RecordDict, what: str) -> None:
        self._digests[kind] = messages.digest(content)
        self.members.hand_out(kind, content)
        self.members.require(self.members.hosts(), what)

    def ask(self, ask: Ask) -> Replies:
        """Send a request for numbers and read the replies; raises the errors of `Request.read`."""
        request = self.request(ask)
        timeout = self.config.run.reply_timeout
        return request.read(self.grid.send_and_receive(request.messages, timeout=timeout))

    def request(self, ask: Ask) -> "Request":
        """Set up nodes that joined late or have restarted, and prepare a request to all groups."""
        assert self._catalogue is not None
        self.grid.seconds_waited = 0.0
        digest = asks.request_digest(ask, asks.world_of(self.config, *self._digests.values()))
        path = None
        # Updates of PluralLLM are large, and the run's folder holds PluralLLM's weights anyway.
        if self._folder is not None and ask.kind not in (asks.UPDATE, asks.VALIDATION):
            path = self._folder / f"{digest}.npz"
        return Request(self.members, ask, self._catalogue, digest=digest, path=path)


class Request:
    """A request for numbers to all groups, whose replies are kept in the file `path`, if any.

    Attributes:
        messages: a message to each node that hosts groups; none if the file has the replies already.
    """

    def __init__(self, members: Members, ask: Ask, catalogue: Catalogue, *, digest: str, path: Path | None) -> None:
        self._members, self._ask, self._catalogue, self._path = members, ask, catalogue, path
        self._numbers = asks.layouts_of(ask, catalogue)
        self._kept = path is not None and path.exists()
        self.messages: list[Message] = []
        if not self._kept:
            before = members.hosts().items()
            members.prepare()
            if back := sorted(name for name, _ in members.hosts().items() - before):
                log.warning("back: %s", ", ".join(back))
            content = messages.pack_ask(ask, digest)
            self.messages = members.messages(messages.ASK, content, {*members.hosts().values()})

    def read(self, replies: Iterable[Message]) -> Replies:
        """Read the groups' numbers, and keep them; a group with faulty numbers counts as missing.

        Raises:
            TooFew: fewer groups answered than `run.min-groups`.
            UserError: the replies cannot be saved, or saved replies cannot be read.
        """
        if self._kept and self._path is not None:
            return kept_replies(self._path, self._numbers)
        names = self._members.names
        row_of: dict[str, FloatArray] = {}
        reasons: dict[str, str | None] = dict.fromkeys(names, "no answer")
        for node, reply in self._members.read(replies):
            assert reply.numbers is not None
            for place, name in self._members.own(node, reply):
                row_of[name] = reply.numbers[place]
                reasons[name] = asks.fault(self._ask, row_of[name], self._catalogue)
        _warn_missing({name: reason for name, reason in reasons.items() if reason})
        row_of = {name: row_of[name] for name in names if reasons[name] is None}
        self._members.require(row_of, f"give {self._ask.kind}")
        read = Replies(tuple(row_of), self._numbers, np.stack([*row_of.values()]))
        if self._path is not None:
            keep_replies(self._path, read)
        return read


def _warn_missing(reasons: Mapping[str, str]) -> None:
    """Warn which groups count as missing, in one line per reason."""
    for reason in dict.fromkeys(reasons.values()):
        names = [name for name, own in reasons.items() if own == reason]
        some = "group %s counts" if len(names) == 1 else "groups %s count"
        log.warning(f"{some} as missing: %s", listed(names), plain(reason))
