"""Faults in groups' rows: whoever has one counts as missing, and the others stay.

Axis letters: J answers, N numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from appa_flwr.protocol import asks
from appa_flwr.protocol.asks import Ask, Number, ScoreRequest
from server_app.federation.foreign import listed, plain

FloatArray = npt.NDArray[np.float64]

log = logging.getLogger("appa.server")


def warn_missing(reasons: Mapping[str, str]) -> None:
    """Warn which groups count as missing: one line a reason, however many they are."""
    for reason in dict.fromkeys(reasons.values()):
        names = [name for name, own in reasons.items() if own == reason]
        some = "group %s counts" if len(names) == 1 else "groups %s count"
        log.warning(f"{some} as missing: %s", listed(names), plain(reason))


def of_row(ask: Ask, row_N: FloatArray, numbers: Mapping[str, Number]) -> str | None:
    """What is wrong with a group's row; None where it can be used."""
    try:
        own = asks.split(row_N, numbers)
        asks.flatten(own, numbers)
    except ValueError as error:
        return str(error)
    if ask.kind != asks.REWARDS:
        return None
    request = ScoreRequest.of(ask)
    unreadable_J = np.isnan(request.prediction_JK).all(axis=1)
    for metric, side in request.keys:
        reward_J, known_J = own[f"{metric} {side} reward"], own[f"{metric} {side} known"]
        if (reward_J[unreadable_J] > 0).any():
            return f"{metric} rewards above 0 for answers that nobody can read"
        if not np.isin(known_J, (0.0, 1.0)).all() or (side == asks.TARGET_SIDE and not known_J.all()):
            return f"{metric} rewards that are not known"
    return None
