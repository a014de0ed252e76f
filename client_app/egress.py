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
from appa_flwr.protocol import messages, queries, refusals
from appa_flwr.protocol.queries import Query
from appa_flwr.protocol.refusals import FAILED, Refused
from client_app.node import Node
from client_app.numbers import MAKERS

log = logging.getLogger("appa.client")


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A reply before it leaves: its content, and the words of `may-leave` for its numbers; "" if it has none."""

    content: RecordDict
    words: str = ""


def guarded(action: Callable[[RecordDict, Node], Outgoing]) -> Callable[[Message, Context], Message]:
    """Turn an action into a message handler for Flower.

    Flower would send the whole message of an exception to the server, and the message may quote a survey row. The
    handler sends the name of the action and the class of the exception, or the fixed text of a refusal; the traceback
    stays in the group's own log. A deployed node records a reply in its ledger first; otherwise no numbers leave.
    """

    def handle(message: Message, context: Context) -> Message:
        escape_output()
        name, started = action.__name__, time.monotonic()
        try:
            outgoing = action(message.content, Node.of(context))
            _write_down(message, context, outgoing, started)
            return Message(outgoing.content, reply_to=message)
        except Refused as refused:
            log.error("%s refused: %s", name, refused)
            code, reason = refused.code, str(refused)
        except Exception as error:
            log.exception("%s failed", name)
            code, reason = FAILED, f"{name} failed: {type(error).__name__} (details are in the group's own log)"
        with contextlib.suppress(UserError):  # this reply holds no numbers, so it may leave without a record
            _write_down(message, context, Outgoing(RecordDict()), started, refused=reason)
        return Message(Error(code=code, reason=reason), reply_to=message)

    return handle


def numbers(query: Query, digest: str, node: Node) -> Outgoing:
    """Compute the numbers of each of a node's groups.

    Raises:
        Refused: the owner's policy forbids the request, or its `digest` is of another catalogue, other target
            tables or another config.
        ValueError: a number is outside the bounds of the request.
    """
    word, make = MAKERS[query.kind]
    if not node.policy.may(word):
        raise Refused(refusals.MAY_NOT_LEAVE[word])
    if digest != queries.query_digest(query, node.context_hash):
        raise Refused(refusals.OTHER_CONTEXT)
    shapes = queries.layouts_of(query, node.masks)
    row_of = {group.name: queries.flatten(make(group, query), shapes) for group in node.groups}
    truth = queries.TRUTH_REFERENCE
    if truth in query.settings.get("references", ()) and node.policy.may(truth):  # type: ignore[operator]
        word += f", {truth}"
    return Outgoing(messages.pack_reply(list(row_of), np.stack([*row_of.values()])), word)


def _write_down(message: Message, context: Context, outgoing: Outgoing, started: float, *, refused: str = "") -> None:
    ledger = ledger_of(context.node_config)
    if ledger is None:
        return
    kind = outgoing.words or message.metadata.message_type.partition(".")[2]
    log.warning("%s cost %.1f s", kind, time.monotonic() - started)
    arrays = [array for record in outgoing.content.array_records.values() for array in record.values()]
    ledger.write(
        Release(
            time=time.time(),
            run=str(message.metadata.run_id),
            kind=kind,
            groups=str(context.node_config["group"]),
            numbers=sum(int(np.prod(array.shape)) for array in arrays),
            sha256="" if refused else messages.digest(outgoing.content),
            refused=refused,
        )
    )


def check_run(node: Node) -> None:
    """Refuse a run at its start if its config needs numbers that the owner's policy does not let leave."""
    word = {"mean": "answers", "predicted-mean": "predictions"}.get(node.config.sft.target, "")
    if word and not node.policy.may(word):
        raise Refused(refusals.MAY_NOT_LEAVE[word])
