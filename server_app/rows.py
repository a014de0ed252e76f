"""The rows of summary.json: the groups score what the models and baselines answer."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from appa_flwr.core.errors import UserError
from appa_flwr.protocol.asks import ANSWERS, PREDICTIONS, Ask
from appa_flwr.protocol.rewards import metrics_of
from appa_flwr.run.pair_scores import put, replace_rows
from appa_flwr.run.records import MEAN_PREDICTION, SummaryRow
from appa_flwr.run.run_files import DIFFERENCES, PREDICTIONS_FILE, SUMMARY
from server_app import baselines, evaluation
from server_app.evaluation import Scored
from server_app.inputs import IntArray, PolicyInputs, RunInputs
from server_app.lookups import look_ups

FloatArray = npt.NDArray[np.float64]

log = logging.getLogger("appa.server")


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


def _known_answers(run: RunInputs, test_J: IntArray) -> dict[str, FloatArray]:
    """Answers to the held-out questions by look-up, and the mean prediction, as far as groups let them be known."""
    known = dict[str, FloatArray]()
    if (mean_QK := _mean(run, ANSWERS)) is not None:
        known = look_ups(mean_QK, run.catalogue, test_J)
    # Where single groups' predictions are known, `baselines` scores their mean.
    if run.config.eval.ceilings and not run.groups.plain and (mean_QK := _mean(run, PREDICTIONS)) is not None:
        known[MEAN_PREDICTION] = mean_QK[test_J]
    return known


def _mean(run: RunInputs, kind: str) -> FloatArray | None:
    """The groups' mean answers or predictions (Q, K); None where an owner lets none leave, or too few give them."""
    if run.groups.without(kind):
        return None
    try:
        mean_QK: FloatArray = run.groups.ask(Ask(kind)).mean("votes")
    except UserError as error:
        log.warning("no rows by the groups' mean %s: %s", kind, error)
        return None
    return mean_QK


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
        known |= _known_answers(run, test_J)
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
            against = ", ".join(run.groups.without("predictions"))
            if against:
                said += f"; NO CEILINGS: {against} keep their predictions to themselves"
            elif not run.groups.plain:
                said += "; NO CEILINGS AND NO OWN PREDICTIONS: they need single groups' numbers"
            else:
                said += ", ceilings"
        phase.step(1, 1, said)
    return rows
