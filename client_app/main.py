"""The groups' side: a Flower ClientApp with one action per message of the protocol.

PluralLLM's network, and torch with it, is imported inside the actions that need it: deployed, every message starts a
fresh process, and scoring does without.

Axis letters: Q public questions, H held-out ones, K options.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import escape_output
from appa_flwr.owner.ledger import ledger_of
from appa_flwr.owner.owner_policy import OwnerPolicy, owner_policy_of
from appa_flwr.protocol import sum_messages, votes, wire
from client_app import outgoing, protection, scoring, state, survey_answers, tables
from client_app.protection import Protection
from pluralllm.data import group_data, option_embedding


class GroupApp(ClientApp):
    """Flower's ClientApp, but a message of another kind is refused through the one exit too."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message."""
        escape_output()
        if message.metadata.message_type not in KINDS:
            return _unknown(message, context)
        return super().__call__(message, context)


KINDS = (*wire.QUERIES, *wire.IN_SUMS, "train", "evaluate")
app = GroupApp()
log = logging.getLogger("appa.client")


@outgoing.guarded
def _unknown(message: Message, context: Context) -> Message:
    raise outgoing.Refused(wire.UNKNOWN_ACTION)


@app.query("roll_call")
@outgoing.guarded
def roll_call(message: Message, context: Context) -> Message:
    """Say which groups live here; a simulated node learns where the run's survey lies."""
    survey_answers.context_config(context)
    owner_policy_of(context.node_config)  # one that cannot be read lets nothing out, no name either
    if not survey_answers.deployed(context.node_config) and (path := wire.unpack_roll_call(message.content)):
        state.remember_survey(state.memory_of(context), path)
    names = survey_answers.my_groups(context)
    return outgoing.send(message, [wire.GroupReply(name) for name in names])


@app.query("catalogue")
@outgoing.guarded
def catalogue(message: Message, context: Context) -> Message:
    """Keep the public questions; load the groups' private answers and cut them to these questions."""
    config, owner_policy = survey_answers.context_config(context), owner_policy_of(context.node_config)
    protection.check_allowed(config, owner_policy)
    memory, digest = state.memory_of(context), wire.digest(message.content)
    public = wire.unpack_catalogue(message.content)
    training = {q.question_id for q, train in zip(public.questions, public.train_Q, strict=True) if train}
    embedding = option_embedding(public)
    replies, refused = [], 0
    simulated = not survey_answers.deployed(context.node_config)
    names = survey_answers.my_groups(context)
    asked = tuple(q for q, unanswered in zip(public.questions, public.unanswered_Q, strict=True) if not unanswered)
    for name, answers in survey_answers.answers(context, names, asked).items():
        if isinstance(answers, UserError):
            # Only this group is missing then: which groups share a node is chance and must not change a run.
            log.error("group %s takes no part: its answers cannot be used: %s", name, answers)
            continue
        parts = {"training": answers.keys() & training, "held-out": answers.keys() - training}
        if refused := _refusal(context, owner_policy, digest, name, parts):
            log.error("group %s takes no part: %s", name, wire.REFUSALS[refused])
            continue
        d_g = group_data(name, answers, embedding=embedding, question_ids=training)
        truth_QK = np.full(public.option_QK.shape, np.nan)
        for row, question in enumerate(public.questions):
            if (own := answers.get(question.question_id)) is not None:
                truth_QK[row] = 0.0
                truth_QK[row, : len(own)] = own
        state.remember_data(memory, d_g, truth_QK)
        counts = {"answered": len(d_g), "known": len(answers)}
        counts |= {"truth": int(owner_policy.truth), "probes": int(owner_policy.probes), "mean": int(owner_policy.mean)}
        # Answers themselves, which leave a simulated group only: there the server is the same program.
        sends_answers = simulated and name not in config.unseen_group_names and config.run.sums == "plain"
        held_out_HK = truth_QK[public.held_out_Q] if sends_answers else None
        replies.append(wire.GroupReply(name, counts=counts, held_out_HK=held_out_HK))
    if not replies and refused:
        raise outgoing.Refused(refused)
    if not replies:
        raise UserError("no group of this node has answers that can be used")
    state.remember_catalogue(memory, message.content, tuple(reply.group for reply in replies))
    return outgoing.send(message, replies)


def _refusal(
    context: Context, owner_policy: OwnerPolicy, digest: str, group: str, parts: Mapping[str, Collection[str]]
) -> int:
    """Why a group's owner lets it take no part in a catalogue; 0 where they do."""
    if (ledger := ledger_of(context.node_config)) is None:
        return 0
    if len(parts["training"]) < owner_policy.least_answers:
        return wire.FEW_ANSWERS
    if not ledger.first_of(str(context.run_id), digest):
        return wire.OTHER_CATALOGUE
    return 0 if ledger.enter(digest, group, parts, least=owner_policy.least_answers) else wire.NEARLY_SAME


@app.train()
@outgoing.guarded
def train(message: Message, context: Context) -> Message:
    """One round of PluralLLM's federated pretraining; the groups of a node are averaged by their number of answers."""
    from client_app import predictor

    owner_policy, config = owner_policy_of(context.node_config), survey_answers.context_config(context)
    protection.check_training(config, owner_policy)
    memory = state.memory_of(context)
    public, groups = state.catalogue(memory), tables.training_groups(memory, config)
    settings = message.content.config_records["config"]
    protection.count_reply(context, "train", digest=state.catalogue_digest(memory), limit=owner_policy.training_replies)
    trained = predictor.train_round(
        config,
        message.content.array_records["arrays"],
        groups,
        option_embedding(public),
        round_number=int(str(settings["server-round"])),
        proximal=float(str(settings.get("proximal-mu", 0.0))),
        secret=protection.secret(context.node_config, owner_policy),
    )
    loss = protection.rounded_mean(trained.loss, trained.num_examples, owner_policy)
    return outgoing.send_weights(message, trained.weights, num_examples=trained.num_examples, loss=loss)


@app.evaluate()
@outgoing.guarded
def evaluate(message: Message, context: Context) -> Message:
    """Score the last round's weights on training groups' held-out questions, for each choice of what views count."""
    from client_app import predictor

    owner_policy, config = owner_policy_of(context.node_config), survey_answers.context_config(context)
    if not owner_policy.training:
        raise outgoing.Refused(wire.TRAINING_REFUSED)
    memory = state.memory_of(context)
    public, groups = state.catalogue(memory), tables.training_groups(memory, config)
    protection.count_reply(
        context, "evaluate", digest=state.catalogue_digest(memory), limit=owner_policy.validation_replies
    )
    ours = predictor.load(config, message.content.array_records["arrays"], option_embedding(public), public.train_Q)
    truths = [tables.held_out(memory, mine.group, public, owner_policy) for mine in groups]
    num_answers, errors = ours.validate(list(zip(groups, truths, strict=True)))
    errors = [protection.rounded_mean(error, num_answers, owner_policy, most=wire.LARGEST_ERROR) for error in errors]
    return outgoing.send_errors(message, num_examples=num_answers, errors=errors)


@app.query("targets")
@outgoing.guarded
def targets(message: Message, context: Context) -> Message:
    """Write every group's target table from the final PluralLLM: from now on scoring is a look-up and a metric.

    Sums tell the server how good the tables are. Once in a run: where there are tables, other weights change nothing,
    since weights made for the purpose, sent again and again, would tell the answers bit by bit.
    """
    from client_app import predictor, summands
    from pluralllm.group_mean import mean_from_sums

    config, owner_policy = survey_answers.context_config(context), owner_policy_of(context.node_config)
    protection.check_allowed(config, owner_policy)
    memory = state.memory_of(context)
    public, weights = state.catalogue(memory), wire.unpack_weights(message.content)
    names = state.groups(memory)
    if all(state.has_targets(memory, name) for name in names):
        return outgoing.send(message, [wire.GroupReply(name) for name in names])
    digest = state.catalogue_digest(memory)
    protection.count_reply(context, wire.TARGETS, digest=digest, limit=owner_policy.target_replies)
    if config.pluralllm.fresh_contexts:
        state.remember_weights(memory, weights)
    ours = predictor.load(config, weights, option_embedding(public), public.train_Q)
    state.remember_setup(memory, message.content)
    # Totals made for the purpose would tell a deployed group's answers by the scores that they earn.
    totals = None if survey_answers.deployed(context.node_config) else wire.unpack_totals(message.content)
    replies = []
    for name in names:
        mine = state.data(memory, name)
        found = ours.table(mine, draw=0)
        truth, others = tables.held_out(memory, name, public, owner_policy), None
        if totals is not None:
            own = truth if name in totals.groups else None
            others = mean_from_sums(totals.answer_QK, totals.count_Q, own=own)
        parts = ours.scores(mine, found, truth, least=owner_policy.least_answers, mean_of_others=others)
        state.remember_targets(memory, name, found)
        if config.run.sums == "secure":
            unseen = name in config.unseen_group_names
            state.remember_predictor_scores(memory, name, summands.predictor_scores(parts, public, unseen=unseen))
            replies.append(wire.GroupReply(name))
            continue
        sums = {(part, kind): measures for part, kinds in parts.items() for kind, measures in kinds.items()}
        replies.append(wire.GroupReply(name, sums=protection.rounded_sums(sums, owner_policy)))
    return outgoing.send(message, replies)


@app.query("vote")
@outgoing.guarded
def vote(message: Message, context: Context) -> Message:
    """Vote for SFT: the group's own answer to a training question where it has one, its prediction otherwise.

    With `sft.target` = "predicted-mean" the prediction for every question.
    """
    config, owner_policy = survey_answers.context_config(context), owner_policy_of(context.node_config)
    protection.check_allowed(config, owner_policy)
    if not owner_policy.votes:
        raise outgoing.Refused(wire.VOTES_REFUSED)
    asked = wire.asks_distributions(message.content)
    kind = votes.DISTRIBUTION if asked else votes.kind(config.task, config.sft.target)
    predicted = config.sft.target == "predicted-mean" and not asked
    if kind == votes.DISTRIBUTION and not (owner_policy.probes if predicted else owner_policy.mean):
        raise outgoing.Refused(wire.PREDICTIONS_REFUSED if predicted else wire.MEAN_REFUSED)
    memory = state.memory_of(context)
    public = state.catalogue(memory)
    replies = []
    for name in state.groups(memory):
        vote_QK = tables.ballot(memory, public, name, kind=kind, predicted=predicted)
        replies.append(wire.GroupReply(name, votes_QK=vote_QK))
    return outgoing.send(message, replies)


@app.query("score")
@outgoing.guarded
def score(message: Message, context: Context) -> Message:
    """Return rewards of the server's answers, and nothing else."""
    request = wire.unpack_score_request(message.content)
    exit_ = Protection.of(context.node_config)
    protection.check_allowed(survey_answers.context_config(context), exit_.owner_policy)
    if not all(map(exit_.owner_policy.allows, request.metrics)):  # the run's config may name another one
        raise outgoing.Refused(wire.METRIC_REFUSED)
    if request.asked == wire.PROBES_ASKED and not exit_.owner_policy.probes:
        raise outgoing.Refused(wire.PROBES_REFUSED)
    memory = state.memory_of(context)
    public = state.catalogue(memory)
    replies = []
    for name in state.groups(memory):
        rewards = {}
        for side in request.sides:
            side_QK = tables.side(context, public, name, side, draw=request.draw)
            scored = scoring.score(request, side_QK, public.option_QK)
            for metric, reward_J in exit_.released(request, scored, side_QK, public, group=name, side=side).items():
                rewards[metric, side] = reward_J
        replies.append(wire.GroupReply(name, rewards))
    return outgoing.send(message, replies)


@app.query("keys")
@outgoing.guarded
def keys(message: Message, context: Context) -> Message:
    """Give the groups' public keys for secure sums."""
    from client_app import secure

    return Message(sum_messages.pack_public_keys(*secure.keys(context)), reply_to=message)


@app.query("prepare")
@outgoing.guarded
def prepare(message: Message, context: Context) -> Message:
    """Seal rounds of secure sums ahead, so that one in which a group drops out can be finished."""
    from client_app import secure

    return Message(sum_messages.pack_prepared(*secure.prepare(message, context)), reply_to=message)


@app.query("mask")
@outgoing.guarded
def mask(message: Message, context: Context) -> Message:
    """Give the groups' numbers under masks that only the sum is rid of."""
    from client_app import secure

    return Message(sum_messages.pack_parts(*secure.mask(message, context)), reply_to=message)


@app.query("unmask")
@outgoing.guarded
def unmask(message: Message, context: Context) -> Message:
    """Help to take the masks off a sum."""
    from client_app import secure

    return Message(sum_messages.pack_shares(secure.unmask(message, context)), reply_to=message)
