"""GRPO on APPA rewards: TRL's own trainer, taught through the service by the groups of the generated population.

    python -m experiments.grpo --steps 60 --rule appa --seed 0

The groups score against their true distributions, the policy starts from SFT on their votes, and all scores are on
held-out questions, next to the uniform answer and the ceilings. It shows how a trainer that is not ours takes its
rewards by `appa_flwr.trainers.trl`; with real groups `appa serve` stands where `serving` stands here.

Axis letters: G groups, Q questions, J answers, K options.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import transformers
import typer
from datasets import Dataset
from matplotlib.figure import Figure
from transformers import PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from appa_flwr.analysis.alignment import alignment_scores
from appa_flwr.analysis.ceilings import OBJECTIVES, SOLVED_METRICS, shared_answer
from appa_flwr.config import GENERATED_SURVEY, Config, assemble
from appa_flwr.core import markdown
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file
from appa_flwr.protocol import votes, wire
from appa_flwr.report.plots import style
from appa_flwr.run import run_files
from appa_flwr.survey.arrays import as_arrays
from appa_flwr.survey.generate import ground_truth, population
from appa_flwr.trainers.trl import RemoteGroupRewards
from client_app import scoring
from experiments import entry
from server_app import evaluation
from server_app.federation.answers import Answers
from server_app.federation.catalogue import build_catalogue
from server_app.models import sft
from server_app.models.base import Base, load_model, prepare, with_dtype
from server_app.models.exports import merged
from server_app.serve.phase import serving

FloatArray = npt.NDArray[np.float64]

COMPLETIONS_PER_QUESTION = 8
# GRPO takes one step a batch where our PPO takes eight; and here groups score against answers, not predictions
DEFAULTS = (
    "ppo.learning-rate=0.0005",
    "data.unanswered=leave",
    "sft.target=smoothed-votes",
    "sft.rounding=nearest",
    "sft.steps=200",
    "sft.batch-size=8",
    "sft.learning-rate=0.001",
    "rollout.batch-size=96",
    "rollout.answers-per-question=1",
    "ppo.baseline=value",
)
LOGGED = "group_reward/"  # what the reward function logs, as the trainer calls it
OF_GROUP = f"{LOGGED}group/"
WORDS = {"reward": "aggregate", f"{LOGGED}fairness_index": "FI", f"{LOGGED}format_score": "format"}
RESULT, PLOT, POLICY = "grpo.json", "grpo.png", "policy"
TENTH = 10

Say = Callable[[str], None]


@dataclass(frozen=True)
class Score:
    """One method's scores on the held-out questions against the true distributions.

    All in [0, 1]; the format score is None for answers that no model wrote.
    """

    method: str
    avg_as: float
    min_as: float
    fi: float
    format_score: float | None


@dataclass(frozen=True, eq=False)
class LocalGroups:
    """Groups in this process, without Flower: each scores against its table of distributions (G, Q, K)."""

    groups: tuple[str, ...]
    side_GQK: FloatArray
    option_QK: npt.NDArray[np.bool_]
    seconds: Mapping[str, float] = field(default_factory=dict)

    def score(
        self, request: wire.ScoreRequest, *, iteration: int = 0, meanwhile: Callable[[], None] | None = None
    ) -> dict[tuple[str, str], FloatArray]:
        """See `server_app.federation.group_rewards.Groups`."""
        if meanwhile is not None:
            meanwhile()
        found = [scoring.score(request, side_QK, self.option_QK) for side_QK in self.side_GQK]
        return {
            (metric, side): np.stack([of[metric] for of in found])
            for metric in request.metrics
            for side in request.sides
        }


@dataclass(frozen=True, eq=False)
class Setup:
    """The public questions with their prompts, the groups with their true answers, and where the policy starts."""

    config: Config
    catalogue: wire.Catalogue
    target_GQK: FloatArray
    groups: LocalGroups
    base: Base
    prompts: list[list[int]]

    @property
    def train_J(self) -> npt.NDArray[np.int64]:
        """Positions of the training questions."""
        return np.flatnonzero(~self.catalogue.held_out_Q)

    @property
    def test_J(self) -> npt.NDArray[np.int64]:
        """Positions of the held-out questions."""
        return np.flatnonzero(self.catalogue.held_out_Q)


def set_up(config: Config, say: Say) -> Setup:
    """Draw the population, and find or build the base model; `say` gets lines of progress."""
    catalogue = build_catalogue(config)
    _, truth = ground_truth(**population(config.data, config.seed))
    target_GQK, _ = as_arrays(catalogue.questions, truth)

    def building(step: int, of: int) -> None:
        if step % max(1, of // TENTH) == 0:
            say(f"building the tiny policy (cached for later runs): {step}/{of}")

    training = [q for q, held_out in zip(catalogue.questions, catalogue.held_out_Q, strict=True) if not held_out]
    base = prepare(config, training, progress=building)
    prompts = [base.prompt_ids(config, question) for question in catalogue.questions]
    groups = LocalGroups(tuple(truth), target_GQK, catalogue.option_QK)
    return Setup(config, catalogue, target_GQK, groups, base, prompts)


def fine_tuned(setup: Setup, folder: Path, say: Say) -> PreTrainedModel:
    """The policy that GRPO starts from: SFT on the groups' votes, as in a federated run."""
    config, option_QK, train_J = setup.config, setup.catalogue.option_QK, setup.train_J
    votes_GQK = np.stack([votes.cast(t_QK, option_QK, kind=votes.BALLOTS[config.task]) for t_QK in setup.target_GQK])
    taught_QK = sft.sft_targets(votes_GQK, option_QK, target=config.sft.target)
    texts = sft.answer_texts(config, taught_QK, option_QK)
    sft.fine_tune(
        load_model(config, setup.base.source, quantized=False),
        setup.base,
        config,
        prompts=[setup.prompts[q] for q in train_J],
        answers=[texts[q] for q in train_J],
        folder=folder,
        progress=lambda now, of, loss: say(f"SFT step {now}/{of}: loss {loss:.3f}"),
    )
    if config.policy.tuning != "full":
        return merged(config, setup.base, folder)
    return load_model(config, str(folder), quantized=False)


def train(model: PreTrainedModel, setup: Setup, *, steps: int, say: Say) -> list[dict[str, float]]:
    """GRPO on the groups' aggregated rewards; the model is changed in place.

    Returns:
        What the trainer logged, one entry a step; each step takes `rollout.batch-size` new completions.
    """
    config, catalogue = setup.config, setup.catalogue
    questions = [catalogue.questions[q] for q in setup.train_J]
    rows = [{"prompt": setup.base.prompt_text(config, q), "question_id": q.question_id} for q in questions]

    class Report(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                rest = ", ".join(f"{word} {logs[key]:.3f}" for key, word in WORDS.items())
                reward_G = _rewards(logs)
                say(
                    f"GRPO step {state.global_step}/{steps}: reward {np.mean(reward_G):.3f}, worst group "
                    f"{min(reward_G):.3f}, {rest}"
                )

    with (
        tempfile.TemporaryDirectory(prefix="appa-grpo-") as scratch,  # where the trainer saves nothing
        serving(setup.groups, catalogue, config, Path(scratch)) as (url, token),
    ):
        arguments = GRPOConfig(
            output_dir=scratch,
            save_strategy="no",
            max_steps=steps,
            per_device_train_batch_size=config.rollout.batch_size,
            num_generations=COMPLETIONS_PER_QUESTION,
            max_completion_length=config.rollout.response_length,
            temperature=config.rollout.temperature,
            learning_rate=config.ppo.learning_rate,
            lr_scheduler_type=config.ppo.scheduler,
            max_grad_norm=config.ppo.max_grad_norm,
            bf16=config.policy.compute_dtype == "bfloat16",
            gradient_checkpointing=False,
            seed=config.seed,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = GRPOTrainer(
            model,
            RemoteGroupRewards(url, token).group_reward,
            arguments,
            Dataset.from_list(rows),
            processing_class=setup.base.tokenizer,
            callbacks=[Report()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return [line for line in trainer.state.log_history if "reward" in line]


def _rewards(line: Mapping[str, float]) -> list[float]:
    """The groups' mean alignment rewards in a line of the trainer's log."""
    return [value for key, value in line.items() if key.startswith(OF_GROUP)]


def score(method: str, answers: Answers, setup: Setup) -> Score:
    """Scores of answers to the held-out questions."""
    metric = setup.config.reward_metric
    reward_GJ = setup.groups.score(answers.request([metric]))[metric, wire.TARGET_SIDE]
    scores = alignment_scores(reward_GJ)
    written = None if np.isnan(answers.format_score_J).any() else float(answers.format_score_J.mean())
    return Score(method, scores.avg_as, scores.min_as, scores.fairness_index, written)


def reference_scores(setup: Setup) -> list[Score]:
    """The uniform answer and the best shared answers: the scale of a learned score."""
    test_J, option_JK = setup.test_J, setup.catalogue.option_QK[setup.test_J]
    found = {"uniform": option_JK / option_JK.sum(1, keepdims=True)}
    metric = setup.config.reward_metric
    for objective in OBJECTIVES if metric in SOLVED_METRICS else ():
        found[f"ceiling-{objective}"] = shared_answer(
            setup.target_GQK[:, test_J], option_JK, metric=metric, objective=objective
        )
    return [score(name, evaluation.given_answers(test_J, answer_JK), setup) for name, answer_JK in found.items()]


@style.picture
def plot(log: Sequence[Mapping[str, float]], *, title: str) -> Figure:
    """The alignment reward of every step: the groups' mean, and the worst group's.

    Not the aggregated one, since APPA's has another scale in steps in which it falls back to the mean.
    """
    figure = style.figure(4, width=8)
    axes = figure.add_subplot(xlabel="GRPO step", ylabel="alignment reward", title=title)
    steps = [line["step"] for line in log]
    axes.plot(steps, [float(np.mean(_rewards(line))) for line in log], label="mean of the groups")
    axes.plot(steps, [min(_rewards(line)) for line in log], label="worst group")
    axes.legend()
    return figure


def table(scores: Sequence[Score]) -> str:
    """A Markdown table, a row a method."""
    rows = [
        [row.method, *("-" if v is None else f"{v:.3f}" for v in (row.avg_as, row.min_as, row.fi, row.format_score))]
        for row in scores
    ]
    return markdown.table(["method", "Avg AS", "Min AS", "FI", "format"], rows)


def run(config: Config, *, steps: int, out: Path, say: Say = lambda line: print(line, flush=True)) -> list[Score]:
    """Base, SFT, GRPO; write scores, log, plot and policy into `out`, and return the scores.

    Raises:
        UserError: a survey that is not generated, or a batch that does not hold whole sets of completions.
    """
    if config.survey != GENERATED_SURVEY:
        raise UserError("survey: this example knows the generated population only; leave the key out")
    if config.rollout.batch_size % COMPLETIONS_PER_QUESTION:
        raise UserError(
            f"rollout.batch-size = {config.rollout.batch_size}: must be a multiple of {COMPLETIONS_PER_QUESTION}, the "
            "completions of each question"
        )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    setup = set_up(config, say)

    def evaluated(method: str, model: PreTrainedModel) -> Score:
        answers = evaluation.greedy_answers(
            model, setup.base, config, prompts=setup.prompts, question_J=setup.test_J, catalogue=setup.catalogue
        )
        found = score(method, answers, setup)
        say(f"{method}: Avg AS {found.avg_as:.3f}, Min AS {found.min_as:.3f}")
        return found

    before = evaluated("base", load_model(config, setup.base.source, quantized=False))
    model = fine_tuned(setup, out / "sft-model", say)
    start = evaluated("sft", model)
    log = train(model, setup, steps=steps, say=say)
    model.save_pretrained(out / POLICY)
    setup.base.tokenizer.save_pretrained(out / POLICY)
    after = evaluated("grpo", load_model(config, str(out / POLICY), quantized=False))
    scores = [before, start, after, *reference_scores(setup)]
    content = {"config": config.flat(), "steps": steps, "scores": [asdict(row) for row in scores], "log": log}
    run_files.write(out / RESULT, content)
    title = f"GRPO on the rewards of {len(setup.groups.groups)} groups, rule {config.rule}"
    replace_file(out / PLOT, plot(log, title=title))
    return scores


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of GRPO.")] = 20,
    rule: Annotated[str, typer.Option(help="How the groups' rewards become one.")] = "appa",
    seed: Annotated[int, typer.Option(help="Seed of population, model and training.")] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("-c", "--config", metavar="KEY=VALUE", help="Another key; repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/grpo"),
) -> None:
    """Train the tiny policy with TRL's GRPO on aggregated group rewards."""
    keys = [*DEFAULTS, *(overrides or []), f"rule={rule}", f"seed={seed}"]
    scores = run(with_dtype(assemble(None, keys, folder=Path.cwd())), steps=steps, out=out)
    print(f"\n{table(scores)}\n\n{out / RESULT}, {out / PLOT}, {out / POLICY}")


if __name__ == "__main__":
    entry.run(main)
