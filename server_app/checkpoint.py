"""Checkpoint from which a run is resumed in PPO: its state after an iteration."""

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
    """PPO after a number of completed iterations."""

    iteration: int
    questions: int  # taken for rollouts, including rollouts that got no reward
    rule: Mapping[str, Any]  # from `RewardRule.saved`
    engine: Mapping[str, Any]  # from `PPOEngine.state`


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint in place of the last one, which is intact after a UserError."""
    # Saved through memory: on a full disk torch's own writer hides the reason.
    data = io.BytesIO()
    torch.save(vars(checkpoint), data)
    replace_file(path, data.getvalue())


def load(path: Path) -> Checkpoint | None:
    """Load the checkpoint, with its tensors on the CPU; None if there is no file, UserError if it cannot be read."""
    if not path.exists():
        return None
    try:
        return Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, EOFError, TypeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path}: cannot be read ({reason}); without it the run resumes before PPO") from None
