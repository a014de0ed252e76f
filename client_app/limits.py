"""What an owner lets the server ask for: which numbers, of which runs, and how many that rest on a question.

Axis letters: Q public questions, K options.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from appa_flwr.protocol import asks, refusals
from appa_flwr.protocol.asks import Ask, Task
from appa_flwr.protocol.refusals import Refused
from appa_flwr.secure.roster import LEAST_GROUPS
from client_app.numbers import KINDS
from client_app.party import Group, Party

LEAST_STEPS = 16
"""Optimizer steps of a training round, below which a plain step is nearly a sum of single answers."""

TENTH = 10
"""PluralLLM's validations and scores, which rest on an answer more directly, get a tenth of the limit of rounds."""


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


def check(ask: Ask, task: Task, party: Party) -> None:
    """Refuse a request that the owner's policy forbids, whatever the run's config says, or that is of another world."""
    policy, masked, deployed = party.policy, bool(task.cohort), party.ledger is not None
    if policy.roster and not masked and ask.kind != asks.OWN_SCORES:
        raise Refused(refusals.ONLY_SUMS)  # a server that is refused a sum could ask for its parts
    if not policy.roster and (masked or (ask.kind == asks.TERMS and deployed)):
        raise Refused(refusals.NO_ROSTER)
    key, _ = KINDS[ask.kind]
    # Within a sum over groups that the owner knows a prediction tells no more than a vote.
    if not policy.may(key) and not (masked and key == "predictions" and policy.may("votes")):
        raise Refused(refusals.MAY_NOT_LEAVE[key])
    appa = ask.kind == asks.TERMS and ask.text("rule") == "appa"
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
