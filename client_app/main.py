"""The groups' side: a Flower ClientApp with five actions and a single exit for replies (`client_app.leave`).

Axis letters: Q public questions, K options.
"""

import logging

import numpy as np
from flwr.app import RecordDict
from flwr.clientapp import ClientApp

from appa_flwr.core.errors import UserError
from appa_flwr.protocol import messages
from appa_flwr.secure.masks import last_round
from client_app import leave
from client_app.leave import Leaving
from client_app.memory import keep_array
from client_app.party import Party

log = logging.getLogger("appa.client")

app = ClientApp()
"""Flower answers a message of another kind with an error that names only the kind; it is not in the ledger."""


@app.query("hello")
@leave.guarded
def hello(content: RecordDict, party: Party) -> Leaving:
    """Reply with the groups of this node; a simulated node stores the path of the run's survey."""
    run, survey = messages.unpack_hello(content)
    if party.ledger is None:
        party.memory["survey"] = survey.encode()
    with party.facts() as facts:
        last = last_round(facts, run)
    return Leaving(messages.pack_reply(party.hosted, roster=party.policy.roster, round=last))


@app.query("catalogue")
@leave.guarded
def catalogue(content: RecordDict, party: Party) -> Leaving:
    """Store the public questions, and the groups' private answers to these questions."""
    leave.check_run(party)
    public = messages.unpack_catalogue(content)
    training = {q.question_id for q, train in zip(public.questions, public.train_Q, strict=True) if train}
    asked = [q for q, unanswered in zip(public.questions, public.unanswered_Q, strict=True) if not unanswered]
    answered: dict[str, int] = {}
    problem = UserError("no group of this node has answers that can be used")
    for name in party.hosted:
        try:
            answers = party.answers(name, asked)
            parts = {"training": answers.keys() & training, "held-out": answers.keys() - training}
            leave.check_catalogue(party, messages.digest(content), name, parts)
        except UserError as error:
            # Only this group is left out: which groups share a node is arbitrary and must not change a run.
            log.error("group %s takes no part: %s", name, error)
            problem = error
            continue
        truth_QK = np.full(public.option_QK.shape, np.nan)
        for row, question in enumerate(public.questions):
            if (own := answers.get(question.question_id)) is not None:
                truth_QK[row] = 0.0
                truth_QK[row, : len(own)] = own
        keep_array(party.memory, f"truth {name}", truth_QK)
        answered[name] = len(parts["training"])
    if not answered:
        raise problem
    party.memory["catalogue"] = messages.to_bytes(content)
    party.memory["groups"] = "\n".join(answered).encode()
    counts, may = list(answered.values()), list(party.policy.may_leave)
    return Leaving(messages.pack_reply(list(answered), answered=counts, may=may))


@app.query("targets")
@leave.guarded
def targets(content: RecordDict, party: Party) -> Leaving:
    """Write every group's target table from the final PluralLLM; scoring is then a look-up and a metric.

    The tables are written once per run, and later weights change nothing: a server that may send weights again and
    again could craft them so that the tables tell the answers bit by bit.
    """
    from client_app import predictor

    groups = party.groups
    if "targets" not in party.memory:
        weight_P = messages.unpack_weights(content)
        ours = predictor.load(party.config, weight_P, party.public)
        for group in groups:
            keep_array(party.memory, f"targets {group.name}", ours.targets(group.data))
        if party.config.pluralllm.fresh_contexts:
            party.memory["weights"] = weight_P.tobytes()
        party.memory["targets"] = messages.digest(content).encode()
    return Leaving(messages.pack_reply([group.name for group in groups]))


@app.query("ask")
@leave.guarded
def ask(content: RecordDict, party: Party) -> Leaving:
    """Reply with the groups' numbers of the requested kind."""
    request, task = messages.unpack_ask(content)
    return leave.numbers(request, task, party)


@app.query("open")
@leave.guarded
def open_sum(content: RecordDict, party: Party) -> Leaving:
    """Reply with the seed of the group's own mask, to open a sum for which all of the cohort have sent numbers."""
    task = messages.unpack_open(content)
    member = party.member(task)
    return Leaving(messages.pack_reply([member.name], seed=member.open(task)), messages.OPEN, task.cohort)
