"""`appa export prompts`: every engine's rows ask the run's questions by id, and held-out ones stand apart."""

from __future__ import annotations

import json

import datasets
import pandas as pd
import pytest
from typer.testing import CliRunner

from appa_flwr.config import Config
from appa_flwr.launch.cli import app
from server_app.federation.catalogue import build_catalogue

CONFIG = Config.load({"data.num-questions": 20, "data.num-groups": 3})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    keys = ["data.num-questions=20", "data.num-groups=3"]
    done = CliRunner().invoke(app, ["export", "prompts", "generated", *keys, "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


def test_the_splits_are_the_run_s(written):
    catalogue = build_catalogue(CONFIG)
    found = datasets.load_from_disk(str(written / "dataset"))
    for split, held_out in (("train", False), ("test", True)):
        ids = {
            q.question_id for q, test in zip(catalogue.questions, catalogue.held_out_Q, strict=True) if test == held_out
        }
        assert set(found[split]["question_id"]) == ids
    row = found["test"][0]
    (question,) = [q for q in catalogue.questions if q.question_id == row["question_id"]]
    assert row["options"] == list(question.options)
    assert row["prompt"][0]["role"] == "user"
    assert question.text in row["prompt"][0]["content"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_engine_gets_the_same_rows_in_its_shape(written, split):
    found = datasets.load_from_disk(str(written / "dataset"))[split]
    lines = {
        name: [json.loads(line) for line in (written / f"{name}.{split}.jsonl").read_text().splitlines()]
        for name in ("openrlhf", "slime", "nemo-gym")
    }
    table = pd.read_parquet(written / f"verl.{split}.parquet")
    ids, prompts = list(found["question_id"]), list(found["prompt"])
    assert [row["label"] for row in lines["openrlhf"]] == [row["label"] for row in lines["slime"]] == ids
    assert [row["question_id"] for row in lines["nemo-gym"]] == ids
    assert [row["ground_truth"] for row in table["reward_model"]] == ids
    assert [row["input"] for row in lines["openrlhf"]] == prompts
    assert [row["responses_create_params"]["input"] for row in lines["nemo-gym"]] == prompts
    assert [list(prompt) for prompt in table["prompt"]] == prompts
