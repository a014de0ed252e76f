"""The app deployed: a SuperLink and a SuperNode per group, each a process of its own with its own folder and file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from appa_flwr.launcher import COMPLETED, end_processes, flower_environment, free_port, processes_of
from appa_flwr.survey.export import Exported, export_split
from appa_flwr.survey.generate import generate
from appa_flwr.survey.types import Survey

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
CONNECTION = "deployed"
# As small as the loop can be; every message costs a second or more here, since each starts a process.
TINY_LOOP = {
    "ceilings": False,
    "base-steps": 20,
    "sft-steps": 2,
    "num-iterations": 2,
    "pluralllm-rounds": 1,
    "embedding-dim": 16,
    "rollout-batch-size": 16,
    "num-mini-batches": 2,
    "ppo-epochs": 1,
}


@dataclass
class Deployment:
    """Everything one test started; `home` of each party is its folder's `.flwr`."""

    root: Path
    port: int
    parties: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def folder(self, party: str) -> Path:
        return self.root / party

    def environment(self, party: str) -> dict[str, str]:
        changed = flower_environment(self.folder(party) / ".flwr", self.port)
        # The README's commands do without it, so the test does too.
        del changed["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"]
        # The one test run shares two cores: asking for work more often than every second is worth it.
        return changed | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}

    def start(self, party: str, command: Sequence[str]) -> None:
        with (self.root / f"{party}.log").open("wb") as log:
            self.parties[party] = subprocess.Popen(
                command,
                cwd=self.folder(party),
                env=self.environment(party),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self, party: str) -> str:
        return (self.root / f"{party}.log").read_text(errors="replace")

    def flwr(self, *arguments: str, check: bool = True) -> str:
        """A command of the researcher who submits the run."""
        done = subprocess.run(
            ["flwr", *arguments],
            cwd=self.folder("researcher"),
            env=self.environment("researcher"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout

    def status(self) -> str:
        return str(json.loads(self.flwr("list", CONNECTION, "--format", "json"))["runs"][0]["status"])

    def lines(self, name: str) -> list[dict]:
        """Lines of one of the run folder's line files so far."""
        try:
            return [json.loads(line) for line in (self.folder("server") / "runs" / "r" / name).read_text().splitlines()]
        except FileNotFoundError:
            return []

    def end(self) -> None:
        for party in ["researcher", *self.parties]:
            end_processes(self.folder(party) / ".flwr")
        for process in self.parties.values():
            process.wait(timeout=10)


@pytest.fixture(scope="module")
def survey() -> Survey:
    return generate(num_questions=40, num_groups=3, seed=1)


@pytest.fixture
def deployment(tmp_path: Path, survey: Survey) -> Iterator[Deployment]:
    exported = export_split(survey, tmp_path / "export")
    started = Deployment(tmp_path, free_port())
    try:
        _start_server(started, exported)
        for name, private in exported.groups.items():
            _start_group(started, name, private)
        yield started
    finally:
        started.end()
    assert [p for party in started.parties for p in processes_of(started.folder(party) / ".flwr")] == []


def _start_server(deployment: Deployment, exported: Exported) -> None:
    researcher = deployment.folder("researcher") / ".flwr"
    researcher.mkdir(parents=True)
    connection = f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{deployment.port}"\ninsecure = true\n'
    (researcher / "config.toml").write_text(connection)
    deployment.folder("server").mkdir()
    exported.questions.rename(deployment.folder("server") / "questions.jsonl")
    deployment.start("server", ["flower-superlink", "--insecure", "--port", str(deployment.port)])
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def answers() -> bool:
        try:
            direct.open(f"http://127.0.0.1:{deployment.port}/health", timeout=1).close()
        except OSError:
            return False
        return True

    _wait(answers, deployment, seconds=60)


def _start_group(deployment: Deployment, name: str, private: Path) -> None:
    folder = deployment.folder(private.stem)
    folder.mkdir()
    private.rename(folder / private.name)
    address = ["--superlink", f"127.0.0.1:{deployment.port}", "--port", str(free_port())]
    node_config = f'group="{name}" data="{private.name}"'
    deployment.start(private.stem, ["flower-supernode", "--insecure", *address, "--node-config", node_config])


def _wait(happened: Callable[[], bool], deployment: Deployment, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        ended = [party for party, process in deployment.parties.items() if process.poll() is not None]
        assert not ended, deployment.log(ended[0])
        assert time.monotonic() < deadline, deployment.log("server")
        time.sleep(0.2)


def _run_config(**changed: object) -> list[str]:
    values = TINY_LOOP | {"survey": "questions.jsonl", "run-name": "r", "output-dir": "runs", "cache-dir": "cache"}
    values |= {key.replace("_", "-"): value for key, value in changed.items()}
    return ["--run-config", " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())]


def _private_texts(survey: Survey) -> dict[str, list[str]]:
    """What must not be seen outside a group's folder: its answers as its file has them."""
    return {
        name: [json.dumps(shares.tolist())[1:-1] for shares in answers.values()]
        for name, answers in survey.answers.items()
    }


def _leaks(folder: Path, survey: Survey) -> list[str]:
    texts = [(path, path.read_bytes().decode(errors="replace")) for path in folder.rglob("*") if path.is_file()]
    assert texts
    return [
        f"{name}: {path}"
        for name, private in _private_texts(survey).items()
        for path, text in texts
        if any(row in text for row in private)
    ]


def test_three_processes_with_a_file_each_align_a_policy(deployment, survey):
    names = survey.groups
    config = _run_config(groups=";".join(names), min_groups=3)
    log = deployment.flwr("run", str(REPO), CONNECTION, "--stream", *config)
    assert deployment.status() == COMPLETED, log + deployment.log("server")
    server = deployment.folder("server")
    run = server / "runs" / "r"
    rows = json.loads((run / "summary.json").read_text())
    assert {row["policy"] for row in rows} == {"base", "sft", "ppo", "uniform", "majority"}
    assert all(set(row["per_group"]) == set(names) for row in rows)
    iterations = deployment.lines("metrics.jsonl")
    assert [line["iteration"] for line in iterations] == [1, 2]
    assert all(set(line["rewards"]) == set(names) and not line["missing_groups"] for line in iterations)
    assert (run / "report.html").exists()
    # Each group's folder still holds its own answers, which shows that the search below would find them.
    for party in set(deployment.parties) - {"server"}:
        assert [leak.split(":")[0] for leak in _leaks(deployment.folder(party), survey)].count(party.title()) >= 1
    assert sorted(p.name for p in server.iterdir()) == [".flwr", "cache", "questions.jsonl", "runs"]
    assert _leaks(server, survey) == []
    assert not any(row in deployment.log("server") for rows in _private_texts(survey).values() for row in rows)
