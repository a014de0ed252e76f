"""Whether a survey's groups and a metric, or the rollouts of a model, can tell aggregation rules apart.

Legend: G groups, Q questions, K options, J answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from appa_flwr.analysis.aggregation import RULES, Rule, State, make, parameters
from appa_flwr.analysis.disagreement import CLEAR_GAP, Disagreement, disagreement
from appa_flwr.config.sections import APPASection
from appa_flwr.protocol.rewards import METRICS
from appa_flwr.survey.arrays import as_arrays
from appa_flwr.survey.types import Survey

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

SAME_REWARD = 0.99
"""A reward that correlates more with the plain mean's teaches the same as that, within what can be measured."""

ITERATIONS, ANSWERS = 30, 96
CONCENTRATION = 20.0
"""Of the Dirichlet draws around the groups' mean: the answers of a policy that knows the mean and no group."""

LEAST_SHAPE = 0.05
COMPARED = 2
HALF = 0.5
NEVER = 1.1
"""A fairness threshold that no index reaches."""


@dataclass(frozen=True)
class Diagnosis:
    """What can be said of a survey before anything is trained on it.

    Attributes:
        metric: of the scores.
        stakes: the groups against the best shared answers, on all questions that two groups or more have.
        agreement: rule -> correlation of its reward with the plain mean's.
        compared: questions that two groups or more have answered.
        common: questions that all have answered.
        questions: all questions.
    """

    metric: str
    stakes: Disagreement
    agreement: Mapping[str, float]
    compared: int
    common: int
    questions: int

    def sentences(self, *, threshold: float) -> Iterator[str]:
        """In plain words, the warnings last."""
        yield f"By {self.metric}: {self.stakes.sentence(threshold=threshold)}."
        yield (
            f"Of {self.questions} questions, {self.compared} were answered by two groups or more and {self.common} by "
            "all."
        )
        if self.stakes.gap <= CLEAR_GAP:
            yield f"WARNING: no rule can gain more than {CLEAR_GAP:g} for the worst group over the plain mean."
        if self.stakes.fairness >= threshold:
            yield (
                f"WARNING: good answers have a fairness index over the threshold {threshold:g}, so rule appa as "
                "printed takes the plain mean once the policy is good; appa.fairness-quantile or a threshold above 1 "
                "keeps its weights."
            )
        if same := plain_means(self.agreement):
            yield f"WARNING: in effect the plain mean on these groups: {', '.join(same)}."
        if self.compared < HALF * self.questions:
            yield (
                "WARNING: most questions were answered by one group alone, so scores against the survey compare groups "
                "on different questions."
            )


def plain_means(agreement: Mapping[str, float]) -> list[str]:
    """Rules besides `average` whose reward is in effect the plain mean's."""
    return [rule for rule, value in agreement.items() if value > SAME_REWARD and rule != "average"]


def rules(settings: APPASection) -> dict[str, Rule]:
    """Every rule with the parameters of the config, and APPA that never takes the plain mean."""
    found = {
        name: make(name, **{parameter: getattr(settings, parameter) for parameter in parameters(name)})
        for name in RULES
        if name != "alpha"
    }
    return found | {"appa-open": found["appa"].model_copy(update={"fairness_threshold": NEVER})}


def diagnose(survey: Survey, *, metric: str, rules: Mapping[str, Rule], seed: int = 0) -> Diagnosis:
    """What the groups' own answers say of rules, by one metric.

    Args:
        survey: with two groups or more.
        metric: of the rewards.
        rules: name -> rule, such as those of `rules`.
        seed: of the answers that the rules are tried on.
    """
    target_GQK, option_QK = as_arrays(survey.questions, survey.answers)
    known_GQ: BoolArray = np.logical_not(np.isnan(target_GQK).any(axis=2))
    count_Q = known_GQ.sum(axis=0)
    compared_Q = count_Q >= COMPARED
    stakes = disagreement(target_GQK[:, compared_Q], option_QK[compared_Q], metric=metric)
    # A group without an answer scores as the mean of the others would: like them, so it tells no rule apart.
    mean_QK = np.nanmean(target_GQK[:, compared_Q], axis=0)
    filled_GQK = np.where(np.isnan(target_GQK[:, compared_Q]), mean_QK, target_GQK[:, compared_Q])
    drawn = _drawn_rewards(filled_GQK, mean_QK, option_QK[compared_Q], metric=metric, seed=seed)
    return Diagnosis(
        metric=metric,
        stakes=stakes,
        agreement=agreement(rules, drawn),
        compared=int(compared_Q.sum()),
        common=int((count_Q == len(survey.groups)).sum()),
        questions=len(count_Q),
    )


def agreement(rules: Mapping[str, Rule], batches: Iterable[FloatArray]) -> dict[str, float]:
    """Rule -> mean correlation of its reward with the plain mean's in the later half, its history built up by then.

    Args:
        rules: name -> rule.
        batches: rewards (G, J) of `ITERATIONS` iterations.
    """
    states: dict[str, State] = {}
    found: dict[str, list[float]] = {name: [] for name in rules}
    for iteration, reward_GJ in enumerate(batches):
        for name, rule in rules.items():
            result = rule.apply(states.get(name, rule.init(len(reward_GJ))), reward_GJ, reward_GJ)
            states[name] = result.state
            if iteration >= ITERATIONS // 2:
                found[name].append(result.agreement)
    return {name: float(np.mean(values)) for name, values in found.items()}


def rollout_agreement(settings: APPASection, reward_GJ: FloatArray) -> dict[str, float]:
    """`agreement` on the rewards (G, J) of one batch of rollouts, which every rule sees again and again."""
    return agreement(rules(settings), repeat(reward_GJ, ITERATIONS))


def _drawn_rewards(
    target_GQK: FloatArray, mean_QK: FloatArray, option_QK: BoolArray, *, metric: str, seed: int
) -> Iterator[FloatArray]:
    """Rewards (G, J) of answers around the groups' mean, an iteration after the other."""
    rng = np.random.default_rng(seed)
    for _ in range(ITERATIONS):
        question_J = rng.integers(len(mean_QK), size=ANSWERS)
        draw_JK = rng.gamma(np.maximum(CONCENTRATION * mean_QK[question_J], LEAST_SHAPE)) * option_QK[question_J]
        answer_JK = draw_JK / draw_JK.sum(axis=1, keepdims=True)
        yield np.asarray(METRICS[metric](answer_JK, target_GQK[:, question_J], option_QK[question_J]))
