"""Inputs of a run's phases: the run itself, and what its policy starts from.

Axis letters: G groups, Q questions, K options, J held-out or training questions.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from appa_flwr.config import Config
from appa_flwr.core.arrays import BoolArray, FloatArray, IntArray
from appa_flwr.protocol import votes
from appa_flwr.protocol.queries import ANSWERS, PREDICTIONS, VOTES, Catalogue, Query
from appa_flwr.survey.types import Question
from server_app.federation.groups import Groups
from server_app.policy import sft
from server_app.policy.base import Base
from server_app.run_writer import RunWriter


@dataclass(frozen=True, eq=False)
class RunInputs:
    """Inputs of every phase."""

    config: Config
    folder: RunWriter
    groups: Groups
    catalogue: Catalogue
    origin: str = ""  # of the survey, as a sentence
    own: Mapping[str, Mapping[str, FloatArray]] = field(default_factory=dict)  # a simulation's survey answers, by group
    computing: Callable[[], AbstractContextManager[None]] = nullcontext  # block in which another rule may use the run

    def questions(self, which_Q: IntArray | BoolArray) -> list[Question]:
        """The public questions at these positions of the catalogue, or where this mask is True."""
        return [self.catalogue.questions[q] for q in np.arange(len(self.catalogue.questions))[which_Q]]


class PolicyInputs(NamedTuple):
    """Starting point of the policy, and the questions that it learns from and is scored on."""

    base: Base
    prompts: list[list[int]]  # token ids of every question's prompt, by catalogue position
    train_J: IntArray  # training questions that are used
    test_J: IntArray  # held-out questions that are used


class VoteResult(NamedTuple):
    """Result of the groups' votes, as scores (Q, K)."""

    sft_QK: FloatArray  # SFT's targets
    majority_QK: FloatArray  # the majority's answers
    sentence: str  # for the log


def ask_votes(run: RunInputs) -> VoteResult:
    """Let the groups vote; raises the errors of `Groups.ask`."""
    config, groups, option_QK = run.config, run.groups, run.catalogue.option_QK
    kind = {"mean": ANSWERS, "predicted-mean": PREDICTIONS}.get(config.sft.target, VOTES)
    votes_GQK = groups.ask(Query(kind)).each("votes")
    cast_GQK = votes.cast(votes_GQK, option_QK, kind=votes.BALLOTS[config.task])
    # A predictor that ignores its context predicts the same for every group; only this number would show it.
    differ = (votes_GQK != votes_GQK[:1]).any((0, 2)).mean()
    sentence = f"{len(votes_GQK)} groups voted; on {differ:.0%} of the questions not all the same"
    sft_QK = sft.sft_targets(votes_GQK, option_QK, target=config.sft.target)
    return VoteResult(sft_QK, sft.sft_targets(cast_GQK, option_QK, target="majority"), sentence)
