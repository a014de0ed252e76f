"""The app deployed as `appa deploy` makes it: a process, a folder and a key for each party, with TLS between them."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from appa_flwr.launch.deploy import SUBMITTER, Started, start
from appa_flwr.launch.flower import COMPLETED, LOOPBACK, free_port
from appa_flwr.launch.processes import end_processes, processes_of
from appa_flwr.launch.sites import CONNECTION, Sites, prepare
from appa_flwr.survey.generate import generate
from appa_flwr.survey.types import Survey

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
# As small as the loop can be; every message costs a second or more here, since each starts a process.
TINY_LOOP = {
    "eval.ceilings": False,
    "eval.extra-rows": False,
    "policy.base-steps": 20,
    "sft.steps": 2,
    "ppo.num-iterations": 5,
    "pluralllm.rounds": 1,
    "pluralllm.validate-every": 0,
    "sums.mean-of-others": False,
    "embedding.dim": 16,
    "rollout.batch-size": 16,
    "ppo.num-mini-batches": 2,
    "ppo.epochs": 1,
}


@dataclass
class Deployment:
    """What one test started, and where."""

    sites: Sites
    started: Started

    def flwr(self, *arguments: str) -> str:
        """A command of whoever submits the run."""
        return self.started.parties[SUBMITTER].call(["flwr", *arguments])

    def status(self) -> str:
        return self.started.parties[SUBMITTER].status()

    @property
    def run(self) -> Path:
        return self.sites.server / "runs" / "r"

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What a run has written so far into one of its files with an object a line."""
        try:
            complete = (self.run / name).read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in complete]

    def wait(self, happened: Callable[[], bool], *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            log = (self.sites.server / "superlink.log").read_text(errors="replace")
            assert self.started.superlink.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.2)


@pytest.fixture
def survey() -> Survey:
    return generate(num_questions=40, num_groups=2, seed=1)


@pytest.fixture
def deployment(tmp_path: Path, survey: Survey) -> Iterator[Deployment]:
    sites = prepare(survey, tmp_path / "parties", host=LOOPBACK, port=free_port(), keys={})
    home = tmp_path / "homes"
    try:
        yield Deployment(sites, start(sites, home))
    finally:
        end_processes(home)
    assert processes_of(home) == []


def _run_config(**changed: object) -> list[str]:
    values = TINY_LOOP | {
        "survey": "questions.jsonl",
        "run-name": "r",
        "run.output-dir": "runs",
        "run.cache-dir": "cache",
        "federation.group-keys": "group-keys.toml",
    }
    values |= {key.replace("__", ".").replace("_", "-"): value for key, value in changed.items()}
    return ["--run-config", " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())]


def _answers_found(folder: Path, survey: Survey) -> set[str]:
    """The groups of which some file below holds an answer, written as in the group's own file."""
    everything = "".join(path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file())
    return {
        name
        for name, answers in survey.answers.items()
        if any(json.dumps(shares.tolist()) in everything for shares in answers.values())
    }


def test_processes_with_a_file_each_align_a_policy_and_go_on_when_one_ends_until_it_is_back(deployment, survey):
    names = survey.groups
    gone = names[-1]
    deployment.flwr("run", str(REPO), CONNECTION, *_run_config(groups=";".join(names), federation__min_groups=1))
    deployment.wait(lambda: bool(deployment.lines("metrics.jsonl")), seconds=240)
    node = deployment.started.nodes[gone]
    os.killpg(node.pid, signal.SIGTERM)
    deployment.wait(lambda: deployment.lines("metrics.jsonl")[-1]["missing_groups"] == [gone], seconds=120)
    node.wait(timeout=60)
    deployment.started.start_node(deployment.sites, gone)
    deployment.wait(lambda: "report" in {line["phase"] for line in deployment.lines("progress.jsonl")}, seconds=240)
    deployment.wait(lambda: deployment.status() == COMPLETED, seconds=60)

    iterations = deployment.lines("metrics.jsonl")
    assert [line["iteration"] for line in iterations] == list(range(1, 6))
    assert all(set(line["rewards"]) == set(names) for line in iterations)
    assert iterations[0]["missing_groups"] == []
    said = [line["message"] for line in deployment.lines("progress.jsonl") if line["phase"] == "ppo"][1:]
    for line, message in zip(iterations, said, strict=True):
        assert line["missing_groups"] in ([], [gone])
        assert message.endswith(f"; MISSING: {gone}") == bool(line["missing_groups"])
        there = [name for name in names if name not in line["missing_groups"]]
        assert all((line["rewards"][name] is None) == (name not in there) for name in names)
        assert all(0 <= line["rewards"][name] <= 1 for name in there)
    rows = json.loads((deployment.run / "summary.json").read_text())
    assert {row["policy"] for row in rows} == {"base", "sft", "ppo", "uniform", "majority"}
    for row in rows:
        present = {name for name, score in row["per_group"].items() if not math.isnan(score)}
        assert present == set(names), row
    assert (deployment.run / "report.html").exists()

    # The search does find a group's answers where they are, and nowhere at the others.
    sites = deployment.sites
    for name in names:
        assert _answers_found(sites.group(name), survey) == {name}
    assert _answers_found(sites.submitter, survey) == set()
    assert {"cache", "questions.jsonl", "runs"} <= {path.name for path in sites.server.iterdir()}
    assert _answers_found(sites.server, survey) == set()
