"""Destinations of rules: the answers to which an unrestricted policy converges under each rule.

No language model is used: every question has a free answer softmax(theta), updated by the aggregated reward of noisy
answers, whitened and clamped as in PPO. The end points show in seconds, before any training, how rules differ; a
language model may not reach them. `diagnose` uses them to tell whether rules can differ on a survey.

Axis letters: G groups, Q questions, K options, J answers.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import softmax

from appa_flwr.analysis import alignment
from appa_flwr.analysis.ceilings import OBJECTIVES, SOLVED_METRICS, NotSolved, shared_answer
from appa_flwr.analysis.intervals import bootstrap
from appa_flwr.analysis.rule_choice import configured
from appa_flwr.analysis.rules import RULES, Rule
from appa_flwr.config import Config
from appa_flwr.core.arrays import BoolArray, FloatArray
from appa_flwr.core.errors import UserError
from appa_flwr.protocol.rewards import find
from appa_flwr.survey.types import Survey

BATCH = 192
VISITS = 600
"""Number of noisy answers to each question, on average."""
STEP = 0.01
"""Step of the logits for a whitened reward of 1, on average: steps decrease from twice this value to 0."""
NOISE, CLAMP = 0.3, 5.0
LEAST_SHARE = 1e-3
MOST_PAIRS, LEAST_QUESTIONS = 1600, 30
"""Most pairs of a group and a question in `diagnose`, but no fewer questions than this: a rule takes 1 to 2 seconds."""
LEAST_GAIN = 0.005
"""With less to win in Min AS, rules cannot differ on a survey."""

log = logging.getLogger("appa")


def rules(config: Config) -> dict[str, Rule]:
    """All rules but `alpha`, and the config's rules, with the config's parameters."""
    names = dict.fromkeys([*(name for name in RULES if name != "alpha"), *config.rules])
    return {name: configured(name, config.appa) for name in names}


@dataclass(frozen=True, eq=False)
class Destination:
    """Final free answers under one rule: shares (Q, K), 0 at padding.

    `fell_back` is the share of iterations, in the later half, in which the rule took the plain mean, in [0, 1]; None
    for a rule without a threshold.
    """

    answer_QK: FloatArray
    fell_back: float | None


def destination(
    rule: Rule,
    target_GQK: FloatArray,
    option_QK: BoolArray,
    *,
    metric: str,
    seed: int,
    visits: int = VISITS,
    sent: Callable[[FloatArray], FloatArray] | None = None,
) -> Destination:
    """Optimise free answers under a rule, starting from the mean of the groups' targets.

    Calls with the same seed use the same questions and noise. Targets are shares (G, Q, K), rows of NaN where a group
    has none: the mean of the other groups' targets replaces them, so that they do not favour a rule. Each question has
    `visits` noisy answers on average; `sent` maps the rewards (G, J) to those that the groups send.
    """
    rng = np.random.default_rng(seed)
    num_questions, num_options = option_QK.shape
    mean_QK = np.nanmean(target_GQK, axis=0)
    target_GQK = np.where(np.isnan(target_GQK), mean_QK, target_GQK)
    theta_QK = np.log(np.maximum(mean_QK, LEAST_SHARE))
    iterations = -(-visits * num_questions // BATCH)
    tail_QK, fell_back = np.zeros_like(theta_QK), list[bool | None]()
    state = rule.init(len(target_GQK))
    for iteration in range(iterations):
        question_J = rng.integers(num_questions, size=BATCH)
        noise_JK = NOISE * rng.standard_normal((BATCH, num_options))
        answer_JK = _shares(theta_QK[question_J] + noise_JK, option_QK[question_J])
        reward_GJ = find(metric)(answer_JK, target_GQK[:, question_J], option_QK[question_J])
        if sent is not None:
            reward_GJ = sent(reward_GJ)
        result = rule.apply(state, reward_GJ, reward_GJ)
        state = result.state
        spread = result.aggregate_J.std()
        white_J = (result.aggregate_J - result.aggregate_J.mean()) / spread if spread > 0 else np.zeros(BATCH)
        gain_JK = np.clip(white_J, -CLAMP, CLAMP)[:, None] * noise_JK / NOISE
        np.add.at(theta_QK, question_J, 2.0 * STEP * (1.0 - iteration / iterations) * gain_JK)
        if 2 * (iteration + 1) > iterations:
            tail_QK += theta_QK
            fell_back.append(result.fell_back)
    known = [taken for taken in fell_back if taken is not None]
    # The mean over the later half, since a single theta is as noisy as its last steps.
    answer_QK = _shares(tail_QK / len(fell_back), option_QK)
    return Destination(answer_QK, float(np.mean(known)) if known else None)


def _shares(theta_JK: FloatArray, option_JK: BoolArray) -> FloatArray:
    return np.asarray(softmax(np.where(option_JK, theta_JK, -np.inf), axis=1))


def diagnose(survey: Survey, *, metric: str, rules: Mapping[str, Rule], seed: int = 0) -> tuple[pd.DataFrame, ...]:
    """Diagnose whether rules, `average` among them, can differ on a survey: two tables on the groups' own answers.

    The first table has one row: the number of questions, of questions that two groups or more have answered, and of
    questions on which rules were tried, drawn with the seed.

    The second table has a row for each rule: Avg AS and Min AS of its destination, Min AS minus that of `average` as
    an `Interval`, and the share of plain means (see `Destination`). If the metric has ceilings that are found, rows
    "ceiling-average" and "ceiling-min" are the best shared answers. Min AS of `ceiling-min` minus that of `average` is
    the most that a rule can win. Free answers are fitted to the very questions that score them (see
    `Interval.uncorrected`).

    Raises:
        UserError: no question was answered by two groups.
    """
    target_GQK, option_QK = alignment.as_arrays(survey.questions, survey.answers)
    compared_Q = alignment.known_targets(target_GQK, option_QK).sum(axis=0) >= alignment.GROUPS_TO_COMPARE
    if not compared_Q.any():
        raise UserError("no question was answered by two groups, so there is nothing to compare")
    most = max(LEAST_QUESTIONS, MOST_PAIRS // len(target_GQK))
    drawn = np.sort(np.random.default_rng(seed).permutation(np.flatnonzero(compared_Q))[:most])
    target_GQK, option_QK = target_GQK[:, drawn], option_QK[drawn]
    ends = {name: destination(rule, target_GQK, option_QK, metric=metric, seed=seed) for name, rule in rules.items()}
    for objective in OBJECTIVES if metric in SOLVED_METRICS else ():
        try:
            best_QK = shared_answer(target_GQK, option_QK, metric=metric, objective=objective)
        except NotSolved as error:
            log.warning("there is no row ceiling-%s: %s", objective, error)
            continue
        ends[f"ceiling-{objective}"] = Destination(best_QK, None)
    rewards = {
        name: alignment.shared_rewards(end.answer_QK, target_GQK, option_QK, metric=metric)
        for name, end in ends.items()
    }
    rows = []
    for name, reward_GQ in rewards.items():
        scores, over = alignment.alignment_scores(reward_GQ), bootstrap([(reward_GQ, rewards["average"])])["Min AS"]
        rows.append((name, scores.avg_as, scores.min_as, over.uncorrected(), ends[name].fell_back))
    counts = {"Questions": len(compared_Q), "of two groups or more": int(compared_Q.sum()), "tried": len(drawn)}
    columns = ["Rule", "Avg AS", "Min AS", "Min AS minus average's", "Plain mean taken"]
    return pd.DataFrame([counts]), pd.DataFrame(rows, columns=columns)


def verdict(table: pd.DataFrame, *, rule: str) -> str:
    """One line on the second table of `diagnose`: the most to gain in Min AS over `average`, and what a rule gains."""
    least = table.set_index("Rule")["Min AS"].to_dict()
    best = least.get("ceiling-min", max(least.values()))
    most, reached = best - least["average"], least[rule] - least["average"]
    # Free answers end short of the best for the average, which is no difference of rules.
    if (apart := min(most, best - least.get("ceiling-average", 0.0))) < LEAST_GAIN:
        return f"rules {'cannot' if 'ceiling-min' in least else 'do not'} differ here: at most {apart:+.3f} in Min AS"
    return f"rules can differ here: in Min AS up to {most:+.3f} over average, of which {rule} reaches {reached:+.3f}"
