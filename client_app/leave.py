"""The single exit for a group's replies: only fields of the protocol leave, and only as the owner's policy allows.

The policy decides which numbers leave, for which runs, and how many replies may rest on a question.

Axis letters: Q public questions, G groups, N numbers.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Context, Error, Message, RecordDict

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import escape_output
from appa_flwr.owner.ledger import Release, ledger_of
from appa_flwr.protocol import asks, messages, refusals
from appa_flwr.protocol.asks import Ask, Task
from appa_flwr.protocol.refusals import FAILED, Refused
from client_app.numbers import KINDS
from client_app.party import Group, Party

LEAST_STEPS = 16
"""Fewest optimizer steps of a plain training round: with fewer steps an update is nearly a sum over single answers."""

TENTH = 10
"""Validations and scores of PluralLLM depend on an answer more directly than updates: their limit is a tenth."""

log = logging.getLogger("appa.client")


@dataclass(frozen=True, eq=False)
class Leaving:
    """A reply before it leaves: its content, and for the ledger its kind and the cohort of its secure sum."""

    content: RecordDict
    kind: str = ""
    cohort: tuple[str, ...] = ()


def guarded(action: Callable[[RecordDict, Party], Leaving]) -> Callable[[Message, Context], Message]:
    """Turn an action into a message handler for Flower.

    Flower would send the whole message of an exception to the server, and the message may quote a survey row. The
    handler sends the name of the action and the class of the exception, or the fixed text of a refusal; the traceback
    stays in the group's own log. A deployed node records a reply in its ledger first; otherwise no numbers leave.
    """

    def handle(message: Message, context: Context) -> Message:
        escape_output()
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
        with contextlib.suppress(UserError):  # this reply holds no numbers, so it may leave without a record
            _write_down(message, context, Leaving(RecordDict()), refused=reason)
        return Message(Error(code=code, reason=reason), reply_to=message)

    return handle


def numbers(ask: Ask, task: Task, party: Party) -> Leaving:
    """Compute the numbers of each of a node's groups: plain, or masked if the task has a cohort.

    Raises:
        Refused: the owner's policy forbids the request, or the request assumes another catalogue, tables or config.
        ValueError: plain numbers are outside the bounds of the request.
    """
    _check(ask, task, party)
    _, make = KINDS[ask.kind]
    row_of = {group.name: make(group, ask, task) for group in party.groups}
    shapes, kind = asks.numbers_of(ask, party.public), f"ask {ask.kind}"
    if not task.cohort:
        row_GN = np.stack([asks.flatten(row, shapes) for row in row_of.values()])
        return Leaving(messages.pack_reply(list(row_of), row_GN), kind)
    member = party.member(task)
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


def check_run(party: Party) -> None:
    """Refuse a run at its start if its config needs numbers that the owner's policy does not let leave."""
    policy, target = party.policy, party.config.sft.target
    if target == "mean" and not policy.may("answers"):
        raise Refused(refusals.MAY_NOT_LEAVE["answers"])
    if target == "predicted-mean" and not (policy.may("predictions") or policy.roster):
        raise Refused(refusals.MAY_NOT_LEAVE["predictions"])


def check_catalogue(party: Party, catalogue: str, group: str, parts: Mapping[str, Collection[str]]) -> None:
    """Refuse a catalogue, given by its digest, that a group must not answer; `parts` as in `Ledger.enter`."""
    if party.ledger is None:
        return
    least = party.policy.least_answers
    if len(parts["training"]) < least:
        raise Refused(refusals.FEW_ANSWERS)
    if why := party.ledger.enter(party.run_id, catalogue, group, parts, least=least):
        raise Refused({"other": refusals.OTHER_CATALOGUE, "near": refusals.NEARLY_SAME}[why])


def _check(ask: Ask, task: Task, party: Party) -> None:
    policy, masked, deployed = party.policy, bool(task.cohort), party.ledger is not None
    if policy.roster and not masked and ask.kind != asks.OWN_SCORES:
        raise Refused(refusals.ONLY_SUMS)  # otherwise a server could ask for the parts of a sum
    if not policy.roster and (masked or (ask.kind == asks.TERMS and deployed)):
        raise Refused(refusals.NO_ROSTER)
    key, _ = KINDS[ask.kind]
    # In a secure sum over groups that the owner knows, a prediction tells no more than a vote.
    if not policy.may(key) and not (masked and key == "predictions" and policy.may("votes")):
        raise Refused(refusals.MAY_NOT_LEAVE[key])
    appa = ask.kind == asks.TERMS and ask.setting("rule", str) == "appa"
    if appa and party.config.appa.temperature < policy.least_temperature:
        raise Refused(refusals.LOW_TEMPERATURE)
    if task.request != asks.request_digest(ask, party.world):
        raise Refused(refusals.OTHER_WORLD)
    if key == "training" and deployed:
        for group in party.groups:
            _check_training(group, ask, task)


def _check_training(group: Group, ask: Ask, task: Task) -> None:
    """Refuse an update that would be nearly a sum over single answers, and more replies than the owner allows."""
    party, settings = group.party, group.party.config.pluralllm
    weak = settings.local_steps < LEAST_STEPS
    if ask.kind == asks.UPDATE and weak and not task.cohort:
        raise Refused(refusals.WEAK_TRAINING)
    public, limit = party.public, party.policy.training_replies
    limit = limit if ask.kind == asks.UPDATE else -(-limit // TENTH)
    asked_Q = {asks.UPDATE: public.train_Q, asks.VALIDATION: public.held_out_Q}.get(ask.kind, ~public.unanswered_Q)
    rows = np.flatnonzero(asked_Q & ~np.isnan(group.truth_QK).any(axis=1))
    marks = [(public.questions[q].question_id, bytes.fromhex(task.request)) for q in rows]
    if not all(group.spend(ask.kind, marks, limit=limit)):
        raise Refused(refusals.REPLIES_SPENT)
