"""Scores of a model's answers to the held-out questions, through the federation.

Axis letters: G groups, J answers, K options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from transformers import PreTrainedModel

from appa_flwr.analysis.alignment import alignment_scores, skill_score
from appa_flwr.config import Config
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import wire
from appa_flwr.run.pair_scores import COLUMNS, PREDICTIONS, SURVEY, as_rows
from appa_flwr.run.records import Example, ScoreRecord, SummaryRow
from server_app.federation.answers import Answers, parse_answers
from server_app.federation.summed_scores import SummedScores, scores
from server_app.inputs import RunInputs
from server_app.models.base import Base
from server_app.ppo.rollouts import Decoding, sample

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

SIDES = {wire.TARGET_SIDE: PREDICTIONS, wire.TRUTH_SIDE: SURVEY}
NUM_EXAMPLES = 12
CURVE_QUESTIONS = 48
BATCH_SIZE = 64  # answers in a forward pass (PPO table)


def greedy(model: PreTrainedModel, base: Base, config: Config) -> Decoding:
    """Decoding of answers that are scored or asked for: the likeliest token each time."""
    return Decoding.fitting(
        model,
        max_new_tokens=config.ppo.response_length,
        temperature=0.0,
        stop_ids=base.stop_ids,
        pad_id=base.pad_id,
    )


def greedy_answers(
    model: PreTrainedModel,
    base: Base,
    config: Config,
    *,
    prompts: Sequence[Sequence[int]],
    question_J: IntArray,
    catalogue: wire.Catalogue,
    progress: Callable[[int, int], None] = lambda step, of: None,
) -> Answers:
    """Decode one answer to each of these questions, without sampling; `prompts` are by catalogue position.

    `progress` is called with (batches done, batches).
    """
    texts: list[str] = []
    decoding = greedy(model, base, config)
    batches = np.array_split(question_J, -(-len(question_J) // BATCH_SIZE))
    for done, batch in enumerate(batches, start=1):
        decoded = sample(model, [prompts[q] for q in batch], decoding).sequences
        texts += base.texts(decoded.response_JT, decoded.mask_JT)
        progress(done, len(batches))
    return parse_answers(config.task, texts, question_J, catalogue)


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


def score(run: RunInputs, method: str, answers: Answers, *, metrics: Sequence[str], samples: int = 1) -> Scored:
    """Let the groups score one method's answers to the held-out questions; a row for each metric.

    With several samples, answers to one question stand next to each other, and each group's score of it is their mean.
    """
    request = answers.request(metrics, sides=tuple(SIDES))
    if (secure := run.federation.secure) is not None:
        return _from_sums(method, answers, scores(secure, request), metrics=metrics)
    return result(run, method, answers, run.federation.score(request), metrics=metrics, samples=samples)


def result(
    run: RunInputs,
    method: str,
    answers: Answers,
    rewards: Mapping[tuple[str, str], FloatArray],
    *,
    metrics: Sequence[str],
    samples: int = 1,
) -> Scored:
    """The result of one method from its rewards (G, J) by metric and side; a row for each metric."""
    written, share = bool(np.isfinite(answers.format_score_J).all()), float(answers.readable_J.mean())
    readable_J: BoolArray = np.logical_or.reduce(answers.readable_J.reshape(-1, samples), axis=1)
    questions = [run.catalogue.questions[q].question_id for q in answers.question_J[::samples]]
    if samples > 1:
        rewards = {key: of_GJ.reshape(len(of_GJ), -1, samples).mean(axis=2) for key, of_GJ in rewards.items()}
    rows, found = [], []
    for metric in metrics:
        for side, against in SIDES.items():
            reward_GJ, groups = rewards[metric, side], run.federation.groups
            found.append(as_rows(method, metric, against, reward_GJ, groups=groups, questions=questions))
        truth_GJ = rewards[metric, wire.TRUTH_SIDE]
        known = bool((~np.isnan(truth_GJ)).any())
        rows.append(
            SummaryRow(
                method=method,
                metric=metric,
                **vars(_scores(run, rewards[metric, wire.TARGET_SIDE], readable_J)),
                format_score=float(answers.format_score_J.mean()) if written else None,
                survey=_scores(run, truth_GJ, readable_J) if known else None,
                readable=share,
            )
        )
    return Scored(rows, pd.concat(found), answers.texts, np.nanmean(rewards[metrics[0], wire.TARGET_SIDE], axis=0))


def _from_sums(
    method: str,
    answers: Answers,
    found: Mapping[tuple[str, str], SummedScores],
    *,
    metrics: Sequence[str],
) -> Scored:
    """As `result`, from sums: without scores of pairs."""
    written, readable_J = bool(np.isfinite(answers.format_score_J).all()), answers.readable_J

    def record(of: SummedScores) -> ScoreRecord:
        return ScoreRecord(
            fi=of.fairness(np.ones_like(readable_J)),
            fi_readable=of.fairness(readable_J),
            avg_as=of.avg_as,
            min_as=of.min_as,
            per_group=dict(of.per_group),
        )

    rows = [
        SummaryRow(
            method=method,
            metric=metric,
            **vars(record(found[metric, wire.TARGET_SIDE])),
            format_score=float(answers.format_score_J.mean()) if written else None,
            survey=record(survey) if survey.known else None,
            readable=float(readable_J.mean()),
        )
        for metric in metrics
        for survey in (found[metric, wire.TRUTH_SIDE],)
    ]
    none = pd.DataFrame(columns=list(COLUMNS))
    return Scored(rows, none, answers.texts, found[metrics[0], wire.TARGET_SIDE].mean_J)


def _scores(run: RunInputs, reward_GJ: FloatArray, readable_J: BoolArray) -> ScoreRecord:
    found = alignment_scores(reward_GJ, readable_J)
    return ScoreRecord(
        fi=found.fairness_index,
        fi_readable=found.fairness_of_readable,
        avg_as=found.avg_as,
        min_as=found.min_as,
        per_group=dict(zip(run.federation.groups, found.per_group_G.tolist(), strict=True)),
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
