"""Scores without a language model: trivial baselines, what each group's own prediction is worth, and ceilings.

Axis letters: G groups, Q questions, J answers, K options.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from appa_flwr.analysis.ceilings import SOLVED_METRICS, NotSolved, shared_answer
from appa_flwr.analysis.destinations import destination, drawn_questions, ends, rules
from appa_flwr.analysis.group_differences import deviations, group_differences
from appa_flwr.config import Config
from appa_flwr.protocol.asks import PREDICTIONS, TARGET_SIDE, TRUTH_SIDE, Ask
from appa_flwr.protocol.rewards import find, metrics_of
from appa_flwr.run import predictions
from appa_flwr.run.records import (
    CEILINGS,
    MEAN_PREDICTION,
    OWN_PREDICTION,
    CapturedRecord,
    Differences,
    DifferencesRecord,
    EndRecord,
    RuleRecord,
    SummaryRow,
)
from server_app.evaluation import given_answers, result, score
from server_app.federation.scores import of_rewards
from server_app.inputs import RunInputs

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

DIGITS = 9
"""To which groups' tables are rounded, so that options which tie in a group's own table tie here and rank the same."""

log = logging.getLogger("appa.server")


@dataclass(frozen=True, eq=False)
class Baselines:
    """The scale of a learned score: rows that need no language model, and how groups and rules differ.

    `predictions` are the groups', which a server keeps of a simulation alone.
    """

    rows: list[SummaryRow]
    pair_scores: pd.DataFrame
    differences: Differences | None
    predictions: pd.DataFrame | None


def baseline_scores(run: RunInputs, *, question_J: IntArray, known_JK: Mapping[str, FloatArray]) -> Baselines:
    """Score trivial baselines, own predictions and ceilings, and compare the groups, and the rules, with each other.

    The ceilings need each group's predictions, so `eval.ceilings = false` leaves them out, and so do secure sums and a
    group's owner who keeps its predictions. In a simulation the groups are compared by their survey answers too.
    `js-distance` has no ceilings.

    Args:
        run: whose groups score.
        question_J: the held-out questions.
        known_JK: trivial baselines beside the uniform answer, such as the majority's answers: their name -> answers.
    """
    groups, config = run.groups, run.config
    option_JK = run.catalogue.option_QK[question_J]
    metrics = metrics_of(config.task, config.reward_metric)
    trivial = {"uniform": option_JK / option_JK.sum(1, keepdims=True), **known_JK}
    scored = [
        score(run, name, given_answers(question_J, answer_JK), metrics=metrics) for name, answer_JK in trivial.items()
    ]

    def found(differences: Differences | None) -> Baselines:
        rows = [row for one in scored for row in one.rows]
        return Baselines(rows, pd.concat([one.pair_scores for one in scored]), differences, predicted)

    predicted: pd.DataFrame | None = None
    if not config.eval.ceilings or groups.without("predictions") or not groups.plain:
        return found(None)
    predicted_GQK = groups.ask(Ask(PREDICTIONS)).rows("votes", groups.names)
    against = {TARGET_SIDE: _rounded(predicted_GQK[:, question_J])}
    if groups.simulated:
        against[TRUTH_SIDE] = _rounded(run.survey_answers()[:, question_J])
    there_G = ~np.isnan(against[TARGET_SIDE]).any(axis=(1, 2))  # a group that did not answer is left out
    target_GQK = against[TARGET_SIDE][there_G]
    mean = given_answers(question_J, target_GQK.mean(axis=0))
    scored.append(score(run, MEAN_PREDICTION, mean, metrics=metrics))
    if groups.simulated:
        names = [groups.names[g] for g in np.flatnonzero(there_G)]
        asked = [run.catalogue.questions[q] for q in question_J]
        predicted = predictions.as_rows(target_GQK, groups=names, questions=asked)
        own = {
            key: of_rewards(groups.names, reward_GJ)
            for key, reward_GJ in _own_rewards(against, option_JK, metrics=metrics).items()
        }
        scored.append(result(run, OWN_PREDICTION, mean, own, metrics=metrics))
    for name, objective in CEILINGS.items():
        for metric in filter(SOLVED_METRICS.__contains__, metrics):
            try:
                best_QK = shared_answer(target_GQK, option_JK, metric=metric, objective=objective)
            except NotSolved as error:
                log.warning("there is no row %s by %s: %s", name, metric, error)
                continue
            best = given_answers(question_J, best_QK)
            scored.append(score(run, name, best, metrics=[metric]))
    if config.reward_metric not in SOLVED_METRICS:
        return found(None)
    truth_GQK = against[TRUTH_SIDE][there_G] if TRUTH_SIDE in against else None
    if truth_GQK is not None and np.isnan(truth_GQK).all():
        truth_GQK = None
    try:
        return found(_compared(target_GQK, truth_GQK, option_JK, config))
    except NotSolved as error:
        log.warning("groups and rules are not compared: %s", error)
        return found(None)


def _compared(
    target_GQK: FloatArray, truth_GQK: FloatArray | None, option_QK: BoolArray, config: Config
) -> Differences:
    """The groups' differences by their predictions, and by their survey answers where these are known; the rules."""
    differ, found = _differences(target_GQK, option_QK, config), _rules(target_GQK, truth_GQK, option_QK, config)
    if truth_GQK is None:
        return Differences(predicted=differ, rules=found)
    return Differences(
        predicted=differ,
        survey=_differences(truth_GQK, option_QK, config),
        captured=CapturedRecord(**vars(deviations(target_GQK, truth_GQK, option_QK))),
        rules=found,
    )


def _differences(target_GQK: FloatArray, option_QK: BoolArray, config: Config) -> DifferencesRecord:
    return DifferencesRecord(**vars(group_differences(target_GQK, option_QK, metric=config.reward_metric)))


def _rules(
    target_GQK: FloatArray, truth_GQK: FloatArray | None, option_QK: BoolArray, config: Config
) -> dict[str, RuleRecord]:
    """The end of each rule on the predictions, scored against these and, where known, against the survey answers."""
    metric = config.reward_metric
    drawn = drawn_questions(*target_GQK.shape[:2], seed=config.seed)
    target_GQK, option_QK = target_GQK[:, drawn], option_QK[drawn]
    truth_GQK = None if truth_GQK is None else truth_GQK[:, drawn]
    found = {
        name: destination(rule, target_GQK, option_QK, metric=metric, seed=config.seed)
        for name, rule in rules(config).items()
    }

    def scored(against_GQK: FloatArray) -> dict[str, EndRecord]:
        return {
            name: EndRecord(
                avg_as=end.avg_as,
                min_as=end.min_as,
                over_average=(end.over_average.value, end.over_average.low, end.over_average.high),
            )
            for name, end in ends(found, against_GQK, option_QK, metric=metric).items()
        }

    predicted = scored(target_GQK)
    survey = {} if truth_GQK is None else scored(truth_GQK)
    return {
        name: RuleRecord(fell_back=one.fell_back, predicted=predicted[name], survey=survey.get(name))
        for name, one in found.items()
    }


def _rounded(table_GJK: FloatArray) -> FloatArray:
    """Distributions to `DIGITS`; rows of NaN stay."""
    rounded_GJK: FloatArray = (table_GJK / table_GJK.sum(-1, keepdims=True)).round(DIGITS)
    return rounded_GJK


def _own_rewards(
    tables: Mapping[str, FloatArray], option_JK: BoolArray, *, metrics: Sequence[str]
) -> dict[tuple[str, str], FloatArray]:
    """Rewards (G, J) where every group is given its own prediction; NaN where it has nothing to compare with."""
    uniform_JK = option_JK / option_JK.sum(axis=1, keepdims=True)
    own_GJK, found = tables[TARGET_SIDE], {}
    for side, against_GJK in tables.items():
        known_GJ: BoolArray = np.logical_not(np.isnan(own_GJK + against_GJK).any(axis=2))
        known_GJ1 = known_GJ[:, :, None]
        safe_GJK, safe_against_GJK = (np.where(known_GJ1, table, uniform_JK) for table in (own_GJK, against_GJK))
        for metric in metrics:
            reward_GJ = find(metric)(safe_GJK, safe_against_GJK, option_JK)
            found[metric, side] = np.where(known_GJ, reward_GJ, np.nan)
    return found
