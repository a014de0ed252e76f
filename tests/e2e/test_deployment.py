"""The app deployed as `appa deploy` makes it: a process, a folder and a key for each party, with TLS between them.

From another machine a node can join and work, and nobody can submit, list or take anything. The other machine is this
one, by an address of its own that is no loopback.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from real_run import small_environment
from small import AS_OWNERS_ASK

from appa_flwr.core.ports import LOOPBACK, free_port
from appa_flwr.launch import deploy, doctor
from appa_flwr.launch.bundle import bundle_hash
from appa_flwr.launch.deploy import Started, start
from appa_flwr.launch.flower import COMPLETED
from appa_flwr.launch.processes import end_processes, processes_of
from appa_flwr.launch.sites import CONNECTION, GROUP_KEYS_FILE, Sites, prepare
from appa_flwr.launch.terminal import RunFailed
from appa_flwr.survey.generate import generate

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
OUTSIDE = next(
    (
        found.address
        for addresses in psutil.net_if_addrs().values()
        for found in addresses
        if found.family == socket.AF_INET and not found.address.startswith("127.")
    ),
    "",
)
SURVEY = generate(num_questions=40, num_groups=2, seed=1)
# As small as the loop can be; every message costs a second or more here, since each starts a process.
TINY_LOOP = {
    "groups": ";".join(SURVEY.groups),
    "eval.ceilings": False,
    "eval.every": 0,
    "sft.steps": 2,
    "baseline-rules": "",
    "ppo.num-iterations": 1,
    "pluralllm.rounds": 1,
    "ppo.batch-size": 16,
    "sft.target": "smoothed-votes",  # what every owner allows
    **AS_OWNERS_ASK,
    "ppo.num-mini-batches": 2,
    "ppo.epochs": 1,
    "survey": "questions.jsonl",
    "run-name": "r",
    "run.output-dir": "runs",
    "run.group-keys": GROUP_KEYS_FILE,
}


@dataclass
class Deployment:
    """What was started, and where."""

    sites: Sites
    started: Started
    home: Path

    def flwr(self, *arguments: str) -> str:
        """A command of whoever submits the run."""
        return self.started.parties[deploy.SUBMITTER].call(["flwr", *arguments])

    @property
    def run(self) -> Path:
        return self.sites.server / "runs" / "r"

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What a run has written so far into one of its files with an object a line."""
        path = self.run / name
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait(self, happened: Callable[[], bool], *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            log = (self.sites.server / "superlink.log").read_text(errors="replace")
            assert self.started.superlink.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.2)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A started server with a node a group; nothing of it is left at the end."""
    folder, host = tmp_path_factory.mktemp("deployment"), OUTSIDE or LOOPBACK
    sites = prepare(SURVEY, folder / "parties", host=host, port=free_port(), keys={}, bundle=bundle_hash(REPO))
    (home := folder / "homes").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        if OUTSIDE:  # it listens everywhere then, as start.sh has it
            patched.setattr(deploy, "LOOPBACK", "0.0.0.0")
        patched.setenv("XDG_CACHE_HOME", str(sites.server / "cache"))  # where a test can see what the server keeps
        patched.setenv("PYTHONPATH", small_environment()["PYTHONPATH"])
        try:
            yield Deployment(sites, start(sites, home, nodes=sites.groups), home)
        finally:
            end_processes(home)
    assert processes_of(home) == []


def _status(sites: Sites, host: str, path: str) -> int:
    """What a call gets that says of itself that it comes from the server's machine."""
    trusting = ssl.create_default_context(cafile=str(sites.submitter / "ca.crt"))
    with closing(http.client.HTTPSConnection(host, sites.port, timeout=10, context=trusting)) as connection:
        connection.request("POST", path, body=b"", headers={"X-Forwarded-For": LOOPBACK, "Forwarded": "for=127.0.0.1"})
        return connection.getresponse().status


@pytest.mark.skipif(not OUTSIDE, reason="this machine has no address but its loopback's")
def test_runs_are_submitted_at_the_server_alone(deployment):
    sites = deployment.sites
    for path in ("/v1/control/start-run", "/v1/control/list-nodes", "/v1/runtime/acquire-task", "/docs"):
        assert _status(sites, OUTSIDE, path) == 403
        assert _status(sites, LOOPBACK, path) != 403
    assert _status(sites, OUTSIDE, "/v1/fleet/pull-messages") != 403
    found = {finding.what: finding.text for finding in doctor.party(sites.group(SURVEY.groups[0]))}
    assert re.search("its clock is [0-4] s (ahead of|behind)", found["server"])  # Flower tells its time

    flower = deployment.started.parties[deploy.SUBMITTER].home / "config.toml"
    here = flower.read_text()
    flower.write_text(here.replace(LOOPBACK, OUTSIDE))
    for command in (("run", str(REPO), CONNECTION), ("supernode", "list", CONNECTION)):
        with pytest.raises(RunFailed):
            deployment.flwr(*command)
    flower.write_text(here)
    assert json.loads(deployment.flwr("list", CONNECTION, "--format", "json"))["runs"] == []


def _answers_found(folder: Path) -> set[str]:
    """The groups of which some file below holds an answer that only they gave, written as in their own file."""
    everything = "".join(path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file())
    written = {
        name: {json.dumps(shares.tolist()) for shares in answers.values()} for name, answers in SURVEY.answers.items()
    }
    given = Counter(answer for answers in written.values() for answer in answers)
    return {
        name
        for name, answers in written.items()
        if any(given[answer] == 1 and answer in everything for answer in answers)
    }


def test_processes_with_a_file_each_align_a_policy_and_keep_their_answers(deployment):
    names = SURVEY.groups
    keys = " ".join(f"{key}={json.dumps(value)}" for key, value in TINY_LOOP.items())
    deployment.flwr("run", str(REPO), CONNECTION, "--run-config", keys)

    def begun(phase: str) -> bool:
        return any(line["phase"] == phase for line in deployment.lines("progress.jsonl"))

    deployment.wait(lambda: begun("pluralllm"), seconds=400)  # each node has answered
    nodes = [p for p in processes_of(deployment.home) if any("flower-supernode" in part for part in p.cmdline())]
    assert len(nodes) >= len(names)
    for process in nodes:
        # Another user of a group's machine reaches the node's port too, and would get a task and what belongs to it.
        arguments = process.cmdline()
        port = arguments[arguments.index("--port") + 1]
        bystander = RuntimeHttpClient.from_server_address(
            server_address=f"{LOOPBACK}:{port}",
            insecure=True,
            root_certificates=None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
        )
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            bystander.AcquireTask(AcquireTaskRequest(supported_task_types=["clientapp"]))
    deployment.wait(lambda: begun("report"), seconds=500)
    deployment.wait(lambda: deployment.started.parties[deploy.SUBMITTER].status() == COMPLETED, seconds=60)

    (line,) = deployment.lines("metrics.jsonl")
    assert line["missing_groups"] == []
    assert set(line["rewards"]) == set(names)
    assert all(0 <= reward <= 1 for reward in line["rewards"].values())
    rows = json.loads((deployment.run / "summary.json").read_text())
    assert {row["method"] for row in rows} == {"base", "sft", "ppo", "uniform", "majority"}
    for row in rows:
        assert set(row["per_group"]) == set(names)
        assert not any(map(math.isnan, row["per_group"].values())), row
    assert (deployment.run / "report.html").exists()

    # The search does find a group's answers where they are, and nowhere at the others.
    sites = deployment.sites
    for name in names:
        assert _answers_found(sites.group(name)) == {name}
    assert _answers_found(sites.submitter) == set()
    assert {"cache", "questions.jsonl", "runs"} <= {path.name for path in sites.server.iterdir()}
    assert _answers_found(sites.server) == set()
