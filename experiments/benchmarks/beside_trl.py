"""Beside TRL: our PPO and TRL 1.12's PPOTrainer, our SFT and TRL's SFTTrainer; one CPU thread a side.

    python -m experiments.benchmarks.beside_trl ppo --trl-python TRL_ENVIRONMENT/bin/python
    python -m experiments.benchmarks.beside_trl sft

PPO has the same model, prompts, answer lengths and optimizer steps on both sides, each in an environment of its own.
SFT is a real model's. Sides run in turns, in processes of their own: a shared machine is never equally busy, and memory
given back cannot hide what the other takes.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from trl import SFTTrainer

from appa_flwr.config import SMOLLM2_MODEL, Config, Scalar, parse_override
from appa_flwr.core import markdown
from appa_flwr.core.errors import UserError, unknown_name
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import votes
from appa_flwr.survey.generate import generate
from appa_flwr.survey.read import read_survey
from appa_flwr.survey.split import split_questions
from appa_flwr.survey.types import Survey
from experiments import entry
from experiments.benchmarks.engine import CPU_ONE_THREAD, DPA_PROMPTS, Prompts, draw_batches, run_side, save
from experiments.benchmarks.models import save_random, small_qwen3
from experiments.benchmarks.sides import TRL_VERSION, Measured, PeakMemory, Workload, now
from experiments.pluralllm.protocol import SEEN_COUNTRIES, SURVEYS, survey_file
from server_app.models import sft
from server_app.models.base import Base, load_model, prepare, with_dtype

app = typer.Typer(add_completion=False)

ALL = "all"
OURS, TRL = "ours", "TRL"
ROLLOUTS, RESPONSE_LENGTH = 96, 60
SHORT_PROMPTS = Prompts(prefix=0, shortest=16, longest=32)
CASES = {
    "dpa-forced": (DPA_PROMPTS, 1024, False),
    "dpa-natural": (DPA_PROMPTS, 1024, True),
    "short": (SHORT_PROMPTS, 1024, False),
    "vocab32k": (SHORT_PROMPTS, 32_000, False),
}
"""Prompts, vocabulary, and whether answers end on their own, after 10 to 25 tokens; the others have 60."""
STAGES = {"rollout": "rollout", "reference and value": "reference", "update": "update"}

Sides = dict[str, list[Measured]]
"""Both sides of a case, each as often as it was run."""
Keys = Annotated[list[str] | None, typer.Option("-c", "--config", metavar="KEY=VALUE", help="A key; repeatable.")]
Model = Annotated[str, typer.Option(help="As the key `model`.")]
Style = Annotated[Literal["full", "counted", "compact"], typer.Option(help="As the key `policy.prompt-style`.")]
Seed = Annotated[int, typer.Option(help="Of rows, adapters and dropout.")]
Surveys = Annotated[Path | None, typer.Option(help=f"Folder of the real files; else {SURVEYS}.")]


def check(both: Sides) -> None:
    """See that both sides did the same work; that answers are as planned, each has seen itself.

    Raises:
        RuntimeError: other numbers of optimizer steps, or nothing learned.
    """
    steps = {name: [[u.optimizer_steps for u in one.updates] for one in side] for name, side in both.items()}
    if steps[OURS] != steps[TRL]:
        raise RuntimeError(f"optimizer steps: {steps}")
    if not all(one.policy_change > 0 and one.value_change > 0 for side in both.values() for one in side):
        raise RuntimeError(f"a model did not change: {both}")


def ppo_table(cases: dict[str, Sides]) -> str:
    """Markdown: medians over updates, least and most in brackets; memory over runs."""

    def seconds(side: Sequence[Measured], of: str) -> list[float]:
        return [getattr(update, of) for one in side for update in one.updates]

    head = [f"{name}, {of}" for name in ("CPU s", "wall s", "MiB added") for of in (OURS, TRL, "ratio")]
    rows, stages = [], []
    for case, both in cases.items():
        cells = [case]
        for of, form in (("seconds", ".2f"), ("wall", ".2f"), ("added_mib", ".0f")):
            own, trl = (
                [one.added_mib for one in side] if of == "added_mib" else seconds(side, of) for side in both.values()
            )
            cells += [f"{median(s):{form}} ({min(s):{form}} to {max(s):{form}})" for s in (own, trl)]
            cells += [f"{median(own) / median(trl):.3f}"]
        rows.append(cells)
        stages.append([case, *(f"{median(seconds(s, of)):.2f}" for of in STAGES.values() for s in both.values())])
    stages_head = ["CPU s", *(f"{stage}, {side}" for stage in STAGES for side in (OURS, TRL))]
    return f"{markdown.table(['case', *head], rows)}\n\n{markdown.table(stages_head, stages)}\n"


@app.command()
def ppo(
    trl_python: Annotated[str, typer.Option(help=f"Python of an environment with trl=={TRL_VERSION}.")],
    case: Annotated[str, typer.Option(help=f"One of {', '.join(CASES)}, or {ALL}.")] = ALL,
    updates: Annotated[int, typer.Option(min=1, help="Counted updates a process, after one to warm up.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Processes a side, in turns.")] = 2,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and sampling.")] = 0,
    overrides: Keys = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/beside_trl"),
) -> None:
    """Compare our PPO engine with TRL's PPOTrainer; the keys are our side's."""
    if case not in (*CASES, ALL):
        raise unknown_name("case", case, valid=[*CASES, ALL])
    config = dict(parse_override(text) for text in overrides or [])
    done: dict[str, Sides] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in CASES if case == ALL else [case]:
            (prompts, vocabulary, ends), model = CASES[name], Path(scratch) / name
            save_random(small_qwen3(vocabulary=vocabulary), model, seed=seed)
            batches = draw_batches(prompts, vocabulary=vocabulary, rollouts=ROLLOUTS, updates=updates, seed=seed)
            workload = Workload(str(model), batches, RESPONSE_LENGTH, ends, config=config, seed=seed)
            both: Sides = {OURS: [], TRL: []}
            for repeat in range(repeats):
                for side, place, python in ((TRL, "sides.trl", trl_python), (OURS, "engine.ours", sys.executable)):
                    found = run_side(python, place, workload, scratch=Path(scratch), environment=CPU_ONE_THREAD)
                    both[side].append(found)
                    cpu = median(update.seconds for update in found.updates)
                    took = f"{cpu:.2f} CPU s an update, {found.added_mib:.0f} MiB added"
                    print(f"{name}, {repeat + 1} of {repeats}, {side}: {took}", flush=True)
            check(both)
            done[name] = both
            numbers = {case: {side: [*map(asdict, runs)] for side, runs in of.items()} for case, of in done.items()}
            save(out, numbers, ppo_table(done))
    print(f"{ppo_table(done)}\nresults: {out}")


KEYS: dict[str, Scalar] = {
    "policy.tuning": "lora",
    "policy.compute-dtype": "auto",
    "ppo.micro-batch-tokens": 600,  # as in preset smollm2
    "sft.target": "majority",
    "sft.answer-step": 0.01,
    "sft.learning-rate": 5e-6,
}
"""What differs from our run config's defaults: the paper's SFT, in the number format the machine computes in."""
BATCH_KEYS: dict[str, Scalar] = {
    "policy.compute-dtype": "float32",
    "lora.dropout": 0.0,
    "sft.gradient-accumulation-steps": 1,
    "sft.steps": 1,
}
"""For one loss of one batch: what rounding and chance would add is left out."""
WARM_UP = 1  # optimizer steps before those that count
DRAWN_STD = 0.02
CPU_GOAL, MEMORY_GOAL, LOSS_GOAL = 0.25, 0.25, 1e-5

Rows = list[tuple[list[int], str]]
"""Prompts as token ids, and what is taught as their answers."""


@dataclass(frozen=True)
class Side:
    """What a side took: CPU seconds of each counted step, memory as in `Measured`, and its loss of one batch."""

    cpu: list[float]
    baseline_mib: float
    added_mib: float
    loss: float


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Times a trainer's optimizer steps and watches its memory from before the first one."""

    def __init__(self) -> None:
        self.memory, self.cpu = PeakMemory(), list[float]()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.memory.start()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.cpu.append(now() - self._started)


def make_trainer(
    side: str, base: Base, config: Config, rows: Rows, *, folder: Path, callbacks: Sequence[TrainerCallback] = ()
) -> SFTTrainer:
    """A side's trainer on a model of its own: the base in the config's number format, with a new adapter.

    TRL's gets what it had before ours took its place: plain rows, its own adapter, and autocast in bfloat16.
    """
    model = load_model(config, base.source, quantized=False)
    dataset = sft.dataset(base, *zip(*rows, strict=True))
    if side == OURS:
        return sft.make_trainer(model, base, config, dataset, folder=folder, callbacks=callbacks)
    autocast = config.policy.compute_dtype == "bfloat16"
    return SFTTrainer(
        model,
        args=sft.arguments(config, folder, cpu=model.device.type == "cpu", autocast=autocast),
        train_dataset=dataset,
        processing_class=base.tokenizer,
        peft_config=sft.adapter(config),
        callbacks=list(callbacks),
    )


def measure_sft(side: str, base: Base, config: Config, rows: Rows, *, steps: int) -> Side:
    """So many counted steps after the warm-up, then the first batch's loss, under an adapter both sides draw alike."""
    torch.set_num_threads(1)
    given = Config.load({**config.flat(), "sft.steps": WARM_UP + steps})
    exact = Config.load({**config.flat(), **BATCH_KEYS})
    watch = _Steps()
    with tempfile.TemporaryDirectory(prefix="appa-sft-") as scratch:
        make_trainer(side, base, given, rows, folder=Path(scratch), callbacks=[watch]).train()
        added = watch.memory.stop()
        gc.collect()  # a trainer and its model hold each other
        trainer = make_trainer(side, base, exact, rows[: exact.sft.batch_size], folder=Path(scratch))
        draw_adapter(trainer.model, seed=config.seed)
        loss = float(trainer.train().training_loss)
    return Side(watch.cpu[WARM_UP:], watch.memory.baseline_mib, added, loss)


def draw_adapter(model: PreTrainedModel, *, seed: int) -> None:
    """Give a new adapter numbers of which none is 0: as PEFT makes it, it changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            drawn = nn.init.normal_(torch.empty(parameter.shape), std=DRAWN_STD, generator=generator)
            parameter.data.copy_(drawn)


def both_sides(base: Base, config: Config, rows: Rows, *, steps: int) -> dict[str, Side]:
    """Both sides one after the other, each in its own process.

    Raises:
        RuntimeError: they do not compute the same loss.
    """
    sides: dict[str, Side] = {}
    for name in (OURS, TRL):
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
            side = sides[name] = pool.submit(measure_sft, name, base, config, rows, steps=steps).result()
        print(f"{name}: {median(side.cpu):.1f} CPU s a step, {side.added_mib:.0f} MiB added", flush=True)
    if abs(sides[OURS].loss - sides[TRL].loss) > LOSS_GOAL:
        raise RuntimeError(f"loss of one batch: ours {sides[OURS].loss}, TRL {sides[TRL].loss}")
    return sides


def rows_of(survey: Survey, base: Base, config: Config) -> tuple[Rows, Rows]:
    """Training and held-out questions, each shuffled, with the answer that SFT would teach of the groups' own votes.

    Questions that are too long, or whose answer is, are left out.
    """
    by_id = {question.question_id: question for question in survey.questions}
    split = split_questions(survey.questions, test_fraction=config.data.test_fraction, seed=config.seed)
    rng = np.random.default_rng(child_seed(config.seed, "benchmark"))

    def rows(ids: Sequence[str]) -> Rows:
        found = []
        for question in (by_id[question_id] for question_id in rng.permutation(ids)):
            option_1K = np.ones((1, len(question.options)), dtype=bool)
            given = [mine[question.question_id] for mine in survey.answers.values() if question.question_id in mine]
            votes_G1K = np.stack([votes.cast(answer_K[None], option_1K, kind="mode") for answer_K in given])
            scores_1K = sft.sft_targets(votes_G1K, option_1K, target=config.sft.target)
            (answer,) = sft.answer_texts(config, scores_1K, option_1K)
            prompt, taught = base.prompt_ids(config, question), len(completion(base, answer))
            if taught <= config.rollout.response_length and len(prompt) + taught <= config.policy.max_sequence_length:
                found.append((prompt, answer))
        return found

    return rows(split.train), rows(split.test)


def completion(base: Base, answer: str) -> list[int]:
    """An answer's tokens, with the one that ends it."""
    return [*base.tokenizer(answer, add_special_tokens=False)["input_ids"], base.end_id]


def prepared(
    model: str, prompt_style: str, seed: int, surveys: Path | None, overrides: list[str] | None, **keys: Scalar
) -> tuple[Config, Base, Rows, Rows]:
    """The config, the base, and the rows of GlobalQA with the answers of the paper's eight countries."""
    torch.set_num_threads(1)
    given: dict[str, Scalar] = {"model": model, "policy.prompt-style": prompt_style, "seed": seed, **keys}
    config = with_dtype(Config.load({**KEYS, **given, **dict(map(parse_override, overrides or []))}))
    try:
        survey = read_survey(survey_file("globalqa", surveys), groups=SEEN_COUNTRIES, refusals="drop")
    except UserError as error:
        print(f"{error}; the generated survey stands in for it")
        survey = generate(seed=seed)
    base = prepare(config, survey.questions)
    return config, base, *rows_of(survey, base, config)


def needed(rows: Rows, number: int) -> Rows:
    """The first so many rows, from the start again where there are fewer."""
    return list(itertools.islice(itertools.cycle(rows), number))


def sft_table(own: Side, trl: Side) -> str:
    """Markdown: both sides of the step."""
    rows = [
        [name, *(f"{value:{form}}" for value in pair), f"{pair[0] / pair[1]:.2f}", goal]
        for name, pair, form, goal in (
            ("CPU s a step", (median(own.cpu), median(trl.cpu)), ".1f", f"at most {CPU_GOAL}"),
            ("MiB added", (own.added_mib, trl.added_mib), ".0f", f"at most {MEMORY_GOAL}"),
            ("MiB before", (own.baseline_mib, trl.baseline_mib), ".0f", ""),
        )
    ]
    apart = [f"{abs(own.loss - trl.loss):.1e} apart", f"at most {LOSS_GOAL:.0e}"]
    rows.append(["loss of one batch", f"{own.loss:.7f}", f"{trl.loss:.7f}", *apart])
    return markdown.table(["", OURS, TRL, "ratio", "goal"], rows) + "\n"


@app.command("sft")
def sft_step(
    model: Model = SMOLLM2_MODEL,
    prompt_style: Style = "full",
    updates: Annotated[int, typer.Option(min=1, help=f"Counted steps a side, after {WARM_UP} to warm up.")] = 2,
    seed: Seed = 0,
    surveys: Surveys = None,
    overrides: Keys = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/sft"),
) -> None:
    """Compare SFT's step with that of TRL's SFTTrainer."""
    config, base, training, _ = prepared(model, prompt_style, seed, surveys, overrides)
    step = config.sft.batch_size * config.sft.gradient_accumulation_steps
    sides = both_sides(base, config, needed(training, (WARM_UP + updates) * step), steps=updates)
    text = sft_table(sides[OURS], sides[TRL])
    save(out, {name: asdict(side) for name, side in sides.items()}, text)
    print(f"{text}\nresults: {out}")


if __name__ == "__main__":
    entry.run(app, call=lambda command: command())
