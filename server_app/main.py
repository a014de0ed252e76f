"""The server's side: a Flower ServerApp that takes a run through its phases.

join -> pluralllm (while the tiny base is built) -> targets -> votes -> base scores -> sft -> ppo -> scores -> report

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

from appa_flwr import aggregation, report, wire
from appa_flwr.config import TINY_MODEL, Config, split_names
from appa_flwr.errors import UserError
from appa_flwr.rewards import metrics_of
from appa_flwr.seeds import child_seed
from server_app import base as base_models
from server_app import evaluation, sft, tiny
from server_app.base import Base
from server_app.federation import Federation
from server_app.grid import PromptGrid
from server_app.policy import FullModels, LoraModels, PolicyModels
from server_app.ppo_engine import PPOEngine, PPOSettings
from server_app.pretraining import initial_weights, pretrain
from server_app.questions import build_catalogue
from server_app.run_folder import RunFolder, replaced_folder
from server_app.strategy import AppaStrategy, QuestionOrder, RewardSettings

NUM_EXAMPLES = 12
SFT_MODEL, POLICY = "sft-model", "policy"

app = ServerApp()
log = logging.getLogger("appa.server")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run every phase; a user's mistake ends as one line in error.txt and as the run's failure.

    It leaves as an exception: a simulation that ends by SystemExit counts as completed for Flower.
    """
    flat = {k: v for k, v in context.run_config.items() if isinstance(v, bool | int | float | str)}
    config = Config.load(flat).named(datetime.now())
    folder = RunFolder(config)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        Run(PromptGrid(grid), config, folder).everything()
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

    def __init__(self, grid: PromptGrid, config: Config, folder: RunFolder) -> None:
        self._config, self._folder, self._grid = config, folder, grid
        self._federation = Federation(grid, min_groups=config.min_groups, timeout=config.reply_timeout)
        self._catalogue = build_catalogue(config)
        self._test_J = np.flatnonzero(~self._catalogue.train_Q)
        self._train_J = np.flatnonzero(self._catalogue.train_Q)
        self._metrics = metrics_of(config.task)
        self._rows: list[evaluation.Row] = []

    def everything(self) -> None:
        """All phases, from the roll call to the report."""
        self._join()
        start = initial_weights(self._config)  # before anything runs beside: it draws from torch's one generator
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
            sft.sft_targets(votes_GQK, option_QK, target=self._config.sft_target),
        )
        model = base_models.load_model(self._config, base.source, quantized=False)
        self._evaluate("base", model, material)
        self._fine_tune(model, material)
        started = base_models.load_model(
            self._config, str(self._folder.path / SFT_MODEL), quantized=self._config.quantization != "none"
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
            phase.step(1, 1, "uniform, majority" + (", ceilings" if self._config.ceilings else ""))
        self._save_policy(models, base)
        path = report.build(self._folder.path)
        self._folder.progress("report", 1, 1, str(path), None)

    def _join(self) -> None:
        config = self._config
        with self._folder.phase("join") as phase:
            self._federation.gather(config.group_names, patience=config.join_timeout)
            answered = self._federation.send_catalogue(self._catalogue)
            lost = [name for name in self._federation.groups if name not in answered]
            if config.strict and lost:
                raise UserError(
                    f"strict = true, and the answers of {', '.join(lost)} cannot be used; their logs say why"
                )
            questions = f"{len(self._train_J)} training and {len(self._test_J)} held-out questions"
            answers = ", ".join(f"{name} {count}" for name, count in answered.items())
            phase.step(1, 1, f"{questions}; answers by group: {answers}")

    def _prepare_base(self) -> Base:
        torch.set_num_threads(1)
        training = [self._catalogue.questions[q] for q in self._train_J]
        return base_models.prepare(self._config, training, progress=self._base_progress)

    def _base_progress(self, step: int, of: int) -> None:
        if step % max(1, of // 10) == 0:
            self._folder.progress("base", step, of, "building the tiny policy (cached for later runs)", None)

    def _pretrain(self, start: ArrayRecord) -> ArrayRecord:
        with self._folder.phase("pluralllm") as phase:
            weights, losses = pretrain(
                self._grid,
                self._config,
                start,
                num_nodes=self._federation.num_nodes,
                progress=lambda step, of, loss: phase.step(step, of, f"loss {loss:.4f}"),
            )
        self._losses = losses
        return weights

    def _write_targets(self, weights: ArrayRecord) -> None:
        with self._folder.phase("targets") as phase:
            replies = self._federation.send_targets(weights)
            mean = {
                metric: float(np.nanmean([r.rewards[metric, wire.TRUTH_SIDE] for r in replies.values()]))
                for metric in ("js", "js-distance")
            }
            self._folder.write_json(
                "pluralllm.json",
                {
                    "rounds": [{"round": i + 1, "loss": loss} for i, loss in enumerate(self._losses)],
                    "scores": {"predictor": {"js": mean["js"], "js_distance": mean["js-distance"]}},
                },
            )
            phase.step(1, 1, f"predictions against held-out survey answers: JS {mean['js']:.3f}")

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
        """Keep to the questions whose prompt and answer fit `max-sequence-length` (SFT table)."""
        config = self._config
        fits_Q = np.array([len(ids) + config.response_length <= config.max_sequence_length for ids in prompts])
        if not fits_Q[self._train_J].any() or not fits_Q[self._test_J].any():
            raise UserError(
                f"max-sequence-length = {config.max_sequence_length} leaves no training or no held-out question: the "
                f"shortest prompt has {min(map(len, prompts))} tokens and response-length is {config.response_length}"
            )
        if not fits_Q.all():
            log.warning("%d questions are left out: longer than max-sequence-length", int((~fits_Q).sum()))
        self._train_J, self._test_J = self._train_J[fits_Q[self._train_J]], self._test_J[fits_Q[self._test_J]]

    def _fine_tune(self, model: PreTrainedModel, material: Material) -> None:
        step = tiny.ANSWER_STEP if self._config.model == TINY_MODEL else sft.STEP
        with self._folder.phase("sft") as phase:
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
        if config.tuning == "full":
            return FullModels(model)
        return LoraModels(
            model,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            policy_targets=list(split_names(config.policy_lora_targets)),
            value_targets=list(split_names(config.value_lora_targets)),
        )

    def _ppo(self, models: PolicyModels, material: Material) -> None:
        config = self._config
        iterations = config.iterations(len(self._train_J))
        engine = PPOEngine(
            models,
            PPOSettings.of(config, num_iterations=iterations),
            stop_ids=material.base.stop_ids,
            pad_id=material.base.pad_id,
            seed=child_seed(config.seed, "ppo"),
        )
        with self._folder.phase("ppo") as phase:

            def report_iteration(line: dict[str, Any]) -> None:
                self._folder.append_json("metrics.jsonl", line)
                worst = min((r for r in line["rewards"].values() if r is not None), default=float("nan"))
                rewards = [r for r in line["rewards"].values() if r is not None]
                phase.step(
                    line["iteration"],
                    iterations,
                    f"reward {np.mean(rewards):.3f}, worst group {worst:.3f}, FI {line['fairness_index']:.4f}, "
                    f"format {line['format_score']:.3f}, KL {line['kl']:.2f}",
                )

            strategy = AppaStrategy(
                self._federation,
                engine,
                make_rule(config),
                base=material.base,
                catalogue=self._catalogue,
                prompts=material.prompts,
                order=QuestionOrder(self._train_J, child_seed(config.seed, "questions")),
                batch_size=config.rollout_batch_size,
                num_iterations=iterations,
                settings=RewardSettings(
                    config.task,
                    config.reward_metric,
                    config.alignment_weight,
                    config.context_resampling == "every-iteration",
                ),
                report=report_iteration,
            )
            strategy.start(self._grid, ArrayRecord(), num_rounds=iterations, timeout=config.reply_timeout)

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


def make_rule(config: Config) -> aggregation.Rule:
    """The aggregation rule with the parameters the config has for it."""
    params: dict[str, float] = {"min_mean": config.min_mean, "max_cov": config.max_cov, "ema_decay": config.ema_decay}
    if config.rule == "appa":
        params |= {"temperature": config.softmax_temperature, "fairness_threshold": config.fairness_threshold}
    if config.rule == "alpha":
        params |= {"alpha": config.alpha}
    return aggregation.make(config.rule, **params)
