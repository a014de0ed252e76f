"""Beside TRL: our PPO and TRL 1.12's PPOTrainer, our SFT and TRL's SFTTrainer; one CPU thread a side.

    python -m experiments.benchmarks.beside_trl ppo --trl-python TRL_ENVIRONMENT/bin/python
    python -m experiments.benchmarks.beside_trl sft

PPO has the same model, prompts, answer lengths and optimizer steps on both sides, each in an environment of its own.
SFT is a real model's. Sides run in turns, in processes of their own: a shared machine is never equally busy, and memory
given back cannot hide what the other takes.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import typer
from click import Choice
from torch import nn
from transformers import PreTrainedModel
from trl import SFTTrainer

from appa_flwr.config import SMOLLM2_MODEL, Config, Scalar
from appa_flwr.config.sources import read_words
from appa_flwr.core.errors import UserError
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import formats, votes
from appa_flwr.survey.generate import generate
from appa_flwr.survey.sources import read_survey
from appa_flwr.survey.split import split_questions
from appa_flwr.survey.types import Survey
from experiments import entry
from experiments.benchmarks.engine import PHASES, Out, run_side, save, save_random, shown, small_qwen3
from experiments.benchmarks.sides import TRL_VERSION, Recorder, Workload
from experiments.pluralllm.protocol import SEEN_COUNTRIES, SURVEYS, survey_file
from server_app.models import sft
from server_app.models.base import Base, load_model, prepare, with_dtype

app = typer.Typer(add_completion=False)

OURS, TRL = "ours", "TRL"
SHORT_PROMPTS = {"prefix": 0, "shortest": 16, "longest": 32}
CASES: dict[str, dict[str, Any]] = {
    "dpa-forced": {},
    "dpa-natural": {"ends": True},  # after 10 to 25 tokens; the others have 60
    "short": SHORT_PROMPTS,
    "vocab32k": {**SHORT_PROMPTS, "vocabulary": 32_000},
}

Keys = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys.")]
Style = Annotated[Literal["full", "counted", "compact"], typer.Option(help="As the key `policy.prompt-style`.")]
Surveys = Annotated[Path | None, typer.Option(help=f"Folder of the real files; else {SURVEYS}.")]
Updates = Annotated[int, typer.Option(min=1, help="Counted steps or updates a process, after one to warm up.")]


def check(updates: pd.DataFrame) -> None:
    """Raise where the sides of a case did other work; that answers are as planned, each has seen itself."""
    steps = updates.groupby("side")["steps"].agg(list)
    if steps[OURS] != steps[TRL]:
        raise RuntimeError(f"optimizer steps: {dict(steps)}")
    if not (updates[["policy", "value"]] > 0).all(axis=None):
        raise RuntimeError(f"a model did not change: {updates}")


def compared(numbers: pd.DataFrame, columns: list[str]) -> str:
    """Markdown: medians of both sides of every case, and their ratio."""
    both = numbers.pivot_table(index="case", columns="side", values=columns, aggfunc="median", sort=False)
    for name in columns:
        both[name, "ratio"] = both[name, OURS] / both[name, TRL]
    ordered = both[[(name, of) for name in columns for of in (OURS, TRL, "ratio")]]
    return shown(ordered.set_axis(ordered.columns.map(", ".join), axis="columns"))


@app.command()
def ppo(
    trl_python: Annotated[str, typer.Option(help=f"Python of an environment with trl=={TRL_VERSION}.")],
    case: Annotated[
        list[str] | None, typer.Option(click_type=Choice(list(CASES)), help="Repeatable; else all.")
    ] = None,
    updates: Updates = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Processes a side, in turns.")] = 2,
    overrides: Keys = None,
    out: Out = Path("runs/beside_trl"),
) -> None:
    """Compare our PPO engine with TRL's PPOTrainer; the keys are our side's."""
    config: dict[str, Scalar] = read_words(overrides or [])
    done: list[pd.DataFrame] = []
    for name in case or CASES:
        with tempfile.TemporaryDirectory() as model:
            work = Workload(model, rollouts=96, updates=updates, config=config, **CASES[name])
            save_random(small_qwen3(work.vocabulary), Path(model))
            turns = [(TRL, "sides.trl", trl_python), (OURS, "engine.ours", sys.executable)] * repeats
            found = []
            for side, place, python in turns:
                found.append(run_side(python, place, work).assign(case=name, side=side))
                took = found[-1].median(numeric_only=True)
                print(f"{name}, {side}: {took['total']:.2f} CPU s, {took['added']:.0f} MiB added", flush=True)
        done.append(pd.concat(found))
        check(done[-1])
    numbers = pd.concat(done)
    save(out, numbers, compared(numbers, ["total", "added", *PHASES[:-1]]))


KEYS: dict[str, Scalar] = {
    "model": SMOLLM2_MODEL,
    "policy.tuning": "lora",
    "policy.compute-dtype": "auto",
    "ppo.micro-batch-tokens": 600,  # as in preset smollm2
    "sft.target": "majority",
    "sft.answer-step": 0.01,
    "sft.learning-rate": 5e-6,
}
"""Keys that differ from our run config's defaults: the paper's SFT, in the number format the machine computes in."""
BATCH_KEYS: dict[str, Scalar] = {
    "policy.compute-dtype": "float32",
    "sft.steps": 1,
}
"""For one loss of one batch: what rounding and chance would add is left out."""
DRAWN_STD = 0.02
LOSS_GOAL = 1e-5

Rows = list[tuple[list[int], str]]
"""Prompts as token ids, and what is taught as their answers."""


def make_trainer(
    side: str, base: Base, config: Config, rows: Rows, *, folder: str, callbacks: Sequence[Recorder] = ()
) -> SFTTrainer:
    """A side's trainer on a model of its own: the base in the config's number format, with a new adapter.

    TRL's gets what it had before ours took its place: plain rows, its own adapter, and autocast in bfloat16.
    """
    model = load_model(config, base.source, quantized=False)
    dataset = sft.dataset(base, *zip(*rows, strict=True))
    if side == OURS:
        return sft.make_trainer(model, base, config, dataset, folder=Path(folder), callbacks=callbacks)
    autocast = config.policy.compute_dtype == "bfloat16"
    return SFTTrainer(
        model,
        args=sft.arguments(config, Path(folder), cpu=model.device.type == "cpu", autocast=autocast),
        train_dataset=dataset,
        processing_class=base.tokenizer,
        peft_config=sft.adapter(config),
        callbacks=list(callbacks),
    )


def measure_sft(side: str, base: Base, config: Config, rows: Rows, *, updates: int) -> pd.DataFrame:
    """A row for each counted step; the loss is the first batch's, under an adapter that both sides draw alike."""
    torch.set_num_threads(1)
    given = Config.load({**config.flat(), "sft.steps": 1 + updates})
    exact = Config.load({**config.flat(), **BATCH_KEYS})
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="appa-sft-") as scratch:
        make_trainer(side, base, given, rows, folder=scratch, callbacks=[recorder]).train()
        steps = pd.DataFrame(recorder.measured())[["total", "added"]]
        gc.collect()  # a trainer and its model hold each other
        trainer = make_trainer(side, base, exact, rows[: exact.sft.batch_size], folder=scratch)
        draw_adapter(trainer.model, seed=config.seed)
        loss = float(trainer.train().training_loss)
    return steps.assign(loss=loss, side=side)


def draw_adapter(model: PreTrainedModel, *, seed: int) -> None:
    """Give a new adapter numbers of which none is 0, for as PEFT makes it it changes nothing, and no dropout."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            drawn = nn.init.normal_(torch.empty(parameter.shape), std=DRAWN_STD, generator=generator)
            parameter.data.copy_(drawn)


def loss_apart(steps: pd.DataFrame) -> float:
    """Difference of the sides' losses of one batch; an error above the goal."""
    losses = steps.groupby("side")["loss"].first()
    if (apart := abs(losses[OURS] - losses[TRL])) > LOSS_GOAL:
        raise RuntimeError(f"loss of one batch: {dict(losses)}")
    return float(apart)


def rows_of(survey: Survey, base: Base, config: Config) -> Rows:
    """Training questions, shuffled, with the answer that SFT would teach of the groups' own votes.

    Questions that are too long, or whose answer is, are left out.
    """
    by_id = {question.question_id: question for question in survey.questions}
    split = split_questions(survey.questions, test_fraction=config.data.test_fraction, seed=config.seed)
    rng = np.random.default_rng(child_seed(config.seed, "benchmark"))
    rows = []
    for question in (by_id[question_id] for question_id in rng.permutation(split.train)):
        given_G1K = np.array(
            [[of[question.question_id]] for of in survey.answers.values() if question.question_id in of]
        )
        option_1K = np.ones((1, len(question.options)), dtype=bool)
        votes_G1K = votes.cast(given_G1K, option_1K, kind="mode")
        scores_1K = sft.sft_targets(votes_G1K, option_1K, target=config.sft.target)
        answer = formats.answer(config.task, scores_1K[0], step=config.sft.answer_step)
        prompt = base.prompt_ids(config, question)
        taught = len(base.tokenizer(answer, add_special_tokens=False)["input_ids"]) + 1  # with its end
        if taught <= config.ppo.response_length and len(prompt) + taught <= config.policy.max_sequence_length:
            rows.append((prompt, answer))
    return rows


def prepared(
    prompt_style: str, surveys: Path | None, overrides: list[str] | None, *, steps: int
) -> tuple[Config, Base, Rows]:
    """The config, the base, and GlobalQA's rows of the paper's countries, for so many steps."""
    torch.set_num_threads(1)
    given: dict[str, Scalar] = {**KEYS, "policy.prompt-style": prompt_style, "sft.steps": steps}
    config = with_dtype(Config.load({**given, **read_words(overrides or [])}))
    try:
        survey = read_survey(survey_file("globalqa", surveys), groups=SEEN_COUNTRIES, refusals="drop")
    except UserError as error:
        print(f"{error}; the generated survey stands in for it")
        survey = generate(seed=config.seed)
    base = prepare(config, survey.questions)
    training = rows_of(survey, base, config)
    number = steps * config.sft.batch_size
    return config, base, list(islice(cycle(training), number))


@app.command("sft")
def sft_step(
    prompt_style: Style = "full",
    updates: Updates = 2,
    surveys: Surveys = None,
    overrides: Keys = None,
    out: Out = Path("runs/sft"),
) -> None:
    """Compare SFT's step with that of TRL's SFTTrainer."""
    config, base, rows = prepared(prompt_style, surveys, overrides, steps=1 + updates)
    done: list[pd.DataFrame] = []
    for side in (OURS, TRL):
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
            done.append(pool.submit(measure_sft, side, base, config, rows, updates=updates).result())
        print(f"{side}: {done[-1]['total'].median():.1f} CPU s a step", flush=True)
    steps = pd.concat(done).assign(case=prompt_style)
    apart = f"loss of one batch: {loss_apart(steps):.1e} apart (at most {LOSS_GOAL:.0e})"
    save(out, steps, f"{compared(steps, ['total', 'added'])}\n\n{apart}")


if __name__ == "__main__":
    entry.run(app, call=lambda command: command())
