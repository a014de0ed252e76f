"""Values shared by config, rules and equations: the metrics of each task, and the APPA hyperparameters.

A hyperparameter (Table appa-hparams) has a default and a range, and the paper's value if it is another one. This module
is separate so that a group, which reads the config, does not import the rules.
"""

import math
from typing import Annotated

from pydantic import Field

TASK_METRICS = {"dpa": ("js", "js-distance", "wasserstein", "cosine"), "opa": ("borda",)}
"""Task -> the reward metrics that can score its answers, the default first."""

AUTO_METRICS = {
    "auto": {task: metrics[0] for task, metrics in TASK_METRICS.items()},
    "auto-ordinal": {"dpa": "wasserstein", "opa": "borda"},
}
"""Automatic value of `metric` -> task -> the paper's metric, for nominal answers and for ordinal answers."""

EMA_DECAY = 0.8
EmaDecay = Annotated[float, Field(ge=0, lt=1)]
"""lambda of Equation 5."""

TEMPERATURE, PAPER_TEMPERATURE = 0.02, 0.1
Temperature = Annotated[float, Field(gt=0)]
"""T of Equation 6: the default of runs and rules, and the paper's."""

FAIRNESS_THRESHOLD, PAPER_FAIRNESS_THRESHOLD = 1.1, 0.99
FairnessThreshold = Annotated[float, Field(ge=0)]
"""tau of Equation 3: the default of runs and rules, and the paper's. The index never exceeds 1, so a threshold above 1
is never reached."""

ALIGNMENT_WEIGHT = 0.85
AlignmentWeight = Annotated[float, Field(ge=0, le=1)]
"""omega of Equation 20."""

Alpha = Annotated[float, Field(ge=-math.inf, allow_inf_nan=True)]
"""alpha of Equation 2: any number from -inf (minimum) over 0 (mean) to inf (maximum); `ge` keeps nan out."""

MIN_MEAN, MAX_COV = 1e-6, 10.0
"""mu_min and CoV_max: safeguards of Equation 4."""

WORST_SHARE = 0.3
WorstShare = Annotated[float, Field(ge=0, le=1)]
"""c of rule mix: the share of the weights that group DRO sets."""
