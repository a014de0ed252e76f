"""Inputs of a run's phases: the run itself, and what its policy starts from.

Axis letters: G groups, Q questions, K options, J held-out or training questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from appa_flwr.config import Config
from appa_flwr.protocol import formats, votes, wire
from appa_flwr.run.records import ESTIMATE, EstimateRecord, QuestionCounts
from appa_flwr.run.run_files import QUESTIONS
from pluralllm.model import PluralLLM
from server_app.estimates import Estimator
from server_app.federation.catalogue import fitting_questions
from server_app.federation.groups import Federation
from server_app.models import sft
from server_app.models.base import Base
from server_app.run_folder import RunFolder

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RunInputs:
    """Inputs of every phase."""

    config: Config
    folder: RunFolder
    federation: Federation
    catalogue: wire.Catalogue


@dataclass(frozen=True, eq=False)
class PolicyInputs:
    """Starting point of the policy, and what it learns from.

    Attributes:
        base: the starting point.
        prompts: token ids of every question's prompt, by catalogue position.
        train_J: training questions that are used.
        test_J: held-out questions that are used.
        majority_QK: the majority's answers, as scores; None where too few groups voted, as a given SFT model allows.
        sft_QK: what SFT teaches, as scores; None likewise.
        estimator: of what the prompts show; None where they show no estimates.
        estimates: what the prompts show, by catalogue position; empty where they show none.
    """

    base: Base
    prompts: list[list[int]]
    train_J: IntArray
    test_J: IntArray
    majority_QK: FloatArray | None
    sft_QK: FloatArray | None
    estimator: Estimator | None = None
    estimates: tuple[EstimateRecord, ...] = ()

    def by_rule(self, run: RunInputs) -> PolicyInputs:
        """Those of PPO, whose prompts show estimates of what the run's rule comes to; these are SFT's."""
        if self.estimator is None:
            return self
        shown = self.estimator.by_rule(run.config)
        return replace(self, prompts=_prompts(run, self.base, shown), estimates=shown)


@dataclass(frozen=True, eq=False)
class Taught:
    """What the groups' votes come to, as scores (Q, K): SFT's targets, and the majority's answers where known.

    `votes_GQK` are the distributions that SFT's targets are the mean of, where these are known.
    """

    sft_QK: FloatArray
    majority_QK: FloatArray | None
    votes_GQK: FloatArray | None = None


def taught(config: Config, votes_GQK: FloatArray, option_QK: npt.NDArray[np.bool_]) -> Taught:
    """From the votes (G, Q, K)."""
    sft_QK = sft.sft_targets(votes_GQK, option_QK, target=config.sft.target)
    cast_GQK = votes.cast(votes_GQK, option_QK, kind=votes.BALLOTS[config.task])
    averaged = config.task == "dpa" and config.sft.target in ("mean", "predicted-mean")
    majority_QK = sft.sft_targets(cast_GQK, option_QK, target="majority")
    return Taught(sft_QK, majority_QK, votes_GQK if averaged else None)


def policy_inputs(run: RunInputs, base: Base, voted: Taught | None, network: PluralLLM) -> PolicyInputs:
    """Prompts, the questions that can be asked and answered, and SFT's targets; `network` is the trained PluralLLM."""
    config, catalogue = run.config, run.catalogue
    estimator = None
    if config.policy.estimates:
        assert voted is not None  # votes are needed where prompts show estimates
        estimator = Estimator(catalogue, voted.sft_QK, voted.votes_GQK, network)
    shown = () if estimator is None else estimator.for_sft(config)
    prompts = _prompts(run, base, shown)
    sizes_Q = [len(question.options) for question in catalogue.questions]
    by_size = {size: answer_tokens(base, config.task, size) for size in sorted(set(sizes_Q))}
    fitting = fitting_questions(
        config,
        catalogue,
        prompt_tokens_Q=[len(ids) for ids in prompts],
        answer_tokens_Q=[by_size[size] for size in sizes_Q],
    )
    counts = QuestionCounts(
        training=len(fitting.train_J),
        held_out=len(fitting.test_J),
        unanswerable=fitting.unanswerable,
        too_long=fitting.too_long,
    )
    run.folder.write(QUESTIONS, counts)
    run.folder.progress("questions", 1, 1, counts.sentence(), None)
    majority_QK, sft_QK = (None, None) if voted is None else (voted.majority_QK, voted.sft_QK)
    return PolicyInputs(base, prompts, fitting.train_J, fitting.test_J, majority_QK, sft_QK, estimator, shown)


def _prompts(run: RunInputs, base: Base, shown: Sequence[EstimateRecord]) -> list[list[int]]:
    questions = run.catalogue.questions
    estimates: Sequence[str | None] = [one.estimate for one in shown] or [None] * len(questions)
    return [base.prompt_ids(run.config, *asked) for asked in zip(questions, estimates, strict=True)]


def known_answers(run: RunInputs, inputs: PolicyInputs) -> dict[str, FloatArray]:
    """Answers (J, K) to the held-out questions that no group has to be asked for: the majority's, and estimates."""
    known = {}
    if inputs.majority_QK is not None:
        known["majority"] = inputs.majority_QK[inputs.test_J]
    if inputs.estimates:
        known[ESTIMATE] = np.zeros((len(inputs.test_J), run.catalogue.option_QK.shape[1]))
        for answer_K, q in zip(known[ESTIMATE], inputs.test_J, strict=True):
            size = len(inputs.estimates[q].options)
            answer_K[:size] = formats.parse(run.config.task, inputs.estimates[q].estimate, size).prediction
    return known


def taught_texts(run: RunInputs, inputs: PolicyInputs) -> list[str]:
    """SFT's target answer to every question, in the format asked for."""
    assert inputs.sft_QK is not None  # votes are needed where SFT is
    return sft.answer_texts(run.config, inputs.sft_QK, run.catalogue.option_QK)


def answer_tokens(base: Base, task: str, num_options: int) -> int:
    """Tokens of an answer in the format asked for with the token that ends it.

    Measured on the uniform answer: for DPA its two decimals a number take as many characters as any other answer's, for
    OPA it is the options in their order.
    """
    text = formats.answer(task, np.ones(num_options))
    return len(base.tokenizer(text, add_special_tokens=False)["input_ids"]) + 1
