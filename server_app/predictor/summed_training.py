"""PluralLLM's rounds as secure sums: Flower's strategies get one result, the groups' weighted mean.

Axis letters: P weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict

from appa_flwr.config import Config
from appa_flwr.protocol import sum_messages as messages
from appa_flwr.protocol import wire
from pluralllm.architectures import choices
from server_app.federation.grid import OverlapGrid
from server_app.federation.secure_sums import SecureSums

TRAIN, EVALUATE = "train", "evaluate"


@dataclass(frozen=True, eq=False)
class SummedTraining:
    """All groups of the roster; those that do not train add nothing, and nobody sees which."""

    secure: SecureSums
    catalogue: wire.Catalogue
    config: Config

    def trained(self, content: RecordDict) -> RecordDict:
        """The groups' mean weights after a round, weighted by their answers, as one reply's records."""
        (start,) = content.array_records["arrays"].values()
        weight_P = start.numpy()
        shapes: dict[str, tuple[int, ...]] = {"step": weight_P.shape, "share": (1,), "loss": (1,)}
        sums = self.secure.total(messages.TRAINING, content, shapes).sums
        share = float(sums["share"][0])
        number = round(share * int(self.catalogue.train_Q.sum()))
        if not number:
            return RecordDict({"metrics": MetricRecord({"num-examples": 0, "loss": 0.0})})
        step_P = messages.LARGEST_WEIGHT_STEP * sums["step"] / share
        mean = {name: (weight_P + step_P).astype(np.float32) for name in content.array_records["arrays"]}
        loss = messages.LARGEST_LOSS * float(sums["loss"][0]) / share
        metrics = MetricRecord({"num-examples": number, "loss": loss})
        return RecordDict({"arrays": wire.arrays_record(mean), "metrics": metrics})

    def validated(self, content: RecordDict) -> RecordDict:
        """The groups' mean errors on held-out questions, as one reply's records."""
        size = len(choices(self.config.pluralllm.architecture))
        shapes = {"share": (1,), "error": (size,)}
        sums = self.secure.total(messages.VALIDATION, content, shapes).sums
        share = float(sums["share"][0])
        number = round(share * int(self.catalogue.held_out_Q.sum()))
        errors = np.clip(sums["error"] / share, 0.0, wire.LARGEST_ERROR) if number else np.zeros(size)
        return RecordDict({"metrics": MetricRecord({"num-examples": number, "errors": errors.tolist()})})


class SummingGrid(OverlapGrid):
    """A Grid for Flower's strategies whose nodes' results come back as one, their sum; they are told of one node."""

    def __init__(self, grid: OverlapGrid, summed: SummedTraining, node: int) -> None:
        super().__init__(grid)
        self.members, self._summed = (node,), summed

    def send_and_receive(self, messages: Iterable[Message], **_: Any) -> list[Message]:
        """The groups' sum as the reply to the only message; none to none."""
        made = {TRAIN: self._summed.trained, EVALUATE: self._summed.validated}
        return [Message(made[asked.metadata.message_type](asked.content), reply_to=asked) for asked in messages]
