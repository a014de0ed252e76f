"""Public names for notebooks and scripts; `appa_flwr` exports them and imports each on first use."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from appa_flwr.report import frames
from appa_flwr.run.read import RunFiles, read_run


@dataclass(frozen=True)
class Answer:
    """A policy's answer to a question with K options.

    Attributes:
        text: the policy's text.
        prediction: (K,) a distribution, or for rankings preference scores, K for the first; None if unreadable.
        format_score: in [0, 1].
    """

    text: str
    prediction: npt.NDArray[np.float64] | None
    format_score: float


class Policy(Protocol):
    """A trained policy that answers questions outside of a run."""

    def ask(self, question: str, options: Sequence[str]) -> Answer:
        """Answer a question with K options by greedy decoding.

        Raises:
            UserError: fewer than two options, or more than the survey formats allow.
        """


class Predictor(Protocol):
    """A run's preference predictor, also for groups that were not in the run."""

    def predict(self, answers: Mapping[str, npt.ArrayLike]) -> pd.DataFrame:
        """Predict a group's answers to all questions of the run, from its answers to some, or to none.

        `answers` are shares by question id; each of these questions is predicted from the others. The result has one
        row per question and option: `question` (its id), `text`, `option`, `share`.

        Raises:
            UserError: an unknown question, or shares that do not fit its options or do not sum to 1.
        """


class Run(RunFiles):
    """Contents of a run's folder: DataFrames `summary`, `iterations` and `scores`, and the trained models."""

    def intervals(self) -> pd.DataFrame:
        """Levels of all methods and PPO's differences to them, by the training metric, with 95 % intervals.

        One row per method, `less` ("" for its level), kind of target and measure: `value`, the estimate, with `low` and
        `high`, and `sample`, the sample's own number.
        """
        return frames.of_run(self).drop(columns="sd")  # of several runs

    def predictor(self) -> Predictor:
        """The trained preference predictor. Reads the run's survey for its questions, and loads torch.

        Raises:
            UserError: the run has no predictor, or its survey is missing or has changed.
        """
        predictor: Predictor = importlib.import_module("server_app.loaded").LoadedPredictor(self.folder, self.config)
        return predictor

    def policy(self) -> Policy:
        """The trained policy, in float32; by `policy.tuning = "qlora"` on its base in four bits, as it was scored.

        Loads torch and Transformers.

        Raises:
            UserError: the run has no policy, or its base model is missing.
        """
        # Imported by name, since a group has this package without the server's code.
        policy: Policy = importlib.import_module("server_app.loaded").LoadedPolicy(self.folder, self.config)
        return policy


def load_run(path: str | Path) -> Run:
    """Read the files that a run has written so far.

    Raises:
        UserError: the folder is not a run's, or one of its files cannot be read.
    """
    return Run(**vars(read_run(Path(path))))
