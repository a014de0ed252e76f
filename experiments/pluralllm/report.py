"""The tables of the results page: surveys x seeds, beside what costs nothing.

    python -m experiments.pluralllm.report main              # strategies, the paper's architecture, context sizes
    python -m experiments.pluralllm.report variants          # n-grams
    python -m experiments.pluralllm.report countries --datasets globalqa   # how many train

Every command prints Markdown, means over seeds with the lowest and highest. Context sizes are those of the first row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from appa_flwr.config import split_names
from appa_flwr.core import markdown
from appa_flwr.core.errors import unknown_name
from appa_flwr.core.files import cache_folder
from experiments import entry
from experiments.pluralllm.measures import PredictorScores
from experiments.pluralllm.protocol import REAL, SURVEYS, Report, load_problem, recipe, report, train
from pluralllm.encoders import encoder
from pluralllm.scores import PREDICTOR

MEASURES = ("js", "js_distance", "r", "r2", "order")
DATASETS = (*REAL, "generated")
SIZES = (1, 4, 16, 64, 128)
ATTENTION = ("pluralllm.architecture=attention", "pluralllm.num-context-questions=16")


@dataclass(frozen=True)
class TableRow:
    """One line of a table: its name, and all that decides its scores but the survey and the seed."""

    name: str
    keys: tuple[str, ...] = ()
    embedding: str = "minilm"
    central: bool = False
    num_training: int | None = None
    draws: int = 1


DEFAULT = TableRow("residual, FedAdam")
TABLES: dict[str, tuple[TableRow, ...]] = {
    "main": (
        DEFAULT,
        TableRow("residual, FedAvg", ("pluralllm.strategy=fedavg",)),
        TableRow("attention, FedAdam", ATTENTION, draws=4),
        TableRow("residual, central", central=True),
        TableRow("attention, FedAvg", (*ATTENTION, "pluralllm.strategy=fedavg"), draws=4),
    ),
    "variants": (TableRow("n-grams", embedding="ngrams"),),
    "countries": (TableRow("110 countries", num_training=110),),
}


def reports(
    dataset: Any, row: TableRow, *, seeds: Sequence[int], folder: Path | None, sizes: Sequence[int]
) -> Iterator[Report]:
    """Train and score once a seed; n-grams stand in for MiniLM on the generated survey, whose words they know."""
    config = recipe(*row.keys, f"pluralllm.encoder={'ngrams' if dataset == 'generated' else row.embedding}")
    texts_to_vectors = encoder(config.pluralllm.encoder, cache=cache_folder())
    for seed in seeds:
        problem = load_problem(
            dataset, seed=seed, folder=folder, texts_to_vectors=texts_to_vectors, num_training=row.num_training
        )
        trained = train(problem, config, seed=seed, central=row.central)
        yield report(problem, trained, config, seed=seed, sizes=sizes, draws=row.draws)


def spread_text(values: Sequence[float]) -> str:
    """Mean and range over seeds; empty where there is none."""
    if np.isnan(values).any():
        return ""
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def line(name: str, found: Sequence[PredictorScores]) -> list[str]:
    """The texts of one predictor."""
    return [name, *(spread_text([getattr(one, measure) for one in found]) for measure in MEASURES)]


def main(
    table: Annotated[str, typer.Argument(help=", ".join(TABLES))],
    datasets: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(DATASETS),
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1,2",
    rows: Annotated[int, typer.Option(min=0, help="Only so many of the table's rows; 0 = all.")] = 0,
    surveys: Annotated[Path | None, typer.Option(help=f"Folder of the real files; else {SURVEYS}.")] = None,
) -> None:
    """Train every row of a table with every seed and print it, survey by survey and part by part."""
    if table not in TABLES:
        raise unknown_name("table", table, valid=TABLES)
    torch.set_num_threads(1)
    for dataset in split_names(datasets):
        found = {}
        for row in TABLES[table][: rows or None]:
            numbers = [int(seed) for seed in split_names(seeds)]
            sizes = SIZES if row is DEFAULT else ()
            found[row.name] = list(reports(dataset, row, seeds=numbers, folder=surveys, sizes=sizes))
        first = next(iter(found.values()))
        for part, predictors in first[0].scores.items():
            body = [line(name, [one.scores[part][PREDICTOR] for one in runs]) for name, runs in found.items()]
            body += [
                line(f"{size} context questions", [one.by_context[part][size] for one in first])
                for size in first[0].by_context[part]
            ]
            body += [line(name, [one.scores[part][name] for one in first]) for name in predictors if name != PREDICTOR]
            print(f"\n### {dataset}, {part}\n\n{markdown.table(['', *MEASURES], body)}", flush=True)
        for name, runs in found.items():
            train_seconds = spread_text([one.train_cpu_seconds for one in runs])
            print(
                f"\n{name}: CPU s of training {train_seconds}, of all tables "
                f"{spread_text([one.table_cpu_seconds for one in runs])}",
                flush=True,
            )


if __name__ == "__main__":
    entry.run(main)
