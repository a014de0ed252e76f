"""Protection of numbers before they leave, by the owner's policy: how many there are, how exact they are.

Axis letters: J scored answers, Q public questions, K options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from flwr.app import Context

from appa_flwr.config import Config
from appa_flwr.owner.ledger import Ledger, digest, ledger_of
from appa_flwr.owner.owner_policy import OwnerPolicy, owner_policy_of
from appa_flwr.protocol import wire
from client_app.outgoing import Refused

FloatArray = npt.NDArray[np.float64]
Sums = Mapping[tuple[str, str], Mapping[str, float]]

_NUMBER = "answers"  # of answers, among the sums over them


def check_allowed(config: Config, owner_policy: OwnerPolicy) -> None:
    """Refuse a run that asks for training answers, predictions or a foreign metric where the owner has not allowed it.

    Raises:
        Refused: `sft.target` is a mean, or `metric` is foreign.
    """
    if not owner_policy.allows(config.reward_metric):
        raise Refused(wire.METRIC_REFUSED)
    if config.sft.target == "mean" and not owner_policy.mean:
        raise Refused(wire.MEAN_REFUSED)
    # The mean of predictions over groups that the owner knows tells no group's own.
    if config.sft.target == "predicted-mean" and not (owner_policy.probes or owner_policy.roster):
        raise Refused(wire.PREDICTIONS_REFUSED)


def check_training(config: Config, owner_policy: OwnerPolicy) -> None:
    """Refuse to train PluralLLM as the owner has not allowed it.

    Raises:
        Refused: at all, by plain SGD, or by so few steps that what changes is a sum of single answers.
    """
    if not owner_policy.training:
        raise Refused(wire.TRAINING_REFUSED)
    sgd = config.pluralllm.local_optimizer == "sgd"
    if (sgd and not owner_policy.sgd) or config.pluralllm.local_steps < owner_policy.least_steps:
        raise Refused(wire.WEAK_TRAINING)


def count_reply(context: Context, kind: str, *, digest: str, limit: int) -> None:
    """Write down that a reply is about to rest on the answers to the catalogue of this digest.

    Raises:
        Refused: so many have been given about a question that the owner allows no more.
        UserError: the ledger cannot be written.
    """
    ledger = ledger_of(context.node_config)
    if ledger is not None and not ledger.count_reply(digest, kind, limit=limit):
        raise Refused(wire.REPLIES_SPENT)


def secret(node_config: Mapping[str, object], owner_policy: OwnerPolicy) -> str:
    """A deployed node's secret seed of training, beside the run's; empty where the owner's policy says so."""
    ledger = ledger_of(node_config)
    return "" if ledger is None or not owner_policy.secret_draws else ledger.secret().hex()


def rounded_sums(sums: Sums, owner_policy: OwnerPolicy) -> Sums:
    """Sums over own answers, each rounded as the owner's policy says; how many answers they are over stays."""
    step = owner_policy.sum_rounding
    return {
        key: {name: value if name == _NUMBER else _rounded(value, step, most=of[_NUMBER]) for name, value in of.items()}
        for key, of in sums.items()
    }


def rounded_mean(mean: float, number: int, owner_policy: OwnerPolicy, *, most: float = np.inf) -> float:
    """A mean over so many answers, whose sum is rounded as the owner's policy says; none is above `most`."""
    if not number or not owner_policy.sum_rounding:
        return mean
    return min(_rounded(mean * number, owner_policy.sum_rounding) / number, most)


def _rounded(value: float, step: float, *, most: float = np.inf) -> float:
    return min(round(value / step) * step, most) if step else value


@dataclass(frozen=True)
class Protection:
    """An owner's policy, and the ledger that it is kept with; a simulation's node has none."""

    owner_policy: OwnerPolicy
    ledger: Ledger | None

    @classmethod
    def of(cls, node_config: Mapping[str, object]) -> Protection:
        """A UserError where the node's config, or its owner's file, is wrong."""
        return cls(owner_policy_of(node_config), ledger_of(node_config))

    def released(
        self,
        request: wire.ScoreRequest,
        scored: Mapping[str, FloatArray],
        side_QK: FloatArray,
        public: wire.Catalogue,
        *,
        group: str,
        side: str,
    ) -> Mapping[str, FloatArray]:
        """The rewards (J,) by metric that may leave, written down in the ledger; `side_QK` is what they compare with.

        Against the group's own answers NaN stands for what may not; against predictions there is all or nothing.

        Raises:
            Refused: more scores against the prediction of a question than the owner's policy allows.
            UserError: the ledger cannot be written.
        """
        withheld = np.full(len(request.question_J), np.nan)
        if side == wire.TRUTH_SIDE and not self.owner_policy.truth:
            return dict.fromkeys(scored, withheld)
        if self.ledger is None:
            return scored
        # An answer that nobody can read, or to a question the group has no answer to, tells nothing.
        answer_JK = np.where(public.option_QK[request.question_J], request.prediction_JK, 0.0)
        telling_J = ~np.isnan(answer_JK).any(1)
        telling_J &= ~np.isnan(next(iter(scored.values()))) if scored else telling_J
        asked = [(metric, int(j)) for metric in scored for j in np.flatnonzero(telling_J)]
        secret, target = self.ledger.secret(), f"{group}: {side}"
        questions = [public.questions[request.question_J[j]].question_id for _, j in asked]
        side_JK = side_QK[request.question_J]
        digests = [
            # What is compared with belongs to it: the same answer against another table is another score.
            digest(secret, *map(str.encode, (target, question, metric)), answer_JK[j].tobytes(), side_JK[j].tobytes())
            for question, (metric, j) in zip(questions, asked, strict=True)
        ]
        policy = self.owner_policy
        limit = policy.truth_scores_per_question if side == wire.TRUTH_SIDE else policy.scores_per_question
        whole = side == wire.TARGET_SIDE
        allowed = self.ledger.spend(questions, target, digests, limit=limit, whole=whole)
        if whole and not all(allowed):
            raise Refused(wire.SPENT)
        released = {metric: reward_J.copy() for metric, reward_J in scored.items()}
        for (metric, j), mark, may in zip(asked, digests, allowed, strict=True):
            released[metric][j] = self._blurred(released[metric][j], mark) if may else np.nan
        return released

    def _blurred(self, reward: float, mark: bytes) -> float:
        """Noise comes from what is scored, so that nobody averages it away by asking again."""
        if not self.owner_policy.changes_rewards:
            return reward
        noise = np.random.default_rng(int.from_bytes(mark, "little")).normal(0.0, self.owner_policy.reward_noise)
        return float(np.clip(round(reward + noise, self.owner_policy.reward_decimals), 0.0, 1.0))
