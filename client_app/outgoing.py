"""The one exit: every reply of a group leaves through here, and nothing leaves but the protocol's fields.

Axis letters: J scored answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict

from appa_flwr import wire
from appa_flwr.errors import UserError

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


def send_sums(message: Message, reply: wire.SumsReply) -> Message:
    """Answer a step of the sums over groups: a public key, masked numbers, or nothing."""
    return Message(wire.pack_sums_reply(reply), reply_to=message)


def guarded(action: Action) -> Action:
    """Turn any exception of an action into an error reply without private text.

    Flower would send the exception's whole message to the server, and that may quote a survey row. The server is told
    which action failed and the kind of exception, or a refusal's fixed words; the full traceback stays in this group's
    own log.
    """

    def safely(message: Message, context: Context) -> Message:
        try:
            return action(message, context)
        except Refused as refused:
            log.error("action %s refused: %s", action.__name__, refused)
            return Message(Error(code=refused.code, reason=wire.REFUSALS[refused.code]), reply_to=message)
        except Exception as error:
            log.exception("action %s failed", action.__name__)
            reason = f"{action.__name__} failed: {type(error).__name__} (details are in the group's own log)"
            return Message(Error(code=wire.FAILED, reason=reason), reply_to=message)

    return safely
