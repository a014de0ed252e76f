"""The rows of summary.json: the groups score what the models and baselines answer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from flwr.app import RecordDict
from transformers import PreTrainedModel

from appa_flwr.protocol import sum_messages
from appa_flwr.protocol.rewards import metrics_of
from appa_flwr.run.pair_scores import put, replace_rows
from appa_flwr.run.records import MEAN_PREDICTION, SummaryRow
from appa_flwr.run.run_files import DIFFERENCES, PREDICTIONS_FILE, SUMMARY
from server_app import baselines, evaluation
from server_app.evaluation import Scored
from server_app.federation.secure_sums import SecureSums
from server_app.inputs import IntArray, PolicyInputs, RunInputs
from server_app.lookups import look_ups

FloatArray = npt.NDArray[np.float64]


def evaluate(
    run: RunInputs, name: str, model: PreTrainedModel, inputs: PolicyInputs, *, earlier: Sequence[SummaryRow]
) -> Scored:
    """Let the groups score a model's answers to the held-out questions; `earlier` rows stay in summary.json."""
    config = run.config
    # The training metric first: the examples in the report show its rewards.
    metrics = sorted(metrics_of(config.task, config.reward_metric), key=lambda metric: metric != config.reward_metric)
    with run.folder.phase(f"evaluate {name}") as phase:
        answers = evaluation.greedy_answers(
            model,
            inputs.base,
            config,
            prompts=inputs.prompts,
            question_J=inputs.test_J,
            catalogue=run.catalogue,
            progress=lambda step, of: phase.step(step, of, "batches of questions answered"),
        )
        scored = evaluation.score(run, name, answers, metrics=metrics)
        put(run.folder.path, scored.pair_scores)
        run.folder.write(SUMMARY, (*earlier, *scored.rows))
        phase.step(1, 1, in_words(scored.rows[0]))
    return scored


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


def _looked_up(run: RunInputs, test_J: IntArray) -> dict[str, FloatArray]:
    """Answers to the held-out questions by look-up, as far as groups let them be known."""
    if (secure := run.federation.secure) is not None:
        return _summed_answers(run, secure, test_J)
    if not run.federation.without_mean:
        given_GQK = run.federation.votes(needed=False, distributions=True)
        if given_GQK is not None:
            return look_ups(given_GQK.mean(axis=0), run.catalogue, test_J)
    return {}


def _summed_answers(run: RunInputs, secure: SecureSums, test_J: IntArray) -> dict[str, FloatArray]:
    """The same and the mean prediction, from sums."""

    def mean(kind: str) -> FloatArray:
        shape = run.catalogue.option_QK.shape
        mean_QK: FloatArray = shape[1] * secure.total(kind, RecordDict(), {"votes": shape}).mean("votes")
        return mean_QK

    known = {}
    if not run.federation.without_mean:
        known = look_ups(mean(sum_messages.DISTRIBUTIONS), run.catalogue, test_J)
    if run.config.eval.ceilings:
        known[MEAN_PREDICTION] = mean(sum_messages.PREDICTIONS)[test_J]
    return known


def score_baselines(
    run: RunInputs, test_J: IntArray, *, majority_QK: FloatArray | None, earlier: Sequence[SummaryRow]
) -> list[SummaryRow]:
    """Trivial baselines and ceilings; all rows of summary.json, with their skill scores.

    Args:
        run: the run.
        test_J: held-out questions that are used.
        majority_QK: the majority's answers; None where too few groups voted.
        earlier: rows of the models scored so far.
    """
    with run.folder.phase("baselines") as phase:
        known = {} if majority_QK is None else {"majority": majority_QK[test_J]}
        known |= _looked_up(run, test_J)
        found = baselines.baseline_scores(run, question_J=test_J, known_JK=known)
        rows = evaluation.with_skill([*earlier, *found.rows])
        put(run.folder.path, found.pair_scores)
        run.folder.write(SUMMARY, tuple(rows))
        if found.predictions is not None:
            replace_rows(run.folder.path / PREDICTIONS_FILE, found.predictions)
        if found.differences is not None:
            run.folder.write(DIFFERENCES, found.differences)
        said = ", ".join(["uniform", *known])
        if run.config.eval.ceilings:
            against = ", ".join(run.federation.without_probes)
            if run.federation.secure is not None:
                said += (
                    "; NO CEILINGS AND NO OWN PREDICTIONS: they need single groups' answers, and there are sums alone"
                )
            else:
                said += f"; NO CEILINGS: {against} let nobody probe for them" if against else ", ceilings"
        phase.step(1, 1, said)
    return rows
