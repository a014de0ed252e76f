"""What SFT's step costs next to TRL's, and how much of what SFT learned reaches PPO: a real model, one thread.

    python -m experiments.benchmarks.sft

Where the GlobalQA file is not at hand, the generated survey stands in for it, and a line says so.

Axis letters: G groups, K options.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from peft import PeftModel
from transformers import PreTrainedModel

from appa_flwr import markdown, votes
from appa_flwr.config import SMOLLM2_MODEL, Config, Scalar, parse_override
from appa_flwr.errors import UserError
from appa_flwr.files import replace_file
from appa_flwr.run import files
from appa_flwr.seeds import child_seed
from appa_flwr.survey.generate import generate
from appa_flwr.survey.read import read_survey
from appa_flwr.survey.split import split_questions
from appa_flwr.survey.types import Survey
from experiments import entry
from experiments.benchmarks.sft_sides import OURS, TRL, WARM_UP, Rows, Side, in_own_process
from experiments.pluralllm.protocol import SEEN_COUNTRIES, SURVEYS, survey_file
from server_app.engine.passes import logprob_pass
from server_app.engine.prefix import common_length, why_not, window_of
from server_app.engine.sequences import Sequences, pad_prompts, split_prompts
from server_app.models import sft
from server_app.models.base import Base, load_model, prepare, with_dtype
from server_app.models.exports import load_policy

KEYS: dict[str, Scalar] = {
    "policy.tuning": "lora",
    "policy.compute-dtype": "auto",
    "ppo.micro-batch-tokens": 600,  # as in preset smollm2
    "sft.target": "majority",
    "sft.answer-step": 0.01,
    "sft.learning-rate": 5e-6,
}
"""What differs from our run config's defaults: the paper's SFT, in the number format the machine computes in."""

EXACT = "base and adapter in float32"
KINDS = (
    EXACT,
    "merged into bfloat16 weights",
    "merged, then packed to nf4",
    "adapter apart, base in bfloat16",
    "adapter apart, base in nf4",
)
CPU_GOAL, MEMORY_GOAL, LOSS_GOAL, GAIN_GOAL = 0.25, 0.25, 1e-5, 0.75

Say = Callable[[str], None]


@dataclass(frozen=True)
class HandOver:
    """Held-out loss (mean -log p of the answers' tokens, nats) of the base and of the tuned model, stored alike."""

    kind: str
    base: float
    tuned: float

    @property
    def gain(self) -> float:
        """What SFT took off the loss."""
        return self.base - self.tuned


@dataclass(frozen=True)
class Result:
    """Both sides of the step, and the hand-over in the order of `KINDS`; empty where not asked for."""

    sides: dict[str, Side]
    hand_over: list[HandOver]


def read(folder: Path | None, *, seed: int) -> Survey:
    """GlobalQA's questions with the answers of the paper's eight countries, or the generated survey."""
    try:
        return read_survey(survey_file("globalqa", folder), groups=SEEN_COUNTRIES, refusals="drop")
    except UserError as error:
        print(f"{error}; the generated survey stands in for it")
        return generate(seed=seed)


def rows_of(survey: Survey, base: Base, config: Config) -> tuple[Rows, Rows]:
    """Training and held-out questions, each shuffled, with the answer that SFT would teach of the groups' own votes.

    Questions that are too long, or whose answer is, are left out.
    """
    by_id = {question.question_id: question for question in survey.questions}
    split = split_questions(survey.questions, test_fraction=config.data.test_fraction, seed=config.seed)
    rng = np.random.default_rng(child_seed(config.seed, "benchmark"))
    found = []
    for ids in (split.train, split.test):
        prompts, answers = [], []
        for question_id in rng.permutation(ids):
            question = by_id[question_id]
            option_1K = np.ones((1, len(question.options)), dtype=bool)
            votes_G1K = np.stack(
                [
                    votes.cast(mine[question_id][None], option_1K, kind="mode")
                    for mine in survey.answers.values()
                    if question_id in mine
                ]
            )
            scores_1K = sft.sft_targets(votes_G1K, option_1K, target=config.sft.target)
            (answer,) = sft.answer_texts(config, scores_1K, option_1K)
            prompt, taught = base.prompt_ids(config, question), len(completion(base, answer))
            if taught <= config.rollout.response_length and len(prompt) + taught <= config.policy.max_sequence_length:
                prompts.append(prompt)
                answers.append(answer)
        found.append(Rows(prompts, answers))
    return found[0], found[1]


def completion(base: Base, answer: str) -> list[int]:
    """An answer's tokens, with the one that ends it."""
    return [*base.tokenizer(answer, add_special_tokens=False)["input_ids"], base.end_id]


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, base: Base, rows: Rows, *, tokens: int) -> float:
    """Mean -log p of the answers' tokens, nats, by the engine's pass with at most `tokens` tokens at once."""
    answers = [completion(base, answer) for answer in rows.answers]
    longest = max(len(p) + len(a) for p, a in zip(rows.prompts, answers, strict=True))
    shares = why_not(model) is None
    shared = common_length(rows.prompts, window=window_of(model), longest=longest) if shares else 0
    batch = Sequences(
        *split_prompts(rows.prompts, shared=shared, pad_id=base.pad_id, device=model.device),
        *pad_prompts(answers, pad_id=base.pad_id, device=model.device),
    )
    total = 0.0
    with logprob_pass(model, batch.prefix_C, temperature=1.0) as logprobs:
        for rows_J in batch.micro_batches(torch.arange(len(answers), device=model.device), tokens=tokens):
            total -= float(logprobs(batch.rows(rows_J)).double().sum())
    return total / sum(map(len, answers))


def hand_over(base: Base, config: Config, trained: Rows, held_out: Rows, *, say: Say) -> list[HandOver]:
    """Fine-tune, then hold what came of it against the base in every way that it can be stored."""
    exact, half, packed = (
        Config.load({**config.flat(), "policy.compute-dtype": dtype, "policy.quantization": quantization})
        for dtype, quantization in (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "nf4"))
    )

    def plain(given: Config, source: str = base.source) -> PreTrainedModel:
        return load_model(given, source, quantized=given.policy.quantization == "nf4")

    with tempfile.TemporaryDirectory(prefix="appa-sft-") as scratch:
        adapter, merged = Path(scratch) / "adapter", Path(scratch) / "merged"
        sft.fine_tune(
            plain(config),
            base,
            config,
            prompts=trained.prompts,
            answers=trained.answers,
            folder=adapter,
            progress=lambda step, of, loss: say(f"SFT step {step} of {of}: loss {loss:.4f}"),
        )
        PeftModel.from_pretrained(plain(half), str(adapter)).merge_and_unload().save_pretrained(merged)
        ways: list[tuple[Config, Callable[[], PreTrainedModel]]] = [
            (exact, lambda: PeftModel.from_pretrained(plain(exact), str(adapter)).get_base_model()),
            (half, lambda: plain(half, str(merged))),
            (packed, lambda: plain(packed, str(merged))),
            (half, lambda: load_policy(half, base, adapter).policy()),
            (packed, lambda: load_policy(packed, base, adapter).policy()),
        ]

        def loss(model: PreTrainedModel) -> float:
            return held_out_loss(model, base, held_out, tokens=config.ppo.micro_batch_tokens)

        before = {id(given): loss(plain(given)) for given in (exact, half, packed)}
        found = []
        for kind, (given, tuned) in zip(KINDS, ways, strict=True):
            found.append(HandOver(kind, before[id(given)], loss(tuned())))
            say(f"{kind}: {found[-1].base:.4f} to {found[-1].tuned:.4f}")
    return found


def table(result: Result) -> str:
    """Markdown: what was measured of the two."""
    tables = []
    if result.sides:
        own, trl = result.sides[OURS], result.sides[TRL]
        apart = [f"{abs(own.loss - trl.loss):.1e} apart", f"at most {LOSS_GOAL:.0e}"]
        rows = [
            ["CPU s a step", *_both(median(own.cpu), median(trl.cpu), ".1f"), f"at most {CPU_GOAL}"],
            ["MiB added", *_both(own.added_mib, trl.added_mib, ".0f"), f"at most {MEMORY_GOAL}"],
            ["MiB before", *_both(own.baseline_mib, trl.baseline_mib, ".0f"), ""],
            ["loss of one batch", f"{own.loss:.7f}", f"{trl.loss:.7f}", *apart],
        ]
        tables.append(markdown.table(["", OURS, TRL, "ratio", "goal"], rows))
    if result.hand_over:
        whole = result.hand_over[0].gain
        kept = [
            [w.kind, f"{w.base:.4f}", f"{w.tuned:.4f}", f"{w.gain:.4f}", f"{w.gain / whole:.0%}"]
            for w in result.hand_over
        ]
        head = ["hand-over", "base", "after SFT", "gained", f"kept (goal: {GAIN_GOAL:.0%})"]
        tables.append(markdown.table(head, kept))
    return "\n\n".join(tables) + "\n"


def _both(own: float, trl: float, form: str) -> list[str]:
    return [f"{own:{form}}", f"{trl:{form}}", f"{own / trl:.2f}"]


def measure_sides(base: Base, config: Config, rows: Rows, *, steps: int, say: Say) -> dict[str, Side]:
    """Both sides one after the other, each in its own process.

    Raises:
        RuntimeError: they do not compute the same loss.
    """
    sides: dict[str, Side] = {}
    for name in (OURS, TRL):
        side = sides[name] = in_own_process(name, base, config, rows, steps=steps)
        say(f"{name}: {median(side.cpu):.1f} CPU s a step, {side.added_mib:.0f} MiB added")
    if abs(sides[OURS].loss - sides[TRL].loss) > LOSS_GOAL:
        raise RuntimeError(f"loss of one batch: ours {sides[OURS].loss}, TRL {sides[TRL].loss}")
    return sides


def needed(rows: Rows, number: int) -> Rows:
    """The first `number` rows, from the start again where there are fewer."""
    times = -(-number // len(rows.prompts))
    return Rows([*rows.prompts] * times, [*rows.answers] * times).first(number)


def main(
    model: Annotated[str, typer.Option(help="As the key `model`.")] = SMOLLM2_MODEL,
    prompt_style: Annotated[Literal["full", "counted", "compact"], typer.Option(help="As its key.")] = "full",
    measured: Annotated[int, typer.Option(min=0, help=f"Counted steps a side after {WARM_UP}; 0 = none.")] = 2,
    steps: Annotated[int, typer.Option(min=0, help="Of SFT before the hand-over; 0 = without it.")] = 49,
    questions: Annotated[int, typer.Option(min=1, help="Held-out ones, for the hand-over's loss.")] = 32,
    seed: Annotated[int, typer.Option(help="Of rows, adapters and dropout.")] = 0,
    surveys: Annotated[Path | None, typer.Option(help=f"Folder of the real files; else {SURVEYS}.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("-c", "--config", metavar="KEY=VALUE", help="Any other key; repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/sft"),
) -> None:
    """Measure SFT's step and its hand-over to PPO."""
    torch.set_num_threads(1)
    say = partial(print, flush=True)
    given: dict[str, Scalar] = {"model": model, "policy.prompt-style": prompt_style, "seed": seed, "sft.steps": steps}
    config = with_dtype(Config.load({**KEYS, **given, **dict(map(parse_override, overrides or []))}))
    survey = read(surveys, seed=seed)
    base = prepare(config, survey.questions)
    training, held_out = rows_of(survey, base, config)
    step = config.sft.batch_size * config.sft.gradient_accumulation_steps
    result = Result({}, [])
    if measured:
        rows = needed(training, (WARM_UP + measured) * step)
        result = replace(result, sides=measure_sides(base, config, rows, steps=measured, say=say))
    if steps:
        rows, asked = needed(training, steps * step), held_out.first(questions)
        result = replace(result, hand_over=hand_over(base, config, rows, asked, say=say))
    out.mkdir(parents=True, exist_ok=True)
    files.write(out / "results.json", asdict(result))
    replace_file(out / "results.md", table(result).encode())
    print(table(result))
    print(f"results: {out}")


if __name__ == "__main__":
    entry.run(main)
