"""Scores for any model: the groups judge its answers to the held-out questions, as they judge a run's own policy.

Legend: G groups, Q questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd

from appa_flwr.analysis.intervals import Interval, levels, paired_differences
from appa_flwr.protocol import formats
from appa_flwr.protocol.rewards import metrics_of
from appa_flwr.protocol.votes import BALLOTS
from appa_flwr.protocol.votes import cast as cast_votes
from appa_flwr.run import pair_scores
from appa_flwr.run.records import CEILINGS, MODEL, OWN_PREDICTION, SummaryRow
from appa_flwr.run.run_files import SUMMARY
from server_app import evaluation, rows
from server_app.federation.answers import parse_answers
from server_app.inputs import PolicyInputs, RunInputs
from server_app.models import sft
from server_app.models.base import Base
from server_app.serve.requests import Refused


class Models:
    """The models that were scored in a run, which its summary.json keeps; one is judged at a time."""

    def __init__(self, run: RunInputs) -> None:
        self._run, catalogue = run, run.catalogue
        self._test_J = np.flatnonzero(catalogue.held_out_Q)
        self._position = {catalogue.questions[q].question_id: q for q in self._test_J}

    def questions(self) -> dict[str, Any]:
        """The held-out questions with their prompts."""
        config, asked = self._run.config, [self._run.catalogue.questions[q] for q in self._test_J]
        prompts = [formats.prompt(config.task, q.text, q.options, style=config.policy.prompt_style) for q in asked]
        found = [{"question_id": q.question_id, "prompt": text} for q, text in zip(asked, prompts, strict=True)]
        return {"questions": found, "answer_tokens": config.rollout.response_length}

    def judge(self, name: str, answers: Mapping[str, str]) -> dict[str, Any]:
        """Have the groups score a model's answers to all held-out questions; see `result`.

        Raises:
            Refused: a question is none of them, or is left out.
            UserError: too few groups answered.
        """
        if wrong := next((asked for asked in answers if asked not in self._position), None):
            raise Refused(422, f"question_id '{wrong}' is no held-out question")
        if missing := next((asked for asked in self._position if asked not in answers), None):
            raise Refused(
                422, f"{len(self._position) - len(answers)} held-out questions are not answered ('{missing}')"
            )
        run, config = self._run, self._run.config
        earlier = list(SUMMARY.read(run.folder.path) or ())
        if not earlier:
            earlier = rows.score_baselines(run, self._inputs(), earlier=[])
        texts = [answers[run.catalogue.questions[q].question_id] for q in self._test_J]
        scored = evaluation.score(
            run,
            f"{MODEL}{name}",
            parse_answers(config.task, texts, self._test_J, run.catalogue),
            metrics=sorted(
                metrics_of(config.task, config.reward_metric), key=lambda metric: metric != config.reward_metric
            ),
        )
        kept = [row for row in earlier if row.method != f"{MODEL}{name}"]
        pair_scores.put(run.folder.path, scored.pair_scores)
        run.folder.write(SUMMARY, tuple(evaluation.with_skill([*kept, *scored.rows])))
        run.folder.progress("models", 1, 1, f"{name}: {rows.in_words(scored.rows[0])}", None)
        return self.result()

    def result(self) -> dict[str, Any]:
        """The rows by the training metric, and with intervals each model's scores and these less every other one's."""
        folder, metric = self._run.folder.path, self._run.config.reward_metric
        found, all_rows = pair_scores.read(folder), SUMMARY.read(folder) or ()
        shown = [row for row in all_rows if row.metric == metric]
        against = [pair_scores.PREDICTIONS]
        against += [pair_scores.SURVEY] if any(row.survey for row in shown) else []
        compared = [] if found is None else list(self._compared(found, shown, against))
        return {
            "metric": metric,
            "rows": [row.model_dump(mode="json") for row in shown],
            "compared": compared,
        }

    def _compared(
        self, found: pd.DataFrame, shown: Sequence[SummaryRow], against: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        metric = self._run.config.reward_metric
        others = [row.method for row in shown if row.method not in (OWN_PREDICTION, *CEILINGS)]
        for kind in against:
            tables = {name: pair_scores.table(found, name, metric=metric, against=kind) for name in others}
            for name in others:
                if not name.startswith(MODEL):
                    continue
                own = {"model": name.removeprefix(MODEL), "against": kind}
                yield {**own, "less": None, **_numbers(levels([tables[name].to_numpy(float)]))}
                for other in others:
                    both = pair_scores.aligned(tables[name], tables[other]) if other != name else None
                    if both is not None:
                        yield {**own, "less": other.removeprefix(MODEL), **_numbers(paired_differences([both]))}

    def _inputs(self) -> PolicyInputs:
        """What baselines are made from: the votes; no model of ours takes part."""
        run, option_QK = self._run, self._run.catalogue.option_QK
        votes_GQK, majority_QK = run.federation.votes(needed=False), None
        if votes_GQK is not None:
            cast_GQK = cast_votes(votes_GQK, option_QK, kind=BALLOTS[run.config.task])
            majority_QK = sft.sft_targets(cast_GQK, option_QK, target="majority")
        train_J = np.flatnonzero(~run.catalogue.held_out_Q)
        return PolicyInputs(cast(Base, None), [], train_J, self._test_J, majority_QK, None)


def _numbers(found: Mapping[Any, Interval]) -> dict[str, list[float]]:
    return {measure: [one.value, one.low, one.high] for measure, one in found.items()}
