"""The one exit: every reply of a group leaves through here, and nothing leaves but the protocol's fields.

Axis letters: J scored answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import recorddict_to_proto

from appa_flwr.core.errors import UserError
from appa_flwr.owner.ledger import Release, ledger_of
from appa_flwr.owner.owner_policy import owner_policy_of
from appa_flwr.protocol import wire
from appa_flwr.secure.refusals import Refused as NoSum

Action = Callable[[Message, Context], Message]

log = logging.getLogger("appa.client")


class Refused(UserError):
    """This node's own config forbids what was asked for; `code` is one of `wire.REFUSALS`."""

    def __init__(self, code: int) -> None:
        super().__init__(wire.REFUSALS[code])
        self.code = code


def send(message: Message, replies: Sequence[wire.GroupReply]) -> Message:
    """Answer a query with one reply for each group this node hosts.

    Raises:
        UserError: a fault of this client: a reward outside [0, 1], or NaN where only a real reward may stand.
    """
    for reply in replies:
        for (metric, side), reward_J in reply.rewards.items():
            known = ~np.isnan(reward_J)
            if (side == wire.TARGET_SIDE and not known.all()) or np.any((reward_J[known] < 0) | (reward_J[known] > 1)):
                raise UserError(f"a {metric} reward lies outside [0, 1]")
    return Message(wire.pack_replies(replies), reply_to=message)


def send_weights(message: Message, weights: ArrayRecord, *, num_examples: int, loss: float) -> Message:
    """Answer a training message of Flower's stock strategies: weights, how many answers they rest on, mean loss."""
    metrics = MetricRecord({"num-examples": num_examples, "loss": loss})
    return Message(RecordDict({"arrays": weights, "metrics": metrics}), reply_to=message)


def send_errors(message: Message, *, num_examples: int, errors: list[float]) -> Message:
    """Answer a validation message: the mean error over so many answers, of each choice."""
    metrics = MetricRecord({"num-examples": num_examples, "errors": errors})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def guarded(action: Action) -> Action:
    """Turn any exception of an action into an error reply without private text, and write down what leaves.

    Flower would send the exception's whole message to the server, and that may quote a survey row. The server is told
    which action failed and the kind of exception, or a refusal's fixed words; the full traceback stays in this group's
    own log. A deployed node's reply is in its ledger before it leaves; without a ledger none does.
    """

    def safely(message: Message, context: Context) -> Message:
        try:
            # A server that is refused a sum could ask for its parts.
            if _alone(message, context) and owner_policy_of(context.node_config).roster:
                raise Refused(wire.ONLY_SUMS)
            reply = action(message, context)
            _write_down(message, context, reply=reply)
            return reply
        except Refused as refused:
            log.error("action %s refused: %s", action.__name__, refused)
            code, reason = refused.code, wire.REFUSALS[refused.code]
        except NoSum as refused:
            log.error("action %s refused: %s", action.__name__, refused)
            code = wire.SECURE_REFUSALS[refused.name]
            reason = wire.REFUSALS[code]
        except Exception as error:
            log.exception("action %s failed", action.__name__)
            reason = f"{action.__name__} failed: {type(error).__name__} (details are in the group's own log)"
            code = wire.FAILED
        with contextlib.suppress(UserError):  # no number leaves
            _write_down(message, context, refused=reason)
        return Message(Error(code=code, reason=reason), reply_to=message)

    return safely


def _alone(message: Message, context: Context) -> bool:
    """True if the reply would hold a group's numbers by themselves."""
    kind, secure = message.metadata.message_type, context.run_config.get("run.sums") == "secure"
    return kind not in (*wire.NO_NUMBERS, *wire.IN_SUMS) and not (kind == wire.TARGETS and secure)


def _write_down(message: Message, context: Context, *, reply: Message | None = None, refused: str = "") -> None:
    ledger = ledger_of(context.node_config)
    if ledger is None:
        return
    numbers, content = 0, b""
    if reply is not None:
        content = recorddict_to_proto(reply.content).SerializeToString(deterministic=True)
        arrays = sum(int(np.prod(array.shape)) for of in reply.content.array_records.values() for array in of.values())
        numbers = arrays + sum(np.size(value) for of in reply.content.metric_records.values() for value in of.values())
    ledger.write(
        Release(
            time=time.time(),
            run=str(message.metadata.run_id),
            message=message.metadata.message_id,
            kind=message.metadata.message_type,
            groups=str(context.node_config["group"]),
            numbers=numbers,
            sha256=hashlib.sha256(content).hexdigest() if reply is not None else "",
            refused=refused,
        )
    )
