"""examples.json: what each method and each group answers to the held-out questions.

Axis letters: G groups, J answers, K options.
"""

from collections.abc import Mapping

import numpy as np

from appa_flwr.core.arrays import FloatArray, IntArray
from appa_flwr.protocol.queries import PREDICTIONS, Query
from appa_flwr.run.records import Example, MethodAnswer
from appa_flwr.run.schema import EXAMPLES
from server_app.federation.responses import Responses
from server_app.inputs import RunInputs

DIGITS = 4


def add(run: RunInputs, answers: Mapping[str, Responses]) -> None:
    """Add methods' answers to the run's examples; they replace earlier answers of these methods."""
    examples = {example.question_id: example for example in EXAMPLES.read(run.folder.path) or ()}
    for method, responses in answers.items():
        for question, shares_K, text in zip(
            run.questions(responses.question_J), responses.prediction_JK, responses.texts, strict=True
        ):
            key, options = question.question_id, question.options
            known = examples.get(key) or Example(question_id=key, question=question.text, options=options)
            answer = MethodAnswer(
                shares=None if np.isnan(shares_K).any() else _rounded(shares_K[: len(options)]), text=text
            )
            examples[key] = known.model_copy(update={"answers": known.answers | {method: answer}})
    run.folder.write(EXAMPLES, tuple(examples.values()))


def add_groups(run: RunInputs, question_J: IntArray) -> None:
    """Add the groups' answers: their own if the server knows them, or else the predictions that ceilings ask for."""
    predicted = {}
    if run.config.eval.ceilings and not run.groups.members.without(PREDICTIONS):
        replies = run.groups.ask(Query(PREDICTIONS))  # the same request as that of the ceilings, whose replies are kept
        predicted = dict(zip(replies.groups, replies.each("votes"), strict=True))
    place_of = {question.question_id: j for question, j in zip(run.questions(question_J), question_J, strict=True)}
    shown = []
    for example in EXAMPLES.read(run.folder.path) or ():
        key, size = example.question_id, len(example.options)
        own = {group: _rounded(rows[key]) for group, rows in run.own.items() if key in rows}
        others = {
            group: _rounded(table_QK[place_of[key], :size]) for group, table_QK in predicted.items() if group not in own
        }
        shown.append(example.model_copy(update={"survey": own, "predictions": others}))
    run.folder.write(EXAMPLES, tuple(shown))


def _rounded(shares_K: FloatArray) -> tuple[float, ...]:
    return tuple(shares_K.round(DIGITS).tolist())
