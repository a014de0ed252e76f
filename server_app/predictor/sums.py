"""The sums over groups, from the server's side: which are made, in which order, and what the totals are.

keys -> counts -> answers -> fit

The server learns totals over all groups that train, of questions that `sums.min-groups` of them or more answered.

Axis letters: Q questions, K options.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from appa_flwr import secure_sum, wire
from appa_flwr.config import Config
from appa_flwr.errors import UserError
from appa_flwr.run.records import PopulationSummary
from server_app.federation.groups import Federation

FloatArray = npt.NDArray[np.float64]
Progress = Callable[[int, int, str], None]

log = logging.getLogger("appa.server")


# float32 shares of a few hundred groups, added up
TOLERANCE = 1e-3


@dataclass(frozen=True)
class _Exchange:
    """The nodes that take part, and their keys."""

    federation: Federation
    public_keys: Mapping[int, bytes]

    def total(self, step: str, tables: Mapping[str, npt.NDArray[np.generic]]) -> dict[str, FloatArray]:
        """Add up the nodes' parts of one step.

        Raises:
            UserError: a node did not answer, or its part has other names or shapes.
        """
        keys = tuple(sorted(self.public_keys.values()))
        request = wire.SumsRequest(step, keys, tables)
        replies = self.federation.sums(request, nodes=tuple(self.public_keys))
        missing = [node for node in self.public_keys if node not in replies]
        if missing:
            raise UserError(
                f"sums over groups: {self.federation.hosted(missing)} stopped answering at the step {step}, "
                "and without them the sum cannot be read"
            )
        parts = [replies[node].masked for node in self.public_keys]
        shapes = {tuple((name, array.shape) for name, array in sorted(part.items())) for part in parts}
        if len(shapes) != 1:
            raise UserError(f"sums over groups: the nodes' parts of the step {step} differ in shape")
        return secure_sum.total(parts)


def exchange_sums(
    federation: Federation, config: Config, catalogue: wire.Catalogue, *, progress: Progress
) -> PopulationSummary | None:
    """Let the groups, which have the catalogue, learn what the others answered on average.

    Returns:
        How many held-out questions have sums; None where none were asked for, or none can be made: fewer than
        `sums.min-groups` groups train, or a node stops answering.
    """
    if not config.sums.mean_of_others:
        return None
    try:
        return _exchange_sums(federation, config, catalogue, progress=progress)
    except UserError as error:
        log.warning("the mean of the other groups will not be among the scores: %s", error)
        return None


def _exchange_sums(
    federation: Federation, config: Config, catalogue: wire.Catalogue, *, progress: Progress
) -> PopulationSummary:
    steps = 4
    seen = [name for name in federation.present if name not in config.unseen_group_names]
    replies = federation.sums(wire.SumsRequest(wire.KEYS), nodes=federation.homes(seen))
    keys = {node: reply.public_key for node, reply in replies.items() if secure_sum.usable(reply.public_key)}
    there = [name for name in seen if set(federation.homes([name])) <= keys.keys()]
    if len(there) < config.sums.min_groups:
        raise UserError(
            f"sums over groups need sums.min-groups = {config.sums.min_groups} groups that train, and "
            f"there are {len(there)} ({', '.join(there) or 'none'})"
        )
    progress(1, steps, f"{len(keys)} nodes with {len(there)} groups take part")
    exchange = _Exchange(federation, keys)
    counts = exchange.total(wire.COUNTS, {})
    _check(all(((total >= 0) & (total <= len(there)) & (total == np.rint(total))).all() for total in counts.values()))
    allowed_Q = counts["parties"] >= config.sums.min_groups
    count_Q = np.where(allowed_Q, np.rint(counts["count"]), 0).astype(np.int64)
    progress(
        2,
        steps,
        f"{allowed_Q.sum()} of {(~catalogue.train_Q).sum()} held-out questions were answered by "
        f"{config.sums.min_groups} parties or more",
    )
    answer_QK = exchange.total(wire.ANSWERS, {"allowed": allowed_Q})["answers"]
    _check(bool((answer_QK > -TOLERANCE).all() and (np.abs(answer_QK.sum(axis=1) - count_Q) < TOLERANCE).all()))
    progress(3, steps, "answers are summed up")
    tables = {"answers": answer_QK, "count": count_Q.astype(np.float64)}
    nodes = federation.homes(federation.groups)
    fitted = federation.sums(wire.SumsRequest(wire.FIT, tables=tables), nodes=nodes)
    if lost := [node for node in nodes if node not in fitted]:
        log.warning("%s could not use the sums over groups", federation.hosted(lost))
    progress(steps, steps, "every group has its own share taken out")
    return PopulationSummary(min_groups=config.sums.min_groups, held_out=int(allowed_Q.sum()))


def _check(plausible: bool) -> None:
    """Nobody can be named: a part that is wrong looks as random as all the others."""
    if not plausible:
        raise UserError("sums over groups: the totals are no sums of answers; at least one node sent something else")
