"""Do lies pay? For every rule, what a lying minority wins for itself and costs the others.

    python -m experiments.liars

With the policy of `experiments.stand_in`. The group that the mean of all serves worst lies in training, always in the
same way; scores are then by every group's true answers. Honest and lying runs share questions and noise, so their
difference is the lie's.

Legend: G groups, J answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from appa_flwr import markdown
from appa_flwr.aggregation import Rule
from appa_flwr.files import replace_file
from experiments import entry, stand_in
from experiments.stand_in import FloatArray, Groups, Iterations, Questions, Seeds, population, trained

STRETCH = 3.0
CAP = 2.0

CAPPED: Mapping[str, Rule] = {
    f"{name}, cap {CAP:g}": stand_in.RULES[name].model_copy(update={"weight_cap": CAP})
    for name in ("appa-open, T = .02", "mix", "group-dro")
}
RULES = {**stand_in.RULES, **CAPPED}


def _stretched(reward_J: FloatArray) -> FloatArray:
    return np.asarray(np.clip(reward_J.mean() + STRETCH * (reward_J - reward_J.mean()), 0.0, 1.0))


LIES: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "half": lambda reward_J: reward_J / 2,
    "zero": np.zeros_like,
    "stretched": _stretched,
}
"""What the liar sends in place of its rewards (J,): half of them; nothing; three times their distance from the mean."""


def audit(seeds: Sequence[int], *, iterations: int, num_questions: int, num_groups: int) -> list[dict[str, object]]:
    """A record for each rule, lie and seed: what the liar and the others, on average, won by it, in score."""
    found: list[dict[str, object]] = []
    for seed in track(seeds, "populations", console=Console(stderr=True)):
        people = population(seed, num_questions=num_questions, num_groups=num_groups)
        others_G = np.arange(num_groups) != people.liar
        for name, rule in RULES.items():
            honest_G = trained(rule, people, iterations=iterations, seed=seed).mean(axis=1)
            for lie, tell in LIES.items():
                told_G = trained(rule, people, iterations=iterations, seed=seed, lie=tell).mean(axis=1)
                gain_G = told_G - honest_G
                record = {"rule": name, "lie": lie, "seed": seed, "min_as": float(honest_G.min())}
                record |= {"avg_as": float(honest_G.mean())}
                found.append(record | {"liar": float(gain_G[people.liar]), "others": float(gain_G[others_G].mean())})
    return found


def table(records: Sequence[Mapping[str, object]]) -> str:
    """Markdown: a row a rule, its honest scores, and for each lie what the liar and the others won, over the seeds."""
    rows = []
    for name in RULES:
        of_rule = [record for record in records if record["rule"] == name]
        row = [name, *(_mean([one[key] for one in of_rule], sign=False) for key in ("avg_as", "min_as"))]
        for lie in LIES:
            told = [record for record in of_rule if record["lie"] == lie]
            row += [_mean([one[who] for one in told], sign=True) for who in ("liar", "others")]
        rows.append(row)
    head = ["rule", "Avg AS", "Min AS", *(f"{who}, {lie}" for lie in LIES for who in ("liar", "others"))]
    return markdown.table(head, rows)


def _mean(values: Sequence[object], *, sign: bool) -> str:
    numbers = np.array(values, dtype=np.float64)
    spread = f" ± {numbers.std(ddof=1):.3f}" if len(numbers) > 1 else ""
    return f"{numbers.mean():{'+' if sign else ''}.3f}{spread}"


def main(
    seeds: Seeds = 5,
    iterations: Iterations = 1500,
    questions: Questions = 60,
    groups: Groups = 8,
    output: Annotated[Path, typer.Option(help="Folder of the table.")] = Path("runs/liars"),
) -> None:
    """Measure what lies win under every rule."""
    records = audit(range(seeds), iterations=iterations, num_questions=questions, num_groups=groups)
    text = table(records) + "\n"
    replace_file(output / "liars.md", text.encode(), parents=True)
    print(text)


if __name__ == "__main__":
    entry.run(main)
