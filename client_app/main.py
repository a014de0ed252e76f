"""The groups' side: a Flower ClientApp with four actions and a single exit for replies (`client_app.egress`).

Axis letters: Q public questions, K options.
"""

import hashlib
import logging

import numpy as np
from flwr.app import RecordDict
from flwr.clientapp import ClientApp

from appa_flwr.core.errors import UserError
from appa_flwr.protocol import messages, refusals
from appa_flwr.protocol.refusals import Refused
from appa_flwr.survey.types import answer_table
from client_app import egress
from client_app.egress import Outgoing
from client_app.memory import keep_array, keep_survey_path, read_array
from client_app.node import Node

log = logging.getLogger("appa.client")

app = ClientApp()
"""Flower answers a message of another kind with an error that names only the kind; it is not in the ledger."""


@app.query("hello")
@egress.guarded
def hello(content: RecordDict, node: Node) -> Outgoing:
    """Reply with the groups of this node; a simulated node stores the path of the run's survey."""
    survey = messages.unpack_hello(content)
    if node.ledger is None:
        keep_survey_path(node.context, survey)
    return Outgoing(messages.pack_reply(node.hosted))


@app.query("catalogue")
@egress.guarded
def catalogue(content: RecordDict, node: Node) -> Outgoing:
    """Store the public questions, and the groups' private answers to these questions; a run has one catalogue."""
    egress.check_run(node)
    public, data = messages.unpack_catalogue(content), messages.to_bytes(content)
    digest = hashlib.sha256(data).hexdigest().encode()
    if node.memory.setdefault("catalogue", digest) != digest:
        raise Refused(refusals.OTHER_CATALOGUE)
    node.memory["public"] = data
    keep_array(node.memory, "masks", np.column_stack([public.train_Q, public.option_QK]))
    training = {q.question_id for q, train in zip(public.questions, public.train_Q, strict=True) if train}
    asked = [q for q, unanswered in zip(public.questions, public.unanswered_Q, strict=True) if not unanswered]
    answered: dict[str, int] = {}
    problem = UserError("no group of this node has answers that can be used")
    for name in node.hosted:
        try:
            answers = node.answers(name, asked)
            if not (count := len(answers.keys() & training)):
                raise Refused(refusals.NO_ANSWERS)
        except UserError as error:
            # Only this group is left out: which groups share a node is arbitrary and must not change a run.
            log.error("group %s takes no part: %s", name, error)
            problem = error
            continue
        truth_QK = answer_table(public.questions, answers, public.option_QK.shape[1])
        keep_array(node.memory, f"truth {name}", truth_QK)
        answered[name] = count
    if not answered:
        raise problem
    node.memory["groups"] = "\n".join(answered).encode()
    about = node.survey.about
    if node.ledger is not None:
        log.warning("%s: %s", ", ".join(answered), about.precision)
    noise = [] if about.noise is None else [about.noise.spent, about.noise.sd]
    counts, may = list(answered.values()), list(node.policy.may_leave)
    return Outgoing(messages.pack_reply(list(answered), answered=counts, may=may, noise=noise))


@app.query("targets")
@egress.guarded
def targets(content: RecordDict, node: Node) -> Outgoing:
    """Write every group's target table from the final PluralLLM; scoring is then a look-up and a metric.

    The tables are written once per run, and later weights change nothing, so that all rewards of a run are comparable.
    The reply counts each group's questions that are predicted by the mean of all, as its answers cannot be solved for.
    """
    from client_app import predictor

    groups, data = node.groups, messages.to_bytes(content)
    if "targets" not in node.memory:
        ours = predictor.load(node.config, messages.unpack_weights(content), node.public)
        if node.memory.setdefault("weights", data) == data:  # of two messages at once, the first one counts
            for group in groups:
                keep_array(node.memory, f"targets {group.name}", ours.targets(group.data))
            keep_array(node.memory, "by mean", np.array([ours.by_mean.get(group.name, 0) for group in groups]))
            node.memory["targets"] = messages.digest(content).encode()
    by_mean = read_array(node.remembered("by mean")).tolist()
    return Outgoing(messages.pack_reply([group.name for group in groups], by_mean=by_mean))


@app.query("ask")
@egress.guarded
def ask(content: RecordDict, node: Node) -> Outgoing:
    """Reply with the groups' numbers of the requested kind."""
    request, digest = messages.unpack_query(content)
    return egress.numbers(request, digest, node)
