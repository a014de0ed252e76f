"""From another machine a node can join and work, and nobody can submit, list or take anything.

The other machine is this one, by an address of its own that is no loopback.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from deployment import REPO, Deployment

from appa_flwr.launch import deploy, doctor
from appa_flwr.launch.bundle import bundle_hash
from appa_flwr.launch.endings import RunFailed
from appa_flwr.launch.flower import COMPLETED
from appa_flwr.launch.ports import LOOPBACK, free_port
from appa_flwr.launch.processes import end_processes
from appa_flwr.launch.sites import CONNECTION, Sites, prepare
from appa_flwr.survey.generate import generate

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


def status(sites: Sites, host: str, path: str) -> int:
    """What a call gets that says of itself that it comes from the server's machine."""
    trusting = ssl.create_default_context(cafile=str(sites.submitter / "ca.crt"))
    with closing(http.client.HTTPSConnection(host, sites.port, timeout=10, context=trusting)) as connection:
        connection.request("POST", path, body=b"", headers={"X-Forwarded-For": LOOPBACK, "Forwarded": "for=127.0.0.1"})
        return connection.getresponse().status


@pytest.mark.skipif(not OUTSIDE, reason="this machine has no address but its loopback's")
def test_a_node_joins_and_works_from_elsewhere_and_runs_are_submitted_here_alone(tmp_path: Path, monkeypatch):
    survey = generate(num_questions=40, num_groups=2, seed=1)
    keys = {"host": OUTSIDE, "port": free_port(), "keys": {}, "bundle": bundle_hash(REPO)}
    sites = prepare(survey, tmp_path / "parties", **keys)
    monkeypatch.setattr(deploy, "LOOPBACK", "0.0.0.0")  # where it listens, as start.sh has it
    home = tmp_path / "homes"
    try:
        deployment = Deployment(sites, deploy.start(sites, home, nodes=sites.groups), home)
        for path in ("/v1/control/start-run", "/v1/control/list-nodes", "/v1/runtime/acquire-task", "/docs"):
            assert status(sites, OUTSIDE, path) == 403
            assert status(sites, LOOPBACK, path) != 403
        assert status(sites, OUTSIDE, "/v1/fleet/pull-messages") != 403
        found = {finding.what: finding.text for finding in doctor.party(sites.group(survey.groups[0]))}
        assert re.fullmatch(r"[0-4] s (ahead of|behind) the server's", found["clock"])  # Flower tells its time

        flower = deployment.started.parties[deploy.SUBMITTER].home / "config.toml"
        here = flower.read_text()
        flower.write_text(here.replace(LOOPBACK, OUTSIDE))
        for command in (("run", str(REPO), CONNECTION), ("supernode", "list", CONNECTION)):
            with pytest.raises(RunFailed):
                deployment.flwr(*command)
        flower.write_text(here)
        assert json.loads(deployment.flwr("list", CONNECTION, "--format", "json"))["runs"] == []

        names = "; ".join(survey.groups)
        deployment.submit(groups=names, run__phases="pluralllm", federation__min_groups=2)
        deployment.wait(lambda: deployment.status() == COMPLETED, seconds=240)
        assert {line["phase"] for line in deployment.lines("progress.jsonl")} >= {"pluralllm"}
    finally:
        end_processes(home)
