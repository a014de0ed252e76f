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
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, RecordDict
from transformers import PreTrainedModel

from appa_flwr import report
from appa_flwr.analysis import aggregation
from appa_flwr.analysis.ceilings import NotSolved
from appa_flwr.analysis.group_differences import generated_differences
from appa_flwr.config import GENERATED_SURVEY, Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import check_cache, replaced_folder, writing
from appa_flwr.protocol import rewards, sum_messages, wire
from appa_flwr.run.cards import Card, GroupSums, SFTCard
from appa_flwr.run.records import SummaryRow
from appa_flwr.run.resume import LAST_PHASE
from appa_flwr.run.run_files import (
    MACHINE,
    SFT_MODEL,
    SUMMARY,
    SURVEY_FILE,
    WEIGHTS_FILE,
)
from appa_flwr.secure.allowed import check_config
from appa_flwr.secure.summing import TooFew
from appa_flwr.survey.generate import population
from pluralllm import card as cards
from pluralllm.group_mean import MIN_GROUPS
from server_app import machine, ppo_phase, tracking
from server_app.federation.catalogue import build_catalogue, keep_survey
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import read_group_keys
from server_app.federation.groups import Federation
from server_app.federation.secure_sums import SecureSums
from server_app.inputs import PolicyInputs, RunInputs, Taught, policy_inputs, taught
from server_app.models import base as base_models
from server_app.models import sft, sft_checkpoint
from server_app.models.base import Base
from server_app.models.exports import load_policy
from server_app.predictor import phase as pluralllm_phase
from server_app.predictor import pooled_scores
from server_app.predictor.pretraining import Pretraining, initial_weights, pretrain
from server_app.predictor.summed_training import SummedTraining
from server_app.predictor.weights import load_weights, save_weights
from server_app.rows import evaluate, score_baselines
from server_app.run_folder import RunFolder

FloatArray = npt.NDArray[np.float64]


def run_phases(grid: OverlapGrid, config: Config, folder: RunFolder) -> None:
    """All phases of the config, from the roll call to the report."""
    survey = keep_survey(config, survey_file := (folder.path / SURVEY_FILE).absolute())
    federation = Federation(
        grid,
        min_groups=config.run.min_groups,
        timeout=config.run.reply_timeout,
        keys=read_group_keys(config.run.group_keys, expected=config.group_names),
        survey=str(survey_file),
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
    run = RunInputs(config, folder, federation, build_catalogue(config, progress=embedded), survey.about.sentence())
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
    """Call the roll and hand out the catalogue; training questions that each group has answered."""
    config, federation, catalogue = run.config, run.federation, run.catalogue
    with run.folder.phase("join") as phase:
        federation.gather(config.group_names, patience=config.run.reply_timeout)
        for name in config.unseen_group_names:  # a misspelt one would train unnoticed
            if name not in federation.groups and not config.group_names:
                there = ", ".join(federation.groups)
                raise UserError(f'pluralllm.unseen-groups names "{name}", which has not joined; there are {there}')
        answered = federation.send_catalogue(catalogue)
        if config.run.sums == "secure":
            federation.secure = SecureSums(federation, config)
            phase.step(1, 1, federation.secure.start())
        questions = f"{catalogue.train_Q.sum()} training and {catalogue.held_out_Q.sum()} held-out questions"
        if others := int(catalogue.unanswered_Q.sum()):
            questions += f", {others} that nobody answered"
        answers = ", ".join(f"{name} {count}" for name, count in answered.items())
        withheld = f"; NO SURVEY SCORES FROM {names}" if (names := ", ".join(federation.without_truth)) else ""
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
    path, config, federation = run.folder.path / WEIGHTS_FILE, run.config, run.federation
    with run.folder.phase("pluralllm") as phase:
        kept = load_weights(path, start)
        if kept is not None:
            phase.step(1, 1, f"resumed: the weights are those in {WEIGHTS_FILE}")
        elif given is not None:
            kept, _ = given
            save_weights(path, kept)
            phase.step(1, 1, f"the weights are those in {config.pluralllm.checkpoint}")
        else:
            seen = set(federation.present) - set(config.unseen_group_names)
            if not seen:
                raise UserError("only unseen groups have joined; PluralLLM needs a group to train on")
            summed = None if federation.secure is None else SummedTraining(federation.secure, run.catalogue, config)
            kept = pretrain(
                federation.grid,
                config,
                start,
                nodes=federation.nodes_of(seen),
                most={} if summed else _most_answers(run, seen),
                summed=summed,
                progress=lambda step, of, loss: phase.step(step, of, f"loss {loss:.4f}"),
            )
            save_weights(path, kept)
    return kept, pluralllm_phase.new_card(config, run.catalogue, answered, kept) if given is None else given[1]


def _most_answers(run: RunInputs, groups: Collection[str]) -> dict[int, tuple[int, int]]:
    """Node -> most training and held-out answers that its groups among these can have."""
    train_Q, held_out_Q = run.catalogue.train_Q, run.catalogue.held_out_Q
    at_node = Counter(run.federation.nodes_of([name])[0] for name in groups)
    return {node: (count * int(train_Q.sum()), count * int(held_out_Q.sum())) for node, count in at_node.items()}


def write_targets(run: RunInputs, weights: ArrayRecord, card: Card) -> None:
    """Every group writes its target table; the scores that come back go into PluralLLM's card."""
    train_Q, held_out_Q = run.catalogue.train_Q, run.catalogue.held_out_Q
    sizes = {wire.TRAINING_PART: int(train_Q.sum()), wire.HELD_OUT_PART: int(held_out_Q.sum())}
    with run.folder.phase("targets") as phase:
        if (secure := run.federation.secure) is not None:
            run.federation.send_targets(weights, fault=lambda reply: None)
            found = pooled_scores.from_sums(secure, run.catalogue)
        else:
            replies = run.federation.send_targets(weights, fault=lambda reply: pooled_scores.fault(reply.sums, sizes))
            found = pooled_scores.scores(
                {name: reply.sums for name, reply in replies.items()}, run.config.unseen_group_names
            )
        found["group_sums"] = _group_sums(run)
        cards.write(run.folder.path / WEIGHTS_FILE, card.model_copy(update=found))
        for part, predictors in found["scores"].items():
            shown = ", ".join(f"{name} {score['js']:.3f}" for name, score in predictors.items())
            phase.step(1, 1, f"JS against survey answers, {part}: {shown}")


def _group_sums(run: RunInputs) -> GroupSums | None:
    """Basis of the mean of the other groups; None in a deployment, or where too few groups train."""
    totals = run.federation.totals
    if totals is None or len(totals.groups) < MIN_GROUPS:
        return None
    return GroupSums(min_groups=MIN_GROUPS, held_out=int((totals.count_Q >= MIN_GROUPS).sum()))


def collect_votes(run: RunInputs, *, needed: bool) -> Taught | None:
    """What the groups' votes come to; None where too few voted and they are `needed` for the majority's row alone."""
    with run.folder.phase("votes") as phase:
        if (secure := run.federation.secure) is not None:
            if (voted := _summed_votes(run, secure, needed=needed)) is None:
                phase.step(1, 1, "TOO FEW GROUPS VOTED for a majority; SFT needs none, its model is given")
            else:
                phase.step(1, 1, "the groups voted; their sums are known")
            return voted
        votes_GQK = run.federation.votes(needed=needed)
        if votes_GQK is None:
            phase.step(1, 1, "TOO FEW GROUPS VOTED for a majority; SFT needs none, its model is given")
            return None
        # A predictor that ignores its context answers the same for every group, and nothing else would show it.
        differ = (votes_GQK != votes_GQK[:1]).any((0, 2)).mean()
        phase.step(1, 1, f"{len(votes_GQK)} groups voted; on {differ:.0%} of the questions not all the same")
    return taught(run.config, votes_GQK, run.catalogue.option_QK)


def _summed_votes(run: RunInputs, secure: SecureSums, *, needed: bool) -> Taught | None:
    config, option_QK = run.config, run.catalogue.option_QK

    def mean(kind: str) -> tuple[FloatArray, int]:
        summed = secure.total(kind, RecordDict(), {"votes": option_QK.shape})
        return option_QK.shape[1] * summed.mean("votes"), len(summed.groups)

    predicted = config.sft.target == "predicted-mean"
    try:
        mean_QK, number = mean(sum_messages.PREDICTIONS if predicted else sum_messages.VOTES)
        # The most frequent ranking is no sum.
        counted = config.task == "dpa"
        cast_QK, _ = mean(sum_messages.VOTES) if predicted and counted else (mean_QK, 0)
    except TooFew:
        if needed:
            raise
        return None
    return Taught(
        sft.targets_of_mean(mean_QK, option_QK, target=config.sft.target, num_groups=number),
        sft.targets_of_mean(cast_QK, option_QK, target="majority", num_groups=number) if counted else None,
    )


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
