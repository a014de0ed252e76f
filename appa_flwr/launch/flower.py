"""Starts Flower in separate processes, follows a run to its end, and reports why a run failed.

Every launch has a private Flower home in a temporary folder and a free port, so it neither uses an old SuperLink nor
leaves one running. Flower 1.41's `flwr-simulation` also needs a SuperLink, to fetch app and run config by a token.
"""

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

from appa_flwr.analysis import rule_choice
from appa_flwr.config import THREADS, Config
from appa_flwr.config.keys import to_toml_table
from appa_flwr.core.errors import UserError
from appa_flwr.core.ports import LOOPBACK, free_port
from appa_flwr.core.text import duration
from appa_flwr.launch.bundle import sent_files
from appa_flwr.launch.checks import check_server, read_survey
from appa_flwr.launch.processes import flower_home
from appa_flwr.launch.sites import HOME
from appa_flwr.launch.terminal import RunFailed, Stopped
from appa_flwr.owner.ledger import MEMORY_SUFFIX
from appa_flwr.run import schema as files
from appa_flwr.run.resume import claim
from appa_flwr.survey import store

COMPLETED = "finished:completed"
UNFINISHED = ("pending", "starting", "running")
SUPERLINK_START_SECONDS = 120.0  # Flower's own limit of 15 is too short for a busy machine's first import
POLL_SECONDS = 0.2
STOP_SECONDS = 120.0  # for a served run's last answers and its report
MOST_GROUPS = 8  # of a simulated node, so that replies are small and show the progress
TAIL_LINES = 25
STARTED_TOO_SLOWLY = "timed out during startup"  # in an error of Ray's
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def launch(config: Config) -> Path:
    """Run the whole loop in a local Flower simulation, wait for its end and return the run's folder.

    Paths in the config are absolute.

    Raises:
        UserError: before anything is started or written, see `read_survey`, `check_server` and `claim`.
        RunFailed: Flower did not report the run as completed.
        Stopped: a signal came and the run was not serving (a serving run ends normally); all processes have ended.
    """
    config = config.named(datetime.now())
    survey = read_survey(config)
    if not survey.groups:
        raise UserError(f"{config.survey}: has questions alone; a simulation needs the groups' answers to them")
    check_server(config)
    claimed, folder = claim(config, launcher=True), config.run_folder
    again = f"appa {'serve' if config.run.phases == 'serve' else 'run'} --resume {folder}"
    if not config.run.resume:
        store.write(survey, folder / files.SURVEY_FILE)
    print(f"run folder: {folder}", flush=True)
    with ExitStack() as after, flower_home() as home:
        # of a stopped run, whose processes have ended by then
        after.callback(shutil.rmtree, (folder / files.SURVEY_FILE).with_suffix(MEMORY_SUFFIX), ignore_errors=True)
        flower = Flower(home, port := free_port(), folder=home)
        command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
        command += ["--host", LOOPBACK, "--port", str(port)]
        superlink = flower.start_superlink(command)
        command = ["flwr", "run", str(sent_files(home))]
        processes = min(len(survey.groups), os.cpu_count() or 1)
        nodes = processes * ceil(len(survey.groups) / (processes * MOST_GROUPS))  # equally many for each process
        # By default a client needs two CPUs: it could not run on one CPU, and only one client would run on two.
        simulation = f"num-supernodes={nodes} init-args-num-cpus={processes} client-resources-num-cpus=1"
        command += ["--federation-config", simulation]
        try:
            followed(config, flower, command, superlink=superlink)
        except Stopped as stopped:
            if not _stop_serving(folder, flower, superlink):
                stopped.resume = again
                raise
        except RunFailed as failed:
            raise RunFailed(f"{failed}\n{again} continues once the cause is gone") from failed
    claimed.release()
    return folder


def _stop_serving(folder: Path, flower: "Flower", superlink: subprocess.Popen[bytes]) -> bool:
    """Ask a serving run to end with its report; True if it completed. Another signal ends the run at once."""
    session = itertools.takewhile(lambda step: step.phase != files.MACHINE, reversed(files.PROGRESS.read(folder)))
    if all(step.phase != files.SERVE_PHASE for step in session):
        return False
    print("stopping: the requests that are being scored are answered first", flush=True)
    (folder / files.STOP_FILE).touch()
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline and superlink.poll() is None:
        if (status := flower.status()).split(":")[0] not in UNFINISHED:
            return status == COMPLETED
        time.sleep(POLL_SECONDS)
    return False


@dataclass(frozen=True)
class Flower:
    """One party's Flower: its FLWR_HOME, the SuperLink's port, and the working directory of its processes.

    `connection` names the SuperLink in the party's Flower config; empty = the local SuperLink.
    """

    home: Path
    port: int
    folder: Path
    connection: str = ""

    @property
    def _where(self) -> dict[str, Any]:
        # With the user's working directory, Flower's workers would import modules from there.
        environment = flower_environment(self.home, self.port)
        return {"env": environment, "cwd": self.folder, "stdin": subprocess.DEVNULL}

    def start(self, command: list[str], *, log: Path) -> subprocess.Popen[bytes]:
        """Start a Flower command; its output is appended to a file."""
        # In a new session the children do not get the terminal's Ctrl-C, so that the launcher ends them in order.
        with log.open("ab") as file:
            return subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, **self._where
            )

    def start_superlink(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a SuperLink and wait until it listens; raises RunFailed if it does not."""
        log = self.folder / files.SUPERLINK_LOG
        superlink = self.start(command, log=log)
        deadline = time.monotonic() + SUPERLINK_START_SECONDS
        while time.monotonic() < deadline and superlink.poll() is None:
            # It opens its port last; without it `flwr run` would start its own SuperLink.
            with suppress(OSError), socket.create_connection((LOOPBACK, self.port), timeout=1.0):
                return superlink
            time.sleep(POLL_SECONDS)
        raise RunFailed(f"Flower's SuperLink did not start; its last lines:\n{_last_lines(log)}")

    def call(self, command: list[str]) -> str:
        """Run a Flower command to its end and return its output; raises RunFailed if it fails."""
        done = subprocess.run(command, capture_output=True, text=True, check=False, **self._where)
        if done.returncode:
            raise RunFailed(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()}")
        return str(done.stdout)

    def status(self) -> str:
        """Flower's status of the only run, such as "finished:completed"; empty if there is none."""
        try:
            runs = json.loads(self.call(["flwr", "list", *self.connection.split(), "--format", "json"])).get("runs", [])
        except (RunFailed, ValueError):
            return ""
        return str(runs[0]["status"]) if runs else ""


def followed(config: Config, flower: Flower, command: list[str], *, superlink: subprocess.Popen[bytes]) -> None:
    """Submit a run by a `flwr run` of this party, and follow it to its end; it cannot go on without the SuperLink.

    Raises:
        RunFailed: Flower does not report the run as completed.
    """
    folder, settings = config.run_folder, flower.home / "run-config.toml"
    settings.write_text(to_toml_table(config.flat()), encoding="utf-8")
    shown = max((number for number, _ in files.PROGRESS.lines(folder)), default=0)  # before the run was resumed
    client = flower.start([*command, "--stream", "--run-config", str(settings)], log=folder / files.FLOWER_LOG)

    def follow() -> None:
        nonlocal shown
        for number, record in files.PROGRESS.lines(folder, after=shown):
            shown = number
            left = f" ({duration(record.seconds_left)} left)" if record.seconds_left else ""
            print(f"[{record.phase} {record.step}/{record.of}] {record.message}".rstrip() + left, flush=True)

    status = ""
    # Only the status is reliable: the stream can break while the run continues, and returns 0 if the run failed.
    while client.poll() is None or (
        superlink.poll() is None and (status := flower.status()).split(":")[0] in UNFINISHED
    ):
        follow()
        time.sleep(POLL_SECONDS)
    follow()
    if status != COMPLETED or (folder / files.ERROR_FILE).exists():
        for path in flower.home.glob(files.SUPERLINK_LOG):
            shutil.copy(path, folder / files.SUPERLINK_LOG)
        raise RunFailed(_why(folder, status, superlink.poll()))


def flower_environment(home: Path, port: int) -> dict[str, str]:
    """This process's environment, changed so that Flower runs without telemetry and apart from other Flower processes.

    Installed apps, database and logs of a run go to `home`; `port` is the local SuperLink's.
    """
    own = os.environ
    here = sysconfig.get_path("scripts")  # Flower starts its programs by name, even if no environment is activated
    bypass = ",".join(filter(None, (own.get("NO_PROXY") or own.get("no_proxy"), LOOPBACK, "localhost")))
    changed = {
        **own,
        "FLWR_HOME": str(home),
        HOME: str(home),
        rule_choice.CODE_FOLDER: os.getcwd(),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(home),
        # An actor that requests no GPU sees none. This is Ray's current default, which Ray plans to change.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
        "PATH": os.pathsep.join(filter(None, (here, own.get("PATH")))),
        "NO_PROXY": bypass,
        "no_proxy": bypass,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # set in many containers: each process would compile all modules again
        # One thread unless the user sets another number, so that sums are equal on machines with more cores.
        "OMP_NUM_THREADS": own.get("OMP_NUM_THREADS") or "1",
        THREADS: own.get("OMP_NUM_THREADS", ""),
    }
    if find_spec("socksio") is None:  # then httpx fails if a SOCKS proxy is set, even if it would bypass the proxy
        for name in [name for name, value in own.items() if name.lower().endswith("_proxy") and "socks" in value]:
            del changed[name]
    changed.pop("RAY_ADDRESS", None)  # of another Ray, which the simulation would join
    return changed


def _why(folder: Path, status: str, superlink: int | None) -> str:
    """Why a run failed; `superlink` is the exit code of a SuperLink that has ended."""
    error = folder / files.ERROR_FILE
    if error.exists():
        return error.read_text(encoding="utf-8").strip()
    log = folder / (files.FLOWER_LOG if superlink is None else files.SUPERLINK_LOG)
    state = f'Flower reports "{status}"' if status else "Flower did not accept the run"
    if superlink is not None:
        how = f"by {signal.Signals(-superlink).name}" if superlink < 0 else f"with exit code {superlink}"
        state = f"Flower's SuperLink has ended, {how}"
    elif log.exists() and STARTED_TOO_SLOWLY in log.read_text(encoding="utf-8", errors="replace"):
        state += "; Ray took too long to start, as on a busy machine"
    return f"the run did not complete: {state}; the last lines of {log}:\n{_last_lines(log)}"


def _last_lines(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else "(no log)"
    lines = [line for line in _COLOUR.sub("", text).splitlines() if line.strip()]
    return "\n".join(lines[-TAIL_LINES:])
