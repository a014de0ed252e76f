"""Measurement of PluralLLM: the data, the split, the training as a run does it, the scores.

Groups are seen (they train) or unseen (they bring context only); questions are for training or held out from everyone's
training. A part is which groups are scored on which questions. Seen groups on training questions are no part:
these the network knows by heart.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import functools
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from appa_flwr.config import Config, split_names
from appa_flwr.config.sources import assemble, preset
from appa_flwr.core.errors import UserError
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol.asks import VALIDATION, Ask
from appa_flwr.survey.generate import generate
from appa_flwr.survey.sources import read_survey
from appa_flwr.survey.split import split_questions
from appa_flwr.survey.types import Survey
from client_app import predictor
from experiments.pluralllm.central import train_centrally
from experiments.pluralllm.federation import LocalGroups, flower_task
from experiments.pluralllm.measures import PredictorScores, measure
from pluralllm.data import BoolArray, FloatArray, GroupData, OptionEmbedding, group_data
from pluralllm.embedding import embed_questions
from pluralllm.encoders import Encoder
from pluralllm.network import PluralLLM
from pluralllm.prediction import predict_targets
from pluralllm.residual import ExactResidual
from pluralllm.scores import MEAN_OF_OTHERS, NEAREST, PREDICTOR, UNIFORM, group_sums, mean_from_sums, nearest_question
from pluralllm.training import EpisodeConfig, build, choices
from server_app.predictor.pretraining import SERVER_LEARNING_RATE, initial_weights, pretrain

SHORT_ROUNDS = (
    "pluralllm.strategy=fedadam",
    "pluralllm.rounds=100",
    "pluralllm.local-steps=2",
    "pluralllm.learning-rate=0.0",
)
"""Of the tables that were measured on real surveys, and of preset smollm2."""

Dataset = Literal["globalqa", "gss", "opinionqa", "generated"]

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
UNSEEN_HELD_OUT, UNSEEN_TRAINING, SEEN_HELD_OUT = "unseen/held-out", "unseen/training", "seen/held-out"


@dataclass(frozen=True)
class Part:
    """Groups with the answers their predictions rest on, and the answers these are compared with, both (G,)."""

    context: tuple[GroupData, ...]
    truth: tuple[GroupData, ...]


@dataclass(frozen=True)
class Problem:
    """Data to train on, and data to score.

    Attributes:
        embedding: the public table, of all questions.
        training: the seen groups' answers to training questions.
        validation: the same groups' answers that choose among rounds; none of them are trained on.
        trained_Q: which questions are for training.
        parts: name -> what is scored.
    """

    embedding: OptionEmbedding
    training: tuple[GroupData, ...]
    validation: tuple[GroupData, ...]
    trained_Q: BoolArray
    parts: Mapping[str, Part]


def recipe(*given: str) -> Config:
    """A run's defaults but for `SHORT_ROUNDS` and these, each `KEY=VALUE`; only `pluralllm.*` is read."""
    return assemble((*SHORT_ROUNDS, *given), folder=Path(__file__).parents[2])


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
    name: Dataset,
    *,
    seed: int,
    folder: Path | None,
    texts_to_vectors: Encoder,
    num_training: int | None,
) -> Problem:
    """Read a survey from `survey_file`, or generate one, and part its groups and questions by this seed.

    Refusals are left out. GlobalQA's seen groups are the paper's eight countries, those of GSS (13 of 22) and of the
    generated survey (6 of 8) are drawn with the seed, OpinionQA leaves out one of three thirds, by seed modulo 3.
    `num_training` takes so many countries of GlobalQA instead, the eight first, then those with the most answers.
    """
    wanted = (*SEEN_COUNTRIES, *UNSEEN_COUNTRIES) if name == "globalqa" and num_training is None else None
    if name == "generated":
        survey = generate(seed=seed)
    else:
        survey = read_survey(survey_file(name, folder), groups=wanted, refusals="drop")
    names = sorted(survey.groups)
    if name == "globalqa":
        others = [group for group in names if group not in (*SEEN_COUNTRIES, *UNSEEN_COUNTRIES)]
        others.sort(key=lambda group: -len(survey.answers[group]))
        seen: Sequence[str] = (*SEEN_COUNTRIES, *others)[: num_training or len(SEEN_COUNTRIES)]
        survey = replace(survey, answers={group: survey.answers[group] for group in (*seen, *UNSEEN_COUNTRIES)})
    elif name == "opinionqa":
        seen = [group for place, group in enumerate(names) if place % OPINIONQA_FOLDS != seed % OPINIONQA_FOLDS]
    else:
        order = np.random.default_rng(seed).permutation(len(names))
        seen = [names[place] for place in order[: NUM_SEEN[name]]]
    embedding = embed_questions(survey.questions, encoder=texts_to_vectors)
    return split_problem(survey, embedding, seen=seen, seed=seed)


def split_problem(survey: Survey, embedding: OptionEmbedding, *, seen: Sequence[str], seed: int) -> Problem:
    """A survey's groups, those of `seen` and the others, and its questions by the split of this seed."""
    split = split_questions(survey.questions, seed=seed)
    trained = set(split.train)

    def answers(groups: Sequence[str], question_ids: Sequence[str]) -> tuple[GroupData, ...]:
        return tuple(
            group_data(group, survey.answers[group], embedding=embedding, question_ids=question_ids) for group in groups
        )

    unseen = [group for group in sorted(survey.groups) if group not in seen]
    training, held_out = answers(seen, split.train), answers(seen, split.test)
    context = answers(unseen, split.train)
    return Problem(
        embedding,
        training,
        held_out,
        np.array([question_id in trained for question_id in embedding.question_ids]),
        {
            UNSEEN_HELD_OUT: Part(context, answers(unseen, split.test)),
            UNSEEN_TRAINING: Part(context, context),
            SEEN_HELD_OUT: Part(training, held_out),
        },
    )


@dataclass(frozen=True)
class TrainedPredictor:
    """A frozen network, and what training took."""

    model: PluralLLM
    cpu_seconds: float


def train(problem: Problem, config: Config, *, seed: int, central: bool = False) -> TrainedPredictor:
    """Train a fresh network as a run's server does, every group on a node of its own and all of them in this process.

    `central` pools the answers instead and takes as many steps with Adam; it ends with the last step's weights and
    chooses how much learned features count as a run does.
    """
    config = Config.load({**config.flat(), "seed": seed})
    settings = config.pluralllm
    model = build(settings.architecture)
    start = initial_weights(config)
    begin = time.process_time()
    if central:
        model.load_state_dict(start.to_torch_state_dict())
        train_centrally(
            model,
            problem.training,
            problem.embedding,
            steps=settings.rounds * settings.local_steps,
            learning_rate=SERVER_LEARNING_RATE,
            episodes=EpisodeConfig.of(settings),
            generator=torch.Generator().manual_seed(child_seed(seed, "central")),
        )
        if isinstance(model, ExactResidual):
            ours = predictor.Predictor(model, problem.embedding, problem.trained_Q, settings, seed)
            error_V = np.sum([ours.errors(*pair) for pair in zip(problem.training, problem.validation, strict=True)], 0)
            best = choices(settings.architecture)[int(error_V.argmin())]
            assert best is not None
            model.choose(best)
        return TrainedPredictor(model, time.process_time() - begin)

    pairs = {data.group: (data, held_out) for data, held_out in zip(problem.training, problem.validation, strict=True)}

    def numbers(ask: Ask, group: str) -> dict[str, Any]:
        weight_P, (data, held_out) = ask.array("weights", np.float32, axes=1), pairs[group]
        if ask.kind == VALIDATION:
            ours = predictor.load(config, weight_P, problem.embedding, problem.trained_Q)
            return {"answers": [len(held_out)], "error": ours.errors(data, held_out)}
        after_P, loss = predictor.train(
            config,
            weight_P,
            data,
            problem.embedding,
            round_number=int(ask.number("round")),
            proximal=ask.number("proximal"),
            secret="",
        )
        step_P = after_P.astype(np.float64) - weight_P
        return {"step": len(data) * step_P, "answers": [len(data)], "loss": [len(data) * loss]}

    with flower_task():
        trained = pretrain(LocalGroups(config, [*pairs], numbers), config, start, progress=lambda *_: None)
    model.load_state_dict(OrderedDict(trained.weights.to_torch_state_dict()))
    return TrainedPredictor(model, time.process_time() - begin)


@dataclass(frozen=True)
class Report:
    """Scores of one training run: part -> predictor -> measures, and part -> context size -> measures."""

    scores: dict[str, dict[str, PredictorScores]]
    by_context: dict[str, dict[int, PredictorScores]]
    train_cpu_seconds: float
    table_cpu_seconds: float


def report(
    problem: Problem, trained: TrainedPredictor, config: Config, *, seed: int, sizes: Sequence[int], draws: int
) -> Report:
    """Score a trained network on all parts, next to what costs nothing, and with other numbers of context questions.

    A prediction is the mean over `draws` contexts.
    """
    embedding, settings = problem.embedding, config.pluralllm
    begin = time.process_time()

    def tables(part: Part, num_context: int) -> list[FloatArray]:
        table = functools.partial(
            predict_targets,
            trained.model,
            embedding=embedding,
            num_context=num_context,
            seed=child_seed(seed, "context", 0),
            trained=problem.trained_Q,
        )
        return [np.mean([table(data, draw=draw) for draw in range(draws)], axis=0) for data in part.context]

    def measured(by_part: Mapping[str, list[FloatArray]]) -> dict[str, PredictorScores]:
        return {name: measure(by_part[name], part.truth, embedding) for name, part in problem.parts.items()}

    by_part = {name: tables(part, settings.num_context_questions) for name, part in problem.parts.items()}
    table_seconds = time.process_time() - begin
    ours = measured(by_part)
    scores = {
        name: {PREDICTOR: ours[name]}
        | {label: measure(table, part.truth, embedding) for label, table in baselines(problem, part).items()}
        for name, part in problem.parts.items()
    }
    by_size = {size: measured({name: tables(part, size) for name, part in problem.parts.items()}) for size in sizes}
    by_context = {name: {size: of[name] for size, of in by_size.items()} for name in problem.parts}
    return Report(scores, by_context, trained.cpu_seconds, table_seconds)


def baselines(problem: Problem, part: Part) -> dict[str, list[FloatArray]]:
    """Baselines that need no training, a table a group.

    The mean of the others reads what the seen groups answered to the very question, held-out ones too: no predictor of
    a new question knows that. Where nobody else answered it is the uniform answer.
    """
    embedding = problem.embedding
    uniform_QK = embedding.option_QK / embedding.option_QK.sum(axis=1, keepdims=True)

    means = []
    for data in part.truth:
        others = [other for other in (*problem.training, *problem.validation) if other.group != data.group]
        mean_QK = mean_from_sums(*group_sums(others, embedding), min_groups=1)
        means.append(np.where(mean_QK.any(axis=1, keepdims=True), mean_QK, uniform_QK))
    return {
        UNIFORM: [uniform_QK] * len(part.truth),
        NEAREST: [nearest_question(data, embedding) for data in part.context],
        MEAN_OF_OTHERS: means,
    }
