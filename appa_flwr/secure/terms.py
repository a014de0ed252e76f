"""What a group adds to the sums from which a rule's rewards follow: its half of `appa_flwr.analysis.aggregation.sums`.

A group keeps its own history and lead. All terms are in [-1, 1], and `GAIN` fills the words up: 52 fractional bits.

Axis letters: J answers, K windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from appa_flwr.config.sections import APPASection
from appa_flwr.core.errors import UserError
from appa_flwr.secure.fixed_point import LARGEST, decode, encode
from appa_flwr.secure.primitives import Words

FloatArray = npt.NDArray[np.float64]
Terms = dict[str, FloatArray]

GAIN = LARGEST
WINDOW, STEP = 14.0, 7.0
"""A sum of exponentials is right to 1e-10 of itself where the largest is above exp(-14); log 1024 < 7 then overlap."""

LEAD_SLACK, LEAD_ROOM = 8.0, 512.0
WEIGHT_STEP = 3.0
"""eta of rule mix: what a reward that is short by 1 adds to a group's log-weight in one iteration."""


@dataclass(frozen=True)
class Standing:
    """What a group keeps of itself after an iteration; nothing before its first.

    Attributes:
        iteration: in which it last answered, 0 = never.
        history: moving average of its mean reward.
        lead: how far it has fallen behind, less what all groups of that iteration add to theirs.
    """

    iteration: int = 0
    history: float = 0.0
    lead: float = 0.0


@dataclass(frozen=True)
class Public:
    """What the server tells all groups alike with an iteration's answers, made of earlier sums.

    Attributes:
        iteration: from 1 on.
        history: mean of the groups of the last iteration, with which a late one begins.
        lead: the same of their leads.
        reference: log of the sum of exp(weight) over the groups, as the last iteration knew them.
        moves: earlier iteration -> what its groups add to their leads, and under what none falls.
    """

    iteration: int = 1
    history: float = 0.0
    lead: float = 0.0
    reference: float = 0.0
    moves: Mapping[int, tuple[float, float]] = field(default_factory=dict)


def check_rule(rule: str, settings: APPASection) -> None:
    """Raise a UserError where a rule cannot be computed from sums."""
    if rule == "min" or (rule == "alpha" and abs(settings.alpha) > WINDOW):
        raise UserError(
            f"rule={rule} takes single groups' rewards, which no sum holds; run.sums = plain, or beside secure "
            f"sums rule=alpha with appa.alpha={-WINDOW:g}, which is nearer to the minimum than the mean (at most "
            f"+-{WINDOW:g})"
        )
    if rule not in ("average", "alpha", "appa", "mix"):
        raise UserError(f"rule={rule}: what it needs of the groups is not known as sums; run.sums = plain")


def begin(standing: Standing, public: Public) -> Standing:
    """A group's history and lead as an iteration starts from them."""
    if not standing.iteration:
        return Standing(0, public.history, public.lead)
    added, floor = public.moves[standing.iteration]
    return Standing(standing.iteration, standing.history, max(standing.lead + added, floor))


def terms(
    rule: str, settings: APPASection, public: Public, standing: Standing, reward_J: FloatArray, training_J: FloatArray
) -> tuple[Terms, Standing]:
    """A group's terms of the sums of one iteration, and its standing after it.

    Args:
        rule: the run's.
        settings: its parameters.
        public: from the server.
        standing: after the last iteration before this one in which the group has answered.
        reward_J: alignment rewards, in [0, 1].
        training_J: training rewards, in [0, 1].
    """
    now, mean = begin(standing, public), float(reward_J.mean())
    after = Standing(
        public.iteration,
        settings.ema_decay * now.history + (1 - settings.ema_decay) * mean,
        now.lead - WEIGHT_STEP * mean if rule == "mix" else now.lead,
    )
    weight, term_J = _weighted(rule, settings, public, now, after, training_J)
    found = {
        "reward": reward_J,
        "square": reward_J**2,
        "training": training_J,
        "term": term_J,
        "weight": np.array([weight]),
        "history": np.array([after.history]),
        "lead": np.array([after.lead / LEAD_ROOM]),
    }
    if rule == "appa":
        found["next"] = _windows_of_weight(settings, after)
    return found, after


def _weighted(
    rule: str,
    settings: APPASection,
    public: Public,
    now: Standing,
    after: Standing,
    training_J: FloatArray,
) -> tuple[float, FloatArray]:
    """A group's weight, and what the rule sums of its training rewards beside themselves: one number an answer.

    More of them, such as powers, would tell the rewards of as many groups, without their names.
    """
    if rule == "alpha":
        return 1.0, alpha_term(settings.alpha, training_J)
    if rule == "mix":
        weight = math.exp(after.lead - public.reference - LEAD_SLACK)
        return weight, weight * training_J
    if rule == "appa":
        # Settled weights sum to 1; `combine` finds those that are not.
        weight = math.exp(min(_exponent(settings, now) - public.reference, 0.0))
        return weight, np.expm1(weight * training_J) / math.expm1(1)
    return 1.0, np.zeros(0)


def _exponent(settings: APPASection, standing: Standing) -> float:
    """The log of a group's weight under rule appa, before all are made to sum to 1 (Equation 6)."""
    return (1 - standing.history) / settings.temperature


def weight_terms(settings: APPASection, public: Public, standing: Standing) -> Terms:
    """A group's terms of a sum that settles appa's weights before an iteration; see `settled` of the other half."""
    return {"now": _windows_of_weight(settings, begin(standing, public))}


def _windows_of_weight(settings: APPASection, standing: Standing) -> FloatArray:
    """A group's weight under rule appa, in `windows` (K,)."""
    return windows(np.array([_exponent(settings, standing)]), 1 / settings.temperature)[:, 0]


def alpha_term(alpha: float, training_J: FloatArray) -> FloatArray:
    """The term of mean exp(|alpha| u), u the reward, or for a negative alpha what it lacks to 1: (J,)."""
    if abs(alpha) < np.finfo(float).eps:
        return training_J
    exponent_J = abs(alpha) * (training_J if alpha > 0 else 1 - training_J)
    return np.asarray(np.expm1(exponent_J) / np.expm1(abs(alpha)))


def tops(span: float) -> FloatArray:
    """Where the windows on exponents in [0, span] end, (K,)."""
    return np.asarray(span - STEP * np.arange(1 + max(0, math.ceil((span - WINDOW) / STEP))), dtype=np.float64)


def windows(exponent_J: FloatArray, span: float) -> FloatArray:
    """exp(exponent), for exponents in [0, span], in windows that a word can hold: (K, J), at most 1 in each."""
    return np.asarray(np.exp(np.minimum(exponent_J - tops(span)[:, None], 0.0)))


def pack(found: Terms) -> Words:
    """Terms as the words that are masked; what is outside [-1, 1] is cut, and no number counts as 0.

    An error would tell the server, by the group's name, that its number is outside a range of the server's choice.
    """
    packed = np.concatenate([found[name].ravel() for name in sorted(found)])
    return encode(GAIN * np.clip(np.nan_to_num(packed), -1, 1), least=-GAIN, most=GAIN)


def unpack(words: Words, shapes: Mapping[str, tuple[int, ...]], *, groups: int) -> Terms:
    """The sums of `pack`ed terms of these shapes over so many groups.

    Raises:
        UserError: as `decode`.
    """
    sums = decode(words, groups=groups, least=-GAIN, most=GAIN) / GAIN
    ends = np.cumsum([math.prod(shapes[name]) for name in sorted(shapes)])
    parts = np.split(sums, ends[:-1])
    return {name: part.reshape(shapes[name]) for name, part in zip(sorted(shapes), parts, strict=True)}
