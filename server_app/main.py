"""The server's side: a Flower ServerApp that takes a run through its phases.

join -> population -> pluralllm (while the tiny base is built) -> targets -> votes -> base scores -> sft -> ppo ->
scores -> report

With phases = "pluralllm" it is join -> population -> pluralllm -> targets -> report.

A resumed run goes through them again, but takes what was expensive from its folder: PluralLLM's weights, the SFT model
and PPO's checkpoint.

Axis letters: Q questions, K options.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from transformers import PreTrainedModel

from appa_flwr import aggregation, report
from appa_flwr.config import TINY_MODEL, Config, split_names
from appa_flwr.errors import UserError
from appa_flwr.files import writing
from appa_flwr.rewards import metrics_of
from appa_flwr.run.resume import LAST_PHASE, WEIGHTS_FILE
from appa_flwr.seeds import child_seed
from pluralllm import card as cards
from server_app import checkpoint as checkpoints
from server_app import evaluation
from server_app.checkpoint import Checkpoint
from server_app.federation.catalogue import build_catalogue
from server_app.federation.grid import OverlapGrid
from server_app.federation.groups import Federation
from server_app.models import base as base_models
from server_app.models import sft, tiny
from server_app.models.base import Base
from server_app.models.card import model_card
from server_app.models.policy import FullModels, LoraModels, PolicyModels
from server_app.ppo.engine import PPOEngine
from server_app.ppo.strategy import AppaStrategy, QuestionOrder, RewardSettings
from server_app.predictor import phase as pluralllm_phase
from server_app.predictor import scores as pluralllm_scores
from server_app.predictor import sums as population
from server_app.predictor.pretraining import initial_weights, pretrain
from server_app.run_folder import CHECKPOINT_FILE, POLICY, SFT_MODEL, RunFolder, replaced_folder

NUM_EXAMPLES = 12

app = ServerApp()
log = logging.getLogger("appa.server")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run every phase; a user's mistake ends as one line in error.txt and as the run's failure.

    It leaves as an exception: a simulation that ends by SystemExit counts as completed for Flower.
    """
    flat = {k: v for k, v in context.run_config.items() if isinstance(v, bool | int | float | str)}
    config = Config.load(flat).named(datetime.now())
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with RunFolder(config) as folder:
        try:
            Run(OverlapGrid(grid), config, folder).everything()
        except Exception as error:
            folder.fail(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
            raise


@dataclass(frozen=True, eq=False)
class Material:
    """What the phases after pretraining share.

    Attributes:
        base: the starting point.
        prompts: token ids of every question's prompt, by catalogue position.
        majority_QK: the majority's answers, as scores.
        sft_QK: what SFT teaches, as scores.
    """

    base: Base
    prompts: list[list[int]]
    majority_QK: npt.NDArray[np.float64]
    sft_QK: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Evaluated:
    """A policy's answers to the held-out questions, and their mean rewards on the training metric."""

    texts: tuple[str, ...]
    rewards: list[float]


class Run:
    """One run's phases in order; each writes what it found into the run's folder."""

    def __init__(self, grid: OverlapGrid, config: Config, folder: RunFolder) -> None:
        self._config, self._folder, self._grid = config, folder, grid
        self._federation = Federation(
            grid, min_groups=config.federation.min_groups, timeout=config.federation.reply_timeout
        )
        self._catalogue = build_catalogue(config, progress=self._embedding_progress)
        self._test_J = np.flatnonzero(~self._catalogue.train_Q)
        self._train_J = np.flatnonzero(self._catalogue.train_Q)
        self._metrics = metrics_of(config.task)
        self._rows: list[evaluation.Row] = []

    def everything(self) -> None:
        """All phases of the config, from the roll call to the report."""
        if self._config.run.phases == "all":
            base_models.check(self._config)
        start = initial_weights(self._config)  # before anything runs beside: it draws from torch's one generator
        self._given = pluralllm_phase.pretrained(self._config, self._catalogue, start)
        self._join()
        self._share_sums()
        if self._config.run.phases == "all":
            self._align(start)
        else:
            self._write_targets(self._pretrain(start))
        with writing(self._folder.path):
            path = report.build(self._folder.path)
        self._folder.progress(LAST_PHASE, 1, 1, str(path), None)

    def _align(self, start: ArrayRecord) -> None:
        # The tiny base needs no group and PluralLLM's rounds leave the server idle, so they share the time.
        with ThreadPoolExecutor(max_workers=1) as beside:
            building = beside.submit(self._prepare_base)
            weights = self._pretrain(start)
            self._write_targets(weights)
            votes_GQK = self._vote()
            with self._folder.phase("base") as phase:
                base = building.result()
                phase.step(1, 1, f"policy starts from {self._config.model}")
        option_QK = self._catalogue.option_QK
        prompts = [base.prompt_ids(self._config, question) for question in self._catalogue.questions]
        self._leave_out_long(prompts)
        material = Material(
            base,
            prompts,
            sft.sft_targets(votes_GQK, option_QK, target="majority"),
            sft.sft_targets(votes_GQK, option_QK, target=self._config.sft.target),
        )
        model = base_models.load_model(self._config, base.source, quantized=False)
        self._evaluate("base", model, material)
        self._fine_tune(model, material)
        started = base_models.load_model(
            self._config, str(self._folder.path / SFT_MODEL), quantized=self._config.policy.quantization != "none"
        )
        before = self._evaluate("sft", started, material)
        models = self._ppo_models(started)
        self._ppo(models, material)
        after = self._evaluate("ppo", models.policy(), material)
        self._write_examples(before, after)
        with self._folder.phase("baselines") as phase:
            self._rows += evaluation.baseline_rows(
                self._federation,
                self._config,
                self._catalogue,
                question_J=self._test_J,
                majority_QK=material.majority_QK,
            )
            self._folder.write_json("summary.json", self._rows)
            phase.step(1, 1, "uniform, majority" + (", ceilings" if self._config.eval.ceilings else ""))
        self._save_policy(models, base)

    def _join(self) -> None:
        config = self._config
        with self._folder.phase("join") as phase:
            self._federation.gather(config.group_names, patience=config.federation.join_timeout)
            self._check_unseen()
            self._answered = answered = self._federation.send_catalogue(self._catalogue)
            lost = [name for name in self._federation.groups if name not in answered]
            if config.data.strict and lost:
                raise UserError(
                    f"strict = true, and the answers of {', '.join(lost)} cannot be used; their logs say why"
                )
            questions = f"{len(self._train_J)} training and {len(self._test_J)} held-out questions"
            answers = ", ".join(f"{name} {count}" for name, count in answered.items())
            phase.step(1, 1, f"{questions}; answers by group: {answers}")

    def _share_sums(self) -> None:
        with self._folder.phase("population") as phase:
            self._population = population.exchange_sums(
                self._federation, self._config, self._catalogue, progress=phase.step
            )

    def _check_unseen(self) -> None:
        """Refuse a name that would otherwise make a group train unnoticed."""
        groups = self._federation.groups
        for name in self._config.unseen_group_names:
            if name not in groups and not self._config.group_names:
                raise UserError(f'unseen-groups names "{name}", which has not joined; there are {", ".join(groups)}')

    def _prepare_base(self) -> Base:
        torch.set_num_threads(1)
        training = [self._catalogue.questions[q] for q in self._train_J]
        return base_models.prepare(self._config, training, progress=self._base_progress)

    def _embedding_progress(self, done: int, of: int) -> None:
        self._folder.progress("embedding", done, of, "embedding the questions (cached for later runs)", None)

    def _base_progress(self, step: int, of: int) -> None:
        if step % max(1, of // 10) == 0:
            self._folder.progress("base", step, of, "building the tiny policy (cached for later runs)", None)

    def _pretrain(self, start: ArrayRecord) -> ArrayRecord:
        path, config = self._folder.path / WEIGHTS_FILE, self._config
        with self._folder.phase("pluralllm") as phase:
            kept = checkpoints.load_weights(path, start)
            if kept is not None:
                phase.step(1, 1, f"resumed: the weights are those in {WEIGHTS_FILE}")
            elif self._given is not None:
                kept = self._given.pretraining
                checkpoints.save_weights(path, kept)
                phase.step(1, 1, f"the weights are those in {config.pluralllm.checkpoint}")
            else:
                seen = set(self._federation.groups) - set(config.unseen_group_names)
                if not seen:
                    raise UserError("only unseen groups have joined; PluralLLM needs a group to train on")
                kept = pretrain(
                    self._grid,
                    config,
                    start,
                    nodes=self._federation.homes(seen),
                    progress=lambda step, of, loss: phase.step(step, of, f"loss {loss:.4f}"),
                )
                checkpoints.save_weights(path, kept)
                if kept.chosen != config.pluralllm.rounds:
                    log.info(
                        "PluralLLM: the weights are those of round %d, the best on held-out questions", kept.chosen
                    )
        self._card = (
            pluralllm_phase.new_card(config, self._catalogue, self._answered, kept)
            if self._given is None
            else self._given.card
        ).model_copy(update={"population": self._population})
        return kept.weights

    def _write_targets(self, weights: ArrayRecord) -> None:
        with self._folder.phase("targets") as phase:
            replies = self._federation.send_targets(weights)
            found = pluralllm_scores.scores(
                {name: reply.sums for name, reply in replies.items()}, self._config.unseen_group_names
            )
            cards.write(self._folder.path / WEIGHTS_FILE, self._card.model_copy(update=found))
            for part, predictors in found["scores"].items():
                shown = ", ".join(f"{name} {score['js']:.3f}" for name, score in predictors.items())
                phase.step(1, 1, f"JS against survey answers, {part}: {shown}")

    def _vote(self) -> npt.NDArray[np.float64]:
        with self._folder.phase("votes") as phase:
            votes_GQK = self._federation.votes()
            # A predictor that ignores its context answers the same for every group, and nothing else would show it.
            differ = (votes_GQK != votes_GQK[:1]).any((0, 2)).mean()
            phase.step(1, 1, f"{len(votes_GQK)} groups voted; on {differ:.0%} of the questions not all the same")
        return votes_GQK

    def _evaluate(self, name: str, model: PreTrainedModel, material: Material) -> Evaluated:
        with self._folder.phase(f"evaluate {name}") as phase:
            answers = evaluation.greedy_answers(
                model,
                material.base,
                self._config,
                prompts=material.prompts,
                question_J=self._test_J,
                catalogue=self._catalogue,
            )
            # The training metric first: the examples in the report show its rewards.
            metrics = sorted(self._metrics, key=lambda metric: metric != self._config.reward_metric)
            scored = evaluation.score(self._federation, name, answers, metrics=metrics, config=self._config)
            self._rows += scored.rows
            self._folder.write_json("summary.json", self._rows)
            row = scored.rows[0]
            phase.step(
                1,
                1,
                f"Avg AS {row['avg_as']:.3f}, Min AS {row['min_as']:.3f}, FI {row['fi']:.4f}, "
                f"format {row['format_score']:.3f}",
            )
        return Evaluated(answers.texts, scored.reward_J.tolist())

    def _leave_out_long(self, prompts: list[list[int]]) -> None:
        """Keep to the questions whose prompt and answer fit `policy.max-sequence-length` (SFT table)."""
        config = self._config
        fits_Q = np.array(
            [len(ids) + config.rollout.response_length <= config.policy.max_sequence_length for ids in prompts]
        )
        if not fits_Q[self._train_J].any() or not fits_Q[self._test_J].any():
            raise UserError(
                f"policy.max-sequence-length = {config.policy.max_sequence_length} leaves no training or no held-out "
                f"question: the shortest prompt has {min(map(len, prompts))} tokens and rollout.response-length is "
                f"{config.rollout.response_length}"
            )
        if not fits_Q.all():
            log.warning("%d questions are left out: longer than policy.max-sequence-length", int((~fits_Q).sum()))
        self._train_J, self._test_J = self._train_J[fits_Q[self._train_J]], self._test_J[fits_Q[self._test_J]]

    def _fine_tune(self, model: PreTrainedModel, material: Material) -> None:
        step = tiny.ANSWER_STEP if self._config.model == TINY_MODEL else sft.STEP
        with self._folder.phase("sft") as phase:
            if (self._folder.path / SFT_MODEL).exists():
                phase.step(1, 1, f"resumed: the model is that in {SFT_MODEL}")
                return
            texts = sft.answer_texts(self._config, material.sft_QK, self._catalogue.option_QK, step=step)
            sft.fine_tune(
                model,
                material.base,
                self._config,
                prompts=[material.prompts[q] for q in self._train_J],
                answers=[texts[q] for q in self._train_J],
                folder=self._folder.path / SFT_MODEL,
                progress=lambda now, of, loss: phase.step(now, of, f"loss {loss:.4f}"),
            )

    def _ppo_models(self, model: PreTrainedModel) -> PolicyModels:
        config = self._config
        # New adapters draw from the one global generator, which stands elsewhere in a resumed run.
        torch.manual_seed(child_seed(config.seed, "adapters"))
        if config.ppo.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.policy.tuning == "full":
            return FullModels(model)
        return LoraModels(
            model,
            rank=config.lora.rank,
            alpha=config.lora.alpha,
            policy_targets=list(split_names(config.lora.policy_targets)),
            value_targets=list(split_names(config.lora.value_targets)),
        )

    def _ppo(self, models: PolicyModels, material: Material) -> None:
        config = self._config
        iterations = config.iterations(len(self._train_J))
        engine = PPOEngine(
            models,
            config.ppo,
            config.rollout,
            num_iterations=iterations,
            stop_ids=material.base.stop_ids,
            pad_id=material.base.pad_id,
            seed=child_seed(config.seed, "ppo"),
        )
        path = self._folder.path / CHECKPOINT_FILE
        kept = checkpoints.load(path)
        order = QuestionOrder(self._train_J, child_seed(config.seed, "questions"))
        done = 0
        if kept is not None:
            done = kept.iteration
            try:
                engine.restore(kept.engine)
            except (ValueError, KeyError, RuntimeError) as error:
                raise UserError(f"{path}: does not fit this run's models ({error})") from error
            order.take(done * config.rollout.batch_size)
        self._folder.keep_iterations(done)
        groups = self._federation.groups
        with self._folder.phase("ppo", done=done) as phase:
            if done:
                phase.step(done, iterations, f"resumed at iteration {done}")

            def report_iteration(line: dict[str, Any]) -> None:
                self._folder.append_json("metrics.jsonl", line)
                worst = min((r for r in line["rewards"].values() if r is not None), default=float("nan"))
                rewards = [r for r in line["rewards"].values() if r is not None]
                phase.step(
                    line["iteration"],
                    iterations,
                    f"reward {np.mean(rewards):.3f}, worst group {worst:.3f}, FI {line['fairness_index']:.4f}, "
                    f"format {line['format_score']:.3f}, KL {line['kl']:.2f}, "
                    f"waited {line['seconds']['federation_wait']:.2f} s",
                )

            def save(iteration: int, rule: aggregation.State) -> None:
                every = config.run.checkpoint_every
                if every and (iteration % every == 0 or iteration == iterations):
                    checkpoints.save(path, Checkpoint.of(iteration, groups, rule, engine.state()))
                    phase.save_seconds()

            strategy = AppaStrategy(
                self._federation,
                engine,
                make_rule(config),
                base=material.base,
                catalogue=self._catalogue,
                prompts=material.prompts,
                order=order,
                batch_size=config.rollout.batch_size,
                num_iterations=iterations,
                settings=RewardSettings(
                    config.task,
                    config.reward_metric,
                    config.appa.alignment_weight,
                    config.pluralllm.context_resampling == "every-iteration",
                ),
                report=report_iteration,
                checkpoint=save,
                done=done,
                state=None if kept is None else kept.rule_state(groups),
            )
            strategy.start(
                self._grid, ArrayRecord(), num_rounds=iterations - done, timeout=config.federation.reply_timeout
            )

    def _write_examples(self, before: Evaluated, after: Evaluated) -> None:
        examples = []
        for j, question_index in enumerate(self._test_J[:NUM_EXAMPLES]):
            question = self._catalogue.questions[question_index]
            examples.append(
                {
                    "question": question.text,
                    "options": list(question.options),
                    "sft": before.texts[j],
                    "ppo": after.texts[j],
                    "mean_reward": after.rewards[j],
                }
            )
        self._folder.write_json("examples.json", examples)

    def _save_policy(self, models: PolicyModels, base: Base) -> None:
        with replaced_folder(self._folder.path / POLICY) as beside:
            models.save_policy(beside)
            base.tokenizer.save_pretrained(beside)
            card = model_card(self._config, self._rows, self._federation.groups)
            (beside / "README.md").write_text(card)


def make_rule(config: Config) -> aggregation.Rule:
    """The aggregation rule with the parameters the config has for it."""
    params = {name: getattr(config.appa, name) for name in aggregation.parameters(config.rule)}
    return aggregation.make(config.rule, **params)
