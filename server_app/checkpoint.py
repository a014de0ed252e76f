"""What a run keeps to be resumed: PluralLLM's final weights, and PPO's state after an iteration.

Axis letter: G groups.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from flwr.app import Array, ArrayRecord
from safetensors import SafetensorError, safe_open

from appa_flwr.aggregation import State
from appa_flwr.errors import UserError
from appa_flwr.files import replace_file
from appa_flwr.run.records import Round
from server_app.predictor.pretraining import Pretraining

PRETRAINING = "pretraining"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """PPO after an iteration.

    Attributes:
        iteration: that are done.
        history: group -> the aggregation rule's moving average of its rewards.
        answered: group -> whether it has ever answered.
        lead: group -> how far it has fallen behind, as the rule adds it up.
        fairness: the Fairness Index of each iteration.
        engine: `PPOEngine.state()`.
    """

    iteration: int
    history: Mapping[str, float]
    answered: Mapping[str, bool]
    lead: Mapping[str, float]
    fairness: tuple[float, ...]
    engine: Mapping[str, Any]

    @classmethod
    def of(cls, iteration: int, groups: Sequence[str], rule: State, engine: Mapping[str, Any]) -> Checkpoint:
        """The checkpoint of a rule's state over these groups."""
        history, answered, lead = (
            dict(zip(groups, values_G.tolist(), strict=True))
            for values_G in (rule.history_G, rule.answered_G, rule.lead_G)
        )
        return cls(iteration, history, answered, lead, rule.fairness, engine)

    def rule_state(self, groups: Sequence[str]) -> State:
        """The rule's state over the groups of a resumed run: one that is new has never answered."""
        return State(
            history_G=np.array([self.history.get(name, 0.0) for name in groups]),
            answered_G=np.array([self.answered.get(name, False) for name in groups]),
            lead_G=np.array([self.lead.get(name, 0.0) for name in groups]),
            fairness=self.fairness,
        )


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
        raise UserError(
            f"{path}: cannot be read ({_first_line(error)}); without it the run resumes before PPO"
        ) from None


def save_weights(path: Path, pretraining: Pretraining) -> None:
    """Write PluralLLM's weights and how its rounds went.

    Raises:
        UserError: it cannot be written.
    """
    arrays = {name: np.ascontiguousarray(array.numpy()) for name, array in pretraining.weights.items()}
    # One entry: safetensors writes several in the order of a hash, and the same weights would be other bytes.
    known = {"rounds": [entry.model_dump() for entry in pretraining.rounds], "chosen": pretraining.chosen}
    replace_file(path, safetensors.numpy.save(arrays, metadata={PRETRAINING: json.dumps(known)}))


def load_weights(path: Path, start: ArrayRecord) -> Pretraining | None:
    """What `save_weights` wrote; None where nothing is. `start` has the names and shapes that are expected.

    Raises:
        UserError: it cannot be read, or holds other names or shapes.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, "np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            known = json.loads((file.metadata() or {})[PRETRAINING])
            rounds = tuple(Round.model_validate(entry) for entry in known["rounds"])
            chosen = int(known["chosen"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({_first_line(error)}); without it PluralLLM is trained anew"
        ) from None
    expected = {name: tuple(array.shape) for name, array in start.items()}
    if {name: array.shape for name, array in arrays.items()} != expected:
        raise UserError(f"{path}: holds other weights than PluralLLM's of this config; without it it is trained anew")
    return Pretraining(ArrayRecord({name: Array(arrays[name]) for name in start}), rounds, chosen)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
