"""Requests for numbers to all groups of a run.

Axis letters: G groups, J answers, N numbers.
"""

import logging
from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord, RecordDict

from appa_flwr.core.arrays import BoolArray, FloatArray
from appa_flwr.protocol import asks, messages
from appa_flwr.protocol.asks import Ask, Catalogue, Number, ScoreRequest
from server_app.federation.ask import Replies, keep_replies, kept_replies
from server_app.federation.foreign import listed, plain
from server_app.federation.grid import Meanwhile
from server_app.federation.members import Members

Numbers = Mapping[str, Number]

SUM_TOLERANCE = 1e-4  # by which the shares of a vote may miss the sum 1: predictions are computed in float32

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
            TooFew: fewer groups answered than `run.min-groups`.
            UserError: the replies cannot be saved, or saved replies cannot be read.
        """
        assert self._catalogue is not None
        setup = (self._digests.get(kind, "") for kind in (messages.CATALOGUE, messages.TARGETS))
        request = asks.request_digest(ask, asks.world_of(self.config, *setup))
        numbers, path = asks.numbers_of(ask, self._catalogue), None
        # Updates of PluralLLM are large, and the run's folder holds PluralLLM's weights anyway.
        if self._answers is not None and ask.kind not in (asks.UPDATE, asks.VALIDATION):
            path = self._answers / f"{request}.npz"
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
        replies = self._rows(ask, numbers, request, meanwhile)
        if path is not None:
            keep_replies(path, replies)
        return replies

    def _rows(self, ask: Ask, numbers: Numbers, request: str, meanwhile: Meanwhile) -> Replies:
        """Ask for every group's numbers; a group with faulty numbers counts as missing."""
        assert self._catalogue is not None
        contents = dict.fromkeys(self._hosts().values(), messages.pack_ask(ask, request))
        replies = self._send(messages.ASK, contents, meanwhile=meanwhile, numbers=True)
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
        return Replies(tuple(row_of), numbers, np.stack([*row_of.values()]))


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
