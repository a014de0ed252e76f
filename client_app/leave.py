"""The one exit: every reply of a group leaves through here, and nothing leaves but the protocol's fields."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Context, Error, Message, RecordDict

from appa_flwr.core.errors import UserError
from appa_flwr.owner.ledger import Release, ledger_of
from appa_flwr.protocol import asks, messages
from appa_flwr.protocol.asks import Ask, Task
from appa_flwr.protocol.refusals import FAILED, Refused
from client_app.numbers import Numbers
from client_app.party import Party

log = logging.getLogger("appa.client")


@dataclass(frozen=True, eq=False)
class Leaving:
    """A reply on its way out: its content, and for the ledger its kind and the groups of the sum it goes into."""

    content: RecordDict
    kind: str = ""
    cohort: tuple[str, ...] = ()


def guarded(action: Callable[[RecordDict, Party], Leaving]) -> Callable[[Message, Context], Message]:
    """Make Flower's handler of an action.

    Flower would send an exception's whole message to the server, and that may quote a survey row. The server is told
    which action failed and the kind of exception, or a refusal's fixed words; the full traceback stays in this group's
    own log. A deployed node's reply is in its ledger before it leaves; without a ledger none does.
    """

    def handle(message: Message, context: Context) -> Message:
        name = action.__name__
        try:
            leaving = action(message.content, Party.of(context))
            _write_down(message, context, leaving)
            return Message(leaving.content, reply_to=message)
        except Refused as refused:
            log.error("%s refused: %s", name, refused)
            code, reason = refused.code, str(refused)
        except Exception as error:
            log.exception("%s failed", name)
            code, reason = FAILED, f"{name} failed: {type(error).__name__} (details are in the group's own log)"
        with contextlib.suppress(UserError):  # no number leaves
            _write_down(message, context, Leaving(RecordDict()), refused=reason)
        return Message(Error(code=code, reason=reason), reply_to=message)

    return handle


def numbers(ask: Ask, task: Task, party: Party, row_of: Mapping[str, Numbers]) -> Leaving:
    """The numbers of each of a node's groups, plain, or masked where the task has a cohort.

    Raises:
        ValueError: plain numbers outside the bounds that the request gives them.
    """
    shapes, kind = asks.numbers_of(ask, party.public), f"ask {ask.kind}"
    if not task.cohort:
        row_GN = np.stack([asks.flatten(row, shapes) for row in row_of.values()])
        return Leaving(messages.pack_reply(list(row_of), row_GN), kind)
    member = party.member()
    share_N = asks.flatten(row_of[member.name], shapes, cut=True) / asks.scales(shapes)
    return Leaving(messages.pack_reply([member.name], member.mask(task, share_N)), kind, task.cohort)


def _write_down(message: Message, context: Context, leaving: Leaving, *, refused: str = "") -> None:
    ledger = ledger_of(context.node_config)
    if ledger is None:
        return
    arrays = [array for record in leaving.content.array_records.values() for array in record.values()]
    ledger.write(
        Release(
            time=time.time(),
            run=str(message.metadata.run_id),
            kind=leaving.kind or message.metadata.message_type,
            groups=str(context.node_config["group"]),
            numbers=sum(int(np.prod(array.shape)) for array in arrays),
            sha256="" if refused else messages.digest(leaving.content),
            refused=refused,
            cohort="; ".join(leaving.cohort),
        )
    )
