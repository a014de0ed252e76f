"""The strategy of `server_app.ppo.strategy` where the server sees the groups' sums alone.

Axis letters: J rollouts.
"""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from appa_flwr.protocol import wire
from appa_flwr.run.records import CurvePoint
from server_app.federation.summed_rewards import RuleFromSums, SummedState
from server_app.federation.summed_scores import scores
from server_app.ppo.strategy import AppaStrategy, timed


class SummedStrategy(AppaStrategy):
    """Each iteration is two messages, and the reference pass runs beside the first."""

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600, *_: Any, **__: Any
    ) -> Result:
        """See `AppaStrategy.start`.

        Raises:
            TooFew: too few groups answered; policy and state are those of the iteration before.
        """
        secure = self._federation.secure
        assert secure is not None
        rule = RuleFromSums(secure, self._config)
        state = self._state if isinstance(self._state, SummedState) else rule.first()
        for server_round in range(self._done + 1, self._done + 1 + num_rounds):
            now = self._sample(server_round)
            before = secure.seconds_waited
            scored = rule.reward(state, now.answers, now.request, meanwhile=self._reference_pass)
            now.seconds["federation_wait"] = secure.seconds_waited - before
            assert now.reference is not None
            with timed(now.seconds, "update"):
                score_J = torch.tensor(
                    scored.result.aggregate_J, dtype=torch.float32, device=now.rollout.logprob_JT.device
                )
                learned = self._engine.update(now.rollout, now.reference, score_J)
            missing = tuple(name for name in self._federation.groups if name not in scored.state.groups)
            now.line = self._line(server_round, scored.result, learned, group_reward=scored.reward, missing=missing)
            self._done, state = server_round, scored.state
            self._state = state
            if self._is_evaluated(server_round):
                now.line = now.line.model_copy(update={"held_out": self._summed_point()})
            self._finished(now.line, state)
        return Result()

    def _summed_point(self) -> CurvePoint:
        """A point of the learning curve."""
        assert self._federation.secure is not None
        curve, metric = self._curve(), self._config.reward_metric
        found = scores(self._federation.secure, curve.request([metric], sides=(wire.TARGET_SIDE, wire.TRUTH_SIDE)))
        predicted, survey = found[metric, wire.TARGET_SIDE], found[metric, wire.TRUTH_SIDE]
        return CurvePoint(
            avg_as=predicted.avg_as,
            min_as=predicted.min_as,
            survey_avg_as=survey.avg_as if survey.known else None,
            survey_min_as=survey.min_as if survey.known else None,
            format_score=float(curve.format_score_J.mean()),
        )
