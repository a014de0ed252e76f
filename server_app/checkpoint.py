"""Checkpoint from which a run is resumed in PPO: its state after an iteration.

Axis letter: G groups.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from appa_flwr.analysis.aggregation import State
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.secure.terms import Public
from server_app.federation.summed_rewards import SummedState


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """PPO after an iteration.

    Attributes:
        iteration: that are done.
        history: group -> the aggregation rule's moving average of its rewards.
        answered: group -> whether it has ever answered.
        lead: group -> how far it has fallen behind, as the rule adds it up.
        engine: `PPOEngine.state()`.
        summed: the rule's state where the server sees sums alone, and the three before it are empty.
    """

    iteration: int
    history: Mapping[str, float]
    answered: Mapping[str, bool]
    lead: Mapping[str, float]
    engine: Mapping[str, Any]
    summed: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls, iteration: int, groups: Sequence[str], rule: State | SummedState, engine: Mapping[str, Any]
    ) -> Checkpoint:
        """The checkpoint of a rule's state over these groups."""
        if isinstance(rule, SummedState):
            public = vars(rule.public) | {"moves": dict(rule.public.moves)}
            summed = {"public": public, "standings": dict(rule.standings), "groups": list(rule.groups)}
            return cls(iteration, {}, {}, {}, engine, summed)
        history, answered, lead = (
            dict(zip(groups, values_G.tolist(), strict=True))
            for values_G in (rule.history_G, rule.answered_G, rule.lead_G)
        )
        return cls(iteration, history, answered, lead, engine)

    def rule_state(self, groups: Sequence[str]) -> State | SummedState:
        """The rule's state over the groups of a resumed run: one that is new has never answered."""
        if (of := self.summed) is not None:
            return SummedState(Public(**of["public"]), of["standings"], tuple(of["groups"]))
        return State(
            history_G=np.array([self.history.get(name, 0.0) for name in groups]),
            answered_G=np.array([self.answered.get(name, False) for name in groups]),
            lead_G=np.array([self.lead.get(name, 0.0) for name in groups]),
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


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
