"""Scores of models, trivial baselines and ceilings on the held-out questions, all through the same federation.

Axis letters: G groups, Q questions, J answers, K options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from transformers import PreTrainedModel

from appa_flwr.analysis.alignment import alignment_scores, skill_score
from appa_flwr.analysis.ceilings import SOLVED_METRICS, shared_answer
from appa_flwr.analysis.destinations import destination, ends, rules
from appa_flwr.analysis.group_differences import deviations, group_differences
from appa_flwr.config import Config
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import formats, wire
from appa_flwr.protocol.rewards import metrics_of
from appa_flwr.run.pair_scores import PREDICTIONS, SURVEY, as_rows
from appa_flwr.run.records import (
    CEILINGS,
    MEAN_PREDICTION,
    CapturedRecord,
    Differences,
    DifferencesRecord,
    EndRecord,
    Example,
    RuleRecord,
    ScoreRecord,
    SummaryRow,
)
from server_app.federation.answers import Answers, parse_answers
from server_app.federation.groups import Federation
from server_app.models.base import Base
from server_app.ppo.rollouts import Decoding, sample

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

SIDES = {wire.TARGET_SIDE: PREDICTIONS, wire.TRUTH_SIDE: SURVEY}
PROBE_DIGITS = 9
NUM_EXAMPLES = 12
CURVE_QUESTIONS = 48


def greedy_answers(
    model: PreTrainedModel,
    base: Base,
    config: Config,
    *,
    prompts: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    question_J: IntArray,
    catalogue: wire.Catalogue,
) -> Answers:
    """Decode one answer to each of these questions, without sampling; `prompts` are by catalogue position."""
    return parse_answers(
        config.task,
        _decoded(model, base, config, prompts=prompts, question_J=question_J, temperature=0.0),
        question_J,
        catalogue,
    )


def mean_answers(
    model: PreTrainedModel,
    base: Base,
    config: Config,
    *,
    prompts: Sequence[Sequence[int]],
    question_J: IntArray,
    catalogue: wire.Catalogue,
) -> Answers:
    """The mean of `eval.samples` sampled answers to each question, of those that can be read.

    A model that is not sure, and teaches itself by a coarse grid of probabilities, knows more than its likeliest answer
    says. Format scores are means; the texts are the means, written as an answer.
    """
    count = config.eval.samples
    texts = _decoded(
        model,
        base,
        config,
        prompts=prompts,
        question_J=np.repeat(question_J, count),
        temperature=config.rollout.temperature,
    )
    every = parse_answers(config.task, texts, np.repeat(question_J, count), catalogue)
    written_JS = every.prediction_JK.reshape(len(question_J), count, -1)
    read_J: BoolArray = np.logical_not(np.isnan(written_JS).all(axis=(1, 2)))
    prediction_JK = np.full((len(question_J), written_JS.shape[2]), np.nan)
    prediction_JK[read_J] = np.nanmean(written_JS[read_J], axis=1)
    option_JK = catalogue.option_QK[question_J]
    shown = [
        formats.answer(config.task, mean_K[option_K]) if read else texts[count * j]
        for j, (mean_K, option_K, read) in enumerate(zip(prediction_JK, option_JK, read_J, strict=True))
    ]
    return Answers(
        question_J,
        tuple(shown),
        prediction_JK,
        every.format_score_J.reshape(-1, count).mean(axis=1),
        np.asarray(every.parsed_J.reshape(-1, count).any(axis=1)),
    )


def _decoded(
    model: PreTrainedModel,
    base: Base,
    config: Config,
    *,
    prompts: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    question_J: IntArray,
    temperature: float,
) -> list[str]:
    texts: list[str] = []
    decoding = Decoding.fitting(
        model,
        max_new_tokens=config.rollout.response_length,
        temperature=temperature,
        stop_ids=base.stop_ids,
        pad_id=base.pad_id,
    )
    generator = torch.Generator(model.device).manual_seed(child_seed(config.seed, "eval.samples"))
    for batch in np.array_split(question_J, -(-len(question_J) // config.eval.batch_size)):
        decoded = sample(model, [prompts[q] for q in batch], decoding, generator=generator).sequences
        texts += base.texts(decoded.response_JT, decoded.mask_JT)
    return texts


def curve_questions(test_J: IntArray, seed: int) -> IntArray:
    """The held-out questions of the learning curve, the same in all iterations."""
    rng = np.random.default_rng(child_seed(seed, "eval.every"))
    return np.sort(rng.permutation(test_J)[:CURVE_QUESTIONS])


def given_answers(question_J: IntArray, prediction_JK: FloatArray) -> Answers:
    """Answers that no model wrote: a trivial baseline or a ceiling."""
    size = len(question_J)
    return Answers(question_J, ("",) * size, prediction_JK, np.full(size, np.nan), np.ones(size, dtype=bool))


@dataclass(frozen=True, eq=False)
class Scored:
    """One method's result.

    Attributes:
        rows: of summary.json, one a metric: scores against predictions, and under `survey` those against the
            groups' own answers.
        pair_scores: of scores.parquet, all that the rows are means of.
        texts: the answers, as the model wrote them.
        reward_J: each answer's reward on the first metric, averaged over the groups that answered.
    """

    rows: list[SummaryRow]
    pair_scores: pd.DataFrame
    texts: tuple[str, ...]
    reward_J: FloatArray


def score(
    federation: Federation,
    method: str,
    answers: Answers,
    *,
    metrics: Sequence[str],
    config: Config,
    catalogue: wire.Catalogue,
) -> Scored:
    """Let the groups score one method's answers to the held-out questions; a row for each metric."""
    rewards = federation.score(answers.request(metrics, sides=tuple(SIDES)))
    written, readable_J = bool(np.isfinite(answers.format_score_J).all()), answers.readable_J
    questions = [catalogue.questions[q].question_id for q in answers.question_J]
    rows, found = [], []
    for metric in metrics:
        for side, against in SIDES.items():
            given = as_rows(
                method, metric, against, rewards[metric, side], groups=federation.groups, questions=questions
            )
            found.append(given)
        truth_GJ = rewards[metric, wire.TRUTH_SIDE]
        known = bool((~np.isnan(truth_GJ)).any())
        rows.append(
            SummaryRow(
                method=method,
                metric=metric,
                **vars(_scores(federation, rewards[metric, wire.TARGET_SIDE], readable_J, config)),
                format_score=float(answers.format_score_J.mean()) if written else None,
                survey=_scores(federation, truth_GJ, readable_J, config) if known else None,
                readable=float(readable_J.mean()),
            )
        )
    return Scored(rows, pd.concat(found), answers.texts, np.nanmean(rewards[metrics[0], wire.TARGET_SIDE], axis=0))


def _scores(federation: Federation, reward_GJ: FloatArray, readable_J: BoolArray, config: Config) -> ScoreRecord:
    found = alignment_scores(reward_GJ, readable_J, min_mean=config.appa.min_mean, max_cov=config.appa.max_cov)
    return ScoreRecord(
        fi=found.fairness_index,
        fi_readable=found.fairness_of_readable,
        avg_as=found.avg_as,
        min_as=found.min_as,
        per_group=dict(zip(federation.groups, found.per_group_G.tolist(), strict=True)),
    )


def with_skill(rows: Iterable[SummaryRow]) -> list[SummaryRow]:
    """The rows with their skill scores, which the uniform answer's rows give the scale for."""
    rows = list(rows)
    uniform = {row.metric: row for row in rows if row.method == "uniform"}
    return [_rated(row, uniform[row.metric]) if row.metric in uniform else row for row in rows]


def _rated(row: SummaryRow, uniform: SummaryRow) -> SummaryRow:
    survey = row.survey
    if survey is not None and uniform.survey is not None:
        survey = survey.model_copy(update={"skill": skill_score(survey.avg_as, uniform.survey.avg_as)})
    return row.model_copy(update={"skill": skill_score(row.avg_as, uniform.avg_as), "survey": survey})


@dataclass(frozen=True, eq=False)
class Baselines:
    """The scale of a learned score: rows of the trivial baselines and the ceilings, and how the groups differ."""

    rows: list[SummaryRow]
    pair_scores: pd.DataFrame
    differences: Differences | None


def baseline_scores(
    federation: Federation,
    config: Config,
    catalogue: wire.Catalogue,
    *,
    question_J: IntArray,
    known_JK: Mapping[str, FloatArray],
) -> Baselines:
    """Score the trivial baselines and the two ceilings, and compare the groups with each other.

    The ceilings need the groups' targets, which never travel. But K one-hot answers per question scored by cosine give
    them away (docs/decisions.md), so this asks for those, in a simulation against the survey answers too;
    `eval.ceilings = false` leaves it out, and so does a group's owner who lets nobody probe. `js-distance` has none.

    Args:
        federation: the groups that score.
        config: the run's.
        catalogue: the public questions.
        question_J: the held-out questions.
        known_JK: trivial baselines beside the uniform answer, such as the majority's answers: their name -> answers.
    """
    option_JK = catalogue.option_QK[question_J]
    metrics = metrics_of(config.task)
    trivial = {"uniform": option_JK / option_JK.sum(1, keepdims=True), **known_JK}
    scored = [
        score(
            federation, name, given_answers(question_J, answer_JK), metrics=metrics, config=config, catalogue=catalogue
        )
        for name, answer_JK in trivial.items()
    ]

    def result(differences: Differences | None) -> Baselines:
        rows = [row for one in scored for row in one.rows]
        return Baselines(rows, pd.concat([one.pair_scores for one in scored]), differences)

    if not config.eval.ceilings or federation.without_probes:
        return result(None)
    sides = (wire.TARGET_SIDE, wire.TRUTH_SIDE) if federation.simulated else (wire.TARGET_SIDE,)
    probed = probe_targets(federation, question_J, option_JK, sides=sides)
    there_G = ~np.isnan(probed[wire.TARGET_SIDE]).any(axis=(1, 2))  # a group that did not answer is left out
    target_GQK = probed[wire.TARGET_SIDE][there_G]
    mean = given_answers(question_J, target_GQK.mean(axis=0))
    scored.append(score(federation, MEAN_PREDICTION, mean, metrics=metrics, config=config, catalogue=catalogue))
    for name, objective in CEILINGS.items():
        for metric in filter(SOLVED_METRICS.__contains__, metrics):
            best_QK = shared_answer(target_GQK, option_JK, metric=metric, objective=objective)
            best = given_answers(question_J, best_QK)
            scored.append(score(federation, name, best, metrics=[metric], config=config, catalogue=catalogue))
    if config.reward_metric not in SOLVED_METRICS:
        return result(None)
    predicted = _differences(target_GQK, option_JK, config)
    if wire.TRUTH_SIDE not in probed or np.isnan(truth_GQK := probed[wire.TRUTH_SIDE][there_G]).all():
        return result(Differences(predicted=predicted, rules=_rules(target_GQK, None, option_JK, config)))
    captured = deviations(target_GQK, truth_GQK, option_JK)
    return result(
        Differences(
            predicted=predicted,
            survey=_differences(truth_GQK, option_JK, config),
            captured=CapturedRecord(**vars(captured)),
            rules=_rules(target_GQK, truth_GQK, option_JK, config),
        )
    )


def _differences(target_GQK: FloatArray, option_QK: BoolArray, config: Config) -> DifferencesRecord:
    return DifferencesRecord(**vars(group_differences(target_GQK, option_QK, metric=config.reward_metric)))


def _rules(
    target_GQK: FloatArray, truth_GQK: FloatArray | None, option_QK: BoolArray, config: Config
) -> dict[str, RuleRecord]:
    """The end of each rule on the predictions, scored against these and, where known, against the survey answers."""
    metric = config.reward_metric
    found = {
        name: destination(rule, target_GQK, option_QK, metric=metric, seed=config.seed)
        for name, rule in rules(config.appa).items()
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


def examples(catalogue: wire.Catalogue, question_J: IntArray, before: Scored, after: Scored) -> tuple[Example, ...]:
    """Some held-out questions with the answers before and after PPO."""
    return tuple(
        Example(
            question=catalogue.questions[q].text,
            options=catalogue.questions[q].options,
            sft=before.texts[j],
            ppo=after.texts[j],
            mean_reward=float(after.reward_J[j]),
        )
        for j, q in enumerate(question_J[:NUM_EXAMPLES])
    )


def probe_targets(
    federation: Federation, question_J: IntArray, option_JK: BoolArray, *, sides: Sequence[str]
) -> dict[str, FloatArray]:
    """The groups' targets, rebuilt from rewards: the cosine with option k's one-hot answer is p_k / |p|.

    Side -> (G, J, K), rows sum to 1, NaN where a group has nothing to score against or did not answer.
    """
    row, option = np.nonzero(option_JK)
    one_hot = np.zeros((len(row), option_JK.shape[1]))
    one_hot[np.arange(len(row)), option] = 1.0
    request = given_answers(question_J[row], one_hot).request(["cosine"], sides=sides)
    scored = federation.score(replace(request, asked=wire.PROBES_ASKED))
    found = {}
    for side in sides:
        cosine_GP = 2.0 * scored["cosine", side] - 1.0
        target_GJK = np.zeros((len(cosine_GP), *option_JK.shape))
        target_GJK[:, row, option] = np.maximum(cosine_GP, 0.0)
        target_GJK /= target_GJK.sum(-1, keepdims=True)
        # Rounded, so that options that tie in the group's own table tie here too and rank the same.
        found[side] = target_GJK.round(PROBE_DIGITS)
    return found
