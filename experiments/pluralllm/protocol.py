"""How PluralLLM is measured on the real surveys: the data, the split, the training, the scores.

Groups are seen (they train) or unseen (they bring few-shot context only); questions are for training or held out from
everyone's training. The population prior, where asked for, is taken in one of two ways:

- "training": means over the seen groups' training answers, all that a run may use. A held-out question has none.
- "all": means over all answers of the seen groups. A question is then held out from the group that is scored and from
  the network's training, but other groups have answered it, as when a group is asked what others were asked before.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from appa_flwr.config import Config, preset, split_names
from appa_flwr.errors import UserError
from appa_flwr.rewards import js_distance
from appa_flwr.seeds import child_seed
from appa_flwr.survey.generate import generate
from appa_flwr.survey.read import read_survey
from appa_flwr.survey.split import split_questions
from appa_flwr.survey.types import Survey
from experiments import entry
from experiments.pluralllm.directions import NUM_DIRECTIONS, fit_population
from experiments.pluralllm.federation import LocalGrid, flower_task
from pluralllm.data import FloatArray, GroupData, OptionEmbedding, group_data
from pluralllm.embedding import embed_questions
from pluralllm.encoders import Encoder, Kind, encoder, hashed_ngrams
from pluralllm.episodes import EpisodeConfig
from pluralllm.model import ModelConfig, PluralLLM
from pluralllm.population import MIN_GROUPS
from pluralllm.prediction import Targets, predict_targets
from pluralllm.scores import CONTEXT_SIZES, PREDICTOR, Calibration, PredictionScore, calibration, evaluate
from pluralllm.training import local_update, train_centrally
from server_app.models.base import cache_folder
from server_app.predictor.pretraining import pretrain

Dataset = Literal["globalqa", "gss", "opinionqa", "generated"]
Prior = Literal["none", "training", "all"]
Strategy = Literal["central", "fedavg", "fedadam"]

SURVEYS = "APPA_SURVEYS"
REAL: dict[Dataset, str] = {
    "globalqa": "globalqa.jsonl",
    "gss": "gss_demographics.jsonl",
    "opinionqa": "opinionqa.jsonl",
}
SEEN_COUNTRIES = split_names(str(preset("paper")["groups"]))
UNSEEN_COUNTRIES = ("China", "Japan", "France", "Spain", "New Zealand")
NUM_SEEN: dict[Dataset, int] = {"gss": 13, "generated": 6}
OPINIONQA_FOLDS = 3
EMBEDDING_DIM = 128
UNSEEN = "unseen"
PARTS = ("unseen/held-out", "unseen/training", "seen/held-out", "seen/training")


@dataclass(frozen=True)
class Problem:
    """One survey: its features, its groups and its questions, each of these in two parts.

    Answers of unseen groups to training questions are the source of their context.
    """

    embedding: OptionEmbedding
    seen_train: tuple[GroupData, ...]
    seen_test: tuple[GroupData, ...]
    unseen_train: tuple[GroupData, ...]
    unseen_test: tuple[GroupData, ...]


@dataclass(frozen=True)
class Recipe:
    """How to train: sizes, steps and where the population prior comes from.

    Attributes:
        strategy: "central", or what the server does with the groups' weights.
        rounds: federated rounds; the central run takes `rounds * local_steps` steps.
        local_steps: optimizer steps of a group in a round.
        learning_rate: Adam's of the central run and of fedadam's server.
        local_learning_rate: plain gradient descent's of a group.
        prior: source of the population prior.
        min_groups: groups that must have answered a question for it to have a prior.
        num_directions: of difference between groups that the prior holds; 0 for the mean alone.
        episodes: shape of a step's batch.
        num_context: context questions at prediction.
    """

    strategy: Strategy = "fedadam"
    rounds: int = 100
    local_steps: int = 1
    learning_rate: float = 3e-3
    local_learning_rate: float = 0.1
    prior: Prior = "none"
    min_groups: int = MIN_GROUPS
    num_directions: int = NUM_DIRECTIONS
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    num_context: int = 16


@dataclass(frozen=True)
class Trained:
    """A frozen network, the population prior of each seen group, its own share removed, and that of other groups."""

    model: PluralLLM
    seen_prior: tuple[FloatArray, ...] | None
    unseen_prior: FloatArray | None
    cpu_seconds: float

    def tables(self, problem: Problem, *, seen: bool, num_context: int, seed: int, num_draws: int = 1) -> list[Targets]:
        """The target table of every seen group, or of every other one."""
        groups = problem.seen_train if seen else problem.unseen_train
        priors = self.seen_prior if seen and self.seen_prior else (self.unseen_prior,) * len(groups)
        return [
            predict_targets(
                self.model,
                data,
                problem.embedding,
                num_context=num_context,
                seed=seed,
                num_draws=num_draws,
                population=prior,
            )
            for data, prior in zip(groups, priors, strict=True)
        ]


def survey_file(name: Dataset, folder: Path | None) -> Path:
    """A real survey's file, in that folder or the one that APPA_SURVEYS names.

    Raises:
        UserError: it is not there, or no folder is named.
    """
    folder = folder or (Path(os.environ[SURVEYS]) if os.environ.get(SURVEYS) else None)
    if folder is None or not (folder / REAL[name]).is_file():
        where = f" in {folder}" if folder else ""
        raise UserError(f"no {REAL[name]}{where}; name its folder by --surveys DIR or by the variable {SURVEYS}")
    return folder / REAL[name]


@functools.cache
def load_problem(
    name: Dataset, *, seed: int, folder: Path | None = None, texts_to_vectors: Encoder = hashed_ngrams
) -> Problem:
    """Read a survey from `survey_file`, or generate one, and part its groups and questions by this seed.

    Refusals are left out. GlobalQA's seen groups are the paper's eight countries, those of GSS (13 of 22) and of the
    generated survey (6 of 8) are drawn with the seed, OpinionQA leaves out one of three thirds, by seed modulo 3.
    """
    if name == "generated":
        survey = generate(seed=seed)
    else:
        wanted = (*SEEN_COUNTRIES, *UNSEEN_COUNTRIES) if name == "globalqa" else None
        survey = read_survey(survey_file(name, folder), groups=wanted, refusals="drop")
    names = sorted(survey.groups)
    if name == "globalqa":
        seen: Sequence[str] = SEEN_COUNTRIES
    elif name == "opinionqa":
        seen = [group for place, group in enumerate(names) if place % OPINIONQA_FOLDS != seed % OPINIONQA_FOLDS]
    else:
        order = np.random.default_rng(seed).permutation(len(names))
        seen = [names[place] for place in order[: NUM_SEEN[name]]]
    embedding = embed_questions(survey.questions, dim=EMBEDDING_DIM, encoder=texts_to_vectors)
    return split_problem(survey, embedding, seen=seen, seed=seed)


def split_problem(survey: Survey, embedding: OptionEmbedding, *, seen: Sequence[str], seed: int) -> Problem:
    """A survey's groups, those of `seen` and the others, and its questions by the split of this seed."""
    split = split_questions(survey.questions, seed=seed)

    def answers(groups: Sequence[str], question_ids: Sequence[str]) -> tuple[GroupData, ...]:
        return tuple(
            group_data(group, survey.answers[group], embedding=embedding, question_ids=question_ids) for group in groups
        )

    unseen = [group for group in sorted(survey.groups) if group not in seen]
    return Problem(
        embedding,
        seen_train=answers(seen, split.train),
        seen_test=answers(seen, split.test),
        unseen_train=answers(unseen, split.train),
        unseen_test=answers(unseen, split.test),
    )


def merged(train: GroupData, test: GroupData) -> GroupData:
    """All answers of a group, of both parts of its questions."""
    question_N = np.concatenate([train.question_N, test.question_N])
    order = np.argsort(question_N)
    return GroupData(train.group, question_N[order], np.concatenate([train.answer_NK, test.answer_NK])[order])


def train(problem: Problem, recipe: Recipe, *, seed: int) -> Trained:
    """Train a fresh network on the seen groups' training answers."""
    priors: tuple[FloatArray, ...] | None = None
    unseen_prior: FloatArray | None = None
    if recipe.prior != "none":
        summed = problem.seen_train
        if recipe.prior == "all":
            summed = tuple(merged(*parts) for parts in zip(problem.seen_train, problem.seen_test, strict=True))
        priors, unseen_prior = fit_population(
            summed,
            problem.embedding,
            seed=seed,
            min_groups=recipe.min_groups,
            num_directions=recipe.num_directions,
        )
    torch.manual_seed(child_seed(seed, "pluralllm"))
    model = PluralLLM(ModelConfig(embedding_dim=problem.embedding.dim, population=priors is not None))
    start = time.process_time()
    if recipe.strategy == "central":
        train_centrally(
            model,
            problem.seen_train,
            problem.embedding,
            steps=recipe.rounds * recipe.local_steps,
            learning_rate=recipe.learning_rate,
            episodes=recipe.episodes,
            generator=torch.Generator().manual_seed(seed),
            populations=priors,
        )
    else:
        train_federated(model, problem, recipe, priors=priors, seed=seed)
    return Trained(model, priors, unseen_prior, time.process_time() - start)


def train_federated(
    model: PluralLLM, problem: Problem, recipe: Recipe, *, priors: Sequence[FloatArray] | None, seed: int
) -> None:
    """Train `model` in place as a run's server does with every group on a node of its own, all of them in this process.

    A group's update is the run's too, but for the population prior and the episodes, which the recipe varies.
    """
    local = PluralLLM(model.config)

    def answer(message: Message) -> RecordDict:
        group = message.metadata.dst_node_id
        data = problem.seen_train[group]
        local.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        round_number = int(str(message.content.config_records["config"]["server-round"]))
        loss = local_update(
            local,
            data,
            problem.embedding,
            steps=recipe.local_steps,
            learning_rate=recipe.local_learning_rate,
            optimizer="sgd",
            episodes=recipe.episodes,
            generator=torch.Generator().manual_seed(child_seed(seed, "pluralllm", data.group, round_number)),
            population=None if priors is None else priors[group],
        )
        metrics = MetricRecord({"num-examples": len(data), "loss": loss})
        return RecordDict({"arrays": ArrayRecord(OrderedDict(local.state_dict())), "metrics": metrics})

    keys = {"strategy": recipe.strategy, "rounds": recipe.rounds, "server-learning-rate": recipe.learning_rate}
    config = Config.load({f"pluralllm.{key}": value for key, value in (keys | {"validate-every": 0}).items()})
    nodes = range(len(problem.seen_train))
    start = ArrayRecord(OrderedDict(model.state_dict()))
    with flower_task():
        trained = pretrain(LocalGrid(answer), config, start, nodes=nodes, progress=lambda *_: None)
    model.load_state_dict(trained.weights.to_torch_state_dict())


@dataclass(frozen=True)
class Report:
    """Everything one training run scored.

    `scores` is by part (see `PARTS`) and predictor, `calibration` of unseen groups on held-out questions, None for one
    draw, and `by_context` 1 - natural JS distance of unseen groups for each size asked for.
    """

    scores: dict[str, dict[str, PredictionScore]]
    calibration: Calibration | None
    by_context: dict[str, list[float]]
    train_cpu_seconds: float
    table_cpu_seconds: float


def measure(
    problem: Problem, trained: Trained, recipe: Recipe, *, seed: int, num_draws: int = 1, sizes: Sequence[int] = ()
) -> Report:
    """Score a trained network on all four parts, next to what costs nothing."""
    embedding, num_context = problem.embedding, recipe.num_context

    def stacked(targets: Sequence[Targets]) -> FloatArray:
        return np.stack([found.probability_QK for found in targets])

    start = time.process_time()
    seen = trained.tables(problem, seen=True, num_context=num_context, seed=seed, num_draws=num_draws)
    table_seconds = time.process_time() - start
    unseen = trained.tables(problem, seen=False, num_context=num_context, seed=seed, num_draws=num_draws)
    by_size = [
        stacked(trained.tables(problem, seen=False, num_context=size, seed=seed, num_draws=num_draws)) for size in sizes
    ]
    everyone = [merged(*parts) for parts in zip(problem.seen_train, problem.seen_test, strict=True)]
    truths = problem.unseen_test, problem.unseen_train, problem.seen_test, problem.seen_train
    scores, by_context = {}, {}
    for name, truth in zip(PARTS, truths, strict=True):
        targets, known = (unseen, problem.unseen_train) if name.startswith(UNSEEN) else (seen, problem.seen_train)
        scores[name] = evaluate(stacked(targets), truth, embedding, others=everyone, known=known)
        if name.startswith(UNSEEN):
            by_context[name] = [evaluate(found, truth, embedding)[PREDICTOR].js_distance_natural for found in by_size]
    spread, error = [], []
    for data, found in zip(problem.unseen_test, unseen, strict=True):
        rows = data.question_N
        spread.append(found.spread_Q[rows])
        closeness_N = js_distance(found.probability_QK[rows], data.answer_NK, embedding.option_QK[rows], base=np.e)
        error.append(1.0 - closeness_N)
    calibrated = calibration(np.concatenate(spread), np.concatenate(error)) if num_draws > 1 else None
    return Report(scores, calibrated, by_context, trained.cpu_seconds, table_seconds)


def reports(
    dataset: Dataset,
    recipe: Recipe,
    texts_to_vectors: Encoder,
    *,
    seeds: Sequence[int],
    folder: Path | None,
    num_draws: int = 1,
    sizes: Sequence[int] = (),
) -> Iterator[Report]:
    """Train and score once a seed; arguments as in `load_problem` and `measure`."""
    for seed in seeds:
        problem = load_problem(dataset, seed=seed, folder=folder, texts_to_vectors=texts_to_vectors)
        trained = train(problem, recipe, seed=seed)
        yield measure(problem, trained, recipe, seed=seed, num_draws=num_draws, sizes=sizes)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every command of this experiment takes; `chosen_recipe` and `chosen_encoder` read it."""
    parser.add_argument("--prior", choices=get_args(Prior), default=Recipe.prior)
    parser.add_argument("--min-groups", type=int, default=Recipe.min_groups)
    parser.add_argument("--directions", type=int, default=Recipe.num_directions)
    parser.add_argument("--rounds", type=int, default=Recipe.rounds)
    parser.add_argument("--local-steps", type=int, default=Recipe.local_steps)
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--embedding", choices=get_args(Kind), default="ngrams")
    parser.add_argument("--embedding-model", default="", help="folder or hub id, for embeddings but n-grams")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--surveys", type=Path, help=f"folder of the real files; else the variable {SURVEYS}")


def chosen_recipe(chosen: argparse.Namespace) -> Recipe:
    """The recipe of a command line."""
    names = ("prior", "min_groups", "rounds", "local_steps", "learning_rate")
    return Recipe(num_directions=chosen.directions, **{name: getattr(chosen, name) for name in names})


def chosen_encoder(chosen: argparse.Namespace) -> Encoder:
    """The encoder of a command line."""
    return encoder(chosen.embedding, chosen.embedding_model, cache=cache_folder(Config.load({})))


def main() -> None:
    """Train and score once a seed; one JSON line a seed, then the mean and spread of the four parts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("dataset", choices=get_args(Dataset))
    parser.add_argument("--strategy", choices=get_args(Strategy), default=Recipe.strategy)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--context-sizes", action="store_true", help="also score every context size")
    add_options(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    sizes = CONTEXT_SIZES if chosen.context_sizes else ()
    every: list[Report] = []
    recipe = replace(chosen_recipe(chosen), strategy=chosen.strategy)
    given = {"seeds": chosen.seeds, "folder": chosen.surveys, "num_draws": chosen.draws, "sizes": sizes}
    for report in reports(chosen.dataset, recipe, chosen_encoder(chosen), **given):
        print(json.dumps({"seed": chosen.seeds[len(every)], **asdict(report)}, default=np.ndarray.tolist), flush=True)
        every.append(report)
    for part, predictors in every[0].scores.items():
        for name in predictors:
            found = [report.scores[part][name] for report in every]
            distance = np.array([score.js_distance_natural for score in found])
            js = np.mean([score.js for score in found])
            transport = np.mean([score.wasserstein for score in found])
            print(
                f"{part:16} {name:17} JS distance {distance.mean():.4f} ({distance.min():.4f} to {distance.max():.4f})"
                f"  JS {js:.4f}  Wasserstein {transport:.4f}"
            )


if __name__ == "__main__":
    entry.run(main, call=lambda command: command())
