"""The names that a notebook or a script uses; `appa_flwr` itself has them, and loads each when it is asked for."""

from __future__ import annotations

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
        text: as it was written.
        prediction: (K,) a distribution, or for rankings preference scores, K for the first; None if it cannot be read.
        format_score: in [0, 1].
    """

    text: str
    prediction: npt.NDArray[np.float64] | None
    format_score: float


class Policy(Protocol):
    """A trained policy that is asked a question, outside of any run."""

    def ask(self, question: str, options: Sequence[str]) -> Answer:
        """The likeliest answer, token by token, to a question and its K options.

        Raises:
            UserError: fewer than two options, or more than the survey formats allow.
        """


class Predictor(Protocol):
    """A run's preference predictor, for a group that need not have been in the run."""

    def predict(self, answers: Mapping[str, npt.ArrayLike]) -> pd.DataFrame:
        """A group's answers to all questions of the run, from its answers to some, or to none.

        `answers` are shares by question id; each of these questions is predicted from the others. The result has a row
        a question and option: `question` (its id), `text`, `option`, `share`.

        Raises:
            UserError: an unknown question, or shares that do not fit its options or sum to 1.
        """


class Run(RunFiles):
    """A run's folder, read: DataFrames `summary`, `iterations` and `scores`; and its trained models."""

    def intervals(self) -> pd.DataFrame:
        """Levels of all methods and PPO's differences to them, by the training metric, with 95 % intervals.

        A row a method, `less` ("" for its level), kind of target and measure: `value`, `low`, `high`.
        """
        return frames.of_run(self)

    def predictor(self) -> Predictor:
        """The trained preference predictor. Reads the run's survey for its questions, and loads torch.

        Raises:
            UserError: the run has left none, or its survey is no longer there or another one.
        """
        predictor: Predictor = importlib.import_module("server_app.loaded").LoadedPredictor(self.folder, self.config)
        return predictor

    def policy(self) -> Policy:
        """The trained policy, in float32. Loads torch and Transformers.

        Raises:
            UserError: the run has left none, or its base model is no longer there.
        """
        # By name: the server's code lies above this package, which a group has without it.
        policy: Policy = importlib.import_module("server_app.loaded").LoadedPolicy(self.folder, self.config)
        return policy


def load_run(path: str | Path) -> Run:
    """Read what a run has written so far.

    Raises:
        UserError: no run lies there, or one of its files cannot be read.
    """
    return Run(**vars(read_run(Path(path))))
