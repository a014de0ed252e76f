"""PluralLLM's scores on the server: the groups' sums, checked and added up over seen and unseen groups.

A part is the "training" or the "held-out" questions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from flwr.app import RecordDict

from appa_flwr.protocol import sum_messages as messages
from appa_flwr.protocol import wire
from appa_flwr.run.records import Means, PartScores
from pluralllm.scores import (
    AT_SCALES,
    CALIBRATION,
    CONTEXT_SIZES,
    COVERAGE,
    MEAN_OF_OTHERS,
    MEASURES,
    NEAREST,
    PREDICTOR,
    SHARED,
    UNIFORM,
    by_size,
    coverage_at,
    interval_scale,
    summed,
)
from server_app.federation.secure_sums import SecureSums

Sums = Mapping[tuple[str, str], Mapping[str, float]]

ANSWERS, SPREAD, RANK_CORRELATION = "answers", "spread", "rank_correlation"
ALWAYS = (PREDICTOR, UNIFORM, NEAREST)
SOMETIMES = (MEAN_OF_OTHERS, SHARED)
BY_SIZE = {by_size(size): size for size in CONTEXT_SIZES}
# what says whether the stated uncertainty is right -> its measures
UNCERTAINTY = {CALIBRATION: (RANK_CORRELATION,), COVERAGE: AT_SCALES}
NAME_LENGTH = 40  # of a foreign name in a message
SEEN, UNSEEN = "seen", "unseen"
# sums of rewards that are all 1 may end just above their number
ROUNDING = 1e-6


def fault(sums: Sums, sizes: Mapping[str, int]) -> str | None:
    """Fault in the sums that a group sent, in words; None where they can be used. `sizes` is part -> its questions."""
    for name in ALWAYS:
        if (wire.HELD_OUT_PART, name) not in sums:
            return f"no score of {name} on held-out questions"
    for (part, name), measures in sums.items():
        if part not in sizes or name not in (*ALWAYS, *SOMETIMES, *BY_SIZE, *UNCERTAINTY):
            return f"a score of '{name[:NAME_LENGTH]}' on '{part[:NAME_LENGTH]}', which nobody asked for"
        expected = {ANSWERS, *UNCERTAINTY[name]} if name in UNCERTAINTY else {ANSWERS, *MEASURES}
        if set(measures) != (expected | {SPREAD} if name == PREDICTOR else expected):
            return f"other measures of {name} than {', '.join(sorted(expected))}"
        num_answers = measures[ANSWERS]
        if not 0 <= num_answers <= sizes[part] or num_answers != int(num_answers):
            return f"{num_answers} answers scored of {sizes[part]}"
        like = SHARED if name == MEAN_OF_OTHERS else PREDICTOR
        # Scores are compared with each other, so they must be of the same answers.
        if name != SHARED and num_answers != sums.get((part, like), {}).get(ANSWERS):
            return f"{num_answers} answers scored of {name}, others of {like}"
        low = -1.0 if name == CALIBRATION else 0.0
        if not all(low * num_answers - ROUNDING <= value <= num_answers + ROUNDING for value in measures.values()):
            return f"scores of {name} out of range"
    return None


def scores(by_group: Mapping[str, Sums], unseen: Collection[str]) -> dict[str, Any]:
    """The tables of a `Card`, whose parts tell seen and unseen groups apart: "seen/held-out" and the like.

    Args:
        by_group: group -> its sums.
        unseen: groups that did not train.

    Returns:
        The fields "scores", "groups", "by_context", "calibration" and "interval_scale", which the seen groups' held-out
        answers choose. Means are over all answers of these groups; the rank correlation is that of spread and error,
        over the groups where it is defined.
    """
    pooled: dict[tuple[str, str], dict[str, float]] = {}
    groups: dict[str, PartScores] = {name: {} for name in by_group}
    for group, sums in by_group.items():
        for (part, name), measures in sums.items():
            if not measures[ANSWERS]:  # the group has not answered one of these questions
                continue
            part_name = f"{UNSEEN if group in unseen else SEEN}/{part}"
            total = pooled.setdefault((part_name, name), {})
            for measure, value in measures.items():
                total[measure] = total.get(measure, 0.0) + value
            if name not in UNCERTAINTY and name not in BY_SIZE:
                groups[group].setdefault(part_name, {})[name] = _means(measures)
    held_out = (f"{SEEN}/{wire.HELD_OUT_PART}", COVERAGE)
    scale = interval_scale(_at_scales(pooled[held_out])) if held_out in pooled else 1.0
    found: PartScores = {}
    calibration: dict[str, Means] = {}
    by_context: dict[str, dict[int, Means]] = {}
    for (part_name, name), total in pooled.items():
        means = _means(total)
        if name == CALIBRATION:
            calibration.setdefault(part_name, {})[RANK_CORRELATION] = means[RANK_CORRELATION]
            continue
        if name == COVERAGE:
            calibration.setdefault(part_name, {})[COVERAGE] = coverage_at(scale, _at_scales(total))
            continue
        if name in BY_SIZE:
            by_context.setdefault(part_name, {})[BY_SIZE[name]] = means
            continue
        if name == PREDICTOR:
            calibration.setdefault(part_name, {})[SPREAD] = means[SPREAD]
        found.setdefault(part_name, {})[name] = {key: value for key, value in means.items() if key != SPREAD}
    if held_out in pooled:
        del calibration[held_out[0]][COVERAGE]  # by a factor of its own
        if (share := _crossed_coverage(by_group, unseen)) is not None:
            calibration[held_out[0]][COVERAGE] = share
    return {
        "scores": found,
        "groups": groups,
        "by_context": by_context,
        "calibration": calibration,
        "interval_scale": scale if held_out in pooled else None,
    }


def from_sums(secure: SecureSums, catalogue: wire.Catalogue) -> dict[str, Any]:
    """The same from sums over the groups: without tables of single groups, and seen groups' intervals are not crossed.

    Raises:
        TooFew: see `SecureSums.total`.
    """
    names = summed()
    sums = secure.total(messages.PREDICTOR_SCORES, RecordDict(), {"scores": (2, len(names))}).sums["scores"]
    by_kind: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for kind, sum_L in zip((SEEN, UNSEEN), len(catalogue.questions) * sums, strict=True):
        for (part, name, measure), value in zip(names, sum_L.tolist(), strict=True):
            of = by_kind.setdefault(kind, {}).setdefault((part, name), {})
            of[measure] = float(round(value)) if measure == ANSWERS else value
    return scores(by_kind, (UNSEEN,)) | {"groups": {}}


def _crossed_coverage(by_group: Mapping[str, Sums], unseen: Collection[str]) -> float | None:
    """Share of the seen groups' held-out answers within their intervals, each group's by the scale of the others.

    By a scale of its own it would be right by making. None where fewer than two groups can be compared.
    """
    curves = {
        group: sums[wire.HELD_OUT_PART, COVERAGE]
        for group, sums in by_group.items()
        if group not in unseen and sums.get((wire.HELD_OUT_PART, COVERAGE), {}).get(ANSWERS)
    }
    if len(curves) < 2:
        return None
    every = {measure: sum(curve[measure] for curve in curves.values()) for measure in (ANSWERS, *AT_SCALES)}
    within = 0.0
    for curve in curves.values():
        scale = interval_scale(_at_scales({measure: every[measure] - curve[measure] for measure in every}))
        within += curve[ANSWERS] * coverage_at(scale, _at_scales(curve))
    return within / every[ANSWERS]


def _at_scales(sums: Mapping[str, float]) -> list[float]:
    return [sums[measure] / sums[ANSWERS] for measure in AT_SCALES]


def _means(sums: Mapping[str, float]) -> Means:
    num_answers = sums[ANSWERS]
    return {ANSWERS: num_answers} | {key: value / num_answers for key, value in sums.items() if key != ANSWERS}
