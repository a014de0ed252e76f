"""The app deployed as `appa deploy` makes it: a process, a folder and a key for each party, with TLS between them.

From another machine a node can join and work, and nobody can submit, list or take anything. The other machine is this
one, by an address of its own that is no loopback.
"""

import http.client
import json
import re
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest
from deployment import REPO, Deployment, deployed
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from appa_flwr.config.sources import preset
from appa_flwr.core.ports import LOOPBACK
from appa_flwr.launch import deploy, doctor
from appa_flwr.launch.sites import CONNECTION, Sites
from appa_flwr.launch.terminal import RunFailed
from appa_flwr.run.schema import CARD
from appa_flwr.survey.codebook import write
from appa_flwr.survey.noise import Promise
from appa_flwr.survey.sources import convert
from appa_flwr.survey.types import Survey
from experiments.privacy import invented

pytestmark = pytest.mark.slow

OUTSIDE = next(
    (
        found.address
        for addresses in psutil.net_if_addrs().values()
        for found in addresses
        if found.family == socket.AF_INET and not found.address.startswith("127.")
    ),
    "",
)


@pytest.fixture(scope="module")
def survey(tmp_path_factory: pytest.TempPathFactory) -> Survey:
    """Three groups of 200 respondents, whose answers have noise."""
    folder = tmp_path_factory.mktemp("respondents")
    frame, codebook, _ = invented(200, seed=1, groups=3)
    frame.cells.to_csv(folder / "respondents.csv", index=False)
    write(codebook, folder / "codebook.toml")
    return convert(folder / "respondents.csv", codebook=folder / "codebook.toml", promise=Promise(4.0)).survey


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, survey: Survey) -> Iterator[Deployment]:
    where = {"host": OUTSIDE, "everywhere": True} if OUTSIDE else {}
    with deployed(survey, tmp_path_factory.mktemp("deployment"), **where) as found:
        yield found


def _status(sites: Sites, host: str, path: str) -> int:
    """What a call gets that says of itself that it comes from the server's machine."""
    trusting = ssl.create_default_context(cafile=str(sites.server / "ca.crt"))
    with closing(http.client.HTTPSConnection(host, sites.port, timeout=10, context=trusting)) as connection:
        connection.request("POST", path, body=b"", headers={"X-Forwarded-For": LOOPBACK, "Forwarded": "for=127.0.0.1"})
        return connection.getresponse().status


@pytest.mark.skipif(not OUTSIDE, reason="this machine has no address but its loopback's")
def test_runs_are_submitted_at_the_server_alone(deployment, survey):
    sites = deployment.sites
    for path in ("/v1/control/start-run", "/v1/control/list-nodes", "/v1/runtime/acquire-task", "/docs"):
        assert _status(sites, OUTSIDE, path) == 403
        assert _status(sites, LOOPBACK, path) != 403
    assert _status(sites, OUTSIDE, "/v1/fleet/pull-messages") != 403
    found = {finding.what: finding.text for finding in doctor.party(sites.group(survey.groups[0]))}
    assert re.search("its clock is [0-4] s (ahead of|behind)", found["server"])  # Flower tells its time

    flower = deployment.started.parties[deploy.SERVER].home / "config.toml"
    here = flower.read_text()
    flower.write_text(here.replace(LOOPBACK, OUTSIDE))
    for command in (("run", str(REPO), CONNECTION), ("supernode", "list", CONNECTION)):
        with pytest.raises(RunFailed):
            deployment.flwr(*command)
    flower.write_text(here)
    assert json.loads(deployment.flwr("list", CONNECTION, "--format", "json"))["runs"] == []


def _answers_found(folder: Path, survey: Survey) -> set[str]:
    """The groups of which some file below holds an answer that only they gave, written as in their own file."""
    everything = "".join(path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file())
    written = {name: {json.dumps(shares.tolist()) for shares in mine.values()} for name, mine in survey.answers.items()}
    times = Counter(answer for answers in written.values() for answer in answers)
    return {name for name, answers in written.items() if any(times[own] == 1 and own in everything for own in answers)}


def test_processes_with_a_file_each_train_pluralllm_and_keep_their_answers(deployment, survey, monkeypatch, appa):
    """By the command `appa deploy --local`, which finds its parties made and started."""
    names, sites = survey.groups, deployment.sites
    monkeypatch.setattr(deploy, "make_sites", lambda *_, **__: sites)
    monkeypatch.setattr(deploy, "start", lambda *_, **__: deployment.started)
    keys = {"run-name": "r", "run.phases": "pluralllm", "seed": 5, "pluralllm.rounds": 2, "pluralllm.local-steps": 2}
    said = appa("deploy", sites.root, "--local", *(f"{key}={value}" for key, value in keys.items()))
    assert said.splitlines()[-1] == f"report: {deployment.run / 'report.html'}"
    config = json.loads((deployment.run / "config.json").read_text())
    assert config.items() >= (preset("deployed") | keys | {"groups": "; ".join(names)}).items()
    assert config["survey"] == str(sites.server / "questions.jsonl")
    assert config["run.output-dir"] == str(sites.server / "runs")

    nodes = deployment.processes("flower-supernode")
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

    assert set(CARD.read(deployment.run).groups) == set(names)
    claims = [f"{name}: epsilon 4 a respondent (noise of 8 people)" for name in names]  # sqrt(40) times 1.268
    for shown in ((deployment.run / "run.log").read_text(), (deployment.run / "report.html").read_text()):
        assert all(claim in shown for claim in claims)
    # The search does find a group's answers where they are, and nowhere at the others.
    for name, claim in zip(names, claims, strict=True):
        assert claim in "".join(path.read_text(errors="replace") for path in sites.group(name).glob("*.log"))
        assert _answers_found(sites.group(name), survey) == {name}
    assert {"cache", "questions.jsonl", "runs"} <= {path.name for path in sites.server.iterdir()}
    assert _answers_found(sites.server, survey) == set()
