"""The app deployed: a SuperLink and a SuperNode per group, each a process of its own with its own folder and file."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from appa_flwr.launch.flower import COMPLETED, flower_environment, free_port
from appa_flwr.launch.processes import end_processes, processes_of
from appa_flwr.survey.export import Exported, export_split, slugs
from appa_flwr.survey.generate import generate
from appa_flwr.survey.types import Survey

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
CONNECTION = "deployed"
# As small as the loop can be; every message costs a second or more here, since each starts a process.
TINY_LOOP = {
    "eval.ceilings": False,
    "eval.extra-rows": False,
    "policy.base-steps": 20,
    "sft.steps": 2,
    "ppo.num-iterations": 6,
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

    def flwr(self, *arguments: str) -> str:
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
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def status(self) -> str:
        (run,) = json.loads(self.flwr("list", CONNECTION, "--format", "json"))["runs"]
        return str(run["status"])

    @property
    def run(self) -> Path:
        return self.folder("server") / "runs" / "r"

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
            assert self.parties["server"].poll() is None, self.log("server")
            assert time.monotonic() < deadline, self.log("server")
            time.sleep(0.2)

    def end(self) -> None:
        for party in ["researcher", *self.parties]:
            end_processes(self.folder(party) / ".flwr")
        for process in self.parties.values():
            process.wait(timeout=10)


@pytest.fixture
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

    deployment.wait(answers, seconds=60)


def _start_group(deployment: Deployment, name: str, private: Path) -> None:
    folder = deployment.folder(private.stem)
    if not folder.exists():
        folder.mkdir()
        private.rename(folder / private.name)
    address = ["--superlink", f"127.0.0.1:{deployment.port}", "--port", str(free_port())]
    node_config = f'group="{name}" data="{private.name}"'
    deployment.start(private.stem, ["flower-supernode", "--insecure", *address, "--node-config", node_config])


def _run_config(**changed: object) -> list[str]:
    values = TINY_LOOP | {
        "survey": "questions.jsonl",
        "run-name": "r",
        "run.output-dir": "runs",
        "run.cache-dir": "cache",
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


def test_three_processes_with_a_file_each_align_a_policy_and_go_on_when_one_ends_until_it_is_back(deployment, survey):
    names = survey.groups
    gone = names[-1]
    deployment.flwr("run", str(REPO), CONNECTION, *_run_config(groups=";".join(names), federation__min_groups=2))
    deployment.wait(lambda: bool(deployment.lines("metrics.jsonl")), seconds=240)
    party = slugs(names)[gone]
    os.killpg(deployment.parties[party].pid, signal.SIGTERM)
    deployment.wait(lambda: deployment.lines("metrics.jsonl")[-1]["missing_groups"] == [gone], seconds=120)
    deployment.parties[party].wait(timeout=60)
    _start_group(deployment, gone, Path(f"{party}.jsonl"))
    deployment.wait(lambda: "report" in {line["phase"] for line in deployment.lines("progress.jsonl")}, seconds=240)
    deployment.wait(lambda: deployment.status() == COMPLETED, seconds=60)

    iterations = deployment.lines("metrics.jsonl")
    assert [line["iteration"] for line in iterations] == list(range(1, 7))
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

    # The search does find a group's answers where they are, and nowhere at the server's.
    server = deployment.folder("server")
    for name, party in slugs(names).items():
        assert _answers_found(deployment.folder(party), survey) == {name}
    assert sorted(path.name for path in server.iterdir()) == [".flwr", "cache", "questions.jsonl", "runs"]
    assert _answers_found(server, survey) == set()
