"""Does PluralLLM's pretraining stand a group that sends what it likes, and what does noise cost?

    python -m experiments.bad_parties

Six groups of a generated survey train, each on a node of its own; the first one lies in every round. Scores are those
of the five others, on questions held out from all training. With noise nobody lies.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from flwr.app import Array, ArrayRecord
from rich.console import Console
from rich.progress import track

from appa_flwr import markdown
from appa_flwr.config import Config
from appa_flwr.files import replace_file
from experiments import entry
from experiments.pluralllm.protocol import SEEN_HELD_OUT, Part, Problem, Sent, load_problem, recipe, report, train
from pluralllm.scores import MEAN_OF_OTHERS, PREDICTOR, UNIFORM
from server_app.predictor.strategies import DELTA, epsilon

LIAR = 0
STRATEGIES = ("fedadam", "fedavg", "fedmedian", "fedtrimmedavg", "krum", "multikrum")
NOISES = (0.01, 0.1, 1.0)
CLIP = 0.5


def _steps(times: float) -> Sent:
    def sent(group: int, before: ArrayRecord, after: ArrayRecord) -> ArrayRecord:
        if group != LIAR:
            return after
        moved = {name: (old := before[name].numpy()) + times * (after[name].numpy() - old) for name in after}
        return ArrayRecord({name: Array(array.astype(np.float32)) for name, array in moved.items()})

    return sent


LIES: Mapping[str, Sent] = {"nobody": _steps(1.0), "three steps back": _steps(-3.0), "a million steps": _steps(-1e6)}
"""What the liar sends: what it trained; three times its step the other way; a million times."""


def recipes() -> dict[str, Config]:
    """What is compared: each strategy, and FedAvg with noise."""
    given = {name: [f"pluralllm.strategy={name}"] for name in STRATEGIES}
    for noise in NOISES:
        given[f"fedavg, dp-noise = {noise:g}"] = [
            *("pluralllm.strategy=fedavg", "pluralllm.validate-every=0"),
            *(f"pluralllm.dp-noise={noise}", f"pluralllm.dp-clip={CLIP}"),
        ]
    return {name: recipe(*keys) for name, keys in given.items()}


def without_the_liar(problem: Problem) -> Problem:
    """The same problem, scored on the others' held-out answers alone."""
    part = problem.parts[SEEN_HELD_OUT]
    return replace(problem, parts={SEEN_HELD_OUT: Part(part.context[LIAR + 1 :], part.truth[LIAR + 1 :])})


def measure(seeds: Sequence[int], configs: Mapping[str, Config]) -> dict[tuple[str, str], list[float]]:
    """(strategy or baseline, lie) -> mean JS of the others on held-out questions, a number a seed."""
    found: dict[tuple[str, str], list[float]] = {}
    cells = [(name, lie) for name, config in configs.items() for lie in LIES if not config.pluralllm.dp_noise]
    cells += [(name, "nobody") for name, config in configs.items() if config.pluralllm.dp_noise]
    for seed in seeds:
        problem = load_problem("generated", seed=seed)
        scored = without_the_liar(problem)
        for name, lie in track(cells, f"seed {seed}", console=Console(stderr=True)):
            trained = train(problem, configs[name], seed=seed, sent=LIES[lie])
            scores = report(scored, trained, configs[name], seed=seed).scores[SEEN_HELD_OUT]
            found.setdefault((name, lie), []).append(scores[PREDICTOR].js)
        for name in (UNIFORM, MEAN_OF_OTHERS):
            found.setdefault((name, "nobody"), []).append(scores[name].js)
    return found


def table(found: Mapping[tuple[str, str], Sequence[float]], configs: Mapping[str, Config]) -> str:
    """Markdown: a row a strategy, a column a lie, and what the noise promises."""
    rows = []
    for name in dict.fromkeys(name for name, _ in found):
        keys = configs[name].pluralllm if name in configs else None
        promise = f"{epsilon(keys.dp_noise, keys.rounds):.3g}" if keys and keys.dp_noise else ""
        rows.append([name, *(_shown(found.get((name, lie), ())) for lie in LIES), promise])
    return markdown.table(["strategy", *(f"lies: {lie}" for lie in LIES), f"epsilon at delta = {DELTA:g}"], rows)


def _shown(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Generated surveys, from 0 on.")] = 3,
    output: Annotated[Path, typer.Option(help="Folder of the table.")] = Path("runs/bad_parties"),
) -> None:
    """Measure what a lying group costs the others under every strategy, and what noise costs all."""
    logging.getLogger("appa.server").setLevel(logging.ERROR)  # a line for each long step
    configs = recipes()
    text = table(measure(range(seeds), configs), configs) + "\n"
    replace_file(output / "bad_parties.md", text.encode(), parents=True)
    print(text)


if __name__ == "__main__":
    entry.run(main)
