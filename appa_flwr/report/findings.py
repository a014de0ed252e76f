"""What the numbers of a run say, computed from them and put into plain sentences.

A gain over the base policy can be nothing but hedging: a policy that learns to answer uniformly beats a
bad base. So a gain counts only where PPO also beats the uniform answer, and only as PPO's own where it beats
SFT too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from appa_flwr.report.artifacts import Run, is_known
from appa_flwr.run.records import Iteration, Scores

Measure = Literal["Avg AS", "Min AS"]
Verdict = Literal["gain", "not over sft", "none", "unknown"]
MEASURES: tuple[Measure, Measure] = ("Avg AS", "Min AS")
CEILING_OF: dict[Measure, str] = {"Avg AS": "ceiling-average", "Min AS": "ceiling-min"}

SHOWN_TIE = 0.0005
"""Half of the last of the three decimals shown: a smaller difference reads as 0.000 and is none."""

HARDLY_EVER = 10
"""The adaptive branch counts as hardly ever taken if it is in less than one of so many iterations."""


@dataclass(frozen=True)
class Gain:
    """How far PPO's score lies above three others.

    Attributes:
        measure: "Avg AS" or "Min AS".
        ppo: PPO's score in [0, 1].
        over_base, over_uniform, over_sft: PPO's score minus theirs, in [-1, 1]; None where they have no row.
        verdict: "gain" over all three, "not over sft" (over base and uniform only), "none", or "unknown"
            where base or uniform was not measured.
    """

    measure: Measure
    ppo: float
    over_base: float | None
    over_uniform: float | None
    over_sft: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Way:
    """Where the policies stand between base and ceiling on one measure.

    Attributes:
        positions: policy -> score, of those measured among base, uniform, sft, ppo and the measure's ceiling.
        covered: (ppo - base) / (ceiling - base); None where the ceiling does not lie above base. 1 is the
            ceiling, negative is below base.
    """

    measure: Measure
    positions: dict[str, float]
    covered: float | None


@dataclass(frozen=True)
class FallBack:
    """In how many of the iterations that had a threshold the rule took the plain mean."""

    fell_back: int
    total: int

    @property
    def share(self) -> float:
        """Share in [0, 1]."""
        return self.fell_back / self.total

    @property
    def hardly_adaptive(self) -> bool:
        """Whether the adaptive branch was taken in less than a tenth of the iterations."""
        # In whole numbers: 1 - 0.9 is a little less than 0.1.
        return (self.total - self.fell_back) * HARDLY_EVER < self.total


def value_of(scores: Scores, measure: Measure) -> float:
    """Picks the measure out of the scores, in [0, 1]."""
    return scores.avg_as if measure == "Avg AS" else scores.min_as


def _value(run: Run, policy: str, measure: Measure, *, survey: bool) -> float | None:
    scores = run.scores(policy, run.training_metric, survey=survey)
    if scores is None or not is_known(value_of(scores, measure)):
        return None
    return value_of(scores, measure)


def _judge(over_base: float | None, over_uniform: float | None, over_sft: float | None) -> Verdict:
    if over_base is not None and over_base <= SHOWN_TIE:
        return "none"
    if over_uniform is not None and over_uniform <= SHOWN_TIE:
        return "none"
    if over_base is None or over_uniform is None:
        return "unknown"
    return "not over sft" if over_sft is not None and over_sft <= SHOWN_TIE else "gain"


def gains(run: Run, *, survey: bool) -> tuple[Gain, ...]:
    """PPO's gains on the training metric, for Avg AS and Min AS.

    Args:
        run: the run.
        survey: against the survey truth instead of PluralLLM's targets.

    Returns:
        One gain a measure, in the order of `MEASURES`; none where PPO was not evaluated.
    """
    found: list[Gain] = []
    for measure in MEASURES:
        ppo = _value(run, "ppo", measure, survey=survey)
        if ppo is None:
            continue
        others = {policy: _value(run, policy, measure, survey=survey) for policy in ("base", "uniform", "sft")}
        over = {policy: None if other is None else ppo - other for policy, other in others.items()}
        verdict = _judge(over["base"], over["uniform"], over["sft"])
        found.append(Gain(measure, ppo, over["base"], over["uniform"], over["sft"], verdict))
    return tuple(found)


def signed(value: float | None) -> str:
    """A difference with its sign and three decimals, "unknown" for None."""
    return "unknown" if value is None else f"{value:+.3f}"


def sentence(gain: Gain) -> str:
    """The verdict on one measure in one sentence."""
    figures = (
        f"{gain.measure} {gain.ppo:.3f}: {signed(gain.over_base)} over base, "
        f"{signed(gain.over_uniform)} over the uniform answer, {signed(gain.over_sft)} over SFT"
    )
    if gain.verdict == "gain":
        return f"{figures}: a gain."
    if gain.verdict == "not over sft":
        return f"{figures}: above base and the uniform answer, but not above SFT, so PPO itself added nothing."
    if gain.verdict == "unknown":
        return f"{figures}: whether this is a gain cannot be said."
    if gain.over_base is not None and gain.over_base <= SHOWN_TIE:
        return f"{figures}: no gain, not even over base."
    return (
        f"{figures}: no gain, because the uniform answer, which knows nothing of any group, does as well or "
        "better; what was won over base is hedging."
    )


def verdict_word(found: tuple[Gain, ...]) -> str:
    """All measures in a few words: where PPO gained and where it did not."""
    if not found:
        return "No verdict: PPO was not evaluated."
    if any(gain.verdict == "unknown" for gain in found):
        return "No verdict: base or the uniform answer was not evaluated."
    gained = [gain.measure for gain in found if gain.verdict == "gain"]
    if gained:
        return f"PPO gained on {' and '.join(gained)}{'' if len(gained) == len(found) else ' only'}."
    if all(gain.verdict == "not over sft" for gain in found):
        return "PPO did not gain over SFT."
    return "PPO did not gain."


def ways(run: Run, *, survey: bool) -> tuple[Way, ...]:
    """How much of the way from base to the best shared answer PPO covers on the training metric.

    Args:
        run: the run.
        survey: against the survey truth instead of PluralLLM's targets.

    Returns:
        One way a measure for which base, PPO and that measure's ceiling were evaluated.
    """
    found: list[Way] = []
    for measure in MEASURES:
        policies = ("base", "uniform", "sft", "ppo", CEILING_OF[measure])
        values = {policy: _value(run, policy, measure, survey=survey) for policy in policies}
        positions = {policy: value for policy, value in values.items() if value is not None}
        if not {"base", "ppo", CEILING_OF[measure]} <= set(positions):
            continue
        base, ceiling = positions["base"], positions[CEILING_OF[measure]]
        covered = (positions["ppo"] - base) / (ceiling - base) if ceiling - base > SHOWN_TIE else None
        found.append(Way(measure, positions, covered))
    return tuple(found)


def fall_back(iterations: tuple[Iteration, ...]) -> FallBack | None:
    """Counts the iterations in which the rule took the plain mean; None for a rule that has no threshold."""
    branches = [line.fell_back for line in iterations if line.fell_back is not None]
    return FallBack(sum(branches), len(branches)) if branches else None


def federation_share(iterations: tuple[Iteration, ...]) -> float | None:
    """Share in [0, 1] of all iterations' seconds spent waiting for the groups; None if unknown."""
    total = sum(sum(line.seconds.values()) for line in iterations)
    return sum(line.seconds.get("federation_wait", 0.0) for line in iterations) / total if total > 0 else None


def total_seconds(run: Run) -> float | None:
    """Seconds of all phases, or of all iterations where phases are unknown; None where both are."""
    if run.phases:
        return sum(phase.seconds for phase in run.phases)
    if run.iterations:
        return sum(sum(line.seconds.values()) for line in run.iterations)
    return None


def duration(seconds: float) -> str:
    """Seconds as a person says them: "12.3 s", "6 min 5 s", "2 h 3 min"."""
    minute, hour = 60, 3600
    if seconds < minute:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < hour:
        return f"{whole // minute} min {whole % minute} s"
    return f"{whole // hour} h {whole % hour // minute} min"
