"""A run that serves: the groups' real ClientApp in this process, the service on a loopback port, end and resume."""

import asyncio
import json
import socket
import threading
import time
from string import ascii_uppercase
from types import SimpleNamespace

import datasets
import pytest
from fakes import raising
from runs import looped, rounds_of
from small import SMALLEST
from typer.testing import CliRunner

from appa_flwr import loaded
from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.launch import evaluate as evaluation
from appa_flwr.launch.cli import app
from appa_flwr.report import build
from appa_flwr.reward_client.client import Served
from appa_flwr.reward_client.trl import RemoteGroupRewards
from appa_flwr.run.resume import finished
from appa_flwr.run.schema import PROGRESS
from server_app.federation.groups import Groups
from server_app.questions import build_catalogue

KEYS = {
    **SMALLEST,
    "eval.ceilings": True,
    "run.phases": "serve",
    "run-name": "r",
    "serve.port": 0,
}


class Running:
    """A run that serves, in a thread."""

    def __init__(self, folder, **keys):
        self.config = Config.load({**KEYS, "run.output-dir": str(folder), **keys})
        self.folder, self.error = folder / "r", None
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            looped(self.config, 2)
        except BaseException as error:
            self.error = error

    def __enter__(self):
        already = len(PROGRESS.read(self.folder) or ())
        self.thread.start()
        while self.thread.is_alive():
            for line in (PROGRESS.read(self.folder) or ())[already:]:
                if line.phase == "serve" and line.message.startswith("at "):
                    self.url = line.message.split()[1].rstrip(",")
                    self.token = (self.folder / "token").read_text().strip()
                    return self
            time.sleep(0.05)
        raise self.error or AssertionError("it has ended")

    def __exit__(self, *error):
        (self.folder / "stop").touch()
        self.thread.join(30)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


def asked(running, step):
    questions = [q.question_id for q in build_catalogue(running.config).questions][:6]
    rewards = RemoteGroupRewards(running.url, running.token, patience=5.0)
    texts = [f"{share:.2f},{1 - share:.2f}" for share in (0.1, 0.3, 0.5, 0.6, 0.8, 0.9)]
    given = {"prompts": texts, "completions": texts, "question_id": questions}
    return asyncio.run(rewards.group_reward(**given, trainer_state=SimpleNamespace(global_step=step)))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Two sessions of a run, each of which scores; its folder and what came of them."""
    folder, found = tmp_path_factory.mktemp("served"), SimpleNamespace()
    with Running(folder) as first:
        found.first = asked(first, 0)
        found.token = first.token
    found.finished = finished(first.folder)
    with Running(folder, **{"run.resume": True}) as second:
        found.again, found.same_token = asked(second, 1), second.token == found.token
    found.folder = first.folder
    return found


def test_it_scores_until_it_is_stopped_and_goes_on_when_it_is_resumed(served):
    assert not served.finished  # it can go on
    assert served.same_token
    assert all(0 <= reward <= 1 for reward in served.first)
    rounds = rounds_of(served.folder, "trl")
    assert [(line.round, line.iteration) for line in rounds] == [(1, 1), (1001, 2)]
    # The second round stands on the first one's history: h = 0.8 * 0.2 r + 0.2 r of the same answers
    for name, mean in rounds[1].rewards.items():
        assert rounds[1].history[name] == pytest.approx((0.8 * 0.2 + 0.2) * mean)


def test_its_log_says_what_was_scored_and_holds_no_token(served):
    assert "run trl, round 1: 6 answers" in (served.folder / "run.log").read_text()
    for path in served.folder.rglob("*"):
        if path.is_file() and path.name != "token":
            assert served.token.encode() not in path.read_bytes(), path


def test_its_report_shows_rounds_fairness_and_weights(served):
    page = build(served.folder).read_text()
    assert "<dd>2, of 12 answers</dd>" in page
    assert (served.folder / "plots" / "served_trl.png").read_bytes().startswith(b"\x89PNG")
    assert "metrics.jsonl" not in page


def test_any_model_is_judged_beside_the_trivial_answers(tmp_path, monkeypatch):
    keys = {"data.num-questions": 40}
    sizes = {q.question_id: len(q.options) for q in build_catalogue(Config.load({**KEYS, **keys})).questions}
    uniform = {name: ",".join([f"{1 / size:.6f}"] * size) for name, size in sizes.items()}

    class Model:
        def __init__(self, name):
            self.name = name

        def answers(self, prompts, *, answer_tokens):
            return [by_prompt[prompt] if self.name == "flat" else "who knows" for prompt in prompts]

    monkeypatch.setattr(loaded, "LocalModel", Model)
    with Running(tmp_path, **keys) as running:
        client = Served(running.url, running.token, patience=5.0)
        asked = asyncio.run(client.ask("GET", "/v1/held-out"))["questions"]
        assert len(asked) == build_catalogue(running.config).held_out_Q.sum()
        by_prompt = {row["prompt"]: uniform[row["question_id"]] for row in asked}
        for name in ("flat", "silent"):
            found = evaluation.evaluate(client, name, model=name)
        answers = {row["question_id"]: "" for row in asked}
        for name, body in {
            "flat": {"no such": ""},
            "flat ": answers,
            "uniform": answers,
            "extra": {**answers, "no such": ""},
            "less": dict([*answers.items()][1:]),
            "more": {key: [""] for key in answers},
        }.items():
            with pytest.raises(UserError, match="422"):
                asyncio.run(client.ask("POST", f"/v1/models/{name}", {"answers": body}))
    by_method = {row["method"]: row for row in found["rows"] if row["against"] == "predictions"}
    assert {"model:flat", "model:silent", "uniform", "majority", "ceiling-min"} <= set(by_method)
    assert by_method["model:flat"]["avg_as"] == pytest.approx(by_method["uniform"]["avg_as"], abs=1e-4)
    assert (by_method["model:silent"]["avg_as"], by_method["model:silent"]["readable"]) == (0.0, 0.0)
    less = {
        (one["method"], one["less"], one["against"]): (one["value"], one["low"], one["high"])
        for one in found["intervals"]
        if one["measure"] == "Avg AS"
    }
    assert less["model:flat", "uniform", "survey"] == pytest.approx([0.0] * 3, abs=1e-4)
    value, low, high = less["model:silent", "model:flat", "predictions"]
    assert value == pytest.approx(-by_method["model:flat"]["avg_as"])
    assert low < value < high < 0
    assert "<th>silent minus</th>" in build(tmp_path / "r").read_text()


def test_a_model_s_rankings_are_judged_as_rankings(tmp_path):
    with Running(tmp_path, task="opa", metric="borda") as running:
        client = Served(running.url, running.token, patience=5.0)
        size_of = {
            question.question_id: len(question.options) for question in build_catalogue(running.config).questions
        }
        asked = asyncio.run(client.ask("GET", "/v1/held-out"))["questions"]
        answers = {row["question_id"]: ",".join(ascii_uppercase[: size_of[row["question_id"]]]) for row in asked}
        found = asyncio.run(client.ask("POST", "/v1/models/first", {"answers": answers}))
    row = next(row for row in found["rows"] if row["method"] == "model:first")
    assert row["readable"] == row["format_score"] == 1.0


def test_the_end_of_flower_s_superlink_ends_the_run(tmp_path, monkeypatch):
    running = Running(tmp_path)
    with running:
        monkeypatch.setattr(Groups, "ask", raising(ConnectionError("the SuperLink is gone")))
        with pytest.raises(UserError, match="no answer"):
            asked(running, 0)
        running.thread.join(30)
        error, running.error = running.error, None
    assert isinstance(error, ConnectionError)
    assert "gone" in (tmp_path / "r" / "error.txt").read_text()


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=r"serve\.port: 127\.0\.0\.1:\d+ cannot"),
            Running(tmp_path, **{"serve.port": port}),
        ):
            pass
        assert not (tmp_path / "r" / "pluralllm.json").exists()  # it was said before anything was trained


# --- `appa export prompts`: every engine's rows ask the run's questions by id, and held-out ones stand apart ---

EXPORTED = {"data.num-questions": 20, "data.num-groups": 3}


def export(folder, *options):
    keys = [f"{key}={value}" for key, value in EXPORTED.items()]
    done = CliRunner().invoke(app, ["export", "prompts", "generated", *keys, *options, "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return export(tmp_path_factory.mktemp("prompts"))


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_engine_gets_the_run_s_questions_of_a_split_in_its_shape(written, split):
    catalogue = build_catalogue(Config.load(EXPORTED))
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
    chats = [row["prompt"][0]["content"] for row in lines(written / f"{split}.jsonl")]
    assert [row["prompt"] for row in lines(export(tmp_path, "--plain") / f"{split}.jsonl")] == chats
