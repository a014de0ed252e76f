"""Requests to all groups of a run; the only module that knows whether replies are plain or summed.

Axis letters: G groups, J answers, N numbers.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from flwr.app import ArrayRecord, RecordDict

from appa_flwr.core.arrays import BoolArray, FloatArray
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import asks, messages
from appa_flwr.protocol.asks import Ask, Catalogue, Number, ScoreRequest, Task
from appa_flwr.secure import masks
from appa_flwr.secure.masks import SEED_BYTES, Words
from server_app.federation.ask import LostSum, Replies, keep_replies, kept_replies
from server_app.federation.foreign import listed, plain
from server_app.federation.grid import Meanwhile
from server_app.federation.members import Members

Numbers = Mapping[str, Number]

OPENINGS = 2
"""How often at most a group is asked to open a sum."""

SUM_TOLERANCE = 1e-4  # by which the shares of a vote may miss the sum 1: predictions are computed in float32
ROUNDING = 1e-9
"""Rounding error of a masked number, relative to its largest size."""

log = logging.getLogger("appa.server")


class Groups(Members):
    """All groups of a run, and their numbers."""

    def send_catalogue(self, catalogue: Catalogue) -> dict[str, int]:
        """Send the public questions to all groups; return how many training questions each group has answered.

        Raises TooFew if too few groups take part.
        """
        self._catalogue = catalogue
        self._hand_out(messages.CATALOGUE, messages.pack_catalogue(catalogue), "take the catalogue of questions")
        counts = {name: self._nodes[node].answered.get(name) for name, node in self._hosts().items()}
        return {name: count for name, count in counts.items() if count is not None}

    def send_targets(self, weights: ArrayRecord) -> None:
        """Send the frozen PluralLLM to all groups, which compute their target tables with it; TooFew if too few do."""
        self._hand_out(messages.TARGETS, messages.pack_weights(weights), "write a target table")

    def _hand_out(self, kind: str, content: RecordDict, what: str) -> None:
        self._setup[kind], self._digests[kind] = content, messages.digest(content)
        for node in self._nodes.values():
            node.held = min(node.held, 1 + [*self._setup].index(kind))
        self._prepare()
        self._require(self._hosts(), what)

    def ask(self, ask: Ask, *, meanwhile: Meanwhile = None) -> Replies:
        """Ask all groups for numbers, or read the replies to the same request from the run's folder.

        Raises:
            TooFew: fewer groups answered than `run.min-groups`, or fewer than three under sums.
            LostSum: the sum cannot be opened, or a group's part of it was wrong.
            UserError: the replies cannot be saved, or saved replies cannot be read.
        """
        assert self._catalogue is not None
        setup = (self._digests.get(kind, "") for kind in (messages.CATALOGUE, messages.TARGETS))
        request = asks.request_digest(ask, asks.world_of(self.config, *setup))
        numbers, summed = asks.numbers_of(ask, self._catalogue), not self.plain and ask.kind != asks.OWN_SCORES
        path, key = None, f"{ask.kind} {request} {'summed' if summed else 'plain'}"
        # Updates of PluralLLM are large, and the run's folder holds PluralLLM's weights anyway.
        if self._answers is not None and ask.kind not in (asks.UPDATE, asks.VALIDATION):
            path = self._answers / f"{hashlib.sha256(key.encode()).hexdigest()}.npz"
        self.grid.seconds_waited = 0.0
        if path is not None and path.exists():
            if meanwhile is not None:
                meanwhile()
            return kept_replies(path, numbers)
        for node in self._nodes.values():
            node.error = 0
        before = self._hosts().items()
        self._prepare()
        if back := sorted(name for name, _ in self._hosts().items() - before):
            log.warning("back: %s", ", ".join(back))
        if summed and not self.simulated:
            replies = self._sum(ask, numbers, request, meanwhile)
        else:
            replies = self._rows(ask, numbers, request, meanwhile)
            if summed:
                replies = replace(replies, data=replies.data.sum(axis=0))
        if path is not None:
            keep_replies(path, replies)
        return replies

    def _rows(self, ask: Ask, numbers: Numbers, request: str, meanwhile: Meanwhile) -> Replies:
        """Ask for every group's numbers; a group with faulty numbers counts as missing."""
        assert self._catalogue is not None
        content = messages.pack_ask(ask, Task(self.config.run_name, request=request))
        contents = dict.fromkeys(self._hosts().values(), content)
        replies = self._send(messages.ASK, contents, meanwhile=meanwhile, numbers=(np.float64, 2))
        row_of: dict[str, FloatArray] = {}
        reasons: dict[str, str | None] = dict.fromkeys(self.names, "no answer")
        for node, reply in replies.items():
            assert reply.numbers is not None
            for place, name in self._own(node, reply):
                row_of[name] = reply.numbers[place]
                reasons[name] = _fault(ask, row_of[name], numbers, self._catalogue.option_QK)
        _warn_missing({name: reason for name, reason in reasons.items() if reason})
        row_of = {name: row_of[name] for name in self.names if reasons[name] is None}
        self._require(row_of, f"give {ask.kind}")
        return Replies(tuple(row_of), numbers, np.stack([*row_of.values()]), request)

    def _sum(self, ask: Ask, numbers: Numbers, request: str, meanwhile: Meanwhile) -> Replies:
        """Sum masked numbers over a cohort, which then opens the sum; if groups stay silent, the others send again."""
        hosts, size = self._hosts(), (len(asks.scales(numbers)),)
        cohort = tuple(hosts)
        while True:
            self._require(cohort, f"add {ask.kind}")
            self._round += 1
            task = Task(self.config.run_name, self._round, cohort, request, self._roster)
            content = messages.pack_ask(ask, task)
            names = {hosts[name]: name for name in cohort}
            contents = dict.fromkeys(names, content)
            replies = self._send(messages.ASK, contents, meanwhile=meanwhile, numbers=(np.uint64, 1))
            masked = {names[node]: reply.numbers for node, reply in replies.items()}
            words = {name: words_N for name, words_N in masked.items() if words_N is not None and words_N.shape == size}
            if len(words) == len(cohort):
                break
            silent = listed([name for name in cohort if name not in words])
            log.warning("secure sum of %s: without %s, the others are asked again", ask.kind, silent)
            cohort, meanwhile = tuple(name for name in cohort if name in words), None
        seeds: dict[str, bytes] = {}
        for _ in range(OPENINGS):
            if closed := {hosts[name]: name for name in cohort if name not in seeds}:
                replies = self._send(messages.OPEN, dict.fromkeys(closed, messages.pack_open(task)))
                opened = {closed[node]: reply.fields["seed"] for node, reply in replies.items()}
                seeds |= {name: seed for name, seed in opened.items() if len(seed) == SEED_BYTES}
        if silent := ", ".join(name for name in cohort if name not in seeds):
            raise LostSum(f"secure sum of {ask.kind}: all but {silent} have opened it")
        return Replies(cohort, numbers, _total(numbers, task, words, seeds), task.digest.hex())


def _total(numbers: Numbers, task: Task, words: Mapping[str, Words], seeds: Mapping[str, bytes]) -> FloatArray:
    """Unmask the sums (N,) of a task and check their bounds."""
    count = len(task.cohort)
    try:
        total_N = masks.total(task, words, seeds) * asks.scales(numbers)
    except UserError as error:
        raise LostSum(str(error)) from None
    for name, sums in asks.split(total_N, numbers).items():
        least, most = numbers[name].least, numbers[name].most
        slack = ROUNDING * max(abs(least), abs(most))
        if (sums < count * (least - slack)).any() or (sums > count * (most + slack)).any():
            raise LostSum(f"secure sum: a group has sent a wrong part of {name}, and nobody can tell which")
    return total_N


def _warn_missing(reasons: Mapping[str, str]) -> None:
    """Warn which groups count as missing, in one line per reason."""
    for reason in dict.fromkeys(reasons.values()):
        names = [name for name, own in reasons.items() if own == reason]
        some = "group %s counts" if len(names) == 1 else "groups %s count"
        log.warning(f"{some} as missing: %s", listed(names), plain(reason))


def _fault(ask: Ask, row_N: FloatArray, numbers: Mapping[str, Number], option_QK: BoolArray) -> str | None:
    """Fault in a group's row; None if the row can be used."""
    try:
        own = asks.split(row_N, numbers)
        asks.flatten(own, numbers)
    except ValueError as error:
        return str(error)
    if ask.kind in (asks.VOTES, asks.PREDICTIONS, asks.ANSWERS):
        vote_QK, size_Q = own["votes"], option_QK.sum(1)
        shares_Q = np.isclose(vote_QK.sum(1), 1.0, atol=SUM_TOLERANCE)
        places_QK = np.arange(option_QK.shape[1], 0, -1) - (option_QK.shape[1] - size_Q)[:, None]
        ranks_Q = (-np.sort(-vote_QK) == np.maximum(places_QK, 0)).all(1)
        fits = (ranks_Q.all() and ask.kind == asks.VOTES) or shares_Q.all()
        return None if fits and not vote_QK[~option_QK].any() else "votes that are neither shares nor ranks"
    if ask.kind != asks.REWARDS:
        return None
    request = ScoreRequest.of(ask)
    for metric, side in request.keys:
        reward_J, known_J = own[f"{metric} {side} reward"], own[f"{metric} {side} known"]
        if (reward_J[~request.readable_J] > 0).any():
            return f"{metric} rewards above 0 for answers that nobody can read"
        if not np.isin(known_J, (0.0, 1.0)).all() or (side == asks.TARGET_SIDE and not known_J.all()):
            return f"{metric} rewards that are not known"
    return None
