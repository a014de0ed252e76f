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
from appa_flwr.run.run_files import SUMMARY
from server_app import baselines, evaluation
from server_app.federation.answers import parse_answers
from server_app.federation.ask import TooFew
from server_app.inputs import RunInputs, ask_votes
from server_app.serve import prompts


class Judge:
    """Lets the groups score models, one at a time; summary.json stores the scores."""

    def __init__(self, run: RunInputs) -> None:
        self._run, catalogue = run, run.catalogue
        self._test_J = np.flatnonzero(catalogue.held_out_Q)
        self._questions = [catalogue.questions[q] for q in self._test_J]

    def questions(self) -> dict[str, Any]:
        """The held-out questions, with the prompts that ask for an answer."""
        config = self._run.config
        prompt_rows = prompts.rows(config, self._questions, plain=True)
        return {"questions": prompt_rows, "answer_tokens": config.ppo.response_length}

    def scores(self, name: str, answers: Mapping[str, str]) -> dict[str, Any]:
        """The groups' scores of a model's answers to all held-out questions; see `appa_flwr.report.frames.as_json`.

        Raises:
            HTTPException: the name is that of a baseline, an answer is to another question, or one is missing.
            UserError: too few groups answered.
        """
        if name in METHODS and name not in TRAINED_METHODS:
            raise HTTPException(422, f"the name '{name}' is taken by a row that is no model's")
        ids = [question.question_id for question in self._questions]
        if other := sorted(set(ids) ^ set(answers)):
            problem = "not answered" if other[0] in ids else "no held-out question"
            raise HTTPException(422, f"answers: '{other[0]}' is {problem}")
        run, config, method = self._run, self._run.config, f"{MODEL}{name}"
        texts = [answers[question_id] for question_id in ids]
        parsed = parse_answers(config.task, texts, self._test_J, run.catalogue)
        kept = list(SUMMARY.read(run.folder.path) or ())
        if not kept:
            majority_QK = None
            with contextlib.suppress(TooFew):
                majority_QK = ask_votes(run).majority_QK
            kept = baselines.score_baselines(run, self._test_J, majority_QK=majority_QK, earlier=[])
        rows = evaluation.score(run, method, parsed, metrics=evaluation.metric_names(config))
        run.folder.progress("models", 1, 1, f"{name}: {evaluation.in_words(rows[0])}", None)
        run.folder.write(SUMMARY, (*(row for row in kept if row.method != method), *rows))
        return frames.as_json(run.folder.path)
