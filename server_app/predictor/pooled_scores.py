"""PluralLLM's scores on the server: the groups' sums, added up over seen and unseen groups.

Axis letters: L sums of `pluralllm.scores.summed`.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from appa_flwr.protocol.asks import SCORES, Ask, Catalogue
from appa_flwr.run.records import PartScores
from pluralllm.scores import COUNT, MEAN_OF_OTHERS, PREDICTORS, summed
from server_app.federation.groups import Groups

FloatArray = npt.NDArray[np.float64]

SEEN, UNSEEN = "seen", "unseen"
ROUNDING = 1e-6
"""Sums of rewards that are all 1 may end just above their number."""

log = logging.getLogger("appa.server")


def scores(groups: Groups, catalogue: Catalogue, unseen: tuple[str, ...]) -> dict[str, Any]:
    """The tables of a `Card`, whose parts tell seen and unseen groups apart: "seen/held-out" and the like.

    Args:
        groups: who are asked.
        catalogue: the public questions.
        unseen: groups that did not train.

    Returns:
        The fields "scores", whose means are over all answers of these groups, and "groups", which is empty where single
        groups' sums are not known.

    Raises:
        UserError: too few groups answered.
    """
    replies = groups.ask(Ask(SCORES, settings={"size": len(summed())}))
    if not groups.plain:
        return {"scores": tables(replies.sum("scores")), "groups": {}}
    size = int(catalogue.held_out_Q.sum())
    usable: dict[str, FloatArray] = {}
    for name, score_2L in zip(replies.groups, replies.each("scores"), strict=True):
        if why := fault(score_2L, size, unseen=name in unseen):
            log.warning("group %s: its scores of PluralLLM are left out: %s", name, why)
        else:
            usable[name] = score_2L
    total_2L = np.sum([*usable.values()], axis=0) if usable else np.zeros((2, len(summed())))
    return {"scores": tables(total_2L), "groups": {name: tables(score_2L) for name, score_2L in usable.items()}}


def fault(score_2L: FloatArray, size: int, *, unseen: bool) -> str | None:
    """Fault in a group's sums over at most `size` held-out questions, in words; None where they can be used."""
    by_measure = score_2L.reshape(2, len(PREDICTORS), -1)
    if by_measure[int(not unseen)].any():
        return "they are not those of an unseen group" if unseen else "they are those of an unseen group"
    own = by_measure[int(unseen)]
    count, measures, alone = own[..., 0], own[..., 1:], PREDICTORS.index(MEAN_OF_OTHERS)
    if (count != np.round(count)).any() or (count > size).any():
        return "more answers than there are questions, or a part of one"
    # Scores are compared with each other, so they must be of the same answers.
    if (count[:alone] != count[0]).any() or (count[alone:] != count[alone]).any():
        return "predictors scored on different answers"
    if (measures > count[..., None] + ROUNDING).any():
        return "sums above the number of answers"
    return None


def tables(score_2L: FloatArray) -> PartScores:
    """Means from sums over answers, of seen and of unseen groups; a predictor without an answer is left out."""
    parts: PartScores = {}
    for kind, sum_L in zip((SEEN, UNSEEN), score_2L, strict=True):
        count = 0.0
        for (name, measure), value in zip(summed(), sum_L.tolist(), strict=True):
            if measure == COUNT:
                count = float(round(value))  # a masked sum is a little off
            if count:
                means = parts.setdefault(f"{kind}/held-out", {}).setdefault(name, {})
                means[measure] = count if measure == COUNT else value / count
    return parts
