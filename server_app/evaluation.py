"""Scores of a model's answers to the held-out questions, through the federation.

Axis letters: G groups, J answers, K options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from transformers import PreTrainedModel

from appa_flwr.analysis.alignment import skill_score
from appa_flwr.config import Config
from appa_flwr.config.ranges import TASK_METRICS
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol.asks import TARGET_SIDE, TRUTH_SIDE, Catalogue
from appa_flwr.run.pair_scores import COLUMNS, PREDICTIONS, SURVEY, as_rows, put
from appa_flwr.run.records import Example, RuleRound, ScoreRecord, SummaryRow
from appa_flwr.run.run_files import SUMMARY
from server_app.federation.answers import Answers, parse_answers
from server_app.federation.scores import GroupScores, of_rewards, scores
from server_app.inputs import PolicyInputs, RunInputs
from server_app.policy.base import Base
from server_app.policy.sample import Decoding, sample

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

SIDES = {TARGET_SIDE: PREDICTIONS, TRUTH_SIDE: SURVEY}
NUM_EXAMPLES = 12
CURVE_QUESTIONS = 48
BATCH_SIZE = 64  # answers in a forward pass (PPO table)


def decode(
    base: Base,
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[str]:
    """A model's answers of at most so many tokens, a batch; the likeliest token each time at temperature 0."""
    decoding = Decoding(tokens, temperature, base.stop_ids)
    decoded = sample(model, prompts, decoding, generator=generator).sequences
    return base.texts(decoded.response_JT, decoded.mask_JT)


def greedy_answers(
    run: RunInputs,
    model: PreTrainedModel,
    inputs: PolicyInputs,
    question_J: IntArray,
    *,
    progress: Callable[[int, int], None] = lambda step, of: None,
) -> Answers:
    """Decode one answer to each of these questions, without sampling.

    `progress` is called with (batches done, batches).
    """
    texts: list[str] = []
    batches = np.array_split(question_J, -(-len(question_J) // BATCH_SIZE))
    for done, batch in enumerate(batches, start=1):
        prompts = [inputs.prompts[q] for q in batch]
        texts += decode(inputs.base, model, prompts, tokens=run.config.ppo.response_length)
        progress(done, len(batches))
    return parse_answers(run.config.task, texts, question_J, run.catalogue)


def curve_answers(run: RunInputs, model: PreTrainedModel, inputs: PolicyInputs) -> Answers:
    """Answers to the held-out questions of the learning curve, the same in all iterations."""
    rng = np.random.default_rng(child_seed(run.config.seed, "eval.every"))
    return greedy_answers(run, model, inputs, np.sort(rng.permutation(inputs.test_J)[:CURVE_QUESTIONS]))


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


def evaluate(
    run: RunInputs, name: str, model: PreTrainedModel, inputs: PolicyInputs, *, earlier: Sequence[SummaryRow]
) -> Scored:
    """Let the groups score a model's answers to the held-out questions; `earlier` rows stay in summary.json."""
    with run.folder.phase(f"evaluate {name}") as phase:
        answers = greedy_answers(
            run,
            model,
            inputs,
            inputs.test_J,
            progress=lambda step, of: phase.step(step, of, "batches of questions answered"),
        )
        scored = score(run, name, answers, metrics=metric_names(run.config))
        put(run.folder.path, scored.pair_scores)
        run.folder.write(SUMMARY, (*earlier, *scored.rows))
        phase.step(1, 1, in_words(scored.rows[0]))
    return scored


def metric_names(config: Config) -> list[str]:
    """What a model is scored by, the training metric first: the examples in the report show its rewards."""
    return sorted(TASK_METRICS[config.task], key=lambda metric: metric != config.reward_metric)


def in_words(row: SummaryRow) -> str:
    """A row's scores in the log."""
    words = [f"Avg AS {row.avg_as:.3f}", f"Min AS {row.min_as:.3f}", f"FI {row.fi:.4f}"]
    if missing := [name for name, score in row.per_group.items() if math.isnan(score)]:
        words.append(f"WITHOUT {', '.join(missing)}")
    if row.readable is not None and row.readable < 1:
        words.append(f"FI of the {row.readable:.0%} readable answers {row.fi_readable:.4f}")
    if row.format_score is not None:
        words.append(f"format {row.format_score:.3f}")
    return ", ".join(words) + (" (MOSTLY UNREADABLE)" if row.mostly_unreadable else "")


def round_in_words(line: RuleRound, group_reward: float, *more: str) -> str:
    """A rule's round in the log: the groups' mean reward, which the worst group's compares with, and what `more` says.

    The rule's own reward is no mean over groups, and on another scale.
    """
    words, rewards = [f"reward {group_reward:.3f}"], [reward for reward in line.rewards.values() if reward is not None]
    if rewards:
        words.append(f"worst group {min(rewards):.3f}")
    words += [f"FI {line.fairness_index:.4f}", f"format {line.format_score:.3f}", *more]
    return ", ".join(words) + (f"; MISSING: {', '.join(line.missing_groups)}" if line.missing_groups else "")


def score(run: RunInputs, method: str, answers: Answers, *, metrics: Sequence[str], samples: int = 1) -> Scored:
    """Let the groups score one method's answers to the held-out questions; a row for each metric.

    With several samples, answers to one question stand next to each other, and each group's score of it is their mean;
    that takes single groups' scores.
    """
    scored = scores(run.groups, answers.request(metrics, sides=tuple(SIDES)))
    if samples > 1:
        scored = {key: _means(scores, run.groups.names, samples) for key, scores in scored.items()}
    return result(run, method, answers, scored, metrics=metrics, samples=samples)


def _means(scores: GroupScores, names: Sequence[str], samples: int) -> GroupScores:
    """The scores of questions, each the mean of so many answers'."""
    assert scores.reward_GJ is not None
    return of_rewards(names, scores.reward_GJ.reshape(len(names), -1, samples).mean(axis=2))


def result(
    run: RunInputs,
    method: str,
    answers: Answers,
    scored: Mapping[tuple[str, str], GroupScores],
    *,
    metrics: Sequence[str],
    samples: int = 1,
) -> Scored:
    """The result of one method from its scores by metric and side; a row for each metric.

    Pair scores are there where single groups' scores are known.
    """
    written, share = bool(np.isfinite(answers.format_score_J).all()), float(answers.readable_J.mean())
    readable_J: BoolArray = np.logical_or.reduce(answers.readable_J.reshape(-1, samples), axis=1)
    questions = [question.question_id for question in run.questions(answers.question_J[::samples])]
    pairs = [
        as_rows(method, metric, against, reward_GJ, groups=run.groups.names, questions=questions)
        for metric in metrics
        for side, against in SIDES.items()
        if (reward_GJ := scored[metric, side].reward_GJ) is not None
    ]
    rows = [
        SummaryRow(
            method=method,
            metric=metric,
            **vars(_record(scored[metric, TARGET_SIDE], readable_J)),
            format_score=float(answers.format_score_J.mean()) if written else None,
            survey=_record(survey, readable_J) if survey.known else None,
            readable=share,
        )
        for metric in metrics
        for survey in (scored[metric, TRUTH_SIDE],)
    ]
    pair_scores = pd.concat(pairs) if pairs else pd.DataFrame(columns=list(COLUMNS))
    return Scored(rows, pair_scores, answers.texts, scored[metrics[0], TARGET_SIDE].mean_J)


def _record(scored: GroupScores, readable_J: BoolArray) -> ScoreRecord:
    return ScoreRecord(
        fi=scored.fairness(np.ones_like(readable_J)),
        fi_readable=scored.fairness(readable_J),
        avg_as=scored.avg_as,
        min_as=scored.min_as,
        per_group=dict(scored.per_group),
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


def examples(catalogue: Catalogue, question_J: IntArray, before: Scored, after: Scored) -> tuple[Example, ...]:
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
