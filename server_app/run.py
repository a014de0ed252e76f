"""A run's phases in their order: each takes what it needs, writes what it found into the run's folder, and returns it.

join -> pluralllm (while the tiny base is built) -> targets -> votes -> base scores -> sft -> ppo ->
scores -> report

With run.phases = "pluralllm" it is join -> pluralllm -> targets -> report; with "serve" other trainers' answers are
scored before that report; with "sft" PPO, its scores and the policy's folder are left out.

A resumed run goes through them again, but takes what was expensive from its folder: PluralLLM's weights, the SFT model
and PPO's checkpoint.

Axis letters: G groups, Q questions, K options.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from flwr.app import ArrayRecord
from transformers import PreTrainedModel

from appa_flwr import report
from appa_flwr.analysis import aggregation
from appa_flwr.analysis.ceilings import NotSolved
from appa_flwr.analysis.group_differences import generated_differences
from appa_flwr.config import GENERATED_SURVEY, Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import check_cache, replaced_folder, writing
from appa_flwr.protocol import rewards
from appa_flwr.run.cards import Card, GroupSums, SFTCard
from appa_flwr.run.records import SummaryRow
from appa_flwr.run.resume import LAST_PHASE
from appa_flwr.run.run_files import (
    ANSWERS_FOLDER,
    MACHINE,
    SFT_MODEL,
    SUMMARY,
    SURVEY_FILE,
    WEIGHTS_FILE,
)
from appa_flwr.secure.rule_sums import check_config
from appa_flwr.survey.generate import population
from pluralllm import card as cards
from pluralllm.scores import MIN_GROUPS
from server_app import machine, ppo_phase, tracking
from server_app.federation.ask import TooFew
from server_app.federation.catalogue import build_catalogue, keep_survey
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import read_group_keys
from server_app.federation.groups import Groups
from server_app.inputs import PolicyInputs, RunInputs, Taught, ask_votes, policy_inputs
from server_app.models import base as base_models
from server_app.models import sft, sft_checkpoint
from server_app.models.base import Base
from server_app.models.exports import load_policy
from server_app.predictor import phase as pluralllm_phase
from server_app.predictor import pooled_scores
from server_app.predictor.pretraining import Pretraining, initial_weights, pretrain
from server_app.predictor.weights import load_weights, save_weights
from server_app.rows import evaluate, score_baselines
from server_app.run_folder import RunFolder


def run_phases(grid: OverlapGrid, config: Config, folder: RunFolder) -> None:
    """All phases of the config, from the greeting of the groups to the report."""
    survey = keep_survey(config, survey_file := (folder.path / SURVEY_FILE).absolute())
    groups = Groups(
        grid,
        config,
        keys=read_group_keys(config.run.group_keys, expected=config.group_names),
        survey=str(survey_file),
        answers=folder.path / ANSWERS_FOLDER,
    )

    folder.progress(MACHINE, 1, 1, machine.described(folder.path), None)
    folder.progress("survey", 1, 1, survey.about.sentence(), None)
    serving = config.run.phases == "serve"
    with_policy = not serving and config.run.phases != "pluralllm"
    tracking.check(config)
    for rule in filter(None, (config.rule, config.baseline_rule)):
        aggregation.configured(rule, config.appa)  # one of the user's own may be wrong
    rewards.try_out(config.reward_metric, config.task)
    check_config(config)
    if serving:
        from server_app.serve.app import check, serve  # with a web server, which other runs have no use for

        check(config)
    if with_policy:  # before the questions are embedded, which may take minutes
        check_cache()
        base_models.check(config, say=lambda text: folder.progress("base", 1, 1, text, None))
    embedded = folder.timed("embedding", "embedding the questions (cached for later runs)")
    run = RunInputs(config, folder, groups, build_catalogue(config, progress=embedded), survey.about.sentence())
    if config.survey == GENERATED_SURVEY:
        drawn = population(config.data, config.seed)
        try:
            differences = generated_differences(**drawn).sentence(threshold=config.appa.fairness_threshold)
        except NotSolved as error:
            differences = str(error)
        folder.progress("survey", 1, 1, f"the generated population, by JS: {differences}", None)
    start = initial_weights(config)  # before anything runs beside: it draws from torch's one generator
    given = pluralllm_phase.pretrained(config, run.catalogue, start)
    held_out = [run.catalogue.questions[q] for q in np.flatnonzero(run.catalogue.held_out_Q)]
    given_sft = sft_checkpoint.given(config, held_out)
    answered = join(run)

    def make_targets() -> None:
        kept, card = train_predictor(run, start, given, answered)
        write_targets(run, kept.weights, card)

    if with_policy:
        # The tiny base needs no group and PluralLLM's rounds leave the server idle, so they share the time.
        with ThreadPoolExecutor(max_workers=1) as executor:
            building = executor.submit(prepare_base, run)
            make_targets()
            voted = collect_votes(run, needed=given_sft is None)
            with folder.phase("base") as phase:
                base = building.result()
                phase.step(1, 1, f"policy starts from {config.model}")
        align(run, policy_inputs(run, base, voted), given_sft)
    else:
        make_targets()
    if serving:
        serve(run)
    with writing(folder.path):
        path = report.build(folder.path)
    folder.progress("stopped" if serving else LAST_PHASE, 1, 1, str(path), None)  # who serves can go on


def align(run: RunInputs, inputs: PolicyInputs, given_sft: SFTCard | None) -> None:
    """SFT and PPO with their scores, the trivial baselines and ceilings, and the policy's folder."""
    config, folder = run.config, run.folder
    torch.set_num_threads(base_models.threads(config))
    rows = start_policy(run, inputs, given_sft)
    gc.collect()  # the trainer and its model hold each other, and PPO needs the memory
    models = load_policy(config, inputs.base, folder.path / SFT_MODEL)
    before = evaluate(run, "sft", models.policy(), inputs, earlier=rows)
    rows = score_baselines(run, inputs.test_J, majority_QK=inputs.majority_QK, earlier=rows + before.rows)
    if config.run.phases == "sft":
        return
    ppo_phase.align_by_rule(run, models, inputs, before, rows)
    del models  # what follows needs the memory
    if config.baseline_rule not in ("", config.rule):
        ppo_phase.align_by_baseline(run, inputs, before, rows)


def start_policy(run: RunInputs, inputs: PolicyInputs, given: SFTCard | None) -> list[SummaryRow]:
    """The base's scores, and the SFT model in the run's folder: trained here, or that of an earlier session or run.

    With `given`, an earlier run's, there are no scores of the base: they stand in that run.
    """
    folder = run.folder.path / SFT_MODEL
    if folder.exists():
        run.folder.progress("sft", 1, 1, f"resumed: the model is that in {SFT_MODEL}", None)
        return [row for row in SUMMARY.read(run.folder.path) or () if row.method == "base"]
    if given:
        sft_checkpoint.take(run.config, given, inputs.base, folder)
        run.folder.progress("sft", 1, 1, f"the model is that in {run.config.sft.checkpoint}", None)
        return []
    model = base_models.load_model(run.config, inputs.base.source, quantized=False)
    rows = evaluate(run, "base", model, inputs, earlier=[]).rows
    fine_tune(run, model, inputs)
    return rows


def join(run: RunInputs) -> dict[str, int]:
    """Greet the groups and hand out the catalogue; training questions that each group has answered."""
    config, groups, catalogue = run.config, run.groups, run.catalogue
    with run.folder.phase("join") as phase:
        groups.gather(config.group_names, patience=config.run.reply_timeout)
        check_config(config, groups=len(groups.names))
        for name in config.unseen_group_names:  # a misspelt one would train unnoticed
            if name not in groups.names and not config.group_names:
                there = ", ".join(groups.names)
                raise UserError(f'pluralllm.unseen-groups names "{name}", which has not joined; there are {there}')
        answered = groups.send_catalogue(catalogue)
        questions = f"{catalogue.train_Q.sum()} training and {catalogue.held_out_Q.sum()} held-out questions"
        if others := int(catalogue.unanswered_Q.sum()):
            questions += f", {others} that nobody answered"
        answers = ", ".join(f"{name} {count}" for name, count in answered.items())
        withheld = f"; NO SURVEY SCORES FROM {names}" if (names := ", ".join(groups.without("truth"))) else ""
        phase.step(1, 1, f"{questions}; answers by group: {answers}{withheld}")
    return answered


def prepare_base(run: RunInputs) -> Base:
    """The base model, built here if it is the tiny one."""
    torch.set_num_threads(1)
    training = [run.catalogue.questions[q] for q in np.flatnonzero(~run.catalogue.held_out_Q)]
    built = run.folder.timed("base", "building the tiny policy (cached for later runs)")

    def progress(step: int, of: int) -> None:
        if step % max(1, of // 10) == 0:
            built(step, of)

    return base_models.prepare(run.config, training, progress=progress)


def train_predictor(
    run: RunInputs,
    start: ArrayRecord,
    given: tuple[Pretraining, Card] | None,
    answered: Mapping[str, int],
) -> tuple[Pretraining, Card]:
    """Pretrain PluralLLM over the groups, unless its weights are given or kept from an earlier session."""
    path, config = run.folder.path / WEIGHTS_FILE, run.config
    with run.folder.phase("pluralllm") as phase:
        kept = load_weights(path, start)
        if kept is not None:
            phase.step(1, 1, f"resumed: the weights are those in {WEIGHTS_FILE}")
        elif given is not None:
            kept, _ = given
            save_weights(path, kept)
            phase.step(1, 1, f"the weights are those in {config.pluralllm.checkpoint}")
        else:
            if not set(run.groups.present) - set(config.unseen_group_names):
                raise UserError("only unseen groups have joined; PluralLLM needs a group to train on")
            kept = pretrain(
                run.groups, config, start, progress=lambda step, of, loss: phase.step(step, of, f"loss {loss:.4f}")
            )
            save_weights(path, kept)
    return kept, pluralllm_phase.new_card(config, run.catalogue, answered, kept) if given is None else given[1]


def write_targets(run: RunInputs, weights: ArrayRecord, card: Card) -> None:
    """Every group writes its target table; scores of these go into PluralLLM's card."""
    with run.folder.phase("targets") as phase:
        run.groups.send_targets(weights)
        try:
            found = pooled_scores.scores(run.groups, run.catalogue, run.config.unseen_group_names)
        except TooFew:
            phase.step(1, 1, "NO SCORES OF PLURALLLM: too few groups let them leave")
            cards.write(run.folder.path / WEIGHTS_FILE, card)
            return
        found["group_sums"] = _group_sums(run)
        cards.write(run.folder.path / WEIGHTS_FILE, card.model_copy(update=found))
        for part, predictors in found["scores"].items():
            shown = ", ".join(f"{name} {score['js']:.3f}" for name, score in predictors.items())
            phase.step(1, 1, f"JS against survey answers, {part}: {shown}")


def _group_sums(run: RunInputs) -> GroupSums | None:
    """Basis of the mean of the other groups; None in a deployment, or where too few groups train."""
    trained = [g for g, name in enumerate(run.groups.names) if name not in run.config.unseen_group_names]
    if not run.groups.simulated or len(trained) < MIN_GROUPS:
        return None
    answer_GQK = run.survey_answers()[trained][:, run.catalogue.held_out_Q]
    count_Q = len(trained) - np.isnan(answer_GQK).any(axis=2).sum(axis=0)
    return GroupSums(min_groups=MIN_GROUPS, held_out=int((count_Q >= MIN_GROUPS).sum()))


def collect_votes(run: RunInputs, *, needed: bool) -> Taught | None:
    """What the groups' votes come to; None where too few voted and they are `needed` for the majority's row alone."""
    with run.folder.phase("votes") as phase:
        try:
            voted = ask_votes(run)
        except TooFew:
            if needed:
                raise
            phase.step(1, 1, "TOO FEW GROUPS VOTED for a majority; SFT needs none, its model is given")
            return None
        phase.step(1, 1, voted.sentence)
    return voted


def fine_tune(run: RunInputs, model: PreTrainedModel, inputs: PolicyInputs) -> None:
    """SFT of the model into the run's folder."""
    assert inputs.sft_QK is not None  # votes are needed where SFT is
    rows = sft.passes_of_texts(run.config, inputs.sft_QK, run.catalogue.option_QK, inputs.train_J)
    training = [run.catalogue.questions[q] for q in inputs.train_J]
    with run.folder.phase("sft") as phase, replaced_folder(run.folder.path / SFT_MODEL) as beside:
        sft.fine_tune(
            model,
            inputs.base,
            run.config,
            prompts=[inputs.prompts[q] for q, _ in rows],
            answers=[text for _, text in rows],
            folder=beside,
            progress=lambda now, of, loss: phase.step(now, of, f"loss {loss:.4f}"),
        )
        sft_checkpoint.write_card(beside, run.config, inputs.base, training)
