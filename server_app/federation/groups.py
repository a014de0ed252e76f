"""One way to ask all groups for numbers; the only place that knows whether replies are plain or summed.

Axis letters: G groups, N numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import asks, messages
from appa_flwr.protocol.asks import Ask, Catalogue, Number
from appa_flwr.protocol.messages import Head
from appa_flwr.secure import masks
from appa_flwr.secure.masks import SEED_BYTES, Task, Words
from server_app.federation import faults
from server_app.federation.ask import Answer, AnswerStore, FloatArray, HalfOpened
from server_app.federation.foreign import listed
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import GroupKeys
from server_app.federation.members import Members

CHECKPOINT_EVERY = 10
"""Iterations from one checkpoint to the next, where nothing asks for more."""

OPENINGS = 2
"""How often a group is asked to open a sum."""

ROUNDING = 1e-9
"""Of a masked number, in units of its largest size."""

log = logging.getLogger("appa.server")


@dataclass(frozen=True, eq=False)
class _Question:
    """A request as the groups are asked it, see `Groups.ask`."""

    ask: Ask
    numbers: Mapping[str, Number]
    world: str
    meanwhile: Callable[[], None] | None
    label: int

    @property
    def request(self) -> str:
        return asks.request_digest(self.ask, self.world)


class Groups(Members):
    """All groups of a run, and their numbers."""

    def __init__(
        self,
        grid: OverlapGrid,
        config: Config,
        *,
        keys: GroupKeys | None = None,
        survey: str = "",
        answers: Path | None = None,
    ) -> None:
        """`survey` is the path of the run's survey, which simulated nodes read; `answers` a folder to keep answers."""
        super().__init__(grid, config, keys=keys, survey=survey)
        self._store = AnswerStore(answers)
        self._catalogue: Catalogue | None = None

    @property
    def checkpoint_every(self) -> int:
        """Iterations from one checkpoint to the next: under sums the groups' histories never go back."""
        return CHECKPOINT_EVERY if self.plain else 1

    def send_catalogue(self, catalogue: Catalogue) -> dict[str, int]:
        """See `Members.send_catalogue`; what the numbers' shapes follow from."""
        self._catalogue = catalogue
        return super().send_catalogue(catalogue)

    def ask(self, ask: Ask, *, meanwhile: Callable[[], None] | None = None, label: int = 0) -> Answer:
        """Ask all groups for numbers, unless the run has had them before.

        Args:
            ask: the request.
            meanwhile: computed here while the groups work.
            label: of the messages, for whoever watches them.

        Raises:
            TooFew: fewer groups answered than `run.min-groups`, or under sums than three.
            HalfOpened: a sum that can no longer be had, or in which a group's part was wrong.
            UserError: an answer cannot be kept, or one that was kept cannot be read.
        """
        assert self._catalogue is not None
        question = _Question(ask, asks.numbers_of(ask, self._catalogue), self._world(), meanwhile, label)
        self.seconds_waited = 0.0
        summed = not self.plain and ask.kind != asks.OWN_SCORES
        key = f"{ask.kind} {question.request} {'summed' if summed else 'plain'}"
        if (kept := self._store.read(ask.kind, key, question.numbers)) is not None:
            if meanwhile is not None:
                meanwhile()
            return kept
        self._errors.clear()
        if not self.simulated:
            self._bring_back()
        if summed and not self.simulated:
            answer = self._sum(question)
        else:
            answer = self._rows(question)
            if summed:
                answer = Answer(answer.groups, answer.numbers, answer.data.sum(axis=0), answer.task)
        self._store.keep(ask.kind, key, answer)
        return answer

    def _world(self) -> str:
        return asks.world_of(
            self.config, *(self._digests.get(kind, "") for kind in (messages.CATALOGUE, messages.TARGETS))
        )

    def _rows(self, question: _Question) -> Answer:
        """Every group's numbers; a group with a fault in its own counts as missing."""
        ask, hosts = question.ask, self._hosts()
        content = messages.pack_ask(ask, Head(self.config.run_name, question.world))
        replies = self._tell(
            messages.ASK,
            dict.fromkeys(hosts.values(), content),
            meanwhile=question.meanwhile,
            label=question.label,
            numbers=(np.float64, 2),
        )
        row_of: dict[str, FloatArray] = {}
        reasons: dict[str, str | None] = dict.fromkeys(self.names, "no answer")
        for node, reply in replies.items():
            row_GN = reply.numbers
            for place, name in self._own(node, reply, hosts):
                if row_GN is None or len(row_GN) != len(reply.groups):
                    reasons[name] = "not a row for each group"
                else:
                    row_of[name] = row_GN[place]
                    reasons[name] = faults.of_row(ask, row_of[name], question.numbers)
        faults.warn_missing({name: reason for name, reason in reasons.items() if reason})
        there = tuple(name for name in self.names if reasons[name] is None)
        faults.warn_alike(ask, {name: row_of[name] for name in there}, question.numbers)
        self._require(there, f"give {ask.kind}")
        return Answer(there, question.numbers, np.stack([row_of[name] for name in there]), question.request)

    def _sum(self, question: _Question) -> Answer:
        """The sum over a cohort that shrinks until all of it have sent masked numbers, which they open then."""
        hosts, online = self._hosts(), self.grid.online()
        cohort = tuple(name for name, node in hosts.items() if node in online)
        while True:
            self._require(cohort, f"add {question.ask.kind}")
            self._round += 1
            task = Task(self.config.run_name, self._round, cohort, question.request, self._roster)
            words = self._masked(question, task, hosts)
            if len(words) == len(cohort):
                break
            silent = listed([name for name in cohort if name not in words])
            log.warning("secure sum of %s: without %s, the others are asked again", question.ask.kind, silent)
            cohort = tuple(name for name in cohort if name in words)
            question = replace(question, meanwhile=None)
        seeds: dict[str, bytes] = {}
        for _ in range(OPENINGS):
            if closed := [name for name in cohort if name not in seeds]:
                contents = {hosts[name]: messages.pack_open(task) for name in closed}
                replies = self._tell(messages.OPEN, contents, label=question.label, seed=bytes)
                came = {name: replies[hosts[name]].fields["seed"] for name in closed if hosts[name] in replies}
                seeds |= {name: seed for name, seed in came.items() if len(seed) == SEED_BYTES}
        if closed := [name for name in cohort if name not in seeds]:
            raise HalfOpened(f"secure sum of {question.ask.kind}: all but {', '.join(closed)} have opened it")
        return Answer(cohort, question.numbers, _total(question.numbers, task, words, seeds), task.digest.hex())

    def _masked(self, question: _Question, task: Task, hosts: Mapping[str, int]) -> dict[str, Words]:
        """The masked numbers of those of a cohort that have sent theirs."""
        content = messages.pack_ask(question.ask, Head(task.run, question.world, task.round, task.cohort))
        replies = self._tell(
            messages.ASK,
            {hosts[name]: content for name in task.cohort},
            meanwhile=question.meanwhile,
            label=question.label,
            numbers=(np.uint64, 1),
        )
        size = (len(asks.scales(question.numbers)),)
        sent = {name: replies[hosts[name]].numbers for name in task.cohort if hosts[name] in replies}
        return {name: words for name, words in sent.items() if words is not None and words.shape == size}


def _total(
    numbers: Mapping[str, Number], task: Task, words: Mapping[str, Words], seeds: Mapping[str, bytes]
) -> FloatArray:
    """The sums (N,) of a task."""
    count, problem = len(task.cohort), ""
    try:
        total_N = masks.total(task, words, seeds) * asks.scales(numbers)
    except UserError as error:
        raise HalfOpened(str(error)) from None
    for name, sums in asks.split(total_N, numbers).items():
        least, most = numbers[name].least, numbers[name].most
        slack = ROUNDING * max(abs(least), abs(most))
        if (sums < count * (least - slack)).any() or (sums > count * (most + slack)).any():
            problem = name
    if problem:
        raise HalfOpened(f"secure sum: a group has sent a wrong part of {problem}, and nobody can tell which")
    return total_N
