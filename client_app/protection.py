"""What the owner's policy does to rewards before they leave: how many there are, how exact they are.

Axis letters: J scored answers, Q public questions, K options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appa_flwr import wire
from appa_flwr.owner.ledger import Ledger, digest, ledger_of
from appa_flwr.owner.policy import Policy, policy_of
from client_app.outgoing import Refused

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Protection:
    """A node's policy, and the ledger that it is kept with; a simulation's node has none."""

    policy: Policy
    ledger: Ledger | None

    @classmethod
    def of(cls, node_config: Mapping[str, object]) -> Protection:
        """A UserError where the node's config, or its owner's file, is wrong."""
        return cls(policy_of(node_config), ledger_of(node_config))

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
            Refused: more scores against the prediction of a question than the policy allows.
            UserError: the ledger cannot be written.
        """
        withheld = np.full(len(request.question_J), np.nan)
        if side == wire.TRUTH_SIDE and not self.policy.truth:
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
        digests = [
            # What is compared with belongs to it: the same answer against another table is another score.
            digest(secret, target.encode(), question.encode(), metric.encode(), answer_JK[j].tobytes(), row.tobytes())
            for question, (metric, j) in zip(questions, asked, strict=True)
            for row in (side_QK[request.question_J[j]],)
        ]
        limit = self.policy.truth_scores_per_question if side == wire.TRUTH_SIDE else self.policy.scores_per_question
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
        if not self.policy.changes_rewards:
            return reward
        noise = np.random.default_rng(int.from_bytes(mark, "little")).normal(0.0, self.policy.reward_noise)
        return float(np.clip(round(reward + noise, self.policy.reward_decimals), 0.0, 1.0))
