"""Phases of a run, in order. Each phase writes its results into the run's folder.

survey -> rules -> embedding -> join -> pluralllm (while the tiny base is built) -> targets -> votes -> base scores ->
sft -> sft scores -> baselines -> ppo and its scores, by each rule -> report

With run.phases = "pluralllm" the phases are join -> pluralllm -> targets -> report; with "serve" the run scores the
answers of other trainers before the report.

A resumed run repeats all phases, but takes expensive results from its folder: PluralLLM's weights, the SFT model and
PPO's checkpoint.
"""

import gc
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import torch

from appa_flwr import report
from appa_flwr.analysis.rule_choice import check_rules, unread
from appa_flwr.config import Config
from appa_flwr.core.files import replaced_folder, writing
from appa_flwr.core.ports import listening
from appa_flwr.core.text import NAMES, listed
from appa_flwr.protocol import formats
from appa_flwr.run.resume import LAST_PHASE, rule_values
from appa_flwr.run.schema import (
    BY_MEAN,
    NOISE,
    QUESTIONS,
    REPLIES_FOLDER,
    RULE_VALUES,
    SFT_MODEL,
    SUMMARY,
    SURVEY_FILE,
)
from server_app import examples, ppo_phase
from server_app.baselines import score_baselines
from server_app.evaluation import evaluate
from server_app.federation.grid import OverlapGrid
from server_app.federation.group_keys import read_group_keys
from server_app.federation.groups import Groups
from server_app.inputs import PolicyInputs, RunInputs, VoteResult, ask_votes
from server_app.policy import base as base_models
from server_app.policy import sft
from server_app.policy.base import Base
from server_app.policy.models import load_policy
from server_app.predictor import phase as predictor_phase
from server_app.predictor.checkpoint import load
from server_app.predictor.pretraining import initial_weights
from server_app.preflight import WITHOUT_POLICY, check
from server_app.questions import build_catalogue, fitting_questions, keep_survey
from server_app.run_writer import RunWriter


def run_phases(grid: OverlapGrid, config: Config, folder: RunWriter) -> None:
    """Run all phases of the config, from the survey to the report."""
    survey = keep_survey(config, survey_file := (folder.path / SURVEY_FILE).absolute())
    rules = check_rules(config, survey.groups or config.group_names)
    groups = Groups(
        grid,
        config,
        keys=read_group_keys(config.run.group_keys, expected=config.group_names),
        survey=str(survey_file),
        replies=folder.path / REPLIES_FOLDER,
    )
    grid.progress = lambda heard, of, left: folder.progress("replies", heard, of, "nodes have answered", left)
    folder.progress("survey", 1, 1, survey.about.sentence(), None)
    if config.run.phases != "pluralllm":
        folder.write(RULE_VALUES, values := rule_values(config, rules))
        sentences = [f"{name}: {rule.sentence()}" for name, rule in values.items()]
        sentences += [f"NO RULE HERE READS {', '.join(keys)} of the config"] if (keys := unread(config)) else []
        folder.progress("rules", 1, 1, "; ".join(sentences), None)
    if serving := config.run.phases == "serve":
        listening(config.serve.host, config.serve.port).close()
    # Check the base model before the questions are embedded, which may take minutes.
    check(config, say=lambda text: folder.progress("base", 1, 1, text, None))
    embedded = folder.timed("embedding", "embedding the questions")
    own = survey.answers if grid.simulated else {}
    catalogue = build_catalogue(config, survey, progress=embedded)
    run = RunInputs(config, folder, groups, catalogue, survey.about.sentence(), own)
    start = initial_weights(config)  # before other threads start, since it draws from torch's global generator
    file = config.pluralllm.checkpoint
    checkpoint = load(Path(file), config, catalogue, start) if file else None
    # A deployment must name its groups; in a simulation they are the survey's.
    join(run, config.group_names or (sorted(survey.groups) if grid.simulated else ()))
    if config.run.phases in WITHOUT_POLICY:
        predictor_phase.train(run, start, checkpoint)
    else:
        # Building the tiny base needs no group and PluralLLM's rounds leave the server idle, so both run at once.
        stop = Event()
        with ThreadPoolExecutor(max_workers=1) as executor:
            building = executor.submit(prepare_base, run, stop)
            try:
                predictor_phase.train(run, start, checkpoint)
                phase = folder.phase("votes")
                votes = ask_votes(run)
                phase.step(1, 1, votes.sentence)
            except BaseException:
                stop.set()
                raise
            phase = folder.phase("base")
            base = building.result()
            phase.step(1, 1, f"policy starts from {config.model}")
        align(run, policy_inputs(run, base), votes)
    if serving:
        from server_app.serve import app  # imports a web server, which other runs do not need

        app.serve(run)
    note_claims(run)  # of groups that joined late, too
    with writing(folder.path):
        path = report.build(folder.path)
    folder.progress("stopped" if serving else LAST_PHASE, 1, 1, str(path), None)  # a serving run can be resumed


def join(run: RunInputs, expected: Sequence[str]) -> None:
    """Greet the expected groups and send the catalogue."""
    config, groups, catalogue = run.config, run.groups, run.catalogue
    phase = run.folder.phase("join")
    groups.members.gather(expected, patience=config.run.reply_timeout)
    answered = groups.send_catalogue(catalogue)
    questions = f"{catalogue.train_Q.sum()} training and {catalogue.held_out_Q.sum()} held-out questions"
    if others := int(catalogue.unanswered_Q.sum()):
        questions += f", {others} that nobody answered"
    answers = listed([f"{name} {count}" for name, count in answered.items()])
    if len(answered) > NAMES:
        least, middle, most = np.quantile([*answered.values()], (0.0, 0.5, 1.0))
        answers += f"; least {least:.0f}, median {middle:.0f}, most {most:.0f}"
    if withheld := listed(groups.members.without("truth")):
        answers += f"; no scores against survey answers from {withheld}"
    phase.step(1, 1, f"{questions}; answers by group: {answers}")
    note_claims(run)


def note_claims(run: RunInputs) -> None:
    """Write for log and report what the owners say of noise in their answers, and who is predicted by the mean."""
    members = run.groups.members
    for phase, claim in ((NOISE, members.noise()), (BY_MEAN, members.by_mean())):
        if claim:
            run.folder.progress(phase, 1, 1, claim, None)


def prepare_base(run: RunInputs, stop: Event) -> Base:
    """Prepare the base model. The tiny model is built here, and `stop` ends the building after the current step."""
    torch.set_num_threads(1)
    built = run.folder.timed("base", "building the tiny policy (cached for later runs)")

    def progress(step: int, of: int) -> None:
        if stop.is_set():
            raise CancelledError
        if step % max(1, of // 10) == 0:
            built(step, of)

    return base_models.prepare(run.config, run.questions(~run.catalogue.held_out_Q), progress=progress)


def policy_inputs(run: RunInputs, base: Base) -> PolicyInputs:
    """Make the prompts, and choose the questions whose prompt and answer fit."""
    config, catalogue = run.config, run.catalogue
    prompts = [base.prompt_ids(config, question) for question in catalogue.questions]
    sizes_Q = [len(question.options) for question in catalogue.questions]
    by_size = {size: answer_tokens(base, config.task, size) for size in sorted(set(sizes_Q))}
    lengths = {"prompt_tokens_Q": [*map(len, prompts)], "answer_tokens_Q": [by_size[size] for size in sizes_Q]}
    train_J, test_J, counts = fitting_questions(config, catalogue, **lengths)
    run.folder.write(QUESTIONS, counts)
    run.folder.progress("questions", 1, 1, counts.sentence(), None)
    return PolicyInputs(base, prompts, train_J, test_J)


def answer_tokens(base: Base, task: str, num_options: int) -> int:
    """Number of tokens of an answer in the requested format, including the end token; measured on the uniform one."""
    text = formats.answer(task, np.ones(num_options))
    return len(base.tokenizer(text, add_special_tokens=False)["input_ids"]) + 1


def align(run: RunInputs, inputs: PolicyInputs, votes: VoteResult) -> None:
    """Run SFT and score it, score trivial baselines and ceilings, and align a policy by each of the run's rules."""
    config = run.config
    torch.set_num_threads(base_models.threads(config))
    score_and_fine_tune(run, inputs, votes)
    gc.collect()  # trainer and model refer to each other, and the next models need the memory
    sft_model = run.folder.path / SFT_MODEL
    evaluate(run, "sft", load_policy(config, inputs.base, sft_model).policy, inputs)
    score_baselines(run, inputs.test_J, majority_QK=votes.majority_QK)
    examples.add_groups(run, inputs.test_J)
    at_once = ppo_phase.rules_at_once(config)
    for first in range(0, len(config.rules), at_once):
        ppo_phase.align_by(run, config.rules[first : first + at_once], inputs)


def score_and_fine_tune(run: RunInputs, inputs: PolicyInputs, votes: VoteResult) -> None:
    """Score the base model and train the SFT model, unless the run's folder has it; all later scores are removed."""
    folder = run.folder.path / SFT_MODEL
    if folder.exists():
        run.folder.progress("sft", 1, 1, f"resumed: the model is that in {SFT_MODEL}", None)
        run.folder.write(SUMMARY, tuple(row for row in SUMMARY.read(run.folder.path) or () if row.method == "base"))
        return
    packed = run.config.policy.tuning == "qlora"
    model = base_models.load_model(run.config, inputs.base.source, quantized=packed)
    evaluate(run, "base", model, inputs)
    if packed:  # every row is scored on the same base, but SFT trains its adapter on the base as it is
        del model
        model = base_models.load_model(run.config, inputs.base.source, quantized=False)
    texts = sft.passes_of_texts(run.config, votes.sft_QK, run.catalogue.option_QK, inputs.train_J)
    phase = run.folder.phase("sft")
    with replaced_folder(folder) as beside:
        sft.fine_tune(
            model,
            inputs.base,
            run.config,
            prompts=[inputs.prompts[q] for q, _ in texts],
            answers=[text for _, text in texts],
            folder=beside,
            progress=lambda now, of, loss: phase.step(now, of, f"loss {loss:.4f}"),
        )
