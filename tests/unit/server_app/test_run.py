"""What comes before the policy: the questions that it can be asked, and an error while its base is built."""

import time
from types import SimpleNamespace

import pytest
from fakes import catalogue_of
from nodes import SimulatedGrid, simulated
from runs import gathered, replying, run_server
from small import SMALLEST, config_in

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.run.schema import PROGRESS
from server_app import run
from server_app.inputs import RunInputs
from server_app.questions import fitting_questions
from server_app.run import answer_tokens
from server_app.run_writer import RunWriter

LENGTHS = Config.load({"policy.max-sequence-length": 30, "ppo.response-length": 10})
CATALOGUE = catalogue_of([2, 2, 2, 2], train=[True, False, True, False])


def fitting(prompt_tokens_Q, answer_tokens_Q):
    return fitting_questions(LENGTHS, CATALOGUE, prompt_tokens_Q=prompt_tokens_Q, answer_tokens_Q=answer_tokens_Q)


@pytest.mark.parametrize(
    ("prompts", "answers", "unanswerable", "too_long"),
    [
        # 20 tokens of prompt and 10 of answer make 30, which just fits
        ([21, 21, 20, 20], [10, 10, 10, 10], 0, 2),
        ([5, 5, 5, 5], [11, 11, 10, 10], 2, 0),
        ([21, 21, 5, 5], [11, 10, 10, 2], 1, 1),  # one that neither fits is left out once
    ],
)
def test_only_questions_that_can_be_asked_and_answered_are_used(prompts, answers, unanswerable, too_long):
    train_J, test_J, counts = fitting(prompts, answers)
    assert (train_J.tolist(), test_J.tolist()) == ([2], [3])
    assert (counts.training, counts.held_out) == (1, 1)
    assert (counts.unanswerable, counts.too_long) == (unanswerable, too_long)


@pytest.mark.parametrize("tokens_Q", [[5, 500, 5, 500], [500, 5, 500, 5]])
def test_a_length_that_no_training_or_no_held_out_question_fits_is_an_error(tokens_Q):
    with pytest.raises(UserError, match=r"policy\.max-sequence-length = 30 .* 5 tokens"):
        fitting(tokens_Q, [1] * 4)
    with pytest.raises(UserError, match=r"ppo\.response-length = 10 .* 5 tokens"):
        fitting([1] * 4, tokens_Q)


@pytest.mark.parametrize(("task", "tokens"), [("dpa", {2: 10, 12: 60, 13: 65}), ("opa", {2: 4, 26: 52, 27: 55})])
def test_an_answer_s_tokens_with_its_end(task, tokens):
    # by characters: K numbers of four with K - 1 commas and an end; K letters, of which the 27th is "AA"
    base = SimpleNamespace(tokenizer=lambda text, add_special_tokens: {"input_ids": [*text]})
    assert {size: answer_tokens(base, task, size) for size in tokens} == tokens


def test_of_many_groups_the_log_names_ten(tmp_path):
    names = [f"G{number:03}" for number in range(40)]
    groups = gathered({1: replying(*names)}, names)
    with RunWriter(config_in(tmp_path)) as folder:
        run.join(RunInputs(groups.config, folder, groups, CATALOGUE), names)
    assert len(groups.members.answered()) == 40
    (line,) = [line.message for line in PROGRESS.read(folder.path) if "answers by group" in line.message]
    assert [name in line for name in names] == [True] * 10 + [False] * 30
    assert "median 2" in line


def test_an_error_in_pluralllm_waits_for_no_base(tmp_path, monkeypatch):
    steps = []

    def prepare(config, questions, *, progress):
        for step in range(1000):  # ten seconds
            time.sleep(0.01)
            progress(step, 1000)
            steps.append(step)

    def train(*_):
        while not steps:
            time.sleep(0.01)
        raise UserError("no group trained")

    monkeypatch.setattr(run.base_models, "prepare", prepare)
    monkeypatch.setattr(run.predictor_phase, "train", train)
    config = config_in(tmp_path, **SMALLEST)
    with pytest.raises(UserError, match="no group trained"):
        run_server(SimulatedGrid(simulated(config, 2)), config)
    assert len(steps) < 500
    assert (tmp_path / "r" / "error.txt").read_text() == "no group trained\n"


@pytest.mark.parametrize(("tuning", "packed"), [("full", False), ("lora", False), ("qlora", True)])
def test_the_base_is_scored_in_as_many_bits_as_its_policies_and_sft_trains_on_all(
    tuning, packed, tmp_path, monkeypatch
):
    """A model is here whether it is quantized."""
    config = config_in(tmp_path, **{"policy.tuning": tuning})
    scored, trained = {}, []
    monkeypatch.setattr(run.base_models, "load_model", lambda config, source, *, quantized: quantized)
    monkeypatch.setattr(run, "evaluate", lambda _, name, model, *rest, **keys: scored.update({name: model}))
    monkeypatch.setattr(run.sft, "passes_of_texts", lambda *_: [])
    monkeypatch.setattr(run.sft, "fine_tune", lambda model, *_, **__: trained.append(model))
    inputs = SimpleNamespace(base=SimpleNamespace(source=""), prompts=[], train_J=[])
    with RunWriter(config) as folder:
        phases = SimpleNamespace(config=config, folder=folder, catalogue=CATALOGUE)
        run.score_and_fine_tune(phases, inputs, SimpleNamespace(sft_QK=None))
    assert scored == {"base": packed}
    assert trained == [False]
