"""Checkpoint from which a run is resumed in PPO: its state after an iteration."""

import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from appa_flwr.core.errors import UserError, first_line
from appa_flwr.core.files import read_hashed, replace_hashed
from server_app.policy.ppo import PPOEngine


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """PPO after a number of completed iterations."""

    iteration: int
    rule: Mapping[str, Any]  # from `RewardRule.saved`
    engine: Mapping[str, Any]  # from `state_of`


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint in place of the last one, which is intact after a UserError."""
    # Saved through memory: on a full disk torch's own writer hides the reason.
    data = io.BytesIO()
    torch.save(vars(checkpoint), data)
    replace_hashed(path, data.getvalue())


def load(path: Path) -> Checkpoint | None:
    """Load the checkpoint, with its tensors on the CPU; None if there is no file, UserError if it cannot be read."""
    if not path.exists():
        return None
    try:
        fields = torch.load(io.BytesIO(read_hashed(path)), map_location="cpu", weights_only=True)
        fields.pop("questions", None)  # of earlier checkpoints; it follows from the iteration
        return Checkpoint(**fields)
    except (OSError, ValueError, RuntimeError, EOFError, TypeError, pickle.UnpicklingError) as error:
        raise UserError(
            f"{path}: cannot be read ({first_line(error)}); without it the run resumes before PPO"
        ) from None


def state_of(engine: PPOEngine) -> dict[str, Any]:
    """State from which another engine on the same models can continue; see `restore`."""
    return {
        "policy": [p.detach() for p in engine.models.policy_parameters],
        "value": [p.detach() for p in engine.models.value_parameters],
        "optimizer": engine.optimizer.state_dict(),
        "schedule": engine.schedule.state_dict(),
        "device": engine.generator.device.type,
        "generator": engine.generator.get_state(),
        "shuffle": json.dumps(engine.shuffle.bit_generator.state),
        "sampled": engine.sampled.size,
        "tokens": engine.budget.size,
    }


def restore(engine: PPOEngine, state: Mapping[str, Any]) -> None:
    """Restore a result of `state_of`, with tensors on any device.

    Raises:
        ValueError: the state was written on another kind of device, whose random numbers differ.
        RuntimeError: the parameters do not fit these models.
    """
    here, there = engine.generator.device.type, state["device"]
    if here != there:
        raise ValueError(f"it was written on a {there} device, this machine has {here}; resume on a {there} device")
    trained = {"policy": engine.models.policy_parameters, "value": engine.models.value_parameters}
    with torch.no_grad():
        for name, parameters in trained.items():
            for parameter, saved in zip(parameters, state[name], strict=True):
                parameter.view(saved.shape).copy_(saved)  # no broadcast
    engine.optimizer.load_state_dict(state["optimizer"])
    engine.schedule.load_state_dict(state["schedule"])
    engine.generator.set_state(state["generator"].cpu())
    engine.shuffle.bit_generator.state = json.loads(state["shuffle"])
    engine.sampled.size, engine.budget.size = state["sampled"], state["tokens"]
