"""A run's findings on its preference predictor, in rows and sentences for the page and the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table

from appa_flwr.report.artifacts import number
from appa_flwr.run.cards import Card

MEASURES: Mapping[str, str] = {"js": "JS", "js_distance": "JS dist. (natural)", "wasserstein": "Was."}
HEAD = ("Groups / questions", "Predictor", *MEASURES.values(), "Answers")
PREDICTORS: Mapping[str, str] = {
    "pluralllm": "PluralLLM",
    "nearest-question": "Own nearest question",
    "uniform": "Uniform answer",
    "mean-of-others": "Mean of the other groups",
    "pluralllm-shared": "PluralLLM, same answers",
}
"""In the order of the table. The last is PluralLLM on the answers where the mean of the other groups is known."""
HELD_OUT = "held-out"
NOTE = (
    "Agreement with the groups' own survey answers, mean over answers, 0 to 1, higher is better. Groups computed it "
    "themselves and sent sums. Training questions are predicted from the group's other answers."
)


@dataclass(frozen=True)
class GroupScores:
    """One group: predictor -> JS against its own held-out answers."""

    name: str
    unseen: bool
    js: Mapping[str, float]


def blocks(found: Card) -> dict[str, list[tuple[str, ...]]]:
    """The score table in texts: part, such as "seen / held-out" -> a row a predictor, as `HEAD` goes on."""
    return {
        _part(part): [
            (PREDICTORS.get(name, name), *(number(score[measure]) for measure in MEASURES), f"{score['answers']:.0f}")
            for name, score in _ordered(predictors).items()
        ]
        for part, predictors in found.scores.items()
    }


def table(found: Card) -> Table:
    """The score table for a terminal."""
    shown = Table(*HEAD)
    for part, rows in blocks(found).items():
        shown.add_section()
        for row in rows:
            shown.add_row(part if row is rows[0] else "", *row)
    return shown


def note(found: Card) -> str:
    """Caption of the table, and the origin of the mean of the other groups or the reason it is missing."""
    sums = found.group_sums
    if not any("mean-of-others" in predictors for predictors in found.scores.values()):
        others = (
            "The mean of the other groups is not shown: too few groups answered the same questions, or they are "
            "deployed and send no answers."
        )
    else:
        others = (
            "The mean of the other groups knows the very answers these gave to the question, so it is a hard baseline."
        )
    if sums is not None:
        others += (
            f" Sums over groups, each of at least {sums.min_groups}, were made for {sums.held_out} held-out questions."
        )
    return f"{NOTE} {others}"


def validated(found: Card) -> str | None:
    """A sentence on the error by which the shares of views were chosen; None without it."""
    if found.validation is None:
        return None
    return (
        "How much each view counts was chosen by the error on the training groups' held-out questions, a JS distance "
        f"(natural) of {found.validation:.3f}; this flatters them a little, and unseen groups had no say."
    )


def trust(found: Card) -> list[str]:
    """A sentence for each kind of group on how well its learned targets agree with its survey answers."""
    sentences = []
    for part, predictors in found.scores.items():
        groups, _, questions = part.partition("/")
        if questions == HELD_OUT and "pluralllm" in predictors:
            others = ", ".join(
                f"{PREDICTORS.get(name, name).lower()} {score['js']:.3f}"
                + (_on_fewer(predictors) if name == "mean-of-others" else "")
                for name, score in _ordered(predictors).items()
                if name not in ("pluralllm", "pluralllm-shared")
            )
            sentences.append(
                f"The predictions agree with the survey answers of {groups} groups by JS "
                f"{predictors['pluralllm']['js']:.3f} on held-out questions ({others})."
            )
    return sentences


def by_group(found: Card) -> list[GroupScores]:
    """Every group with its scores on held-out questions, unseen ones last, the worst predicted first."""
    groups = [
        GroupScores(
            name,
            part.startswith("unseen/"),
            {PREDICTORS.get(kind, kind): score["js"] for kind, score in _ordered(predictors).items()},
        )
        for name, parts in found.groups.items()
        for part, predictors in parts.items()
        if part.endswith(f"/{HELD_OUT}")
    ]
    return sorted(groups, key=lambda group: (group.unseen, group.js.get(PREDICTORS["pluralllm"], 0.0)))


def _part(part: str) -> str:
    return part.replace("/", " / ")


def _fewer(predictors: Mapping[str, Mapping[str, float]]) -> tuple[float, float] | None:
    """Answers to which the mean of the other groups is known, and all answers; None where these are the same."""
    if not {"pluralllm", "pluralllm-shared"} <= predictors.keys():
        return None
    shared, everything = predictors["pluralllm-shared"]["answers"], predictors["pluralllm"]["answers"]
    return None if shared == everything else (shared, everything)


def _on_fewer(predictors: Mapping[str, Mapping[str, float]]) -> str:
    """Says of the mean of the other groups what it may be compared with, where it is known for fewer answers."""
    fewer = _fewer(predictors)
    if fewer is None:
        return ""
    return (
        f" on {fewer[0]:.0f} of {fewer[1]:.0f} answers, where PluralLLM has {predictors['pluralllm-shared']['js']:.3f}"
    )


def _ordered(predictors: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    """The predictors as they are shown: known ones first, and PluralLLM on the same answers only where these differ."""
    names = [*(name for name in PREDICTORS if name in predictors), *(name for name in predictors)]
    twice = "pluralllm-shared" if _fewer(predictors) is None else None
    return {name: predictors[name] for name in names if name != twice}
