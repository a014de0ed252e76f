"""The groups' side: a Flower ClientApp with one action per message of the protocol.

PluralLLM and torch are imported inside the actions that need them: deployed, every message starts a fresh process, and
scoring needs neither.

Axis letters: Q public questions, K options.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from appa_flwr import votes, wire
from appa_flwr.errors import UserError
from appa_flwr.owner.policy import policy_of
from client_app import data, outgoing, scoring, state
from client_app.protection import Protection

if TYPE_CHECKING:
    from pluralllm.data import GroupData

app = ClientApp()
log = logging.getLogger("appa.client")


@app.query("roll_call")
@outgoing.guarded
def roll_call(message: Message, context: Context) -> Message:
    """Say which groups live here."""
    config = data.context_config(context)
    policy_of(context.node_config)  # one that cannot be read lets nothing out, no name either
    names = data.my_groups(config, context.node_config)
    return outgoing.send(message, [wire.GroupReply(name) for name in names])


@app.query("catalogue")
@outgoing.guarded
def catalogue(message: Message, context: Context) -> Message:
    """Keep the public questions; load the groups' private answers and cut them to these questions."""
    from pluralllm.data import group_data

    config, policy = data.context_config(context), policy_of(context.node_config)
    data.check_allowed(config, policy)
    public = wire.unpack_catalogue(message.content)
    training = {q.question_id for q, train in zip(public.questions, public.train_Q, strict=True) if train}
    embedding = state.embedding(public)
    replies = []
    names = data.my_groups(config, context.node_config)
    for name, mine in data.answers(config, context.node_config, names).items():
        if isinstance(mine, UserError):
            # Only this group is missing then: which groups share a node is chance and must not change a run.
            log.error("group %s takes no part: its answers cannot be used: %s", name, mine)
            continue
        answers = data.known_answers(config, context.node_config, mine, public.questions)
        d_g = group_data(name, answers, embedding=embedding, question_ids=training)
        truth_QK = np.full(public.option_QK.shape, np.nan)
        for row, question in enumerate(public.questions):
            if (own := answers.get(question.question_id)) is not None:
                truth_QK[row] = 0.0
                truth_QK[row, : len(own)] = own
        state.remember_data(context.state, d_g, truth_QK)
        counts = {"answered": len(d_g), "known": len(answers)}
        counts["simulated"] = int(not data.deployed(context.node_config))
        counts |= {"truth": int(policy.truth), "probes": int(policy.probes)}
        replies.append(wire.GroupReply(name, counts=counts))
    if not replies:
        raise UserError("no group of this node has answers that can be used")
    state.remember_catalogue(context.state, message.content, tuple(reply.group for reply in replies))
    return outgoing.send(message, replies)


@app.query("population")
@outgoing.guarded
def population(message: Message, context: Context) -> Message:
    """Take part in the sums over groups: masked parts leave, totals come, each group keeps what it makes of them."""
    from client_app import population as sums

    policy = policy_of(context.node_config)
    if not policy.sums:
        raise outgoing.Refused(wire.SUMS_REFUSED)
    public = state.catalogue(context.state)
    node = sums.Node(
        context.state,
        data.context_config(context),
        public.train_Q,
        public.option_QK,
        min_nodes=policy.min_nodes if data.deployed(context.node_config) else 0,
    )
    return outgoing.send_sums(message, sums.respond(wire.unpack_sums_request(message.content), node))


@app.train()
@outgoing.guarded
def train(message: Message, context: Context) -> Message:
    """One round of PluralLLM's federated pretraining; the groups of a node are averaged by their number of answers."""
    from client_app import predictor

    if not policy_of(context.node_config).training:
        raise outgoing.Refused(wire.TRAINING_REFUSED)
    config = data.context_config(context)
    settings = message.content.config_records["config"]
    trained = predictor.train_round(
        config,
        message.content.array_records["arrays"],
        _training_groups(context),
        state.embedding(state.catalogue(context.state)),
        round_number=int(str(settings["server-round"])),
        proximal=float(str(settings.get("proximal-mu", 0.0))),
    )
    return outgoing.send_weights(message, trained.weights, num_examples=trained.num_examples, loss=trained.loss)


@app.evaluate()
@outgoing.guarded
def evaluate(message: Message, context: Context) -> Message:
    """Score a round's weights on the training groups' held-out questions: the server keeps the best round's."""
    from client_app import predictor

    if not policy_of(context.node_config).training:
        raise outgoing.Refused(wire.TRAINING_REFUSED)
    public = state.catalogue(context.state)
    weights = message.content.array_records["arrays"]
    ours = predictor.load(data.context_config(context), weights, state.embedding(public), public.train_Q)
    cells, errors = ours.validate(
        [
            (mine, predictor.held_out_answers(mine.group, state.truth(context.state, mine.group), public.train_Q))
            for mine in _training_groups(context)
        ]
    )
    return outgoing.send_errors(message, num_examples=cells, errors=errors)


@app.query("targets")
@outgoing.guarded
def targets(message: Message, context: Context) -> Message:
    """Write every group's target table from the final PluralLLM: from now on scoring is a look-up and a metric.

    Sums tell the server how good the tables are, those over training answers once in a run.
    """
    from client_app import predictor

    config = data.context_config(context)
    data.check_allowed(config, policy_of(context.node_config))
    public = state.catalogue(context.state)
    weights = wire.unpack_weights(message.content)
    if config.pluralllm.context_resampling == "every-iteration":
        state.remember_weights(context.state, weights)
    ours = predictor.load(config, weights, state.embedding(public), public.train_Q)
    replies = []
    for name in state.groups(context.state):
        mine = state.data(context.state, name)
        found = ours.table(mine, draw=0)
        parts = ours.scores(
            mine,
            found,
            state.truth(context.state, name),
            mean_of_others=state.mean_of_others(context.state, name),
        )
        if state.has_targets(context.state, name):
            # Weights made for the purpose, sent again and again, would tell the training answers bit by bit.
            parts.pop(wire.TRAINING_PART, None)
        state.remember_targets(context.state, name, ours.reward_table(mine, found, draw=0), found.interval())
        sums = {(part, kind): measures for part, kinds in parts.items() for kind, measures in kinds.items()}
        replies.append(wire.GroupReply(name, sums=sums))
    return outgoing.send(message, replies)


@app.query("vote")
@outgoing.guarded
def vote(message: Message, context: Context) -> Message:
    """Vote for SFT: the group's own answer to a training question where it has one, its prediction otherwise."""
    config, policy = data.context_config(context), policy_of(context.node_config)
    data.check_allowed(config, policy)
    if not policy.votes:
        raise outgoing.Refused(wire.VOTES_REFUSED)
    kind = votes.DISTRIBUTION if config.sft.target == "mean" else votes.BALLOTS[config.task]
    public = state.catalogue(context.state)
    replies = []
    for name in state.groups(context.state):
        truth_QK = state.truth(context.state, name)
        own_Q1 = (public.train_Q & ~np.isnan(truth_QK).any(1))[:, None]
        opinion_QK = np.where(own_Q1, truth_QK, state.targets(context.state, name))
        replies.append(wire.GroupReply(name, votes_QK=votes.cast(opinion_QK, public.option_QK, kind=kind)))
    return outgoing.send(message, replies)


@app.query("score")
@outgoing.guarded
def score(message: Message, context: Context) -> Message:
    """Return rewards of the server's answers, and nothing else."""
    request = wire.unpack_score_request(message.content)
    protection = Protection.of(context.node_config)
    data.check_allowed(data.context_config(context), protection.policy)
    if request.asked == wire.PROBES_ASKED and not protection.policy.probes:
        raise outgoing.Refused(wire.PROBES_REFUSED)
    public = state.catalogue(context.state)
    replies = []
    for name in state.groups(context.state):
        rewards = {}
        for side in request.sides:
            if side == wire.TRUTH_SIDE:
                # Only held-out answers are ever compared with: training answers are D_g, and enough rewards tell them.
                side_QK = np.where(public.train_Q[:, None], np.nan, state.truth(context.state, name))
            elif request.draw:
                side_QK = _fresh_targets(context, name, draw=request.draw)
            else:
                side_QK = state.targets(context.state, name)
            scored = scoring.score(request, side_QK, public.option_QK)
            for metric, reward_J in protection.released(
                request, scored, side_QK, public, group=name, side=side
            ).items():
                rewards[metric, side] = reward_J
        replies.append(wire.GroupReply(name, rewards))
    return outgoing.send(message, replies)


def _training_groups(context: Context) -> list[GroupData]:
    unseen = data.context_config(context).unseen_group_names
    return [state.data(context.state, name) for name in state.groups(context.state) if name not in unseen]


def _fresh_targets(context: Context, group: str, *, draw: int) -> npt.NDArray[np.float64]:
    from client_app import predictor

    public = state.catalogue(context.state)
    config = data.context_config(context)
    ours = predictor.load(config, state.weights(context.state), state.embedding(public), public.train_Q)
    mine = state.data(context.state, group)
    return ours.reward_table(mine, ours.table(mine, draw=draw), draw=draw)
