"""What a group adds to each sum: named arrays of numbers in [-1, 1], the same names and shapes for all groups.

PluralLLM and torch are imported inside the parts that need them.

Axis letters: J scored answers, L measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from flwr.app import Context

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.owner.owner_policy import OwnerPolicy
from appa_flwr.protocol import sum_messages as messages
from appa_flwr.protocol import votes, wire
from appa_flwr.protocol.rewards import training_reward
from appa_flwr.secure import terms
from appa_flwr.secure.refusals import FEW_OWN
from appa_flwr.secure.refusals import Refused as NoSum
from appa_flwr.secure.roster import LEAST_GROUPS
from appa_flwr.secure.terms import Standing
from client_app import outgoing, protection, scoring, state, survey_answers, tables
from pluralllm.data import GroupData, option_embedding

OWN_SCORE, OWN_DECIMALS = "own score", 2
"""In the ledger, and how exact it leaves a deployed group: what one question adds to a mean over many is less."""

FloatArray = npt.NDArray[np.float64]
Sums = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Summand:
    """A group's numbers, its standing after them, and what its owner lets out beside."""

    terms: terms.Terms
    standing: Standing | None = None
    released: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Group:
    """A group of this node, and what its numbers are made of; its sums are over `least` groups or more."""

    context: Context
    config: Config
    owner_policy: OwnerPolicy
    public: wire.Catalogue
    name: str
    standing: Standing
    least: int

    @property
    def memory(self) -> state.Memory:
        """The node's."""
        return state.memory_of(self.context)

    @property
    def data(self) -> GroupData:
        """Its training answers; none where it does not train PluralLLM."""
        data = state.data(self.memory, self.name)
        return data.first(0) if self.name in self.config.unseen_group_names else data


def summand(asked: messages.Asked, group: Group) -> Summand:
    """The numbers of one group.

    Raises:
        UserError: nobody knows a sum of that name.
        Refused: its owner's policy does not let the group take part in it.
    """
    if asked.what not in _MAKERS:
        raise UserError("a sum of an unknown kind")
    return _MAKERS[asked.what](asked, group)


def _rewards(asked: messages.Asked, group: Group) -> Summand:
    given, request = messages.unpack_rule_terms(asked.content), _score_request(asked, group)
    _check_rule(given.rule, group.config)
    if given.format_score_J is None or given.parsed_J is None or request.sides != (wire.TARGET_SIDE,):
        raise UserError("rewards are of answers with format scores, against predictions")
    target_QK = tables.side(group.context, group.public, group.name, wire.TARGET_SIDE, draw=request.draw)
    reward_J = scoring.score(request, target_QK, group.public.option_QK)[group.config.reward_metric]
    training_1J = training_reward(
        reward_J[None], given.format_score_J, given.parsed_J, alignment_weight=group.config.appa.alignment_weight
    )
    found, after = terms.terms(given.rule, group.config.appa, given.public, group.standing, reward_J, training_1J[0])
    return Summand(found, after)


def _score_request(asked: messages.Asked, group: Group) -> wire.ScoreRequest:
    request = wire.unpack_score_request(asked.content)
    if not all(map(group.owner_policy.allows, request.metrics)):  # the run's config may name another one
        raise outgoing.Refused(wire.METRIC_REFUSED)
    return request


def _weights(asked: messages.Asked, group: Group) -> Summand:
    given = messages.unpack_rule_terms(asked.content)
    _check_rule(given.rule, group.config)
    return Summand(terms.weight_terms(group.config.appa, given.public, group.standing))


def _check_rule(rule: str, config: Config) -> None:
    if rule not in (config.rule, config.baseline_rule):
        raise UserError("a rule that is none of the run's")
    terms.check_rule(rule, config.appa)


def _training(asked: messages.Asked, group: Group) -> Summand:
    from client_app import predictor

    protection.check_training(group.config, group.owner_policy)
    _check_enough(asked, group)
    start = asked.content.array_records["arrays"]
    (weight_P,) = (array.numpy().astype(np.float64) for array in start.values())
    step_P, share, loss = np.zeros_like(weight_P), 0.0, 0.0
    if len(data := group.data):
        settings = asked.content.config_records["config"]
        trained = predictor.train_round(
            group.config,
            start,
            [data],
            option_embedding(group.public),
            round_number=int(str(settings["server-round"])),
            proximal=float(str(settings.get("proximal-mu", 0.0))),
            secret=protection.secret(group.context.node_config, group.owner_policy),
        )
        (trained_P,) = (array.numpy().astype(np.float64) for array in trained.weights.values())
        step_P, loss = trained_P - weight_P, trained.loss
        share = len(data) / int(group.public.train_Q.sum())
    return Summand(
        {
            "step": share * np.clip(step_P / messages.LARGEST_WEIGHT_STEP, -1, 1),
            "share": np.array([share]),
            "loss": np.array([share * min(max(loss / messages.LARGEST_LOSS, -1.0), 1.0)]),
        }
    )


def _validation(asked: messages.Asked, group: Group) -> Summand:
    from client_app import predictor

    if not group.owner_policy.training:
        raise outgoing.Refused(wire.TRAINING_REFUSED)
    _check_enough(asked, group)
    weights = asked.content.array_records["arrays"]
    ours = predictor.load(group.config, weights, option_embedding(group.public), group.public.train_Q)
    truth = tables.held_out(group.memory, group.name, group.public, group.owner_policy)
    if group.name in group.config.unseen_group_names:
        truth = truth.first(0)
    count, errors = ours.validate([(state.data(group.memory, group.name), truth)])
    share = count / max(1, int(group.public.held_out_Q.sum()))
    return Summand({"share": np.array([share]), "error": share * np.array(errors)})


def _predictor_scores(asked: messages.Asked, group: Group) -> Summand:
    score_2L = state.predictor_scores(group.memory, group.name)
    few_2 = [not _enough(asked, group, unseen=unseen) for unseen in (False, True)]
    return Summand({"scores": np.where(np.array(few_2)[:, None], 0.0, score_2L)})


def _enough(asked: messages.Asked, group: Group, *, unseen: bool) -> bool:
    """True if three groups or more of the (un)seen ones are in the sum, whoever drops out of it yet."""
    cohort, unseen_names = set(asked.task.cohort), set(group.config.unseen_group_names)
    of_kind = cohort & unseen_names if unseen else cohort - unseen_names
    return len(of_kind) - max(0, len(cohort) - group.least) >= LEAST_GROUPS


def _check_enough(asked: messages.Asked, group: Group) -> None:
    """Unseen groups add zeros: where all others are unseen, the sum is one group's step.

    Raises:
        NoSum: too few might train.
    """
    if not _enough(asked, group, unseen=False):
        raise NoSum(FEW_OWN)


def predictor_scores(parts: Sums, public: wire.Catalogue, *, unseen: bool) -> FloatArray:
    """A group's scores of PluralLLM as they are summed, (2, L): a row of seen groups, one of unseen ones, and its own
    filled.
    """
    from pluralllm.scores import summed

    mine_L = np.array([parts.get(part, {}).get(name, {}).get(measure, 0.0) for part, name, measure in summed()])
    return np.stack([mine_L * (not unseen), mine_L * unseen]) / len(public.questions)


def _votes(asked: messages.Asked, group: Group) -> Summand:
    config, owner_policy = group.config, group.owner_policy
    if not owner_policy.votes:
        raise outgoing.Refused(wire.VOTES_REFUSED)
    kind = votes.BALLOTS[config.task] if asked.what == messages.VOTES else votes.DISTRIBUTION
    if asked.what == messages.DISTRIBUTIONS and not owner_policy.mean:
        raise outgoing.Refused(wire.MEAN_REFUSED)
    # By predictions where SFT learns from them, as with votes one by one.
    predicted = asked.what == messages.PREDICTIONS or (
        asked.what == messages.VOTES and config.sft.target == "predicted-mean"
    )
    vote_QK = tables.ballot(group.memory, group.public, group.name, kind=kind, predicted=predicted)
    return Summand({"votes": vote_QK / group.public.option_QK.shape[1]})


def _scores(asked: messages.Asked, group: Group) -> Summand:
    request = _score_request(asked, group)
    found: terms.Terms = {}
    released: dict[str, float] = {}
    for of in request.sides:
        side_QK = tables.side(group.context, group.public, group.name, of)
        if of == wire.TRUTH_SIDE and not group.owner_policy.truth:
            side_QK = np.full_like(side_QK, np.nan)
        for metric, reward_J in scoring.score(request, side_QK, group.public.option_QK).items():
            known_J, name = ~np.isnan(reward_J), f"{metric} {of}"
            found |= {
                f"{name} reward": np.nan_to_num(reward_J),
                f"{name} square": np.nan_to_num(reward_J) ** 2,
                f"{name} known": known_J.astype(np.float64),
                f"{name} own": np.array([reward_J[known_J].mean() if known_J.any() else 0.0]),
                f"{name} groups": np.array([float(known_J.any())]),
            }
            if known_J.any() and _may_release(group, request.question_J[known_J]):
                mean = float(reward_J[known_J].mean())
                released[name] = (
                    round(mean, OWN_DECIMALS) if survey_answers.deployed(group.context.node_config) else mean
                )
    return Summand(found, released=released)


def _may_release(group: Group, question_J: npt.NDArray[np.int64]) -> bool:
    """Whether the mean score of answers to these questions may leave: one of a single answer tells what was answered.

    Raises:
        UserError: the ledger cannot be written.
    """
    policy = group.owner_policy
    if not policy.own_score or len(np.unique(question_J)) < policy.least_answers:
        return False
    digest = state.catalogue_digest(group.memory)
    try:
        protection.count_reply(group.context, OWN_SCORE, digest=digest, limit=policy.own_scores)
    except outgoing.Refused:
        return False
    return True


_MAKERS: Mapping[str, Callable[[messages.Asked, Group], Summand]] = {
    messages.REWARDS: _rewards,
    messages.WEIGHTS: _weights,
    messages.TRAINING: _training,
    messages.VALIDATION: _validation,
    messages.PREDICTOR_SCORES: _predictor_scores,
    messages.VOTES: _votes,
    messages.PREDICTIONS: _votes,
    messages.DISTRIBUTIONS: _votes,
    messages.SCORES: _scores,
}
