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
from pluralllm.scores import MEAN_OF_OTHERS, MEASURES, NEAREST, PREDICTOR, SHARED, UNIFORM, summed
from server_app.federation.secure_sums import SecureSums

Sums = Mapping[tuple[str, str], Mapping[str, float]]

ANSWERS = "answers"
ALWAYS = (PREDICTOR, UNIFORM, NEAREST)
SOMETIMES = (MEAN_OF_OTHERS, SHARED)
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
        if part not in sizes or name not in (*ALWAYS, *SOMETIMES):
            return f"a score of '{name[:NAME_LENGTH]}' on '{part[:NAME_LENGTH]}', which nobody asked for"
        if set(measures) != {ANSWERS, *MEASURES}:
            return f"other measures of {name} than {', '.join(sorted((ANSWERS, *MEASURES)))}"
        num_answers = measures[ANSWERS]
        if not 0 <= num_answers <= sizes[part] or num_answers != int(num_answers):
            return f"{num_answers} answers scored of {sizes[part]}"
        like = SHARED if name == MEAN_OF_OTHERS else PREDICTOR
        # Scores are compared with each other, so they must be of the same answers.
        if name != SHARED and num_answers != sums.get((part, like), {}).get(ANSWERS):
            return f"{num_answers} answers scored of {name}, others of {like}"
        if not all(-ROUNDING <= value <= num_answers + ROUNDING for value in measures.values()):
            return f"scores of {name} out of range"
    return None


def scores(by_group: Mapping[str, Sums], unseen: Collection[str]) -> dict[str, Any]:
    """The tables of a `Card`, whose parts tell seen and unseen groups apart: "seen/held-out" and the like.

    Args:
        by_group: group -> its sums.
        unseen: groups that did not train.

    Returns:
        The fields "scores" and "groups". Means are over all answers of these groups.
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
            groups[group].setdefault(part_name, {})[name] = _means(measures)
    found: PartScores = {}
    for (part_name, name), total in pooled.items():
        found.setdefault(part_name, {})[name] = _means(total)
    return {"scores": found, "groups": groups}


def from_sums(secure: SecureSums, catalogue: wire.Catalogue) -> dict[str, Any]:
    """The same from sums over the groups: without tables of single groups.

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


def _means(sums: Mapping[str, float]) -> Means:
    num_answers = sums[ANSWERS]
    return {ANSWERS: num_answers} | {key: value / num_answers for key, value in sums.items() if key != ANSWERS}
