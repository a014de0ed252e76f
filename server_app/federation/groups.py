"""Requests for numbers to all groups of a run.

Axis letters: G groups, J answers, N numbers.
"""

import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from appa_flwr.config import Config
from appa_flwr.core.arrays import FloatArray
from appa_flwr.core.text import NAMES
from appa_flwr.protocol import messages, queries
from appa_flwr.protocol.queries import Catalogue, Layout, Query
from server_app import log
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import GroupKeys
from server_app.federation.members import Members
from server_app.federation.replies import Replies, keep_replies, kept_replies
from server_app.federation.sanitize import listed, plain


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
        self.grid, self.config, self.folder = grid, config, replies
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

    def ask(self, query: Query, *, history: bool = False) -> Replies:
        """Send a request for numbers and read the replies; raises the errors of `PendingQuery.read`."""
        pending = self.pending(query, history=history)
        timeout = self.config.run.reply_timeout
        return pending.read(self.grid.send_and_receive(pending.messages, timeout=timeout))

    def pending(self, query: Query, *, history: bool = False, passing: str = "") -> "PendingQuery":
        """Prepare a request to all groups; first sets up nodes that joined late or have restarted, which may wait.

        Only groups without a stored reply are asked, and none if other numbers rest on the stored replies (`history`).
        Replies are stored for the whole run, or in the folder `passing` until it is forgotten. Raises a UserError if
        stored replies cannot be read.
        """
        assert self._catalogue is not None
        self.grid.seconds_waited = 0.0
        self.grid.traffic.clear()
        digest = queries.query_digest(query, queries.context_hash(self.config, *self._digests.values()))
        path = None
        # Updates of PluralLLM are large, and the run's folder holds PluralLLM's weights anyway.
        if self.folder is not None and query.kind not in (queries.UPDATE, queries.VALIDATION):
            path = self.folder / passing / f"{digest}.npz"
        kept = kept_replies(path, queries.layouts_of(query, self._catalogue))
        pending = PendingQuery(self.members, query, messages.pack_query(query, digest), self._catalogue, path, kept)
        missing = set(self.names) - set(kept.groups)
        if missing and not (kept.groups and history):
            before = self.members.hosts().items()
            self.members.prepare()
            if back := sorted(name for name, _ in self.members.hosts().items() - before):
                log.warning("back: %s", listed(back, NAMES))
            pending.messages = pending.to(missing)
        return pending

    def forget(self, passing: str) -> None:
        """Remove a rule's `passing` replies: of PPO's iterations up to a checkpoint, which no resumed run repeats."""
        if self.folder is not None:
            shutil.rmtree(self.folder / passing, ignore_errors=True)


@dataclass(eq=False)
class PendingQuery:
    """A request for numbers to all groups."""

    members: Members
    query: Query
    content: RecordDict
    catalogue: Catalogue
    path: Path | None  # file that stores the replies; None = they are not stored
    kept: Replies  # stored replies, perhaps of some groups only
    messages: list[Message] = field(default_factory=list)  # to each node that hosts groups without a stored reply

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """The arrays of a group's numbers, by name."""
        return self.kept.numbers

    def to(self, groups: Collection[str]) -> list[Message]:
        """Messages to the nodes that host these groups, as far as they can be asked now."""
        nodes = {node for name, node in self.members.hosts().items() if name in groups}
        numbers = sum(math.prod(layout.shape) for layout in self.layouts.values())
        return self.members.messages(messages.ASK, self.content, nodes, numbers=numbers)

    def read(self, replies: Iterable[Message]) -> Replies:
        """Read the groups' numbers, and keep them with those that were stored.

        Raises:
            TooFew: see `rows`.
            UserError: the replies cannot be saved.
        """
        if self.kept.groups and not self.messages:
            return self.kept
        old = dict(zip(self.kept.groups, self.kept.data_GN, strict=True))
        row_of = old | dict(self.rows(replies))
        groups = tuple(name for name in self.members.names if name in row_of)
        read = Replies(groups, self.layouts, np.stack([row_of[name] for name in groups]))
        if self.path is not None and len(row_of) > len(old):
            keep_replies(self.path, read)
        return read

    def rows(self, replies: Iterable[Message]) -> Iterator[tuple[str, FloatArray]]:
        """Groups and their numbers (N,) as they arrive; a group with faulty numbers counts as missing.

        Where too few groups answer, the others are asked again for `run.reply-timeout` seconds.

        Raises:
            TooFew: fewer groups answered than `run.min-groups`.
        """
        members = self.members
        missing = {name: "no answer" for name in members.names if name not in self.kept.groups}
        yield from self._taken(replies, missing)
        for left in members.pauses(missing, f"give {self.query.kind}"):
            members.prepare(again=True)
            again = self.to(missing.keys() - members.refusing(missing))
            yield from self._taken(members.grid.send_and_receive(again, timeout=left), missing)
        for reason in dict.fromkeys(missing.values()):  # one line for each
            names = [name for name in missing if missing[name] == reason]
            some = "group %s counts" if len(names) == 1 else "groups %s count"
            log.warning(f"{some} as missing: %s", listed(names), plain(reason))
        members.require([name for name in members.names if name not in missing], f"give {self.query.kind}")

    def _taken(self, replies: Iterable[Message], missing: dict[str, str]) -> Iterator[tuple[str, FloatArray]]:
        """Rows of groups that were `missing`, which are removed from there; or else the fault is noted."""
        for node, reply in self.members.read(replies):
            assert reply.numbers is not None
            for place, name in self.members.own(node, reply):
                fault = queries.fault(self.query, reply.numbers[place], self.catalogue, task=self.members.config.task)
                if name in missing and fault is None:
                    del missing[name]
                    yield name, reply.numbers[place]
                elif name in missing and fault is not None:
                    missing[name] = fault
