"""Scores for any model: the groups score its answers to the held-out questions like those of a run's own policy.

Axis letter: J held-out questions.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from fastapi import HTTPException

from appa_flwr.report import frames
from appa_flwr.run.records import METHODS, MODEL, TRAINED_METHODS
from appa_flwr.run.schema import SUMMARY
from server_app import baselines, evaluation
from server_app.federation.replies import TooFew
from server_app.federation.responses import parse_responses
from server_app.inputs import RunInputs, ask_votes


def scores(run: RunInputs, name: str, answers: Mapping[str, str]) -> dict[str, Any]:
    """The groups' scores of a model's answers to all held-out questions; see `appa_flwr.report.frames.as_json`.

    Raises:
        HTTPException: the name is that of a baseline, an answer is to another question, or one is missing.
    """
    if name in METHODS and name not in TRAINED_METHODS:
        raise HTTPException(422, f"the name '{name}' is taken by a row that is no model's")
    test_J = np.flatnonzero(run.catalogue.held_out_Q)
    ids = [question.question_id for question in run.questions(test_J)]
    if other := sorted(set(ids) ^ set(answers)):
        problem = "not answered" if other[0] in ids else "no held-out question"
        raise HTTPException(422, f"answers: '{other[0]}' is {problem}")
    config, method = run.config, f"{MODEL}{name}"
    parsed = parse_responses(config.task, [answers[question_id] for question_id in ids], test_J, run.catalogue)
    if not SUMMARY.read(run.folder.path):
        majority_QK = None
        with contextlib.suppress(TooFew):
            majority_QK = ask_votes(run).majority_QK
        baselines.score_baselines(run, test_J, majority_QK=majority_QK)
    rows = evaluation.score(run, [(method, parsed, evaluation.metric_names(config))])
    run.folder.progress("models", 1, 1, f"{name}: {evaluation.in_words(rows)}", None)
    evaluation.add_rows(run, rows)
    return frames.as_json(run.folder.path)
