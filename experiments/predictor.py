"""PluralLLM alone on real surveys, compared with baselines without training: surveys x seeds x rows of a table.

    python -m experiments.predictor

Each architecture is trained by each of Flower's strategies. Groups are seen (they train) or unseen (they provide only
context); both are scored on questions that are held out from all training. Prints Markdown tables of the mean over
seeds with the lowest and highest number.

Axis letters: G groups, Q questions, K options.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import pandas as pd
import torch
import typer

from appa_flwr.analysis.alignment import deviation_correlation
from appa_flwr.config import Config, split_names
from appa_flwr.config.sources import assemble, preset
from appa_flwr.core.arrays import BoolArray, FloatArray
from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.protocol.messages import join_weights
from appa_flwr.protocol.queries import Catalogue, Layout, Query, flatten
from appa_flwr.protocol.rewards import js_distance
from appa_flwr.survey.generate import generate
from appa_flwr.survey.sources import read_survey
from appa_flwr.survey.types import Survey
from client_app import predictor
from client_app.numbers import MAKERS, Numbers
from experiments import entry, study
from pluralllm.data import GroupData, group_data
from pluralllm.prediction import GroupPredictor
from pluralllm.scores import NEAREST, UNIFORM, nearest_question
from server_app.federation.groups import Groups
from server_app.federation.replies import Replies
from server_app.predictor.pretraining import initial_weights, pretrain
from server_app.questions import build_catalogue

SETTINGS, PAPER = (
    tuple(f"{key}={value}" for key, value in preset(name).items() if key.startswith("pluralllm."))
    for name in ("smollm2", "paper")
)
SURVEYS = "APPA_SURVEYS"
REAL = {"globalqa": "globalqa.jsonl", "gss": "gss_demographics.jsonl", "opinionqa": "opinionqa.jsonl"}
DATASETS = (*REAL, "generated")
SEEN_COUNTRIES = split_names(str(preset("paper")["groups"]))
UNSEEN_COUNTRIES = ("China", "Japan", "France", "Spain", "New Zealand")
NUM_SEEN = {"gss": 13, "generated": 6}
OPINIONQA_FOLDS = 3
UNSEEN, SEEN = "unseen", "seen"
SIZES = (1, 4, 16, 64, 128)
"""Further numbers of context questions with which the first row is scored."""
ADAPTIVE = {
    "FedProx": ("pluralllm.strategy=fedprox",),
    "FedAdam": ("pluralllm.strategy=fedadam", "pluralllm.learning-rate=0.1"),
    "FedYogi": ("pluralllm.strategy=fedyogi", "pluralllm.learning-rate=0.1"),
}
ROWS: Mapping[str, tuple[str, ...]] = {
    row + (f", {strategy}" if strategy else ""): (*keys, *more)
    for row, keys in {"residual": (), "attention": PAPER}.items()
    for strategy, more in {"": (), **ADAPTIVE}.items()
}
"""Name of a predictor, with its strategy unless that is FedAvg -> its config keys."""
ATTENTION_DRAWS = 4
"""Number of contexts over which the attention network's predictions are averaged; a run redraws them per iteration."""


class Part(NamedTuple):
    """Groups' answers to training questions, the context of predictions, and to held-out questions, both (G,)."""

    context: tuple[GroupData, ...]
    truth: tuple[GroupData, ...]


class Problem(NamedTuple):
    """The public questions and the groups, of which the `SEEN` groups train."""

    public: Catalogue
    parts: Mapping[str, Part]


def load_problem(name: str, *, seed: int, folder: Path) -> Problem:
    """Read a survey in the folder, or generate one, and split its groups and questions by this seed.

    Refusals are dropped. GlobalQA's seen groups are the paper's eight countries; those of GSS (13 of 22) and of the
    generated survey (6 of 8) are drawn with the seed; OpinionQA's unseen groups are one of three thirds, by seed modulo
    3. Texts are embedded by MiniLM, or by n-grams for the generated survey, whose held-out questions have known words.

    Raises:
        UserError: the survey's file is missing.
    """
    if name == "generated":
        survey = generate(seed=seed)
    elif not (folder / REAL[name]).is_file():
        raise UserError(f"{folder}: no {REAL[name]}; name its folder by --surveys DIR or the variable {SURVEYS}")
    else:
        countries = (*SEEN_COUNTRIES, *UNSEEN_COUNTRIES) if name == "globalqa" else None
        survey = read_survey(folder / REAL[name], groups=countries, refusals="drop")
    names = sorted(survey.groups)
    if name == "globalqa":
        seen: Sequence[str] = SEEN_COUNTRIES
    elif name == "opinionqa":
        seen = [group for place, group in enumerate(names) if place % OPINIONQA_FOLDS != seed % OPINIONQA_FOLDS]
    else:
        order = np.random.default_rng(seed).permutation(len(names))
        seen = [names[place] for place in order[: NUM_SEEN[name]]]
    groups = {UNSEEN: [name for name in names if name not in seen], SEEN: seen}
    return problem_of(survey, groups, encoder="ngrams" if name == "generated" else "minilm", seed=seed)


def problem_of(survey: Survey, groups: Mapping[str, Sequence[str]], *, encoder: str, seed: int) -> Problem:
    """Split a survey's answered questions by this seed, and embed them."""
    config = Config.load({"seed": seed, "pluralllm.encoder": encoder})
    public = build_catalogue(config, replace(survey, extra=()))

    def part(groups: Sequence[str]) -> Part:
        own = [group_data(name, survey.answers[name], public=public) for name in groups]
        return Part(*(tuple(data.only(side_Q) for data in own) for side_Q in (public.train_Q, ~public.train_Q)))

    return Problem(public, {name: part(names) for name, names in groups.items()})


def train(
    problem: Problem, config: Config, *, sent: Callable[[Query, str, Numbers], Numbers] = lambda query, group, row: row
) -> GroupPredictor:
    """Train a new network as a run's server does, with one node per group, all in this process.

    `sent` is what a group sends in place of its numbers.
    """
    node = SimpleNamespace(config=config, public=problem.public)
    members: dict[str, Any] = {
        data.group: SimpleNamespace(node=node, data=data) for data in problem.parts[SEEN].context
    }

    def pending(query: Query) -> SimpleNamespace:
        """See `Groups.pending`; no message is sent."""
        _, make = MAKERS[query.kind]
        rows = [sent(query, name, make(group, query)) for name, group in members.items()]
        shapes = {name: Layout(np.shape(value), -np.inf, np.inf) for name, value in rows[0].items()}
        replies = Replies(tuple(members), shapes, np.stack([flatten(row, shapes) for row in rows]))
        by_group = zip(replies.groups, replies.data_GN, strict=True)
        return SimpleNamespace(messages=[], layouts=shapes, read=lambda _: replies, rows=lambda _: by_group)

    grid = SimpleNamespace(send_and_receive=lambda messages, *, timeout: [])
    groups = cast(Groups, SimpleNamespace(names=[*members], folder=None, grid=grid, pending=pending))
    weights, *_ = pretrain(groups, config, initial_weights(config), progress=lambda *_: None)
    return predictor.load(config, join_weights(weights), problem.public)


def measure(predicted: Sequence[FloatArray], truth: Sequence[GroupData], option_QK: BoolArray) -> dict[str, float]:
    """Compare (G,) tables of predictions (Q, K) with the groups' answers to questions with at least two options.

    "js_distance" is the mean over answers of 1 - the Jensen-Shannon distance with natural logarithms, as in the papers
    of GPO and PluralLLM; "r" is the `deviation_correlation`.
    """
    prediction_GQK, truth_GQK = np.stack(predicted), np.full((len(truth), *option_QK.shape), np.nan)
    for table_QK, data in zip(truth_GQK, truth, strict=True):
        table_QK[data.question_N] = data.answer_NK
    reward_GQ = js_distance(prediction_GQK, truth_GQK, option_QK, base=np.e)[:, option_QK.sum(axis=1) > 1]
    distance = float(reward_GQ[~np.isnan(reward_GQ)].mean())
    return {"js_distance": distance, "r": deviation_correlation(prediction_GQK, truth_GQK, option_QK)}


def baselines(problem: Problem, part: Part) -> dict[str, list[FloatArray]]:
    """Baselines without training, one table per group.

    The mean of the others uses the seen groups' answers to the same question, even to a held-out one, which a predictor
    of new questions cannot know. If no other group has answered, it is the uniform answer.
    """
    public = problem.public
    uniform_QK = public.option_QK / public.option_QK.sum(axis=1, keepdims=True)
    means, groups = [], [data for part in problem.parts[SEEN] for data in part]
    for data in part.truth:
        sum_QK = np.zeros(public.option_QK.shape)
        for other in groups:
            if other.group != data.group:
                sum_QK[other.question_N] += other.answer_NK
        total_Q1 = sum_QK.sum(axis=1, keepdims=True)
        means.append(np.divide(sum_QK, total_Q1, out=uniform_QK.copy(), where=total_Q1 > 0.0))
    return {
        UNIFORM: [uniform_QK] * len(part.truth),
        NEAREST: [nearest_question(data, public) for data in part.context],
        "mean-of-others": means,
    }


def scores(dataset: str, row: str, seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Train once and score both parts; the first row adds other numbers of context questions, and baselines."""
    config = assemble((*SETTINGS, *ROWS[row], f"seed={seed}"), folder=None)
    problem = load_problem(dataset, seed=seed, folder=folder)
    trained = train(problem, config)
    draws = ATTENTION_DRAWS if config.pluralllm.architecture == "attention" else 1

    def tables(part: Part, size: int) -> list[FloatArray]:
        ours = replace(trained, num_context=size)
        return [
            np.mean([ours.targets(data, context_seed=draw) for draw in range(draws)], axis=0) for data in part.context
        ]

    for name, part in problem.parts.items():
        predicted = {row: tables(part, config.pluralllm.num_context_questions)}
        if row == next(iter(ROWS)):
            predicted |= {f"{size} context questions": tables(part, size) for size in SIZES}
            predicted |= baselines(problem, part)
        for label, by_group in predicted.items():
            at = {"part": name, "predictor": label, "seed": seed}
            yield {**at, **measure(by_group, part.truth, problem.public.option_QK)}


def main(
    datasets: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(DATASETS),
    seeds: Annotated[int, typer.Option(min=1, help="Splits of groups and questions.")] = 3,
    surveys: Annotated[Path, typer.Option(envvar=SURVEYS, help="Folder of the real files.")] = Path(),
) -> None:
    """Train every row with every seed and print a table for each survey."""
    torch.set_num_threads(1)
    for dataset in split_names(datasets):
        if dataset not in DATASETS:
            raise unknown_name("data set", dataset, valid=DATASETS)
        lines = (line for row in ROWS for seed in range(seeds) for line in scores(dataset, row, seed, surveys))
        numbers = pd.DataFrame(lines).sort_values("part", kind="stable").set_index(["part", "predictor", "seed"])
        shown = study.table(study.every(numbers, show=study.extremes))
        print(f"\n### {dataset}\n\n{shown}", flush=True)


if __name__ == "__main__":
    entry.run(main)
