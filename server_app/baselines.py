"""Scores without a language model: trivial baselines, look-ups, and ceilings.

Axis letters: G groups, Q questions, J answers, K options.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from appa_flwr.analysis.ceilings import SOLVED_METRICS, NotSolved, sample, shared_answer
from appa_flwr.config import TASK_METRICS
from appa_flwr.core.arrays import BoolArray, FloatArray, IntArray
from appa_flwr.core.errors import UserError
from appa_flwr.core.seeds import child_seed
from appa_flwr.core.text import listed
from appa_flwr.protocol.queries import ANSWERS, PREDICTIONS, Catalogue, Query
from appa_flwr.run.records import CEILINGS, MEAN_PREDICTION, NEAREST_QUESTIONS, OPTION_LIST
from pluralllm.data import GroupData
from pluralllm.scores import nearest_question
from server_app import examples, log
from server_app.evaluation import add_rows, given_answers, score
from server_app.inputs import RunInputs

DIGITS = 9
"""Decimals of the groups' rounded tables: options that tie in a group's own table also tie here and rank the same."""

NUM_NEAREST = 3


def score_baselines(run: RunInputs, test_J: IntArray, *, majority_QK: FloatArray | None) -> None:
    """Score the uniform answer, the majority's, look-ups and ceilings on the held-out questions `test_J`.

    `majority_QK` has the majority's answers, None if unknown. There are no look-ups if an owner lets no answers leave;
    no ceilings if an owner lets no predictions leave, with `eval.ceilings = false`, and for `js-distance`. With many
    groups ceilings are of a `sample` of the questions. The rows are added to summary.json.
    """
    phase, members = run.folder.phase("baselines"), run.groups.members
    option_JK, metrics = run.catalogue.option_QK[test_J], TASK_METRICS[run.config.task]
    known_JK = {} if majority_QK is None else {"majority": majority_QK[test_J]}
    if not members.without(ANSWERS):
        try:
            mean_QK = run.groups.ask(Query(ANSWERS)).each("votes").mean(axis=0)
        except UserError as error:
            log.warning("no rows by the groups' mean answers: %s", error)
        else:
            known_JK |= look_ups(mean_QK, run.catalogue, test_J)
    answers_JK = {"uniform": option_JK / option_JK.sum(1, keepdims=True), **known_JK}
    ceilings, sampled, words = [], None, ", ".join(answers_JK)
    if run.config.eval.ceilings and (withheld := listed(members.without(PREDICTIONS))):
        words += f"; NO CEILINGS: {withheld} keep their predictions to themselves"
    elif run.config.eval.ceilings:
        target_GJK = _rounded(run.groups.ask(Query(PREDICTIONS)).each("votes")[:, test_J])
        answers_JK[MEAN_PREDICTION] = target_GJK.mean(axis=0)
        num_groups, seed = len(run.groups.names), child_seed(run.config.seed, "ceilings")
        solved = sample(option_JK, groups=num_groups, seed=seed)
        for name, metric, answer_JK in _ceilings(target_GJK[:, solved], option_JK[solved], metrics):
            ceilings.append((name, given_answers(test_J[solved], answer_JK), [metric]))
        if (count := len(solved)) == len(test_J):
            words += ", ceilings"
        else:
            part = f", ceilings ON A SAMPLE of {count} of {len(test_J)} questions, as " if count else "; NO CEILINGS: "
            sampled, words = count, f"{words}{part}{num_groups} groups are many for the solver"
    answered = [(name, given_answers(test_J, answer_JK), metrics) for name, answer_JK in answers_JK.items()]
    rows = score(run, [*answered, *ceilings])
    examples.add(run, {name: answers for name, answers, _ in answered if name in known_JK})
    add_rows(run, [row.model_copy(update={"sampled": sampled}) if row.method in CEILINGS else row for row in rows])
    phase.step(1, 1, words)


def look_ups(mean_QK: FloatArray, catalogue: Catalogue, question_J: IntArray) -> dict[str, FloatArray]:
    """Answers (J, K) to held-out questions by look-up in the training questions, the same for all groups.

    `mean_QK` has the groups' mean answers, normalised or not; only answers to training questions are used.

    Returns:
        "option-list": the mean answer to training questions with the same options, or else with equally many; uniform
        if there are none. "nearest-questions": the mean over the `NUM_NEAREST` training questions with equally many
        options whose options, each embedded with its question, are nearest.
    """
    total_Q1 = mean_QK.sum(axis=1, keepdims=True)
    known_Q = np.flatnonzero(catalogue.train_Q & (total_Q1[:, 0] > 0))
    share_QK = mean_QK / np.where(total_Q1 > 0, total_Q1, 1.0)
    mean = GroupData("mean", known_Q, share_QK[known_Q].astype(np.float32))
    near_JK = nearest_question(mean, catalogue, question_J, count=NUM_NEAREST)
    same_JK = np.stack([_by_options(share_QK, catalogue, known_Q, catalogue.questions[j].options) for j in question_J])
    return {OPTION_LIST: same_JK, NEAREST_QUESTIONS: near_JK}


def _by_options(share_QK: FloatArray, catalogue: Catalogue, known_Q: IntArray, options: tuple[str, ...]) -> FloatArray:
    alike = [q for q in known_Q if catalogue.questions[q].options == options]
    alike = alike or [q for q in known_Q if len(catalogue.questions[q].options) == len(options)]
    uniform_K: FloatArray = (np.arange(share_QK.shape[1]) < len(options)) / len(options)
    return np.asarray(share_QK[alike].mean(axis=0)) if alike else uniform_K


def _ceilings(
    target_GJK: FloatArray, option_JK: BoolArray, metrics: Sequence[str]
) -> Iterator[tuple[str, str, FloatArray]]:
    """Yield method, metric and best answers (J, K) of each ceiling that is found."""
    if not len(option_JK):
        return
    for (name, objective), metric in product(CEILINGS.items(), filter(SOLVED_METRICS.__contains__, metrics)):
        try:
            yield name, metric, shared_answer(target_GJK, option_JK, metric=metric, objective=objective)
        except NotSolved as error:
            log.warning("there is no row %s by %s: %s", name, metric, error)


def _rounded(table_GJK: FloatArray) -> FloatArray:
    """Normalise distributions and round them to `DIGITS` decimals."""
    rounded_GJK: FloatArray = (table_GJK / table_GJK.sum(-1, keepdims=True)).round(DIGITS)
    return rounded_GJK
