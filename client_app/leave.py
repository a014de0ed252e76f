"""The single exit for a group's replies: only fields of the protocol leave, and only as the owner's policy allows.

Axis letters: G groups, N numbers.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flwr.app import Context, Error, Message, RecordDict

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import escape_output
from appa_flwr.owner.ledger import Release, ledger_of
from appa_flwr.protocol import asks, messages, refusals
from appa_flwr.protocol.asks import Ask
from appa_flwr.protocol.refusals import FAILED, Refused
from client_app.numbers import KINDS
from client_app.party import Party

log = logging.getLogger("appa.client")


@dataclass(frozen=True, eq=False)
class Leaving:
    """A reply before it leaves: its content, and the words of `may-leave` for its numbers; "" if it has none."""

    content: RecordDict
    words: str = ""


def guarded(action: Callable[[RecordDict, Party], Leaving]) -> Callable[[Message, Context], Message]:
    """Turn an action into a message handler for Flower.

    Flower would send the whole message of an exception to the server, and the message may quote a survey row. The
    handler sends the name of the action and the class of the exception, or the fixed text of a refusal; the traceback
    stays in the group's own log. A deployed node records a reply in its ledger first; otherwise no numbers leave.
    """

    def handle(message: Message, context: Context) -> Message:
        escape_output()
        name, started = action.__name__, time.monotonic()
        try:
            leaving = action(message.content, Party.of(context))
            _write_down(message, context, leaving, started)
            return Message(leaving.content, reply_to=message)
        except Refused as refused:
            log.error("%s refused: %s", name, refused)
            code, reason = refused.code, str(refused)
        except Exception as error:
            log.exception("%s failed", name)
            code, reason = FAILED, f"{name} failed: {type(error).__name__} (details are in the group's own log)"
        with contextlib.suppress(UserError):  # this reply holds no numbers, so it may leave without a record
            _write_down(message, context, Leaving(RecordDict()), started, refused=reason)
        return Message(Error(code=code, reason=reason), reply_to=message)

    return handle


def numbers(ask: Ask, request: str, party: Party) -> Leaving:
    """Compute the numbers of each of a node's groups.

    Raises:
        Refused: the owner's policy forbids the request, or its digest `request` is of another catalogue, other target
            tables or another config.
        ValueError: a number is outside the bounds of the request.
    """
    word, make = KINDS[ask.kind]
    if not party.policy.may(word):
        raise Refused(refusals.MAY_NOT_LEAVE[word])
    if request != asks.request_digest(ask, party.world):
        raise Refused(refusals.OTHER_WORLD)
    shapes = asks.layouts_of(ask, party.masks)
    row_of = {group.name: asks.flatten(make(group, ask), shapes) for group in party.groups}
    if asks.TRUTH_SIDE in ask.settings.get("sides", ()) and party.policy.may(asks.TRUTH_SIDE):  # type: ignore[operator]
        word += f", {asks.TRUTH_SIDE}"
    return Leaving(messages.pack_reply(list(row_of), np.stack([*row_of.values()])), word)


def _write_down(message: Message, context: Context, leaving: Leaving, started: float, *, refused: str = "") -> None:
    ledger = ledger_of(context.node_config)
    if ledger is None:
        return
    kind = leaving.words or message.metadata.message_type.partition(".")[2]
    log.warning("%s cost %.1f s", kind, time.monotonic() - started)
    arrays = [array for record in leaving.content.array_records.values() for array in record.values()]
    ledger.write(
        Release(
            time=time.time(),
            run=str(message.metadata.run_id),
            kind=kind,
            groups=str(context.node_config["group"]),
            numbers=sum(int(np.prod(array.shape)) for array in arrays),
            sha256="" if refused else messages.digest(leaving.content),
            refused=refused,
        )
    )


def check_run(party: Party) -> None:
    """Refuse a run at its start if its config needs numbers that the owner's policy does not let leave."""
    word = {"mean": "answers", "predicted-mean": "predictions"}.get(party.config.sft.target, "")
    if word and not party.policy.may(word):
        raise Refused(refusals.MAY_NOT_LEAVE[word])
