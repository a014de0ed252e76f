"""Examples of what a policy answers: six held-out questions, with methods and groups beside each other.

A ranking is drawn by places: the first has the whole width, the last of K options 1 / K of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from rich.table import Table
from rich.text import Text

from appa_flwr.report.frames import MOST_GROUPS, QUANTILES, method_name
from appa_flwr.report.tables import show
from appa_flwr.run.pair_scores import TARGETS, table
from appa_flwr.run.read import BY, RunReader
from appa_flwr.run.records import LOOK_UPS, PPO, Example

OF_EACH = 2
CELLS = 20
"""Characters of a bar in the terminal."""

Answers = Mapping[str, npt.ArrayLike | None]
"""Method or group -> answer to a question with K options, as shares or preference scores (K,); None if unreadable."""


class Mark(NamedTuple):
    """A bar or dot: whose, what is written on it, and its place in percent of the width."""

    name: str
    text: str
    percent: float


class Row(NamedTuple):
    """An option, with methods' bars and groups' dots."""

    option: str
    bars: list[Mark]
    dots: list[Mark]


class Shown(NamedTuple):
    """A question, and why it is shown; `unread` maps methods to what they wrote, if that cannot be read."""

    why: str
    question: str
    rows: list[Row]
    predicted: Sequence[str]  # groups whose dots are PluralLLM's predictions
    unread: Mapping[str, str]


def worst_off(run: RunReader) -> tuple[str, pd.Series]:
    """The group with PPO's lowest score, and its scores by question; "" and none if they are not known."""
    for against in TARGETS:
        score_GQ = table(run.scores, PPO, metric=run.metric, against=against)
        if len(score_GQ):
            lowest = score_GQ.iloc[int(score_GQ.mean(axis=1).argmin())]
            return str(lowest.name), lowest.dropna()
    return "", pd.Series(dtype=float)


def shown(run: RunReader) -> Iterator[Shown]:
    """Yield the chosen questions; none without scores of PPO."""
    worst, score_Q = worst_off(run)
    known = {example.question_id: example for example in run.examples if example.question_id in score_Q}
    if not known:
        return
    score_Q = score_Q[[*known]]
    apart_Q = pd.Series({key: _apart(example) for key, example in known.items()}, dtype=float)
    reasons = {
        "groups differ most": -apart_Q[apart_Q > 0],
        f"worst for {worst}": score_Q,
        f"best for {worst}": -score_Q,
    }
    names = methods(run)
    for why, value_Q in reasons.items():
        left = value_Q[value_Q.index.isin(known)].sort_values(kind="stable").index
        for key in left[:OF_EACH]:
            yield _shown(known.pop(key), why, names, ranks=run.config.task == "opa")


def _apart(example: Example) -> float:
    """Mean distance (L1) of the groups' answers from their mean; 0 if none is known."""
    share_GK = np.array([*example.survey.values(), *example.predictions.values()])
    return float(np.abs(share_GK - share_GK.mean(axis=0)).sum(axis=1).mean()) if len(share_GK) else 0.0


def methods(run: RunReader) -> dict[str, str]:
    """SFT, PPO by each rule, and the look-up whose worst-off group is best off, with their names."""
    if run.summary.empty:
        return {}
    by_rule = [name for name in dict.fromkeys(run.summary["method"]) if name.split(BY)[0] == PPO]
    scored = run.summary[run.summary["metric"] == run.metric].drop_duplicates("method").set_index("method")["min_as"]
    best = scored[scored.index.isin(LOOK_UPS)].astype(float).nlargest(1).index
    return {name: method_name(name, run.config.rule) for name in ("sft", *by_rule, *best)}


def _shown(example: Example, why: str, names: Mapping[str, str], *, ranks: bool) -> Shown:
    answer_of = {label: example.answers[name] for name, label in names.items() if name in example.answers}
    answers = {label: answer.shares for label, answer in answer_of.items()}
    unread = {label: answer.text for label, answer in answer_of.items() if answer.shares is None}
    drawn = rows(example.options, answers, {**example.survey, **example.predictions}, ranks=ranks)
    predicted = [*example.predictions] if example.survey else [dot.name for dot in drawn[0].dots]
    return Shown(why, example.question, drawn, predicted, unread)


def rows(options: Sequence[str], answers: Answers, groups: Answers, *, ranks: bool) -> list[Row]:
    """A row per option; a ranking's are in the order of the first of PPO's. Of many groups dots are quantiles."""
    bars, dots = (
        {name: _values(own, ranks=ranks) for name, own in by.items() if own is not None} for by in (answers, groups)
    )
    if len(dots) > MOST_GROUPS:
        levels = np.quantile([*dots.values()], [*QUANTILES.values()], axis=0)
        dots = {f"{name} of {len(dots):,} groups": level_K for name, level_K in zip(QUANTILES, levels, strict=True)}
    first = next((value_K for name, value_K in bars.items() if name.startswith("PPO")), None)
    order = np.argsort(first, kind="stable") if ranks and first is not None else range(len(options))

    def marks(values: Mapping[str, npt.NDArray[np.float64]], k: int) -> list[Mark]:
        size = len(options)
        return [
            Mark(name, f"{x:.0f}.", 100 * (size + 1 - x) / size) if ranks else Mark(name, f"{x:.0%}", 100 * min(x, 1.0))
            for name, x in ((name, float(value_K[k])) for name, value_K in values.items())
        ]

    return [Row(options[k], marks(bars, k), marks(dots, k)) for k in order]


def _values(answer: npt.ArrayLike, *, ranks: bool) -> npt.NDArray[np.float64]:
    shares = pd.Series(np.asarray(answer, dtype=np.float64))
    return np.asarray(shares.rank(ascending=False, method="min") if ranks else shares)


def terminal(one: Shown) -> Table:
    """The bars and dots of a question for a terminal."""
    lines = []
    for row in one.rows:
        line = {"option": row.option}
        line |= {bar.name: f"{'█' * round(bar.percent * CELLS / 100)} {bar.text}" for bar in row.bars}
        if places := {round(dot.percent * CELLS / 100) for dot in row.dots}:
            line["groups"] = "".join("●" if place in places else "·" for place in range(CELLS + 1))
        lines.append(line)
    grid = show(pd.DataFrame(lines), title=f"{one.question} ({one.why})" if one.why else one.question)
    if one.unread:
        wrote = [f"{name} wrote {text!r}, which cannot be read" for name, text in one.unread.items()]
        grid.caption, grid.caption_justify = Text("; ".join(wrote)), "left"
    return grid
