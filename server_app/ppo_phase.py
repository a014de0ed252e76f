"""The PPO phase: align a policy by each of the run's rules, from the same SFT model."""

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from flwr.app import ArrayRecord

from appa_flwr import report
from appa_flwr.analysis.rules import State
from appa_flwr.config import TINY_MODEL, Config
from appa_flwr.core.errors import UserError
from appa_flwr.core.files import replace_file, replaced_folder, writing
from appa_flwr.core.seeds import child_seed
from appa_flwr.protocol import formats
from appa_flwr.run import pair_scores, schema
from appa_flwr.run.read import BY
from appa_flwr.run.records import KL_JUMP, PPO, Iteration
from appa_flwr.run.resume import LAST_PHASE, finished, resumable
from appa_flwr.run.schema import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    METRICS_FILE,
    POLICY,
    SFT_MODEL,
    SUMMARY,
    WEIGHTS_FILE,
    rule_folder,
)
from server_app import checkpoint as checkpoints
from server_app import evaluation, flower_quiet
from server_app.checkpoint import Checkpoint
from server_app.inputs import PolicyInputs, RunInputs
from server_app.policy.base import cores
from server_app.policy.model_card import model_card
from server_app.policy.models import PolicyModels, load_policy
from server_app.policy.ppo import PPOEngine
from server_app.questions import question_batches
from server_app.reward_rule import RewardRule
from server_app.run_writer import RunWriter
from server_app.side_by_side import SideBySide
from server_app.strategy import AppaStrategy

MODEL_CARD = "README.md"
CHECKPOINT_EVERY = 10  # iterations
TRAINING_EPOCHS = 5  # passes over the training questions where `ppo.num-iterations` is 0 (PPO table)
# Files that the policies of all rules share, and that the report of each policy shows.
_SHARED = (
    WEIGHTS_FILE,
    *(file.name for file in (schema.CARD, schema.QUESTIONS, schema.RULE_VALUES, schema.EXAMPLES)),
)


def rules_at_once(config: Config) -> int:
    """Number of rules whose policies train at the same time; see `run.rules-at-once`."""
    # Other models use all cores, or a GPU, one after another, and two of them may not fit into memory.
    return config.run.rules_at_once or (cores() if config.model == TINY_MODEL else 1)


def align_by(run: RunInputs, rules: Sequence[str], inputs: PolicyInputs) -> None:
    """Align a policy by each of these rules at the same time; a rule whose run has finished is left out."""
    side_by_side = SideBySide()
    with ExitStack() as opened:
        tasks = []
        for rule in rules:
            if (run_by_rule := opened.enter_context(run_by(run, rule))) is not None:
                run_by_rule = replace(run_by_rule, computing=side_by_side.computing)
                # All models are loaded first, since loading sets torch's default dtype and its random generator.
                models = load_policy(run.config, inputs.base, run.folder.path / SFT_MODEL)
                tasks.append(partial(align, run_by_rule, models, inputs))
        opened.enter_context(flower_quiet())  # Flower's lines count a resumed run's rounds from 1
        if tasks:
            side_by_side.do(tasks)


@contextmanager
def run_by(run: RunInputs, rule: str) -> Iterator[RunInputs | None]:
    """Yield the run that trains a policy by one of the rules; None if that run has finished.

    For the config's `rule` this is the run itself. For each of `baseline-rules` it is a run with its own folder inside
    the run's folder, whose report is built at the end.
    """
    if rule == run.config.rule:
        yield run
        return
    path = run.folder.path / rule_folder(rule)
    if finished(path):
        yield None
        return
    config = resumable(path) if (path / CONFIG_FILE).exists() else baseline_config(run.config, rule, path)
    with RunWriter(config, above=run.folder) as folder:
        with writing(folder.path):
            for name in _SHARED:
                if (run.folder.path / name).exists():
                    shutil.copyfile(run.folder.path / name, folder.path / name)
        scores = pair_scores.read(run.folder.path)
        pair_scores.put(folder.path, scores[scores["method"] != PPO])  # PPO's are of the other rule
        folder.write(SUMMARY, tuple(row for row in SUMMARY.read(run.folder.path) or () if row.method != PPO))
        yield replace(run, config=config, folder=folder)
        folder.progress(LAST_PHASE, 1, 1, str(report.build(folder.path)), None)


def align(run: RunInputs, models: PolicyModels, inputs: PolicyInputs) -> None:
    """Align the SFT model by the run's rule; the policy and its scores go into the run's folder.

    The policy is saved before it is scored, so that it is not lost if too few groups answer then.
    """
    run.folder.log_this_thread()
    train_policy(run, models, inputs)
    question = run.catalogue.questions[inputs.test_J[0]]

    def card() -> str:
        return model_card(
            run.config,
            SUMMARY.read(run.folder.path) or (),
            run.groups.names,
            inputs.base,
            survey=run.origin,
            prompt=formats.prompt(run.config.task, question.text, question.options, style=run.config.prompt_style),
        )

    with replaced_folder(folder := run.folder.path / POLICY) as beside:
        models.save_policy(beside)
        inputs.base.tokenizer.save_pretrained(beside)
        (beside / MODEL_CARD).write_text(card())
    evaluation.evaluate(run, PPO, models.policy, inputs)
    replace_file(folder / MODEL_CARD, card().encode())


def baseline_config(config: Config, rule: str, path: Path) -> Config:
    """Config of the run for one of `baseline-rules`, whose folder lies inside the folder of the main run."""
    return Config.load(
        {
            **config.flat(),
            "rule": rule,
            "baseline-rules": "",
            "run.output-dir": str(path.parent),
            "run-name": path.name,
            "run.resume": False,
            "pluralllm.checkpoint": str(path.parent / WEIGHTS_FILE),
        }
    )


def num_iterations(config: Config, num_train_questions: int) -> int:
    """PPO iterations: `ppo.num-iterations`, or enough for five passes over the questions if that is 0."""
    questions = config.ppo.batch_size // config.ppo.answers_per_question
    passes = math.ceil(TRAINING_EPOCHS * num_train_questions / questions)
    return config.ppo.num_iterations or max(1, passes)


def train_policy(run: RunInputs, models: PolicyModels, inputs: PolicyInputs) -> None:
    """Train the policy by PPO on the groups' rewards, from the checkpoint if there is one."""
    config, folder, rule = run.config, run.folder, RewardRule(run.groups.names, run.config)
    iterations = num_iterations(config, len(inputs.train_J))
    stops, seed = inputs.base.stop_ids, child_seed(config.seed, "ppo")
    engine = PPOEngine(models, config.ppo, num_iterations=iterations, stop_ids=stops, seed=seed)
    path = folder.path / CHECKPOINT_FILE
    done, state = 0, rule.first()
    if (checkpoint := checkpoints.load(path)) is not None:
        try:
            checkpoints.restore(engine, checkpoint.engine)
        except (ValueError, KeyError, RuntimeError) as error:
            raise UserError(f"{path}: does not fit this run's models ({error})") from error
        done, state = checkpoint.iteration, rule.restored(checkpoint.rule)
    batches = islice(question_batches(inputs.train_J, config.ppo, child_seed(config.seed, "questions")), done, None)
    made = folder.keep_iterations(done)
    repeated = [*range(done + 1, made + 1)]
    phase = folder.phase(PPO if len(config.rules) == 1 else PPO + BY + config.rule, done=done)
    if made:
        phase.step(done, iterations, f"resumed at iteration {done}" + (f"; repeats {repeated}" if repeated else ""))

    kls = [line.kl for line in METRICS_FILE.read(folder.path)]

    def keep(line: Iteration, state: State) -> None:
        line = line.model_copy(update={"kl_jumped": bool(kls) and line.kl - kls[-1] > KL_JUMP})
        kls.append(line.kl)
        folder.append(METRICS_FILE, line)
        jumped = " (JUMPED: the last update threw the policy back)" if line.kl_jumped else ""
        more = f"KL {line.kl:.2f}{jumped}", f"waited {line.seconds['federation_wait']:.2f} s"
        phase.step(line.iteration, iterations, evaluation.round_in_words(line, *more))
        if line.iteration % CHECKPOINT_EVERY == 0 or line.iteration == iterations:
            checkpoints.save(path, Checkpoint(line.iteration, rule.saved(state), checkpoints.state_of(engine)))
            run.groups.forget(rule_folder(config.rule))

    strategy = AppaStrategy(run, inputs, engine, rule, batches, iterations, keep, done, state)
    strategy.start(run.groups.grid, ArrayRecord(), num_rounds=iterations - done, timeout=config.run.reply_timeout)
