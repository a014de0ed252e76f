"""Scores of answers over the groups, from single rewards or from their sums.

Axis letters: G groups, J answers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis.alignment import GROUPS_TO_COMPARE, alignment_scores
from appa_flwr.analysis.equations import fairness_index
from appa_flwr.protocol import asks
from appa_flwr.protocol.asks import ScoreRequest
from appa_flwr.secure.rule_sums import fairness_of_sums
from server_app.federation.ask import Replies, TooFew
from server_app.federation.groups import Groups

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class GroupScores:
    """Scores by one metric and one side.

    Attributes:
        avg_as: mean of the groups' own scores; NaN if no group has one.
        min_as: lowest of the groups' own scores; NaN unless all are known.
        per_group: group -> its own score; NaN if the group has or gives none.
        fairness: function of a mask (J,): the Fairness Index over answers where the mask is True, NaN if undefined.
        reward_GJ: every group's rewards, NaN where a group has none; None if only sums are known.
    """

    avg_as: float
    min_as: float
    per_group: Mapping[str, float]
    fairness: Callable[[BoolArray], float]
    reward_GJ: FloatArray | None = None

    @property
    def known(self) -> bool:
        """True if any group has a score."""
        return not math.isnan(self.avg_as)


def scores(groups: Groups, request: ScoreRequest) -> dict[tuple[str, str], GroupScores]:
    """(metric, side) -> the groups' scores of answers; raises the errors of `Groups.ask`.

    Under sums, groups whose owners allow it also give their own scores.
    """
    replies, names = groups.ask(request.ask(asks.REWARDS)), groups.names
    if groups.plain:
        return {key: _of_rewards(replies, " ".join(key), names) for key in request.keys}
    own: Replies | None = None
    with suppress(TooFew):  # too few owners let the own score of their group leave
        own = groups.ask(request.ask(asks.OWN_SCORES))
    return {key: _of_sums(replies, own, " ".join(key), names) for key in request.keys}


def _of_rewards(replies: Replies, name: str, names: Sequence[str]) -> GroupScores:
    reward_GJ, known_GJ = replies.rows(f"{name} reward", names), replies.rows(f"{name} known", names)
    reward_GJ = np.where(known_GJ == 1.0, reward_GJ, np.nan)

    def fairness(used_J: BoolArray) -> float:
        return fairness_index(reward_GJ[:, used_J], min_groups=GROUPS_TO_COMPARE) if used_J.any() else math.nan

    if np.isnan(reward_GJ).all():
        return GroupScores(math.nan, math.nan, dict.fromkeys(names, math.nan), fairness, reward_GJ)
    scored = alignment_scores(reward_GJ)
    own = dict(zip(names, scored.per_group_G.tolist(), strict=True))
    return GroupScores(scored.avg_as, scored.min_as, own, fairness, reward_GJ)


def _of_sums(replies: Replies, own: Replies | None, name: str, names: Sequence[str]) -> GroupScores:
    sum_J, square_J, count_J = (replies.sum(f"{name} {what}") for what in ("reward", "square", "known"))
    count_J, number = np.round(count_J), round(float(replies.sum(f"{name} groups")[0]))

    def fairness(used_J: BoolArray) -> float:
        if not used_J.any():
            return math.nan
        used_J = used_J & (count_J >= GROUPS_TO_COMPARE)
        return fairness_of_sums(sum_J[used_J], square_J[used_J], groups=count_J[used_J])

    known: dict[str, float] = {}
    if own is not None:
        known = {group: float(score) for group, (score, has) in zip(own.groups, own.each(name), strict=True) if has}
    return GroupScores(
        avg_as=float(replies.sum(f"{name} own")[0]) / number if number else math.nan,
        min_as=min(known.values()) if known and len(known) >= number else math.nan,
        per_group={group: known.get(group, math.nan) for group in names},
        fairness=fairness,
    )
