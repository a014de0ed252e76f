"""The groups' rewards as sums: each answer's reward by the run's rule, from totals alone.

Histories and leads are the groups' own: what each hands over for the next iteration is sealed, and comes back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from appa_flwr.analysis.aggregation import sums
from appa_flwr.analysis.aggregation.sums import FromSums, Unsettled
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import sum_messages as messages
from appa_flwr.protocol import wire
from appa_flwr.secure import terms
from appa_flwr.secure.terms import Public
from server_app.federation.answers import Answers
from server_app.federation.secure_sums import Incomplete, SecureSums, Summed


@dataclass(frozen=True, eq=False)
class SummedState:
    """A rule's state after an iteration, as the server knows it.

    Attributes:
        public: what all groups are told with the next answers.
        standings: group -> its own, sealed.
        groups: that answered in that iteration; before the first, those that were there.
    """

    public: Public
    standings: Mapping[str, bytes]
    groups: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SummedReward:
    """One iteration's outcome.

    Attributes:
        result: the rule's.
        state: for the next one.
        reward: mean alignment reward over groups and answers.
    """

    result: FromSums
    state: SummedState
    reward: float


class RuleFromSums:
    """A run's rule over its groups' secure sums."""

    def __init__(self, secure: SecureSums, config: Config) -> None:
        self._secure, self._config = secure, config

    def first(self) -> SummedState:
        """Before any iteration."""
        groups = self._secure.expected
        return SummedState(sums.first(self._config.rule, self._config.appa, len(groups)), {}, groups)

    def reward(
        self, state: SummedState, answers: Answers, request: wire.ScoreRequest, *, meanwhile: Callable[[], None]
    ) -> SummedReward:
        """The rewards of an iteration's answers.

        Raises:
            TooFew: too few groups answered; the state is as it was.
        """
        done = False

        def once() -> None:
            nonlocal done
            if not done:
                meanwhile()
            done = True

        settings, public, there = self._config.appa, state.public, set(self._secure.expected)
        appa, settled = self._config.rule == "appa", set(state.groups)
        for _ in range(1 + 2 * len(there)):
            try:
                if appa and there != settled:
                    public, settled = self._settled(state, public, there), there
                summed = self._sums(state, public, answers, request, among=there if appa else None, meanwhile=once)
                result = sums.combine(self._config.rule, settings, public, summed.sums, groups=len(summed.groups))
            except Incomplete as answered:
                there = set(answered.groups)
                continue
            except Unsettled:  # a group has begun from another standing than it was settled with
                settled = set()
                continue
            standings = {**state.standings, **summed.standings}
            reward = float(summed.mean("reward").mean())
            return SummedReward(result, SummedState(result.public, standings, summed.groups), reward)
        raise UserError("secure sum: the groups' weights do not settle: groups come and go while they are asked")

    def _sums(
        self,
        state: SummedState,
        public: Public,
        answers: Answers,
        request: wire.ScoreRequest,
        *,
        among: Collection[str] | None,
        meanwhile: Callable[[], None],
    ) -> Summed:
        content = messages.pack_rule_terms(self._terms(public, answers))
        content.update(wire.pack_score_request(request))
        shapes = sums.shapes(self._config.rule, self._config.appa, len(request.question_J))
        return self._secure.total(
            messages.REWARDS, content, shapes, standings=state.standings, among=among, meanwhile=meanwhile
        )

    def _settled(self, state: SummedState, public: Public, there: set[str]) -> Public:
        """What the groups are told once their weights are settled among those that are there."""
        settings, content = self._config.appa, messages.pack_rule_terms(self._terms(public, None))
        found = terms.weight_terms(settings, public, terms.Standing())
        shapes = {name: array.shape for name, array in found.items()}
        summed = self._secure.total(messages.WEIGHTS, content, shapes, standings=state.standings, among=there)
        return sums.settled(settings, public, summed.sums, len(summed.groups))

    def _terms(self, public: Public, answers: Answers | None) -> messages.RuleTerms:
        name, rule = self._config.run_name, self._config.rule
        if answers is None:
            return messages.RuleTerms(name, rule, public)
        return messages.RuleTerms(name, rule, public, answers.format_score_J, answers.parsed_J)
