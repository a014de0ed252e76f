"""The groups' side: a Flower ClientApp with five actions, and one exit (`client_app.leave`).

Axis letters: Q public questions, K options.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictBytes

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import escape_output
from appa_flwr.protocol import asks, messages, refusals
from appa_flwr.protocol.asks import Catalogue
from appa_flwr.protocol.refusals import REFUSALS, Refused
from appa_flwr.secure.masks import last_round
from client_app import leave, limits
from client_app.leave import Leaving
from client_app.memory import keep_arrays
from client_app.numbers import MAKERS, Asked
from client_app.party import Answers, Party
from pluralllm.data import group_data, option_embedding

log = logging.getLogger("appa.client")


class GroupApp(ClientApp):
    """Flower's ClientApp, but a message of another kind is refused through the one exit too."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        escape_output()
        handle = HANDLERS.get(message.metadata.message_type, _unknown)
        return handle(message, context)


@leave.guarded
def _unknown(content: RecordDict, party: Party) -> Leaving:
    raise Refused(refusals.UNKNOWN_MESSAGE)


@leave.guarded
def hello(content: RecordDict, party: Party) -> Leaving:
    """Say which groups live here; a simulated node learns where the run's survey lies."""
    run, survey = messages.unpack_hello(content)
    if party.ledger is None:
        party.memory["survey"] = survey.encode()
    with party.facts() as facts:
        last = last_round(facts, run)
    return Leaving(messages.pack_reply(party.hosted, roster=party.policy.roster, round=last))


@leave.guarded
def catalogue(content: RecordDict, party: Party) -> Leaving:
    """Keep the public questions; load the groups' private answers and cut them to these questions."""
    limits.check_run(party)
    public, digest = messages.unpack_catalogue(content), messages.digest(content)
    training = {q.question_id for q, train in zip(public.questions, public.train_Q, strict=True) if train}
    embedding = option_embedding(public)
    asked = [q for q, unanswered in zip(public.questions, public.unanswered_Q, strict=True) if not unanswered]
    answered: dict[str, int] = {}
    refused = 0
    for name, answers in party.answers(party.hosted, asked).items():
        if isinstance(answers, UserError):
            # Only this group is missing then: which groups share a node is chance and must not change a run.
            log.error("group %s takes no part: its answers cannot be used: %s", name, answers)
            continue
        parts = {"training": answers.keys() & training, "held-out": answers.keys() - training}
        if refused := _refusal(party, digest, name, parts):
            log.error("group %s takes no part: %s", name, REFUSALS[refused])
            continue
        d_g = group_data(name, answers, embedding=embedding, question_ids=training)
        truth_QK = _table(answers, public)
        keep_arrays(party.memory, f"data {name}", question=d_g.question_N, answer=d_g.answer_NK, truth=truth_QK)
        answered[name] = len(d_g)
    if refused and not answered:
        raise Refused(refused)
    if not answered:
        raise UserError("no group of this node has answers that can be used")
    party.memory["catalogue"] = recorddict_to_proto(content).SerializeToString()
    party.memory["groups"] = "\n".join(answered).encode()
    counts, may = list(answered.values()), list(party.policy.may_leave)
    return Leaving(messages.pack_reply(list(answered), answered=counts, may=may))


def _table(answers: Answers, public: Catalogue) -> asks.FloatArray:
    """A group's own answers (Q, K), held-out ones too, and rows of NaN elsewhere; it is never context."""
    truth_QK = np.full(public.option_QK.shape, np.nan)
    for row, question in enumerate(public.questions):
        if (own := answers.get(question.question_id)) is not None:
            truth_QK[row] = 0.0
            truth_QK[row, : len(own)] = own
    return truth_QK


def _refusal(party: Party, digest: str, group: str, parts: Mapping[str, Collection[str]]) -> int:
    """Why a group's owner lets it take no part in a catalogue; 0 where they do."""
    if party.ledger is None:
        return 0
    least = party.policy.least_answers
    if len(parts["training"]) < least:
        return refusals.FEW_ANSWERS
    why = party.ledger.enter(party.run_id, digest, group, parts, least=least)
    return {"": 0, "other": refusals.OTHER_CATALOGUE, "near": refusals.NEARLY_SAME}[why]


def _public(party: Party) -> tuple[RecordDict, tuple[str, ...]]:
    """The catalogue's message as it came, and the groups of this node that take part.

    Raises:
        Refused: the server has sent none, as after a loss of the node's files.
    """
    content = recorddict_from_proto(RecordDictBytes.FromString(party.remembered("catalogue")))
    return content, tuple(party.remembered("groups").decode().split("\n"))


@leave.guarded
def targets(content: RecordDict, party: Party) -> Leaving:
    """Write every group's target table from the final PluralLLM: from now on scoring is a look-up and a metric.

    Once in a run: where there are tables, other weights change nothing, since weights made for the purpose, sent again
    and again, would tell the answers bit by bit.
    """
    from client_app import predictor

    kept, groups = _public(party)
    if "targets" not in party.memory:
        public, weight_P = messages.unpack_catalogue(kept), messages.unpack_weights(content)
        ours = predictor.load(party.config, weight_P, option_embedding(public), public.train_Q)
        asked = Asked(asks.Ask(asks.SCORES), messages.Head("", ""), party, public)
        for name in groups:
            keep_arrays(party.memory, f"targets {name}", target=ours.table(asked.data(name), draw=0))
        if party.config.pluralllm.fresh_contexts:
            party.memory["weights"] = weight_P.tobytes()
        party.memory["targets"] = messages.digest(content).encode()
    return Leaving(messages.pack_reply(groups))


@leave.guarded
def ask(content: RecordDict, party: Party) -> Leaving:
    """Give the groups' numbers of some kind."""
    request, head = messages.unpack_ask(content)
    limits.check(request, party, cohort=head.cohort)
    kept, groups = _public(party)
    digests = messages.digest(kept), party.memory.get("targets", b"").decode()
    if head.world != asks.world_of(party.config, *digests):
        raise Refused(refusals.OTHER_WORLD)
    asked = Asked(request, head, party, messages.unpack_catalogue(kept))
    limits.count_training(request, head.world, asked.public, party, groups)
    return leave.numbers(asked, {name: MAKERS[request.kind](asked, name) for name in groups})


@leave.guarded
def open_sum(content: RecordDict, party: Party) -> Leaving:
    """Give the seed of the group's own mask, once all of the cohort have sent their numbers."""
    task, (group, *others) = messages.unpack_open(content), party.hosted
    if task.roster != party.roster.sha256 or others:
        raise Refused(refusals.NO_ROSTER)
    seed = party.member(group).open(task)
    return Leaving(messages.pack_reply([group], seed=seed), messages.OPEN, task.cohort)


HANDLERS = {
    messages.HELLO: hello,
    messages.CATALOGUE: catalogue,
    messages.TARGETS: targets,
    messages.ASK: ask,
    messages.OPEN: open_sum,
}
app = GroupApp()
