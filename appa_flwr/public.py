"""Public names for notebooks and scripts; `appa_flwr` exports them and imports each on first use."""

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from appa_flwr.report import frames
from appa_flwr.run.read import RunReader, read_run

if TYPE_CHECKING:
    from appa_flwr.loaded import Policy, Predictor


class Run(RunReader):
    """Contents of a run's folder: DataFrames `summary`, `iterations` and `scores`, and the trained models."""

    def intervals(self) -> pd.DataFrame:
        """Levels of all methods and PPO's differences to them, by the training metric, with 95 % intervals.

        One row per method, `less` ("" for its level), kind of target and measure: `value`, the estimate, with `low` and
        `high`, and `sample`, the sample's own number.
        """
        return frames.of_run(self).drop(columns="sd")  # of several runs

    def predictor(self) -> "Predictor":
        """The run's trained preference predictor; reads the run's survey for its questions, and loads torch."""
        from appa_flwr.loaded import Predictor

        return Predictor(self.folder, self.config)

    def policy(self) -> "Policy":
        """The run's trained policy; loads torch and Transformers."""
        from appa_flwr.loaded import Policy

        return Policy(self.folder, self.config)


def load_run(path: str | Path) -> Run:
    """Read the files that a run has written so far.

    Raises:
        UserError: the folder is not a run's, or one of its files cannot be read.
    """
    return Run(**vars(read_run(Path(path))))
