"""Checkpoint from which a run is resumed in PPO: its state after an iteration."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """PPO after an iteration.

    Attributes:
        iteration: that are done.
        questions: that rollouts have answered, those of rollouts without a reward among them.
        rule: the rule's state, as its `RewardRule` saves it.
        engine: `PPOEngine.state()`.
    """

    iteration: int
    questions: int
    rule: Mapping[str, Any]
    engine: Mapping[str, Any]


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint in place of the last one.

    Raises:
        UserError: it cannot be written; the last one is intact.
    """
    # Through memory: where the disk is full, torch's own writer hides the reason.
    data = io.BytesIO()
    torch.save(vars(checkpoint), data)
    replace_file(path, data.getvalue())


def load(path: Path) -> Checkpoint | None:
    """The checkpoint, with its tensors on the CPU; None where there is none.

    Raises:
        UserError: it cannot be read.
    """
    if not path.exists():
        return None
    try:
        return Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, EOFError, TypeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path}: cannot be read ({reason}); without it the run resumes before PPO") from None
