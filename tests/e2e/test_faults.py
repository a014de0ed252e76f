"""What goes wrong in a deployment, one fault after the other, in real processes.

Their parts are tested in `unit/server_app/federation`, `unit/server_app/test_resume.py` and `test_deployment.py`, so
they are not in a plain run: `make test ARGS="-m long tests/e2e/test_faults.py"`, 40 minutes on two cores.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from deployment import REPO, Deployment, deployed
from real_run import APPA, kill_all, small_environment
from small import SMALLEST

from appa_flwr.core.ports import free_port
from appa_flwr.launch.bundle import bundle_hash
from appa_flwr.launch.deploy import SERVER, START, start_server
from appa_flwr.launch.flower import COMPLETED
from appa_flwr.launch.sites import make_node_key
from appa_flwr.owner.guard import NOT_PINNED
from appa_flwr.owner.ledger import SUFFIX, Ledger
from appa_flwr.protocol import messages
from appa_flwr.survey.generate import generate

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

SURVEY = generate(num_questions=40, num_groups=3, seed=1)
A, B, C = SURVEY.groups
ALL = {"groups": ";".join(SURVEY.groups)}
ACTIVATED = "[Fleet.ActivateNode] Activated node_id="
GIVEN_UP = "Giving up reconnection"


def missing(deployment: Deployment) -> list[str]:
    return deployment.iterations[-1]["missing_groups"] if deployment.iterations else []


def ended(deployment: Deployment) -> None:
    deployment.wait(lambda: deployment.status() == COMPLETED)
    numbers = [line["iteration"] for line in deployment.iterations]
    assert numbers == list(range(1, len(numbers) + 1))
    assert (deployment.run / "report.html").exists()


def start_again(deployment: Deployment, name: str) -> None:
    """Start a node that was killed; Flower lets it in once it counts as gone, and until then the node ends at once."""
    started, log = deployment.started, deployment.started.parties[SERVER].folder / "superlink.log"
    known = log.read_text().count(ACTIVATED)

    def decided() -> bool:
        return log.read_text().count(ACTIVATED) > known or started.nodes[name].poll() is not None

    for _ in range(12):
        started.start_node(name)
        deployment.wait(decided)
        if started.nodes[name].poll() is None:
            return
        time.sleep(10)
    raise AssertionError(f"{name} was not let in")


def releases(deployment: Deployment, name: str) -> list[str]:
    """Kinds of the replies that a group's node has given, oldest first."""
    (path,) = deployment.sites.group(name).glob(f"*{SUFFIX}")
    return [release.kind for release in Ledger(path).releases()]


def warnings(deployment: Deployment) -> str:
    return (deployment.run / "run.log").read_text()


def test_nodes_are_late_killed_restarted_and_frozen_and_the_server_app_is_killed(tmp_path):
    with deployed(SURVEY, tmp_path, nodes=False) as deployment:
        started = deployment.started
        for name in (A, B):
            started.start_node(name)
        keys = {**ALL, "ppo__num_iterations": 60, "run__reply_timeout": 30.0}
        deployment.submit(**keys)
        deployment.wait(lambda: bool(deployment.iterations))
        assert missing(deployment) == [C]
        started.start_node(C)  # late
        deployment.wait(lambda: missing(deployment) == [])

        catalogues = releases(deployment, A).count(messages.CATALOGUE)
        os.killpg(started.nodes[A].pid, signal.SIGKILL)
        deployment.wait(lambda: missing(deployment) == [A])
        start_again(deployment, A)
        deployment.wait(lambda: missing(deployment) == [])
        assert releases(deployment, A).count(messages.CATALOGUE) == catalogues  # it remembers what it was sent

        os.killpg(started.nodes[B].pid, signal.SIGSTOP)  # its app's processes are of its session
        deployment.wait(lambda: missing(deployment) == [B])
        os.killpg(started.nodes[B].pid, signal.SIGCONT)
        deployment.wait(lambda: missing(deployment) == [])

        done = len(deployment.iterations)
        (server_app,) = deployment.processes("flwr-serverapp")
        server_app.kill()
        deployment.wait(lambda: deployment.status().startswith("finished"))
        assert deployment.status() != COMPLETED
        deployment.submit(**keys, run__resume=True)
        ended(deployment)
        assert len(deployment.iterations) == 60 > done
        assert "resumed at iteration" in warnings(deployment)
        assert f"back: {C}" in warnings(deployment)


def test_an_impostor_an_unregistered_node_and_a_second_node_of_one_key(tmp_path):
    with deployed(SURVEY, tmp_path, nodes=False) as deployment:
        started, sites = deployment.started, deployment.sites
        make_node_key(tmp_path / "impostor")
        deployment.flwr("supernode", "register", str(tmp_path / "impostor.pub"), "deployed")
        make_node_key(tmp_path / "unregistered")  # registered nowhere

        def node_of_a(name: str, key: Path):
            folder = shutil.copytree(sites.group(A), tmp_path / f"folder-of-{name}")
            shutil.copyfile(key, folder / "node.key")
            node = replace(started.parties[A], home=deployment.home / name, folder=folder)
            return node.start([START, str(free_port())], log=tmp_path / f"{name}.log")

        impostor, unregistered = (node_of_a(name, tmp_path / name) for name in ("impostor", "unregistered"))
        for name in SURVEY.groups:
            started.start_node(name)
        deployment.submit(**ALL, ppo__num_iterations=4)
        deployment.wait(lambda: bool(deployment.iterations))
        second = node_of_a("second", sites.group(A) / "node.key")
        ended(deployment)
        assert impostor.poll() is None
        for refused in (unregistered, second):
            assert refused.wait(timeout=60) != 0
        assert "has no group's key; the node is left out" in warnings(deployment)
        assert all(line["missing_groups"] == [] for line in deployment.iterations)
        for name in ("unregistered", "second"):
            assert "could not establish a connection to the SuperLink" in (tmp_path / f"{name}.log").read_text()


def test_a_group_runs_the_bundle_that_its_owner_pinned_and_no_other(tmp_path):
    with deployed(SURVEY, tmp_path, nodes=False) as deployment:
        for name, pinned in ((A, bundle_hash(REPO)), (B, "0" * 64)):
            (deployment.sites.group(name) / "policy.toml").write_text(f'bundle = "{pinned}"\n')
            deployment.started.start_node(name)
        deployment.submit(groups=f"{A};{B}", run__min_groups=1, run__reply_timeout=30.0)
        ended(deployment)
        assert all(line["missing_groups"] == [B] for line in deployment.iterations)
        assert NOT_PINNED in warnings(deployment)
        assert f"groups that did not join: {B}" in warnings(deployment)


def test_a_killed_superlink_starts_again_and_the_run_goes_on(tmp_path):
    with deployed(SURVEY, tmp_path) as deployment:
        keys = {**ALL, "ppo__num_iterations": 8}
        deployment.submit(**keys)
        deployment.wait(lambda: len(deployment.iterations) > 1)
        server = deployment.started.parties[SERVER]
        deployment.started.superlink.kill()
        deployment.started.superlink.wait()
        deployment.started.superlink = start_server(server, deployment.home)
        deployment.wait(lambda: deployment.status().startswith("finished"))
        if deployment.status() != COMPLETED:
            deployment.submit(**keys, run__resume=True)
        ended(deployment)
        assert len(deployment.iterations) == 8
        assert all(node.poll() is None for node in deployment.started.nodes.values())


def test_a_frozen_superlink_ends_the_run_with_a_line_and_the_run_resumes(tmp_path):
    with deployed(SURVEY, tmp_path) as deployment:
        started = deployment.started
        keys = {**ALL, "ppo__num_iterations": 4}
        deployment.submit(**keys)
        deployment.wait(lambda: len(deployment.iterations) > 1)
        os.kill(started.superlink.pid, signal.SIGSTOP)
        try:
            deployment.wait((deployment.run / "error.txt").exists)
        finally:
            os.kill(started.superlink.pid, signal.SIGCONT)
        said = (deployment.run / "error.txt").read_text()
        assert "SuperLink" in said
        assert "run.resume=true" in said
        assert f"failed: {said}" in warnings(deployment)
        deployment.wait(lambda: deployment.status().startswith("finished"))
        assert deployment.status() != COMPLETED
        # The part of it that starts runs has ended. A node that was just connecting has given up: it has ended, or its
        # process goes on and does nothing.
        started.superlink.kill()
        started.superlink.wait()
        started.superlink = start_server(started.parties[SERVER], deployment.home)
        for name, node in started.nodes.items():
            if node.poll() is not None or GIVEN_UP in (deployment.sites.group(name) / "supernode.log").read_text():
                with suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)
                node.wait()
                start_again(deployment, name)
        deployment.submit(**keys, run__resume=True)
        ended(deployment)
        assert len(deployment.iterations) == 4


KEYS = {
    **SMALLEST,
    "run.min-groups": 2,
    "data.num-questions": 40,
    "policy.prompt-style": "compact",  # its survey is a file, for which "auto" has another style
    "seed": 1,
    "pluralllm.rounds": 3,  # in more and longer rounds the order in which nodes are added up shows
    "sft.steps": 60,
    "sft.batch-size": 16,
    "ppo.num-iterations": 4,
}


def test_killed_by_all_its_processes_it_ends_with_the_simulation_s_numbers(tmp_path, appa_run):
    """By the command; at which moments a run may be killed, `test_resume` tells."""
    simulated = appa_run("simulated", **{key: json.dumps(value) for key, value in KEYS.items()})
    assert simulated.code == 0, simulated.err
    keys = [f"{key}={json.dumps(value)}" for key, value in (KEYS | {"run-name": "r"}).items()]
    folder, temporary = tmp_path / "trial", tmp_path / "temporary"
    temporary.mkdir()
    environment = small_environment() | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    subprocess.run([*APPA, "deploy", str(folder), *keys], cwd=tmp_path, env=environment, check=True)
    command = [*APPA, "deploy", str(folder), "--local", *keys]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as launcher:
        assert any(line.startswith("[ppo 2/4]") for line in launcher.stdout)
        kill_all(temporary)
    again = [*command, "run.resume=true"]
    subprocess.run(again, cwd=tmp_path, env=environment, check=True)
    (run,) = (folder / "server" / "runs").iterdir()
    ours = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    theirs = simulated.lines("metrics.jsonl")
    assert len(ours) == len(theirs) == KEYS["ppo.num-iterations"]
    for one, other in zip(ours, theirs, strict=True):
        assert one["rewards"] == pytest.approx(other["rewards"], abs=1e-6), one["iteration"]
        assert one["group_reward"] == pytest.approx(other["group_reward"], abs=1e-6), one["iteration"]
