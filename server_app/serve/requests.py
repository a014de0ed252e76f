"""What a trainer asks, and what it gets.

No axis letters: there are no arrays here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appa_flwr.run.records import ServedRound


class Refused(Exception):
    """A request that gets no rewards, and why.

    Attributes:
        status: as HTTP has it: 409 contradicts what was sent before, 422 is wrong in itself, 429 too many wait, 503 too
            few groups answered or the service stops.
        retry_after: seconds after which the same request may succeed; None where it never will.
    """

    def __init__(self, status: int, reason: str, *, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.status, self.retry_after = status, retry_after


@dataclass(frozen=True)
class Item:
    """An answer to be scored; `id` is its trainer's, by which a retry is told from another answer."""

    id: str
    question_id: str
    completion: str

    @property
    def digest(self) -> bytes:
        """Of question and completion."""
        return hashlib.sha256(json.dumps([self.question_id, self.completion]).encode()).digest()


@dataclass(frozen=True)
class Part:
    """A process's share of a batch of `size` answers; `part` counts from 0.

    `round` rises with every batch of a run. A trainer that goes back to a lower one, as from its checkpoint, raises
    `attempt`: what it did since is given up, and the rule's state is that before the round.
    """

    run: str
    round: int
    attempt: int
    size: int
    part: int
    parts: int
    items: Sequence[Item]


@dataclass(frozen=True)
class Scored:
    """Answers with their rewards, in the order in which they were sent.

    Attributes:
        round: that they are of.
        exact: whether the rule has seen the whole batch.
        items: of each its reward, None where it is not valid, why not, and its components.
        metrics: of the round; in stream mode of the last closed one.
    """

    round: int
    exact: bool
    items: tuple[Mapping[str, Any], ...]
    metrics: Mapping[str, Any]


def metrics(record: ServedRound | None) -> dict[str, Any]:
    """What a trainer logs of a round; groups that are missing have no number."""
    if record is None:
        return {}
    of = {name: getattr(record, name) for name in ("fairness_index", "fell_back", "format_score")}
    of |= {f"weight/{name}": weight for name, weight in record.weights.items()}
    of |= {f"group/{name}": mean for name, mean in record.rewards.items() if mean is not None}
    return {**of, "missing_groups": len(record.missing_groups)}
