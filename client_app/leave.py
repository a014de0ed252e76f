"""The one exit: every reply of a group leaves through here, nothing but the protocol's fields, and as its owner allows.

The owner decides which numbers leave, of which runs, and how many that rest on a question.

Axis letters: Q public questions, G groups, N numbers.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import Context, Error, Message, RecordDict

from appa_flwr.core.errors import UserError
from appa_flwr.owner.ledger import Release, ledger_of
from appa_flwr.protocol import asks, messages, refusals
from appa_flwr.protocol.asks import Ask, Task
from appa_flwr.protocol.refusals import FAILED, Refused
from appa_flwr.secure.roster import LEAST_GROUPS
from client_app.numbers import KINDS
from client_app.party import Group, Party

LEAST_STEPS = 16
"""Optimizer steps of a training round, below which a plain step is nearly a sum of single answers."""

TENTH = 10
"""PluralLLM's validations and scores, which rest on an answer more directly, get a tenth of the limit of rounds."""

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


def numbers(ask: Ask, task: Task, party: Party) -> Leaving:
    """The numbers of each of a node's groups, plain, or masked where the task has a cohort.

    Raises:
        Refused: the owner's policy forbids the request, whatever the run's config says, or it is of another world.
        ValueError: plain numbers outside the bounds that the request gives them.
    """
    _check(ask, task, party)
    _, made = KINDS[ask.kind]
    row_of = {group.name: made(group, ask, task) for group in party.groups}
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


def check_run(party: Party) -> None:
    """Refuse a run whose config asks for what the owner's policy lets not leave, before it starts."""
    policy, target = party.policy, party.config.sft.target
    if target == "mean" and not policy.may("answers"):
        raise Refused(refusals.MAY_NOT_LEAVE["answers"])
    if target == "predicted-mean" and not (policy.may("predictions") or policy.roster):
        raise Refused(refusals.MAY_NOT_LEAVE["predictions"])


def check_catalogue(party: Party, catalogue: str, group: str, parts: Mapping[str, Collection[str]]) -> None:
    """Refuse a catalogue, by its digest, for a group; `parts` as in `appa_flwr.owner.ledger.Ledger.enter`."""
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
        raise Refused(refusals.ONLY_SUMS)  # a server that is refused a sum could ask for its parts
    if not policy.roster and (masked or (ask.kind == asks.TERMS and deployed)):
        raise Refused(refusals.NO_ROSTER)
    key, _ = KINDS[ask.kind]
    # Within a sum over groups that the owner knows a prediction tells no more than a vote.
    if not policy.may(key) and not (masked and key == "predictions" and policy.may("votes")):
        raise Refused(refusals.MAY_NOT_LEAVE[key])
    appa = ask.kind == asks.TERMS and ask.setting("rule", str) == "appa"
    if appa and party.config.appa.temperature < policy.least_temperature:
        raise Refused(refusals.LOW_TEMPERATURE)
    trains = set(task.cohort) - set(party.config.unseen_group_names)
    if masked and ask.kind in (asks.UPDATE, asks.VALIDATION) and len(trains) < LEAST_GROUPS:
        raise Refused(refusals.FEW_OWN)
    if task.request != asks.request_digest(ask, party.world):
        raise Refused(refusals.OTHER_WORLD)
    if key == "training" and deployed:
        for group in party.groups:
            _check_training(group, ask, task)


def _check_training(group: Group, ask: Ask, task: Task) -> None:
    """Refuse a step that would be nearly a sum of single answers, and more replies than the owner allows."""
    party, settings = group.party, group.party.config.pluralllm
    weak = settings.local_steps < LEAST_STEPS
    if ask.kind == asks.UPDATE and weak and not task.cohort and not group.unseen:
        raise Refused(refusals.WEAK_TRAINING)
    public, limit = party.public, party.policy.training_replies
    limit = limit if ask.kind == asks.UPDATE else -(-limit // TENTH)
    asked_Q = {asks.UPDATE: public.train_Q, asks.VALIDATION: public.held_out_Q}.get(ask.kind, ~public.unanswered_Q)
    rows = np.flatnonzero(asked_Q & ~np.isnan(group.truth_QK).any(axis=1))
    marks = [(public.questions[q].question_id, bytes.fromhex(task.request)) for q in rows]
    if not all(group.spend(ask.kind, marks, limit=limit)):
        raise Refused(refusals.REPLIES_SPENT)
