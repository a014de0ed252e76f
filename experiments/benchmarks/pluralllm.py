"""What PluralLLM costs on the real GlobalQA file with the paper's eight countries: CPU time of one thread.

    python -m experiments.benchmarks.pluralllm

Where the file is not at hand, the generated survey stands in for it, and a line says so.

Axis letters: Q questions, J rollouts, K options.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer

from appa_flwr import markdown, wire
from appa_flwr.config import Config
from appa_flwr.errors import UserError
from client_app.scoring import score
from experiments import entry
from experiments.pluralllm.protocol import SEEN_HELD_OUT, SURVEYS, Problem, load_problem, recipe, train
from pluralllm.prediction import predict_targets

# what `measure` found: work -> CPU time as it reads, and what it should be
Lines = dict[str, tuple[str, str]]

ROLLOUTS = 96
METRICS = (("js",), ("js", "wasserstein"))
PRETRAINING_GOAL, TABLES_GOAL, SCORING_GOAL = "at most 40 s for 250", "at most 6 s for 8 x 1,130", "at most 1 ms"
MILLISECONDS = 1e3


def answers(problem: Problem, metrics: tuple[str, ...], *, seed: int) -> wire.ScoreRequest:
    """Random answers to random questions, as many as an iteration of PPO has."""
    rng = np.random.default_rng(seed)
    num_questions, num_options = problem.embedding.option_QK.shape
    question_J = rng.integers(num_questions, size=ROLLOUTS)
    return wire.ScoreRequest(question_J, rng.random((ROLLOUTS, num_options)), metrics)


def measure(problem: Problem, config: Config, *, seed: int, repeats: int) -> Lines:
    """Pretrain, make the seen groups' tables, score against the first."""
    lines: Lines = {}
    groups = problem.parts[SEEN_HELD_OUT].context
    start = time.process_time()
    trained = train(problem, config, seed=seed)
    steps = config.pluralllm.rounds * config.pluralllm.local_steps
    lines[f"pretraining, {steps} steps of {len(groups)} groups"] = (
        f"{time.process_time() - start:.1f} s",
        PRETRAINING_GOAL,
    )
    start = time.process_time()
    tables = [
        predict_targets(
            trained.model,
            data,
            problem.embedding,
            num_context=config.pluralllm.num_context_questions,
            seed=seed,
            trained=problem.trained_Q,
        )
        for data in groups
    ]
    size = f"{len(groups)} groups x {len(problem.embedding.option_QK):,} questions"
    lines[f"target tables, {size}"] = f"{time.process_time() - start:.2f} s", TABLES_GOAL
    side_QK = tables[0].probability_QK
    for metrics in METRICS:
        request = answers(problem, metrics, seed=seed)
        laps = []
        for _ in range(repeats):
            start = time.process_time()
            score(request, side_QK, problem.embedding.option_QK)
            laps.append(time.process_time() - start)
        name = f"scoring {ROLLOUTS} answers of one group, {' + '.join(metrics)}"
        lines[name] = f"{MILLISECONDS * median(laps):.2f} ms", SCORING_GOAL
    return lines


def table(lines: Lines) -> str:
    """Markdown."""
    return markdown.table(["", "CPU time", "goal"], ((name, *found) for name, found in lines.items()))


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of federated pretraining, two steps each.")] = 125,
    repeats: Annotated[int, typer.Option(min=1, help="Scorings; their median is reported.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of training, contexts and answers.")] = 0,
    surveys: Annotated[Path | None, typer.Option(help=f"Folder of the real files; else {SURVEYS}.")] = None,
) -> None:
    """Measure PluralLLM's cost."""
    torch.set_num_threads(1)
    try:
        problem = load_problem("globalqa", seed=seed, folder=surveys)
    except UserError as error:
        print(f"{error}; the generated survey stands in for it")
        problem = load_problem("generated", seed=seed)
    config = recipe(f"pluralllm.rounds={rounds}", f"pluralllm.validate-every={rounds}")
    print(table(measure(problem, config, seed=seed, repeats=repeats)))


if __name__ == "__main__":
    entry.run(main)
