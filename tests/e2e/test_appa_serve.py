"""`appa serve` as a user starts it: stopped by Ctrl-C, killed and resumed, while a trainer goes on."""

import asyncio
import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
from real_run import APPA, belonging_to, small_environment, temporary_folder
from runs import rounds_of
from small import READABLE, SMALLEST

from appa_flwr.config import Config
from appa_flwr.core.errors import UserError
from appa_flwr.protocol import formats
from appa_flwr.reward_client import client
from appa_flwr.reward_client.trl import RemoteGroupRewards
from appa_flwr.run.schema import PROGRESS
from server_app.policy import tiny
from server_app.questions import build_catalogue

pytestmark = pytest.mark.slow

LIMIT_SECONDS = 300.0


@contextmanager
def served(folder, *arguments):
    """A process of `appa serve`; gives it, with where it listens, once it does."""
    run = folder / "runs" / "r"
    already = len(PROGRESS.read(run) or ())
    with temporary_folder() as temporary, (folder / "out").open("ab") as out:
        environment = small_environment() | {"TMPDIR": temporary, "OMP_NUM_THREADS": "1"}
        command = [*APPA, "serve", *arguments]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                messages = [line.message for line in (PROGRESS.read(run) or ())[already:]]
                if at := [text for text in messages if text.startswith("at http")]:
                    url = at[-1].split()[1].rstrip(",")
                    yield SimpleNamespace(process=process, url=url, temporary=temporary)
                    return
                time.sleep(0.2)
            raise AssertionError((folder / "out").read_text()[-3000:])
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()


def ask(rewards, questions, step):
    """The rewards of answers to the first four questions, a round of the trainer's `step`."""
    texts = [formats.answer("dpa", range(1, 1 + len(q.options))) for q in questions[:4]]
    given = {"prompts": texts, "completions": texts, "question_id": [q.question_id for q in questions[:4]]}
    return asyncio.run(rewards.group_reward(**given, trainer_state=SimpleNamespace(global_step=step)))


def test_a_served_run_judges_a_model_and_stopped_by_hand_it_ends_with_its_report(tmp_path, monkeypatch, appa):
    keys = SMALLEST | {"run-name": "r", "run.output-dir": str(tmp_path / "runs"), "serve.port": 0, "seed": 3}
    folder, model = tmp_path / "runs" / "r", tmp_path / "model"
    recipe = tiny.TinyRecipe("dpa", steps=1, batch_size=2, hidden_size=32, num_layers=1, num_heads=2)
    for part in tiny.build(recipe, build_catalogue(Config.load(keys)).questions):
        part.save_pretrained(model)
    with served(tmp_path, *(f"{key}={value}" for key, value in keys.items())) as running:
        monkeypatch.setenv(client.URL, running.url)
        monkeypatch.setenv(client.TOKEN, (folder / "token").read_text())
        said = appa("eval", "--model", model, "--name", "mine", "--out", tmp_path / "scores")
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(120) == 0
        assert belonging_to(running.temporary) == {}
    rows = json.loads((tmp_path / "scores" / "scores.json").read_text())["rows"]
    (mine,) = [row for row in rows if (row["method"], row["against"]) == ("model:mine", "survey")]
    (line,) = [line for line in said.splitlines() if line.startswith("│ mine ")]
    assert f"{mine['avg_as']:.3f}" in line
    (folder / "report.html").unlink()
    appa("report", folder)
    page = (folder / "report.html").read_text()
    assert "<th>mine minus</th>" in page
    assert "<dd>appa serve " in page  # the command that repeats it


@pytest.mark.long
def test_a_server_that_is_killed_or_loses_a_worker_goes_on_and_one_that_is_stopped_ends_well(tmp_path):
    keys = READABLE | {"run-name": "r", "run.output-dir": str(tmp_path / "runs"), "serve.port": 0}
    flags = [f"{key}={value}" for key, value in keys.items()]
    folder = tmp_path / "runs" / "r"
    questions = build_catalogue(Config.load(keys)).questions

    with served(tmp_path, *flags) as first:
        token = (folder / "token").read_text()
        before = ask(RemoteGroupRewards(first.url, token), questions, 0)
        first.process.kill()
        psutil.wait_procs([psutil.Process(pid) for pid in belonging_to(first.temporary)], timeout=20.0)
        assert belonging_to(first.temporary) == {}  # what it had started has ended with it
    with served(tmp_path, "--resume", str(folder)) as lost:
        for pid, name in belonging_to(lost.temporary).items():
            if name.startswith("ray::ClientApp"):
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(UserError, match="no answer"):
            ask(RemoteGroupRewards(lost.url, token, patience=5.0), questions[4:], 1)  # whose replies are not kept
        assert lost.process.wait(60) == 1
    assert "WorkerLost: " in (folder / "error.txt").read_text()
    assert (tmp_path / "out").read_text().endswith(f"\nappa serve --resume {folder} continues once the cause is gone\n")
    with served(tmp_path, "--resume", str(folder)) as second:
        rewards = RemoteGroupRewards(second.url, token)
        again = ask(rewards, questions, 1)
        assert len(again) == len(before) == 4
        second.process.send_signal(signal.SIGINT)
        assert second.process.wait(120) == 0
        assert belonging_to(second.temporary) == {}
    assert "<dd>2, of 8 answers</dd>" in (folder / "report.html").read_text()
    assert not (folder / "error.txt").exists()
    assert [line.round for line in rounds_of(folder, "trl")] == [1, 1001]
