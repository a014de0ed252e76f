"""PluralLLM by itself on real surveys, beside what costs nothing: surveys x seeds x rows of a table.

    python -m experiments.predictor main              # strategies, the paper's architecture, context sizes
    python -m experiments.predictor variants          # n-grams
    python -m experiments.predictor countries --datasets globalqa   # how many train

Groups are seen (they train) or unseen (they bring context only); questions are for training or held out from everyone's
training. A part is which groups are scored on which questions. Seen groups on training questions are no part: these the
network knows by heart. Every command prints Markdown, means over seeds with the lowest and highest.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import typer

from appa_flwr.analysis.alignment import deviation_correlation
from appa_flwr.config import Config, split_names
from appa_flwr.config.sources import assemble, preset
from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.protocol.asks import VALIDATION, Ask
from appa_flwr.protocol.rewards import js, js_distance
from appa_flwr.survey.generate import generate
from appa_flwr.survey.sources import read_survey
from appa_flwr.survey.split import split_questions
from client_app import predictor
from experiments import entry, study
from experiments.federation import LocalGroups, flower_task
from pluralllm.data import BoolArray, FloatArray, GroupData, OptionEmbedding, group_data
from pluralllm.embedding import embed_questions
from pluralllm.encoders import encoder
from pluralllm.network import PluralLLM
from pluralllm.prediction import Predictor
from pluralllm.scores import MEAN_OF_OTHERS, NEAREST, UNIFORM, mean_of_groups, nearest_question
from server_app.predictor.checkpoint import network
from server_app.predictor.pretraining import initial_weights, pretrain

SHORT_ROUNDS = (
    "pluralllm.strategy=fedadam",
    "pluralllm.rounds=100",
    "pluralllm.local-steps=2",
    "pluralllm.learning-rate=0.0",
)
"""Of the tables that were measured on real surveys, and of preset smollm2."""
ATTENTION = ("pluralllm.architecture=attention", "pluralllm.num-context-questions=16")

SURVEYS = "APPA_SURVEYS"
REAL = {"globalqa": "globalqa.jsonl", "gss": "gss_demographics.jsonl", "opinionqa": "opinionqa.jsonl"}
DATASETS = (*REAL, "generated")
SEEN_COUNTRIES = split_names(str(preset("paper")["groups"]))
UNSEEN_COUNTRIES = ("China", "Japan", "France", "Spain", "New Zealand")
NUM_SEEN = {"gss": 13, "generated": 6}
OPINIONQA_FOLDS = 3
UNSEEN_HELD_OUT, UNSEEN_TRAINING, SEEN_HELD_OUT = "unseen/held-out", "unseen/training", "seen/held-out"
SIZES = (1, 4, 16, 64, 128)
"""Numbers of context questions with which a table's first row is scored too."""


@dataclass(frozen=True)
class TableRow:
    """One line of a table: its name, and all that decides its scores but the survey and the seed.

    A prediction is the mean over `draws` contexts. `num_training` takes so many of GlobalQA's countries.
    """

    name: str
    keys: tuple[str, ...] = ()
    encoder: str = "minilm"
    num_training: int = len(SEEN_COUNTRIES)
    draws: int = 1


TABLES: dict[str, tuple[TableRow, ...]] = {
    "main": (
        TableRow("residual, FedAdam"),
        TableRow("residual, FedAvg", ("pluralllm.strategy=fedavg",)),
        TableRow("attention, FedAdam", ATTENTION, draws=4),
    ),
    "variants": (TableRow("n-grams", encoder="ngrams"),),
    "countries": (TableRow("110 countries", num_training=110),),
}


class Part(NamedTuple):
    """Groups with the answers their predictions rest on, and the answers these are compared with, both (G,)."""

    context: tuple[GroupData, ...]
    truth: tuple[GroupData, ...]


@dataclass(frozen=True)
class Problem:
    """Data to train on, and data to score.

    Attributes:
        embedding: the public table, of all questions.
        trained_Q: which questions are for training.
        parts: name -> what is scored; seen groups train on the context of `SEEN_HELD_OUT`, and its truth, on which
            none of them trains, chooses among rounds.
    """

    embedding: OptionEmbedding
    trained_Q: BoolArray
    parts: Mapping[str, Part]


@functools.cache
def load_problem(name: str, *, seed: int, folder: Path | None, encoder_name: str, num_training: int) -> Problem:
    """Read a survey in the folder, or generate one, and part its groups and questions by this seed.

    Refusals are left out. GlobalQA's seen groups are the paper's eight countries, of a larger `num_training` also those
    with the most answers; those of GSS (13 of 22) and of the generated survey (6 of 8) are drawn with the seed,
    OpinionQA leaves out one of three thirds, by seed modulo 3.

    Raises:
        UserError: the survey's file is not there, or no folder is named.
    """
    if name == "generated":
        survey = generate(seed=seed)
    elif folder is None or not (folder / REAL[name]).is_file():
        raise UserError(f"{folder or '.'}: no {REAL[name]}; name its folder by --surveys DIR or the variable {SURVEYS}")
    else:
        paper = name == "globalqa" and num_training == len(SEEN_COUNTRIES)
        wanted = (*SEEN_COUNTRIES, *UNSEEN_COUNTRIES) if paper else None
        survey = read_survey(folder / REAL[name], groups=wanted, refusals="drop")
    names = sorted(survey.groups)
    if name == "globalqa":
        others = [group for group in names if group not in (*SEEN_COUNTRIES, *UNSEEN_COUNTRIES)]
        others.sort(key=lambda group: -len(survey.answers[group]))
        seen: Sequence[str] = (*SEEN_COUNTRIES, *others)[:num_training]
        survey = replace(survey, answers={group: survey.answers[group] for group in (*seen, *UNSEEN_COUNTRIES)})
    elif name == "opinionqa":
        seen = [group for place, group in enumerate(names) if place % OPINIONQA_FOLDS != seed % OPINIONQA_FOLDS]
    else:
        order = np.random.default_rng(seed).permutation(len(names))
        seen = [names[place] for place in order[: NUM_SEEN[name]]]
    embedding = embed_questions(survey.questions, encoder=encoder(encoder_name))
    split = split_questions(survey.questions, seed=seed)

    def answers(groups: Sequence[str], question_ids: Sequence[str]) -> tuple[GroupData, ...]:
        kept = {group: {*question_ids} & survey.answers[group].keys() for group in groups}
        return tuple(
            group_data(group, {key: survey.answers[group][key] for key in keys}, embedding=embedding)
            for group, keys in kept.items()
        )

    unseen = [group for group in sorted(survey.groups) if group not in seen]
    context = answers(unseen, split.train)
    parts = {
        UNSEEN_HELD_OUT: Part(context, answers(unseen, split.test)),
        UNSEEN_TRAINING: Part(context, context),
        SEEN_HELD_OUT: Part(answers(seen, split.train), answers(seen, split.test)),
    }
    return Problem(embedding, np.isin(embedding.question_ids, split.train), parts)


def train(problem: Problem, config: Config) -> PluralLLM:
    """Train a fresh network as a run's server does, every group on a node of its own, all of them in this process."""
    pairs = {data.group: (data, held_out) for data, held_out in zip(*problem.parts[SEEN_HELD_OUT], strict=True)}

    def numbers(ask: Ask, group: str) -> dict[str, Any]:
        weight_P, (data, held_out) = ask.array("weights", np.float32, axes=1), pairs[group]
        if ask.kind == VALIDATION:
            ours = predictor.load(config, weight_P, problem.embedding, problem.trained_Q)
            error_V = predictor.errors(ours, data, held_out, config.pluralllm.architecture)
            return {"answers": [len(held_out)], "error": error_V}
        number = ask.count("round")
        after_P, loss = predictor.train(config, weight_P, data, problem.embedding, round_number=number, secret="")
        step_P = after_P.astype(np.float64) - weight_P
        return {"step": len(data) * step_P, "answers": [len(data)], "loss": [len(data) * loss]}

    with flower_task():
        groups = LocalGroups(config, [*pairs], numbers)
        trained = pretrain(groups, config, initial_weights(config), progress=lambda *_: None)
    return network(config, trained.weights)


def measure(
    predicted: Sequence[FloatArray], truth: Sequence[GroupData], embedding: OptionEmbedding
) -> dict[str, float]:
    """Compare (G,) tables of predictions (Q, K) with the groups' answers to questions of at least two options.

    Returns:
        Means over answers: "js", 1 - Jensen-Shannon divergence, base 2, in [0, 1]; "js_distance", 1 - the distance with
        natural logarithms, as in the papers of GPO and PluralLLM; "r", the `deviation_correlation`. NaN where a
        measure does not apply.
    """
    option_QK = embedding.option_QK
    truth_GQK = np.full((len(truth), *option_QK.shape), np.nan)
    scores = []
    for table_QK, prediction_QK, data in zip(truth_GQK, predicted, truth, strict=True):
        rows = data.question_N[option_QK[data.question_N].sum(axis=1) > 1]
        table_QK[data.question_N] = data.answer_NK
        case = prediction_QK[rows], table_QK[rows], option_QK[rows]
        scores.append(np.stack([js(*case), js_distance(*case, base=np.e)]))
    means = dict(zip(("js", "js_distance"), np.concatenate(scores, axis=1).mean(axis=1).tolist(), strict=True))
    return means | {"r": deviation_correlation(np.stack(predicted), truth_GQK, option_QK)}


def baselines(problem: Problem, part: Part) -> dict[str, list[FloatArray]]:
    """Baselines that need no training, a table a group.

    The mean of the others reads what the seen groups answered to the very question, held-out ones too: no predictor of
    a new question knows that. Where nobody else answered it is the uniform answer.
    """
    embedding = problem.embedding
    uniform_QK = embedding.option_QK / embedding.option_QK.sum(axis=1, keepdims=True)
    means, groups = [], [data for part in problem.parts[SEEN_HELD_OUT] for data in part]
    for data in part.truth:
        mean_QK = mean_of_groups(groups, embedding, without=data.group, min_groups=1)
        means.append(np.where(mean_QK.any(axis=1, keepdims=True), mean_QK, uniform_QK))
    return {
        UNIFORM: [uniform_QK] * len(part.truth),
        NEAREST: [nearest_question(data, embedding) for data in part.context],
        MEAN_OF_OTHERS: means,
    }


def scores(dataset: str, row: TableRow, seed: int, folder: Path | None, *, first: bool) -> Iterator[dict[str, Any]]:
    """Train once and score all parts; a table's first row also has other numbers of context questions and baselines.

    N-grams stand in for MiniLM on the generated survey, whose words they know.
    """
    encoder_name = "ngrams" if dataset == "generated" else row.encoder
    config = assemble((*SHORT_ROUNDS, *row.keys, f"pluralllm.encoder={encoder_name}", f"seed={seed}"), folder=None)
    problem = load_problem(dataset, seed=seed, folder=folder, encoder_name=encoder_name, num_training=row.num_training)
    begin = time.process_time()
    model = train(problem, config)
    seconds = time.process_time() - begin

    def tables(part: Part, size: int) -> list[FloatArray]:
        ours = Predictor(model, problem.embedding, problem.trained_Q, num_context=size, seed=seed)
        return [np.mean([ours.targets(data, draw=draw) for draw in range(row.draws)], axis=0) for data in part.context]

    for name, part in problem.parts.items():
        predicted = {row.name: tables(part, config.pluralllm.num_context_questions)}
        if first:
            predicted |= {f"{size} context questions": tables(part, size) for size in SIZES}
            predicted |= baselines(problem, part)
        for label, by_group in predicted.items():
            numbers = measure(by_group, part.truth, problem.embedding)
            took = {"CPU s of training": seconds if label == row.name else np.nan}
            yield {"part": name, "predictor": label, "seed": seed, **numbers, **took}


def main(
    table: Annotated[str, typer.Argument(help=", ".join(TABLES))],
    datasets: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(DATASETS),
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1,2",
    rows: Annotated[int, typer.Option(min=0, help="Only so many of the table's rows; 0 = all.")] = 0,
    surveys: Annotated[Path | None, typer.Option(envvar=SURVEYS, help="Folder of the real files.")] = None,
) -> None:
    """Train every row of a table with every seed and print it, survey by survey and part by part."""
    if table not in TABLES:
        raise unknown_name("table", table, valid=TABLES)
    torch.set_num_threads(1)
    chosen = TABLES[table][: rows or None]
    for dataset in split_names(datasets):
        if dataset not in DATASETS:
            raise unknown_name("data set", dataset, valid=DATASETS)
        numbers = pd.DataFrame(
            line
            for row in chosen
            for seed in map(int, split_names(seeds))
            for line in scores(dataset, row, seed, surveys, first=row is chosen[0])
        )
        for part, of_part in numbers.groupby("part", sort=False):
            indexed = of_part.set_index(["predictor", "seed"]).drop(columns="part")
            shown = study.table({str(name): (indexed[name], study.extremes) for name in indexed})
            print(f"\n### {dataset}, {part}\n\n{shown}", flush=True)


if __name__ == "__main__":
    entry.run(main)
