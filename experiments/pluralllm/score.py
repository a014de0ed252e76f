"""Train on some groups of a survey and score others, on held-out questions or on those of a second file.

    python -m experiments.pluralllm.score --survey answers.jsonl --train-groups "Egypt;India;Kenya" \
        --score-groups "Japan;Spain" --embedding minilm --seeds 0,1,2 --json

The scored groups' context is their answers in the first file (or `--context-groups-file`). Without `--held-out`, a
fifth of the questions is held out by seed. Predictions of a question that is in a group's context leave its own answer
out. A group may both train and be scored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from appa_flwr.config import Config, split_names
from appa_flwr.core import markdown
from appa_flwr.core.errors import UserError
from appa_flwr.survey.read import read_survey
from appa_flwr.survey.split import split_questions
from appa_flwr.survey.types import FloatArray, Question, Survey
from experiments import entry
from experiments.pluralllm.measures import PredictorScores
from experiments.pluralllm.protocol import Part, Problem, recipe, report, train
from pluralllm.data import GroupData, group_data
from pluralllm.embedding import embed_questions
from pluralllm.encoders import Encoder, Kind, encoder
from pluralllm.scores import PREDICTOR
from server_app.models.base import cache_folder

# the share of training questions that choose the round, where the scored questions are in another file
VALIDATION_SHARE = 0.1
FIRST = ("js", "js_distance", "r", "r2", "order", "spearman")
SCORED = "scored"
SIZES = "4,8,16,32,64,128"

Answers = Mapping[str, Mapping[str, FloatArray]]


def merged_questions(surveys: Sequence[tuple[Path, Survey]]) -> tuple[Question, ...]:
    """The questions of several files, each once.

    Raises:
        UserError: two files ask another thing under one id.
    """
    found: dict[str, tuple[Path, Question]] = {}
    for path, survey in surveys:
        for question in survey.questions:
            first, known = found.setdefault(question.question_id, (path, question))
            if known != question:
                raise UserError(
                    f"{path}: question '{question.question_id}' has another text, options or scale than in {first}; "
                    "use one id for one question"
                )
    return tuple(question for _, question in found.values())


def build_problem(
    survey: tuple[Path, Survey],
    held_out: tuple[Path, Survey] | None,
    context: tuple[Path, Survey],
    *,
    training: Sequence[str],
    scored: Sequence[str],
    texts_to_vectors: Encoder,
    dim: int,
    seed: int,
) -> Problem:
    """The first survey's training groups, and the scored groups with their context and the answers to score."""
    questions = merged_questions([survey, context] + ([held_out] if held_out else []))
    embedding = embed_questions(questions, dim=dim, encoder=texts_to_vectors)
    split = split_questions(survey[1].questions, test_fraction=VALIDATION_SHARE if held_out else 0.2, seed=seed)
    trained = set(split.train)

    def answers(of: Answers, groups: Sequence[str], question_ids: set[str] | None) -> tuple[GroupData, ...]:
        return tuple(group_data(name, of[name], embedding=embedding, question_ids=question_ids) for name in groups)

    test = None if held_out else set(split.test)
    truth = answers((held_out or survey)[1].answers, scored, test)
    # with a second file all answers of the first are the group's own; the questions that choose the round included
    known = None if held_out else {question.question_id for question in questions} - set(split.test)
    given = answers(context[1].answers, scored, known)
    return Problem(
        embedding,
        training=answers(survey[1].answers, training, trained),
        validation=answers(survey[1].answers, training, set(split.test)),
        trained_Q=np.array([question_id in trained for question_id in embedding.question_ids]),
        parts={SCORED: Part(given, truth)},
    )


def mean(found: Sequence[PredictorScores]) -> dict[str, float]:
    """Means over seeds, the names that others rely on first; NaN where no seed has a value."""
    values = [asdict(one) for one in found]
    names = [*FIRST, *(name for name in values[0] if name not in FIRST)]
    return {name: float(np.mean([value[name] for value in values])) for name in names}


def finite(value: Any) -> Any:
    """The same for JSON, which has no NaN."""
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value


def score(problems: Mapping[int, Problem], config: Config, *, central: bool, sizes: Sequence[int]) -> dict[str, Any]:
    """Train and score once a seed; the model's means first, then the rest."""
    reports = [
        report(problem, train(problem, config, seed=seed, central=central), config, seed=seed, sizes=sizes)
        for seed, problem in problems.items()
    ]
    scores = [one.scores[SCORED] for one in reports]
    found: dict[str, Any] = mean([one[PREDICTOR] for one in scores])
    found["by_context_size"] = {size: mean([one.by_context[SCORED][size] for one in reports]) for size in sizes}
    found["baselines"] = {
        name: {key: mean([one[name] for one in scores])[key] for key in FIRST[:5]}
        for name in scores[0]
        if name != PREDICTOR
    }
    found["seeds"] = {seed: asdict(one[PREDICTOR]) for seed, one in zip(problems, scores, strict=True)}
    found["rounds_kept"] = {seed: one.round for seed, one in zip(problems, reports, strict=True)}
    found["train_cpu_seconds"] = float(np.mean([one.train_cpu_seconds for one in reports]))
    found["table_cpu_seconds"] = float(np.mean([one.table_cpu_seconds for one in reports]))
    return found


def table(found: Mapping[str, Any]) -> str:
    """Markdown: the model, its baselines, and other context sizes."""
    lines = {PREDICTOR: found, **found["baselines"]}
    lines |= {f"{size} context questions": one for size, one in found["by_context_size"].items()}
    rows = ([name, *("" if key not in one else f"{one[key]:.3f}" for key in FIRST)] for name, one in lines.items())
    return markdown.table(["", *FIRST], rows)


def main(
    survey: Annotated[Path, typer.Option(help="File that is trained on.")],
    train_groups: Annotated[str, typer.Option(help='Names, separated by ; or ,; "all" = all that are not scored.')],
    score_groups: Annotated[str, typer.Option(help="Names of the groups that are scored.")],
    held_out: Annotated[Path | None, typer.Option(help="File with the answers to score.")] = None,
    context_groups_file: Annotated[Path | None, typer.Option(help="File with the scored groups' context.")] = None,
    embedding: Annotated[str, typer.Option(help="ngrams, minilm, sentence-transformers or causal-lm.")] = "ngrams",
    embedding_model: Annotated[str, typer.Option(help="Folder or hub id, for the last two.")] = "",
    seeds: Annotated[str, typer.Option(help="Of split, training and contexts, separated by commas.")] = "0,1,2",
    sizes: Annotated[str, typer.Option(help="Context sizes to score as well.")] = SIZES,
    central: Annotated[bool, typer.Option("--central", help="Pool the answers instead of federated training.")] = False,
    key: Annotated[
        list[str] | None, typer.Option("-c", help="KEY=VALUE of a run's config, such as pluralllm.*")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Train PluralLLM on some groups and score it on others."""
    torch.set_num_threads(1)
    config = recipe(*(key or ()), f"embedding.encoder={embedding}", f"embedding.model={embedding_model}")
    scored = split_names(score_groups)
    asked = split_names(train_groups)
    chosen = None if train_groups == "all" else [*dict.fromkeys((*asked, *(() if context_groups_file else scored)))]
    first = read_survey(survey, groups=chosen, refusals="drop")
    names = [name for name in first.groups if name not in scored] if chosen is None else asked
    context = read_survey(context_groups_file, groups=scored, refusals="drop") if context_groups_file else first
    second = None if held_out is None else (held_out, read_survey(held_out, groups=scored, refusals="drop"))
    kind: Kind = config.embedding.encoder
    texts_to_vectors = encoder(kind, config.embedding.model, cache=cache_folder())
    problems = {
        seed: build_problem(
            (survey, first),
            second,
            (context_groups_file or survey, context),
            training=names,
            scored=scored,
            texts_to_vectors=texts_to_vectors,
            dim=config.embedding.dim,
            seed=seed,
        )
        for seed in map(int, split_names(seeds))
    }
    found = score(problems, config, central=central, sizes=[int(size) for size in split_names(sizes)])
    typer.echo(json.dumps(finite(found)) if as_json else table(found))


if __name__ == "__main__":
    entry.run(main)
