"""`appa export prompts`: every engine's rows ask the run's questions by id, and held-out ones stand apart."""

import json

import datasets
import pytest
from typer.testing import CliRunner

from appa_flwr.config import Config
from appa_flwr.launch.cli import app
from server_app.questions import build_catalogue

CONFIG = Config.load({"data.num-questions": 20, "data.num-groups": 3})
KEYS = ["data.num-questions=20", "data.num-groups=3"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    done = CliRunner().invoke(app, ["export", "prompts", "generated", *KEYS, "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_engine_gets_the_run_s_questions_of_a_split_in_its_shape(written, split):
    catalogue = build_catalogue(CONFIG)
    questions = {
        question.question_id: question
        for question, held_out in zip(catalogue.questions, catalogue.held_out_Q, strict=True)
        if held_out == (split == "test")
    }
    found = lines(written / f"{split}.jsonl")
    ids, prompts = [row["question_id"] for row in found], [row["prompt"] for row in found]
    assert set(ids) == set(questions)
    for row in found:
        (message,) = row["prompt"]
        assert message["role"] == "user"
        assert questions[row["question_id"]].text in message["content"]
        assert row["options"] == list(questions[row["question_id"]].options)
    loaded = datasets.load_dataset("parquet", data_files=str(written / f"verl.{split}.parquet"), split="train")
    assert [row["ground_truth"] for row in loaded["reward_model"]] == ids
    assert list(loaded["prompt"]) == prompts


@pytest.mark.parametrize("split", ["train", "test"])
def test_plain_prompts_are_the_texts_of_the_chats(written, tmp_path, split):
    done = CliRunner().invoke(app, ["export", "prompts", "generated", *KEYS, "--plain", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    chats = [row["prompt"][0]["content"] for row in lines(written / f"{split}.jsonl")]
    assert [row["prompt"] for row in lines(tmp_path / f"{split}.jsonl")] == chats
