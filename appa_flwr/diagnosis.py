"""Before any training: whether a survey, its groups and a metric can tell aggregation rules apart.

Legend: G groups, Q questions, K options, J answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appa_flwr.aggregation import RULES, Rule, make, parameters
from appa_flwr.config.sections import APPASection
from appa_flwr.disagreement import CLEAR_GAP, Disagreement, disagreement
from appa_flwr.rewards import METRICS
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
        same = [rule for rule, value in self.agreement.items() if value > SAME_REWARD and rule != "average"]
        if same:
            yield f"WARNING: in effect the plain mean on these groups: {', '.join(same)}."
        if self.compared < HALF * self.questions:
            yield (
                "WARNING: most questions were answered by one group alone, so scores against the survey compare groups "
                "on different questions."
            )


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
    return Diagnosis(
        metric=metric,
        stakes=stakes,
        agreement=_agreement(rules, filled_GQK, mean_QK, option_QK[compared_Q], metric=metric, seed=seed),
        compared=int(compared_Q.sum()),
        common=int((count_Q == len(survey.groups)).sum()),
        questions=len(count_Q),
    )


def _agreement(
    rules: Mapping[str, Rule],
    target_GQK: FloatArray,
    mean_QK: FloatArray,
    option_QK: BoolArray,
    *,
    metric: str,
    seed: int,
) -> dict[str, float]:
    """Rule -> mean correlation of its reward with the plain mean's, once its history has built up."""
    rng = np.random.default_rng(seed)
    states = {name: rule.init(len(target_GQK)) for name, rule in rules.items()}
    found: dict[str, list[float]] = {name: [] for name in rules}
    for iteration in range(ITERATIONS):
        question_J = rng.integers(len(mean_QK), size=ANSWERS)
        draw_JK = rng.gamma(np.maximum(CONCENTRATION * mean_QK[question_J], LEAST_SHAPE)) * option_QK[question_J]
        answer_JK = draw_JK / draw_JK.sum(axis=1, keepdims=True)
        reward_GJ = np.asarray(METRICS[metric](answer_JK, target_GQK[:, question_J], option_QK[question_J]))
        for name, rule in rules.items():
            result = rule.apply(states[name], reward_GJ, reward_GJ)
            states[name] = result.state
            if iteration >= ITERATIONS // 2:
                found[name].append(result.agreement)
    return {name: float(np.mean(values)) for name, values in found.items()}
