"""Findings of a run, computed from its numbers and put into plain sentences.

A gain over the base policy can be nothing but hedging: a policy that learns to answer uniformly beats a
bad base. So a gain counts only where PPO also beats the uniform answer and the best look-up in the groups' mean
answers, and only as PPO's own where it beats SFT too, each with its whole interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from appa_flwr.analysis.group_differences import CLEAR_GAIN, GroupDifferences
from appa_flwr.analysis.intervals import Interval, paired_differences
from appa_flwr.report.artifacts import RunArtifacts, is_known
from appa_flwr.run.pair_scores import PREDICTIONS, SURVEY, aligned, table
from appa_flwr.run.records import LOOK_UPS, Iteration, RuleRound

Measure = Literal["Avg AS", "Min AS"]
Verdict = Literal["gain", "not over sft", "not over look-up", "none", "unknown"]
MEASURES: tuple[Measure, Measure] = ("Avg AS", "Min AS")
COMPARED = ("base", "uniform", *LOOK_UPS, "sft")
_NAMES = {
    "base": "base",
    "uniform": "the uniform answer",
    "option-list": "the look-up by options",
    "nearest-questions": "the look-up by nearest questions",
    "sft": "SFT",
}
SHOWN_TIE = 0.0005
"""Half of the last of the three decimals shown: a smaller difference reads as 0.000 and is none."""

FEW_QUESTIONS = 30
"""Under so many, questions drawn again and again are too much alike, and a bootstrap's intervals too narrow."""

HARDLY_EVER = 10
"""The adaptive branch counts as hardly ever taken if it is in less than one of so many iterations."""


@dataclass(frozen=True)
class Gain:
    """PPO's score in [0, 1] on a measure, less those of `COMPARED`; with intervals where single scores are known."""

    measure: Measure
    ppo: float
    over: Mapping[str, float]
    intervals: Mapping[str, Interval] = field(default_factory=dict)

    @property
    def look_up(self) -> str | None:
        """The best look-up on this measure, None where none was measured."""
        return min((name for name in LOOK_UPS if name in self.over), key=self.over.__getitem__, default=None)

    @property
    def compared(self) -> tuple[str, ...]:
        """The methods that the verdict rests on, as far as they were measured: of the look-ups only the best."""
        known = ("base", "uniform", *filter(None, [self.look_up]), "sft")
        return tuple(method for method in known if method in self.over)

    def _above(self, method: str) -> bool:
        """True if PPO is above: by more than what is shown as 0, and with its whole interval where there is one."""
        interval = self.intervals.get(method)
        return self.over[method] > SHOWN_TIE and (interval is None or interval.low > 0)

    @property
    def verdict(self) -> Verdict:
        """The first of base, uniform answer, look-up and SFT that PPO is not above; else a gain.

        The base is not scored by a run that begins with another's SFT model, and a run without the uniform answer's
        scores has no verdict.
        """
        if "base" in self.over and not self._above("base"):
            return "none"
        if "uniform" not in self.over:
            return "unknown"
        if not self._above("uniform"):
            return "none"
        if self.look_up is not None and not self._above(self.look_up):
            return "not over look-up"
        return "not over sft" if "sft" in self.over and not self._above("sft") else "gain"


class FallBack(NamedTuple):
    """In how many of the iterations that had a threshold the rule took the plain mean."""

    fell_back: int
    total: int

    @property
    def share(self) -> float:
        """Share in [0, 1]."""
        return self.fell_back / self.total

    @property
    def hardly_adaptive(self) -> bool:
        """True if the adaptive branch was taken in less than a tenth of the iterations."""
        # In whole numbers: 1 - 0.9 is a little less than 0.1.
        return (self.total - self.fell_back) * HARDLY_EVER < self.total


def _measured(run: RunArtifacts, methods: Sequence[str], measure: Measure, *, survey: bool) -> dict[str, float]:
    """Method -> score on the training metric, of those that were measured."""
    scores = {method: run.scores(method, run.training_metric, survey=survey) for method in methods}
    known = {method: one for method, one in scores.items() if one is not None}
    found = {method: one.avg_as if measure == "Avg AS" else one.min_as for method, one in known.items()}
    return {method: value for method, value in found.items() if is_known(value)}


def gains(run: RunArtifacts, *, survey: bool) -> tuple[Gain, ...]:
    """PPO's gains on the training metric, for Avg AS and Min AS; none where PPO was not evaluated.

    `survey`: against the survey answers instead of predictions.
    """
    intervals = {}
    if run.pair_scores is not None:
        tables = {
            method: table(
                run.pair_scores, method, metric=run.training_metric, against=SURVEY if survey else PREDICTIONS
            )
            for method in ("ppo", *COMPARED)
        }
        pairs = {other: aligned(tables["ppo"], tables[other]) for other in COMPARED}
        intervals = {other: paired_differences([both]) for other, both in pairs.items() if both is not None}
    found = []
    for measure in MEASURES:
        scores = _measured(run, ("ppo", *COMPARED), measure, survey=survey)
        if (ppo := scores.get("ppo")) is not None:
            over = {other: ppo - scores[other] for other in COMPARED if other in scores}
            found.append(Gain(measure, ppo, over, {other: of[measure] for other, of in intervals.items()}))
    return tuple(found)


def sentence(gain: Gain) -> str:
    """The verdict on one measure in one sentence."""
    figures = ", ".join(f"{_figure(gain, other)} over {_NAMES[other]}" for other in gain.compared)
    verdict = {
        "gain": "a gain" if gain.intervals else "ahead, how surely is not known without single scores",
        "not over sft": "above base and the uniform answer, but what PPO itself added cannot be told from 0",
        "not over look-up": "above base and the uniform answer, but not surely above a look-up in the groups' mean "
        "answers to training questions, which needs no language model",
        "unknown": "the uniform answer's score is missing, so whether this is a gain cannot be said",
        "none": "no gain, because the uniform answer, which knows nothing of any group, does as well or better; "
        "what was won over base is hedging",
    }[gain.verdict]
    if "base" in gain.over and gain.over["base"] <= SHOWN_TIE:
        verdict = "no gain, not even over base"
    return f"{gain.measure} {gain.ppo:.3f}: {figures}: {verdict}."


def _figure(gain: Gain, other: str) -> str:
    over, interval = gain.over[other], gain.intervals.get(other)
    return f"{over:+.3f}" if interval is None else f"{over:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"


def verdict_word(found: tuple[Gain, ...]) -> str:
    """All measures in a few words: where PPO gained and where it did not."""
    if not found:
        return "No verdict: PPO was not evaluated."
    if any(gain.verdict == "unknown" for gain in found):
        return "No verdict: the uniform answer was not evaluated."
    gained = [gain.measure for gain in found if gain.verdict == "gain"]
    if gained:
        where = f"{' and '.join(gained)}{'' if len(gained) == len(found) else ' only'}"
        return f"PPO gained on {where}." if found[0].intervals else f"PPO is ahead on {where}, how surely is not known."
    verdicts = {gain.verdict for gain in found}
    if verdicts == {"not over sft"}:
        return "PPO is not surely above SFT."
    if verdicts <= {"not over sft", "not over look-up"}:
        behind = [gain.measure for gain in found if gain.verdict == "not over look-up"]
        return f"PPO is not surely above a look-up{'' if len(behind) == len(found) else f' in {behind[0]}'}."
    return "PPO did not gain."


def worst_group(run: RunArtifacts, *, survey: bool) -> str | None:
    """PPO's effect under this rule on the worst group, on the training metric; None where PPO was not evaluated."""
    worst = {}
    for method in ("sft", "ppo"):
        scores = run.scores(method, run.training_metric, survey=survey)
        known = {name: value for name, value in (scores.per_group if scores else {}).items() if is_known(value)}
        if known:
            name = min(known, key=known.__getitem__)
            worst[method] = name, known[name]
    if worst.keys() != {"sft", "ppo"}:
        return None
    (before, low), (after, high) = worst["sft"], worst["ppo"]
    return (
        f"The worst-served group was {before} with {low:.3f} after SFT and is {after} with {high:.3f} after PPO "
        f"({high - low:+.3f}), by rule {run.settings.rule}."
    )


def differences(run: RunArtifacts) -> list[str]:
    """Differences between groups and between rules in this run, in plain words; empty where nothing was compared."""
    return [*_group_differences(run), *_other_rules(run)]


def _group_differences(run: RunArtifacts) -> Iterator[str]:
    found, threshold = run.differences, run.settings.appa.fairness_threshold
    if found is None:
        return
    captured = found.captured
    if captured is not None and is_known(captured.r) and is_known(captured.order):
        yield (
            "How well PluralLLM captures what sets each group apart: predicted and true deviations from the groups' "
            f"mean correlate {captured.r:.2f} (R2 {captured.r2:.2f}; 0 for one prediction for all), their pairwise "
            f"order is right in {captured.order:.0%} of the clear cases (50 % by chance), and the predicted ones are "
            f"{captured.spread:.2f} times as large (the best guess is as flat as the correlation)."
        )
    both = {"survey answers": found.survey, "predictions, which rewards follow": found.predicted}
    for name, differences in both.items():
        if differences is not None:
            words = GroupDifferences(**differences.model_dump()).sentence(threshold=threshold)
            yield f"By the {name}: {words}."


def _other_rules(run: RunArtifacts) -> Iterator[str]:
    """The rule that would end highest for the worst group, by what is known of the groups."""
    ends = {} if run.differences is None else run.differences.rules
    for name, survey in (("predictions", False), ("survey answers", True)):
        known = {rule: one.survey if survey else one.predicted for rule, one in ends.items()}
        scored = {rule: end for rule, end in known.items() if end is not None}
        if not scored:
            continue
        best = max(scored, key=lambda rule: scored[rule].min_as)
        clear = [rule for rule, end in scored.items() if end.over_average[0] > CLEAR_GAIN and end.over_average[1] > 0]
        over = Interval(*scored[best].over_average).signed
        yield (
            f"Free answers that follow each rule on the predictions, against the {name}: the worst group ends highest "
            f"under {best}, {over} over average; surely higher than under average: {', '.join(clear) or 'no rule'}."
        )


def fall_back(iterations: Sequence[RuleRound]) -> FallBack | None:
    """Counts the iterations in which the rule took the plain mean; None for a rule that has no threshold."""
    branches = [line.fell_back for line in iterations if line.fell_back is not None]
    return FallBack(sum(branches), len(branches)) if branches else None


def federation_share(iterations: tuple[Iteration, ...]) -> float | None:
    """Share in [0, 1] of all iterations' seconds spent waiting for the groups; None if unknown."""
    total = sum(sum(line.seconds.values()) for line in iterations)
    return sum(line.seconds.get("federation_wait", 0.0) for line in iterations) / total if total > 0 else None


def total_seconds(run: RunArtifacts) -> float | None:
    """Seconds of all phases, or of all iterations where phases are unknown; None where both are."""
    if run.phases:
        return sum(phase.seconds for phase in run.phases)
    return sum(sum(line.seconds.values()) for line in run.iterations) if run.iterations else None


def duration(seconds: float) -> str:
    """Seconds as a person says them: "12.3 s", "6 min 5 s", "2 h 3 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
