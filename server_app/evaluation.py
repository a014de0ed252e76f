"""Scores of a model's answers to the held-out questions, through the federation.

Axis letters: G groups, J answers, K options.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from appa_flwr.analysis.alignment import GROUPS_TO_COMPARE, Scores, alignment_scores
from appa_flwr.analysis.equations import fairness_index
from appa_flwr.config import TASK_METRICS, Config
from appa_flwr.core.arrays import BoolArray, FloatArray, IntArray
from appa_flwr.core.text import listed
from appa_flwr.protocol.queries import TARGET_REFERENCE, TRUTH_REFERENCE, RewardQuery
from appa_flwr.run.pair_scores import PREDICTIONS, SURVEY, as_rows, put
from appa_flwr.run.records import CurvePoint, RuleRound, ScoreRecord, SummaryRow
from appa_flwr.run.schema import SUMMARY
from server_app import examples
from server_app.federation.replies import Replies
from server_app.federation.responses import Responses, parse_responses
from server_app.inputs import PolicyInputs, RunInputs
from server_app.policy.base import Base
from server_app.policy.sample import Decoding, sample

REFERENCES = {TRUTH_REFERENCE: SURVEY, TARGET_REFERENCE: PREDICTIONS}
BATCH_SIZE = 64  # answers in a forward pass (PPO table)


def decode(base: Base, model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, tokens: int) -> list[str]:
    """Decode a batch of prompts greedily, with at most `tokens` tokens per answer."""
    decoded = sample(model, prompts, Decoding(tokens, 0.0, base.stop_ids)).sequences
    return base.texts(decoded.response_JT, decoded.mask_JT)


def greedy_answers(
    run: RunInputs, model: PreTrainedModel, inputs: PolicyInputs, progress: Callable[[int, int], None] = lambda *_: None
) -> Responses:
    """Decode one answer to each held-out question, without sampling; `progress` gets (batches done, batches)."""
    texts: list[str] = []
    batches = np.array_split(inputs.test_J, -(-len(inputs.test_J) // BATCH_SIZE))
    for done, batch in enumerate(batches, start=1):
        prompts = [inputs.prompts[q] for q in batch]
        with run.computing():
            texts += decode(inputs.base, model, prompts, tokens=run.config.ppo.response_length)
        progress(done, len(batches))
    return parse_responses(run.config.task, texts, inputs.test_J, run.catalogue)


def given_answers(question_J: IntArray, prediction_JK: FloatArray) -> Responses:
    """Answers from given predictions instead of a model's texts: a trivial baseline or a ceiling."""
    size = len(question_J)
    return Responses(question_J, ("",) * size, prediction_JK, np.full(size, np.nan), np.ones(size, dtype=bool))


def evaluate(run: RunInputs, name: str, model: PreTrainedModel, inputs: PolicyInputs) -> None:
    """Let the groups score a model's answers to the held-out questions, and add the rows to summary.json."""
    phase = run.folder.phase(f"evaluate {name}")
    answers = greedy_answers(run, model, inputs, partial(phase.step, message="batches of questions answered"))
    rows = score(run, [(name, answers, metric_names(run.config))])
    examples.add(run, {name: answers})  # first, or a stopped run might show another policy's beside these scores
    add_rows(run, rows)
    phase.step(1, 1, in_words(rows))


def add_rows(run: RunInputs, rows: Sequence[SummaryRow]) -> None:
    """Add rows to the run's summary.json; they replace earlier rows of these methods."""
    methods = {row.method for row in rows}
    kept = [row for row in SUMMARY.read(run.folder.path) or () if row.method not in methods]
    run.folder.write(SUMMARY, (*kept, *rows))


def metric_names(config: Config) -> list[str]:
    """The metrics that score a model, the training metric first."""
    return sorted(TASK_METRICS[config.task], key=lambda metric: metric != config.reward_metric)


def in_words(rows: Sequence[SummaryRow]) -> str:
    """Text of a method's scores by its first metric for the log."""
    parts = []
    for row in [row for row in rows if row.metric == rows[0].metric]:
        words = [f"{row.against}: Avg AS {row.avg_as:.3f}", f"Min AS {row.min_as:.3f}", f"FI {row.fi:.4f}"]
        if missing := [name for name, score in row.per_group.items() if math.isnan(score)]:
            words.append(f"WITHOUT {listed(missing)}")
        if row.readable < 1:
            words.append(f"FI of the {row.readable:.0%} readable answers {row.fi_readable:.4f}")
        parts.append(", ".join(words))
    return "; ".join(parts) + ("" if (form := rows[0].format_score) is None else f"; format {form:.3f}")


def round_in_words(line: RuleRound, *more: str) -> str:
    """Text of a round of the rule for the log, with the texts `more` at the end.

    Shows the groups' mean reward beside the worst group's; the rule's own reward is on another scale.
    """
    words = [f"groups' reward {line.group_reward:.3f}"]
    if rewards := [reward for reward in line.rewards.values() if reward is not None]:
        words.append(f"worst group {min(rewards):.3f}")
    words += [f"FI {line.fairness_index:.4f}", f"format {line.format_score:.3f}", *more]
    return ", ".join(words) + (f"; MISSING: {listed(line.missing_groups)}" if line.missing_groups else "")


def reward_query(answers: Responses, metrics: Sequence[str]) -> RewardQuery:
    """Request for the groups' scores of answers to held-out questions, against all `REFERENCES`."""
    return RewardQuery(answers.question_J, answers.prediction_JK, tuple(metrics), tuple(REFERENCES))


def scores(
    replies: Replies, request: RewardQuery, names: Sequence[str]
) -> dict[tuple[str, str], tuple[ScoreRecord, FloatArray]]:
    """(metric, reference) -> scores of answers by the groups `names`, from their replies to the request.

    Returns:
        The scores, NaN where unknown; and every group's rewards (G, J), NaN where a group has none.
    """
    result = {}
    for metric, reference in request.keys:
        reward_GJ = replies.rows(f"{metric} {reference} reward", names)
        if reference == TRUTH_REFERENCE:
            reward_GJ = np.where(replies.rows(f"{metric} {reference} known", names) == 1.0, reward_GJ, np.nan)
        result[metric, reference] = _record(reward_GJ, request.readable_J, names), reward_GJ
    return result


def _record(reward_GJ: FloatArray, readable_J: BoolArray, names: Sequence[str]) -> ScoreRecord:
    scored = Scores(np.full(len(names), math.nan), avg_as=math.nan, min_as=math.nan, fairness_index=1.0)
    if not np.isnan(reward_GJ).all():
        scored = alignment_scores(reward_GJ)
    fi_readable = fairness_index(reward_GJ[:, readable_J], min_groups=GROUPS_TO_COMPARE)
    return ScoreRecord(
        fi=scored.fairness_index,
        avg_as=scored.avg_as,
        min_as=scored.min_as,
        per_group=dict(zip(names, scored.per_group_G.tolist(), strict=True)),
        fi_readable=fi_readable if readable_J.any() else math.nan,
    )


def curve_points(replies: Replies, request: RewardQuery, names: Sequence[str]) -> dict[str, CurvePoint]:
    """Kind of target -> FI, Avg AS and Min AS of answers to held-out questions during PPO, if known."""
    return {
        REFERENCES[reference]: CurvePoint(fi=record.fi, avg_as=record.avg_as, min_as=record.min_as)
        for (_, reference), (record, _) in scores(replies, request, names).items()
        if not math.isnan(record.avg_as)
    }


def score(run: RunInputs, answered: Iterable[tuple[str, Responses, Sequence[str]]]) -> list[SummaryRow]:
    """Let the groups score answers to held-out questions, and add the single scores to the run's scores.parquet.

    `answered` has methods, their answers and the metrics. The file is written once, for all methods.

    Returns:
        A row for each method, metric and target, none against survey answers if no group gives such scores.
    """
    pairs, rows, groups = [], [], run.groups.names
    for method, answers, metrics in answered:
        request = reward_query(answers, metrics)
        record_of = scores(run.groups.ask(request.query()), request, groups)
        written = bool(np.isfinite(answers.format_score_J).all())
        questions = [question.question_id for question in run.questions(answers.question_J)]
        for metric, (reference, against) in product(metrics, REFERENCES.items()):
            record, reward_GJ = record_of[metric, reference]
            pairs.append(as_rows(method, metric, against, reward_GJ, groups=groups, questions=questions))
            if against == SURVEY and math.isnan(record.avg_as):
                continue
            row = SummaryRow(
                method=method,
                metric=metric,
                against=against,
                **dict(record),
                format_score=float(answers.format_score_J.mean()) if written else None,
                readable=float(request.readable_J.mean()),
            )
            rows.append(row)
    put(run.folder.path, pd.concat(pairs))
    return rows
