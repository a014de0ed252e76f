"""`appa serve` as a user starts it: killed, resumed, and stopped by Ctrl-C, while a trainer goes on; and deployed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from deployment import deployed
from real_run import APPA, TINY_RUN, _belonging_to, _temporary, kill_all

from appa_flwr.config import Config
from appa_flwr.launch.flower import COMPLETED
from appa_flwr.protocol import formats
from appa_flwr.run.served import read_rounds
from appa_flwr.survey.generate import generate
from appa_flwr.trainers.client import Served
from appa_flwr.trainers.trl import RemoteGroupRewards
from server_app.federation.catalogue import build_catalogue

pytestmark = [pytest.mark.slow, pytest.mark.long]

LIMIT_SECONDS = 300.0


@contextmanager
def served(folder, *arguments):
    """A process of `appa serve`; gives it, with where it listens, once it does."""
    progress = folder / "runs" / "r" / "progress.jsonl"
    already = len(progress.read_text().splitlines()) if progress.exists() else 0
    with _temporary() as temporary, (folder / "out").open("ab") as out:
        environment = os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        command = [*APPA, "serve", *arguments]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                lines = progress.read_text().splitlines()[already:] if progress.exists() else []
                messages = [json.loads(line)["message"] for line in lines]
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


def test_a_server_that_is_killed_goes_on_and_one_that_is_stopped_ends_well(tmp_path):
    keys = TINY_RUN | {"run-name": "r", "run.output-dir": str(tmp_path / "runs"), "serve.port": 0}
    flags = [part for key, value in keys.items() for part in ("-c", f"{key}={value}")]
    folder = tmp_path / "runs" / "r"
    questions = build_catalogue(Config.load(keys)).questions

    with served(tmp_path, *flags) as first:
        token = (folder / "token").read_text()
        before = ask(RemoteGroupRewards(first.url, token), questions, 0)
        kill_all(first.temporary)
    with served(tmp_path, "--resume", str(folder)) as second:
        rewards = RemoteGroupRewards(second.url, token)
        again = ask(rewards, questions, 1)
        assert len(again) == len(before) == 4
        second.process.send_signal(signal.SIGINT)
        assert second.process.wait(120) == 0
        assert _belonging_to(second.temporary) == {}
    assert "Served to trl: 2 rounds, 8 answers" in (folder / "report.html").read_text()
    assert not (folder / "error.txt").exists()
    assert [line.round for line in read_rounds(folder)["trl"]] == [1, 1001]


@pytest.mark.timeout(1800)
def test_groups_on_their_own_machines_one_of_which_goes_and_comes_back(tmp_path):
    survey = generate(num_questions=40, num_groups=2, seed=1)
    stays, goes = survey.groups
    with deployed(survey, tmp_path) as found:
        keys = {
            "run__phases": "serve",
            "serve__port": 0,
            "federation__min_groups": 1,
            "federation__join_timeout": 400.0,
        }
        found.submit(groups=";".join(survey.groups), **keys)

        def listening():
            messages = [line["message"] for line in found.lines("progress.jsonl") if line["phase"] == "serve"]
            return next((text.split()[1].rstrip(",") for text in messages if text.startswith("at http")), None)

        found.wait(lambda: listening() is not None, seconds=500)
        where = listening(), (found.run / "token").read_text().strip()
        rewards, asked = RemoteGroupRewards(*where, run="r1", patience=400.0), Served(*where)

        held_out = {one["question_id"] for one in asyncio.run(asked.ask("GET", "/v1/held-out"))["questions"]}
        questions = [q for q in survey.questions if q.question_id not in held_out]

        def missing_after(step):
            given = ask(rewards, questions, step)
            assert all(0 <= reward <= 1 for reward in given)
            status = asyncio.run(asked.ask("GET", "/v1/runs/r1"))
            assert set(status["group_seconds"]) == set(survey.groups) - set(status["missing_groups"])
            return status["missing_groups"]

        assert missing_after(0) == []
        node = found.started.nodes[goes]
        os.killpg(node.pid, signal.SIGTERM)
        node.wait(timeout=60)
        assert missing_after(1) == [goes]
        found.started.start_node(found.sites, goes)
        last = next(step for step in range(2, 60) if not missing_after(step))
        (found.run / "stop").touch()
        found.wait(lambda: found.status() == COMPLETED, seconds=120)
        rounds = read_rounds(found.run)["r1"]
        assert [line.round for line in rounds] == [1000 * step + 1 for step in range(last + 1)]
        assert [line.missing_groups for line in rounds] == [(), *[(goes,)] * (last - 1), ()]
        # A group that was away has kept its history: h is .8 h + .2 r where it answers
        assert rounds[1].history[goes] == rounds[0].history[goes]
        assert rounds[1].history[stays] > rounds[0].history[stays]
        assert f"Served to r1: {last + 1} rounds" in (found.run / "report.html").read_text()
