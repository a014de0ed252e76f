"""Robustness of PluralLLM's pretraining to a group that sends what it likes, and the cost of noise.

    python -m experiments.bad_parties

Six groups of a generated survey train, each on a node of its own; the first one lies in every round. Scores are those
of the five others, on questions held out from all training. With noise nobody lies.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from flwr.app import Array, ArrayRecord

from appa_flwr.config import Config
from experiments import entry
from experiments.pluralllm.measures import measure
from experiments.pluralllm.protocol import (
    SEEN_HELD_OUT,
    Part,
    Problem,
    Sent,
    baselines,
    load_problem,
    recipe,
    report,
    train,
)
from experiments.study import Setting, StudyColumn, mean, spread, study
from pluralllm.scores import MEAN_OF_OTHERS, PREDICTOR, UNIFORM
from server_app.predictor.strategies import DELTA, epsilon

LIAR = 0
STRATEGIES = ("fedadam", "fedavg", "fedmedian", "fedtrimmedavg", "krum", "multikrum")
NOISES = (0.01, 0.1, 1.0)
CLIP = 0.5
HONEST = "nobody"
BASELINES = (UNIFORM, MEAN_OF_OTHERS)


def _steps(times: float) -> Sent:
    def sent(group: int, before: ArrayRecord, after: ArrayRecord) -> ArrayRecord:
        if group != LIAR:
            return after
        moved = {name: (old := before[name].numpy()) + times * (after[name].numpy() - old) for name in after}
        return ArrayRecord({name: Array(array.astype(np.float32)) for name, array in moved.items()})

    return sent


LIES: Mapping[str, Sent] = {HONEST: _steps(1.0), "three steps back": _steps(-3.0), "a million steps": _steps(-1e6)}
"""Weights that the liar sends: what it trained; three times its step the other way; a million times."""


def recipes() -> dict[str, Config]:
    """Settings that are compared: each strategy, and FedAvg with noise."""
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


def score(setting: Setting, seed: int, *, configs: Mapping[str, Config]) -> dict[str, float]:
    """Mean JS of the others on held-out questions, by a strategy and lie or by a baseline; what the noise promises."""
    name, lie = setting
    problem = load_problem("generated", seed=seed)
    scored = without_the_liar(problem)
    if name in BASELINES:
        part = scored.parts[SEEN_HELD_OUT]
        return {"js": measure(baselines(scored, part)[name], part.truth, problem.embedding).js, "epsilon": np.nan}
    config, settings = configs[name], configs[name].pluralllm
    trained = train(problem, config, seed=seed, sent=LIES[lie])
    found = report(scored, trained, config, seed=seed).scores[SEEN_HELD_OUT][PREDICTOR]
    promise = epsilon(settings.dp_noise, settings.rounds) if settings.dp_noise else np.nan
    return {"js": found.js, "epsilon": promise}


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Generated surveys, from 0 on.")] = 3,
    output: Annotated[Path, typer.Option(help="Folder of table and single scores.")] = Path("runs/bad_parties"),
) -> None:
    """Measure what a lying group costs the others under every strategy, and what noise costs all."""
    logging.getLogger("appa.server").setLevel(logging.ERROR)  # a line for each long step
    configs = recipes()
    quiet = [name for name, config in configs.items() if not config.pluralllm.dp_noise]
    others = [name for name in (*configs, *BASELINES) if name not in quiet]
    study(
        "bad_parties",
        ("strategy", "lie"),
        [*itertools.product(quiet, LIES), *itertools.product(others, (HONEST,))],
        range(seeds),
        partial(score, configs=configs),
        (
            *(StudyColumn(f"lies: {lie}", "js", spread, case=lie) for lie in LIES),
            StudyColumn(f"epsilon at delta = {DELTA:g}", "epsilon", partial(mean, form=".3g"), case=HONEST),
        ),
        output=output,
    )


if __name__ == "__main__":
    entry.run(main)
