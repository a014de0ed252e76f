"""Nodes' replies in PluralLLM's pretraining, checked and bounded: they are another party's.

Texts quote nothing from a reply, since they go into a log line.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from statistics import median_low

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, Message, MetricRecord

from appa_flwr.protocol import wire

LARGEST_DISTANCE = wire.LARGEST_ERROR + 1e-6  # and rounding
LARGEST_STEP = 10.0  # of a node, in units of the round's median

Most = Mapping[int, tuple[int, int]]
"""Node -> how many training and how many held-out answers it can have; no bounds where it is empty."""

log = logging.getLogger("appa.server")


def fault(reply: Message, expected: ArrayRecord, most_examples: float) -> str | None:
    """Fault in a node's reply to a training round, whose weights must be as many as the `expected` ones it was sent.

    The node can have trained on `most_examples`.
    """
    arrays, metrics = reply.content.get("arrays"), reply.content.get("metrics")
    if len(reply.content) != 2 or not isinstance(arrays, ArrayRecord) or not isinstance(metrics, MetricRecord):
        return "it must hold the records `arrays` and `metrics` alone"
    if set(metrics) != {"num-examples", "loss"}:
        return "its metrics must be `num-examples` and `loss` alone"
    num_examples, loss = metrics["num-examples"], metrics["loss"]
    if type(num_examples) is not int or num_examples <= 0:  # a bool is an int too
        return "`num-examples` must be a positive integer"
    if num_examples > most_examples:
        return "`num-examples` is more than its groups have answered"
    if not isinstance(loss, float) or not math.isfinite(loss):
        return "`loss` must be a finite number"
    try:
        weights = weights_of(reply, expected)
    except ValueError:
        return "its weights are not as many float32 numbers as it was sent"
    if not all(np.isfinite(array.numpy()).all() for array in weights.values()):
        return "its weights hold NaN or infinity"
    return None


def weights_of(reply: Message, sent: ArrayRecord) -> ArrayRecord:
    """A node's trained weights by the names, and in the order, of those it was sent; Flower pairs arrays by place.

    Raises:
        ValueError: they are not as many.
    """
    shapes = {name: array.shape for name, array in sent.items()}
    return wire.split_weights(reply.content.array_records["arrays"], shapes)


def bound(replies: Sequence[Message], sent: ArrayRecord) -> None:
    """Shorten steps that are more than `LARGEST_STEP` times as long as the median's (the lower one's of two) to that.

    So one node's huge weights do not decide the round.

    Args:
        replies: to a training round, without faults; changed in place, their weights to those of `weights_of`.
        sent: the weights they start from.
    """
    names = list(sent)
    start = [sent[name].numpy().astype(np.float64) for name in names]
    sent_back = [weights_of(reply, sent) for reply in replies]
    steps = [[arrays[n].numpy() - of for n, of in zip(names, start, strict=True)] for arrays in sent_back]
    lengths = [_length(step) for step in steps]
    longest = LARGEST_STEP * median_low(lengths) if lengths else 0.0
    for reply, arrays, step, length in zip(replies, sent_back, steps, lengths, strict=True):
        if length > longest > 0:
            log.warning(
                "node %s: its step is %.0f times as long as the round's median, and counts for %.0f times",
                *(reply.metadata.src_node_id, length / longest * LARGEST_STEP, LARGEST_STEP),
            )
            cut = {n: of + s * (longest / length) for n, of, s in zip(names, start, step, strict=True)}
            arrays = ArrayRecord({n: Array(value.astype(sent[n].numpy().dtype)) for n, value in cut.items()})
        reply.content["arrays"] = arrays


def _length(step: Sequence[npt.NDArray[np.float64]]) -> float:
    # float64: the square of a float32 may be infinite
    return math.sqrt(sum(float(np.square(part).sum()) for part in step))


def validation_errors(reply: Message, count: int, most_answers: float) -> tuple[int, list[float]] | None:
    """Number of validation answers and `count` mean errors of a node; None, with a warning, where it is unusable."""
    if reply.has_error():
        log.warning("node %s: %s", reply.metadata.src_node_id, reply.error.reason)
        return None
    try:
        metrics = reply.content.metric_records["metrics"]
        num_answers, errors = int(str(metrics["num-examples"])), metrics["errors"]
    except (KeyError, ValueError):
        num_answers, errors = -1, None
    numbers = [float(error) for error in errors] if isinstance(errors, list) else []
    usable = 0 <= num_answers <= most_answers and len(numbers) == count
    if not usable or not all(0.0 <= error <= LARGEST_DISTANCE for error in numbers):
        log.warning("node %s: its validation errors cannot be used", reply.metadata.src_node_id)
        return None
    return num_answers, numbers
