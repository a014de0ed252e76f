"""Groups' steps in PluralLLM's pretraining, bounded: they are other parties'."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from statistics import median_low

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, Message

LARGEST_STEP = 10.0  # of a group, in units of the round's median

log = logging.getLogger("appa.server")


def bound(replies: Sequence[Message], sent: ArrayRecord, names: Sequence[str]) -> None:
    """Shorten steps that are more than `LARGEST_STEP` times as long as the median's (the lower one's of two) to that.

    So one group's huge weights do not decide the round.

    Args:
        replies: to a training round; their weights are changed in place.
        sent: the weights they start from.
        names: the groups', by the places that stand for nodes, from 1 on.
    """
    start = {name: array.numpy().astype(np.float64) for name, array in sent.items()}
    weights = [reply.content.array_records["arrays"] for reply in replies]
    steps = [{name: arrays[name].numpy() - value for name, value in start.items()} for arrays in weights]
    lengths = [_length(step.values()) for step in steps]
    longest = LARGEST_STEP * median_low(lengths) if lengths else 0.0
    for reply, step, length in zip(replies, steps, lengths, strict=True):
        if length > longest > 0:
            log.warning(
                "group %s: its step is %.0f times as long as the round's median, and counts for %.0f times",
                *(names[reply.metadata.src_node_id - 1], length / longest * LARGEST_STEP, LARGEST_STEP),
            )
            cut = {name: value + step[name] * (longest / length) for name, value in start.items()}
            narrow = {name: Array(value.astype(sent[name].numpy().dtype)) for name, value in cut.items()}
            reply.content["arrays"] = ArrayRecord(narrow)


def _length(step: Iterable[npt.NDArray[np.float64]]) -> float:
    # float64: the square of a float32 may be infinite
    return math.sqrt(sum(float(np.square(part).sum()) for part in step))
