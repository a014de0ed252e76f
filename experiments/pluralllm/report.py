"""The tables of the results page: one thing varied at a time, real surveys x seeds, beside what costs nothing.

python -m experiments.pluralllm.report strategies        # central, FedAvg, FedAdam, and not trained
python -m experiments.pluralllm.report embeddings --embedding sentence-transformers --embedding-model FOLDER
python -m experiments.pluralllm.report min-groups --prior training
python -m experiments.pluralllm.report noise             # of training, on the features of a question
python -m experiments.pluralllm.report context-sizes
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch

from appa_flwr import markdown
from appa_flwr.errors import UserError
from experiments import entry
from experiments.pluralllm.protocol import (
    PARTS,
    REAL,
    Dataset,
    Recipe,
    Report,
    Strategy,
    add_options,
    chosen_encoder,
    chosen_recipe,
    reports,
)
from pluralllm.encoders import Encoder, hashed_ngrams
from pluralllm.episodes import EpisodeConfig
from pluralllm.scores import CONTEXT_SIZES, PREDICTOR

TABLES = ("strategies", "embeddings", "min-groups", "noise", "context-sizes")
STRATEGIES, EMBEDDINGS, MIN_GROUPS, NOISE, CONTEXT = TABLES
BASELINES = ("mean-of-others", "nearest-question", "uniform")
NOISES = (0.3, 1.0)
GROUP_NUMBERS = (1, 2, 3)


@dataclass(frozen=True)
class Row:
    """One line of a table: its name, and all that decides its scores but the survey and the seed."""

    name: str
    recipe: Recipe
    texts_to_vectors: Encoder


def rows(table: str, recipe: Recipe, texts_to_vectors: Encoder, *, embedding: str) -> list[Row]:
    """The lines of a table; each differs from `recipe` and `texts_to_vectors` in what the table is about.

    Raises:
        UserError: n-grams are to be compared with themselves.
    """
    if table == EMBEDDINGS:
        if texts_to_vectors is hashed_ngrams:
            raise UserError("embeddings: name the one to compare n-grams with, --embedding and --embedding-model")
        return [Row("ngrams", recipe, hashed_ngrams), Row(embedding, recipe, texts_to_vectors)]
    if table == STRATEGIES:
        recipes = {strategy: replace(recipe, strategy=strategy) for strategy in get_args(Strategy)}
        recipes["not trained"] = replace(recipe, rounds=0)
    elif table == MIN_GROUPS:
        recipes = {f"min-groups {number}": replace(recipe, min_groups=number) for number in GROUP_NUMBERS}
    elif table == NOISE:
        recipes = {f"noise {noise}": replace(recipe, episodes=EpisodeConfig(embedding_noise=noise)) for noise in NOISES}
    else:
        recipes = {recipe.strategy: recipe}
    return [Row(name, ours, texts_to_vectors) for name, ours in recipes.items()]


def cell(scores: Sequence[float]) -> str:
    """Mean and range over seeds."""
    return f"{np.mean(scores):.4f} ({min(scores):.4f} to {max(scores):.4f})"


def scores_line(name: str, reports: Sequence[Report], *, predictor: str = PREDICTOR, seconds: str = "") -> str:
    """1 - natural Jensen-Shannon distance of a predictor on all four parts."""
    found = [[report.scores[part][predictor].js_distance_natural for report in reports] for part in PARTS]
    return markdown.line([name, *map(cell, found), seconds])


def context_table(reports: Sequence[Report], sizes: Sequence[int]) -> str:
    """1 - natural Jensen-Shannon distance of unseen groups, a line a size."""
    parts = list(reports[0].by_context)
    rows = [
        [str(size), *(cell([report.by_context[part][place] for report in reports]) for part in parts)]
        for place, size in enumerate(sizes)
    ]
    return markdown.table(["context questions", *parts], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train every row of a table with every seed, and print it as Markdown, a line as soon as it is done."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--datasets", choices=get_args(Dataset), nargs="+", default=tuple(REAL))
    add_options(parser)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = rows(chosen.table, chosen_recipe(chosen), chosen_encoder(chosen), embedding=chosen.embedding)
    sizes = CONTEXT_SIZES if chosen.table == CONTEXT else ()
    for dataset in chosen.datasets:
        print(f"\n### {dataset}, prior {chosen.prior}\n")
        if not sizes:
            print(markdown.table(["", *PARTS, "CPU s a round"], []), flush=True)
        for row in lines:
            given = {"seeds": chosen.seeds, "folder": chosen.surveys, "sizes": sizes}
            found = list(reports(dataset, row.recipe, row.texts_to_vectors, **given))
            if sizes:
                print(context_table(found, sizes), flush=True)
                continue
            seconds = np.mean([report.train_cpu_seconds for report in found]) / max(1, row.recipe.rounds)
            print(scores_line(row.name, found, seconds=f"{seconds:.2f}"), flush=True)
        if not sizes:
            print("\n".join(scores_line(name, found, predictor=name) for name in BASELINES), flush=True)


if __name__ == "__main__":
    entry.run(main, call=lambda command: command())
