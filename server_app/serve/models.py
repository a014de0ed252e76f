"""Scores for any model: the groups judge its answers to the held-out questions, as they judge a run's own policy.

Legend: Q questions, J answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from appa_flwr.protocol import formats
from appa_flwr.protocol.rewards import metrics_of
from appa_flwr.protocol.votes import BALLOTS
from appa_flwr.protocol.votes import cast as cast_votes
from appa_flwr.report import judged
from appa_flwr.run import pair_scores
from appa_flwr.run.records import METHODS, MODEL, TRAINED_METHODS
from appa_flwr.run.run_files import SUMMARY
from server_app import evaluation, rows
from server_app.federation.answers import parse_answers
from server_app.inputs import FloatArray, RunInputs
from server_app.models import sft
from server_app.serve.requests import Refused


class Models:
    """The models that were scored in a run, which its summary.json keeps; one is judged at a time."""

    def __init__(self, run: RunInputs) -> None:
        self._run, catalogue = run, run.catalogue
        self._test_J = np.flatnonzero(catalogue.held_out_Q)
        self._position = {catalogue.questions[q].question_id: q for q in self._test_J}

    def questions(self) -> dict[str, Any]:
        """The held-out questions, with the prompts that ask for an answer."""
        config, found = self._run.config, []
        for question in (self._run.catalogue.questions[q] for q in self._test_J):
            text, options = question.text, question.options
            prompt = formats.prompt(config.task, text, options, style=config.prompt_style)
            found.append({"question_id": question.question_id, "prompt": prompt, "options": list(options)})
        return {"questions": found, "answer_tokens": config.ppo.response_length}

    def judge(self, name: str, answers: Mapping[str, str | Sequence[str]]) -> dict[str, Any]:
        """Have the groups score a model's answers to all held-out questions; see `appa_flwr.report.judged.result`.

        Raises:
            Refused: a question is none of them or is left out, or has another number of samples.
            UserError: too few groups answered.
        """
        if name in METHODS and name not in TRAINED_METHODS:
            raise Refused(422, f"the name '{name}' is taken by a row that is no model's")
        if wrong := next((asked for asked in answers if asked not in self._position), None):
            raise Refused(422, f"question_id '{wrong}' is no held-out question")
        if missing := [asked for asked in self._position if asked not in answers]:
            raise Refused(422, f"{len(missing)} held-out questions are not answered ('{missing[0]}')")
        given = [answers[asked] for asked in self._position]
        of = [[one] if isinstance(one, str) else list(one) for one in given]
        if not (samples := len(of[0])) or any(len(one) != samples for one in of):
            raise Refused(422, "every question needs as many samples as the others")
        run, config, method = self._run, self._run.config, f"{MODEL}{name}"
        question_J = np.repeat(self._test_J, samples)
        parsed = parse_answers(config.task, [text for one in of for text in one], question_J, run.catalogue)
        kept = list(SUMMARY.read(run.folder.path) or ())
        kept = kept or rows.score_baselines(run, self._test_J, majority_QK=self._majority(), earlier=[])
        metrics = sorted(
            metrics_of(config.task, config.reward_metric), key=lambda metric: metric != config.reward_metric
        )
        scored = evaluation.score(run, method, parsed, metrics=metrics, samples=samples)
        pair_scores.put(run.folder.path, scored.pair_scores)
        kept = [row for row in kept if row.method != method] + scored.rows
        run.folder.progress("models", 1, 1, f"{name}: {rows.in_words(scored.rows[0])}", None)
        run.folder.write(SUMMARY, tuple(evaluation.with_skill(kept)))
        return judged.result(run.folder.path)

    def _majority(self) -> FloatArray | None:
        """The majority's answers, from the groups' votes."""
        run, option_QK = self._run, self._run.catalogue.option_QK
        votes_GQK = run.federation.votes(needed=False)
        if votes_GQK is None:
            return None
        cast_GQK = cast_votes(votes_GQK, option_QK, kind=BALLOTS[run.config.task])
        return sft.sft_targets(cast_GQK, option_QK, target="majority")
