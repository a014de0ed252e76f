"""Starts Flower as a process of its own, shows how far the run is, and ends everything it started.

Every launch gets a private Flower home in a temporary folder and a free port, so it neither meets a stale
SuperLink nor leaves one behind. The server tells how far it is by lines in the run's `progress.jsonl`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

import appa_flwr
from appa_flwr.config import GENERATED_SURVEY, HUB_SURVEY, Config, to_toml_table
from appa_flwr.errors import UserError
from appa_flwr.files import lock, writing
from appa_flwr.launch.processes import STOP_SIGNALS, end_processes, watched
from appa_flwr.run.files import LOG_FILE, PROGRESS, write_config
from appa_flwr.survey.types import Rejection

APP_NAME = "appa-flwr"
ERROR_FILE = "error.txt"
FLOWER_LOG = "flower.log"
SUPERLINK_LOG = "superlink.log"
REPORT_FILE = "report.html"

COMPLETED = "finished:completed"
SHOWN_REJECTIONS = 5
SUPERLINK_START_SECONDS = 120.0  # Flower's own limit of 15 is too short for a busy machine's first import
POLL_SECONDS = 0.2
STATUS_SECONDS = 2.0
LOCK_SECONDS = 15.0  # after a kill, the processes of the run may need a moment to end
TAIL_LINES = 25
# Ray puts sockets some 75 characters below its folder, and a socket's path can have 107.
MAX_RAY_FOLDER = 30
_LOOPBACK = "127.0.0.1"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MISTAKE = re.compile(r"^.*\bUserError: (.+)$", re.MULTILINE)


class RunFailed(Exception):
    """The run started and did not complete; the message says why and where the log lies."""


class Stopped(BaseException):
    """A signal asked the launcher to stop; raised in its place so that everything started is ended first."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


# --- before anything starts -----------------------------------------------------------------------


def find_app_folder(start: Path) -> Path:
    """The checkout whose pyproject.toml holds the Flower app.

    Args:
        start: searched first, then its parents, then the folder the installed package lies in.

    Raises:
        UserError: none of them is one.
    """
    for folder in (start, *start.parents, Path(appa_flwr.__file__).parent.parent):
        if _is_app(folder / "pyproject.toml"):
            return folder
    raise UserError(f"no checkout of {APP_NAME} in {start} or above: run inside a clone, or pip install -e one")


def _is_app(pyproject: Path) -> bool:
    try:
        table = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False
    return table.get("project", {}).get("name") == APP_NAME and "app" in table.get("tool", {}).get("flwr", {})


def participants(config: Config) -> tuple[str, ...]:
    """Names of the groups that take part in the run.

    Raises:
        UserError: the survey does not exist or cannot be read, `groups` names one it does not have, or
            there are fewer than `federation.min-groups`.
    """
    known = _survey_groups(config)
    for name in config.group_names:
        if name not in known:
            some = ", ".join(known)
            raise UserError(f'groups names "{name}", which survey = "{config.survey}" does not have; it has: {some}')
    chosen = config.group_names or known
    for name in config.unseen_group_names:
        if name not in chosen:
            raise UserError(f'unseen-groups names "{name}", which is not in this run; it has: {", ".join(chosen)}')
    if len(config.unseen_group_names) == len(chosen):
        raise UserError("unseen-groups names all groups; at least one must train the predictor")
    if len(chosen) < config.federation.min_groups:
        raise UserError(
            f"federation.min-groups = {config.federation.min_groups}, but there are only {len(chosen)} groups"
        )
    return chosen


def left_out(config: Config, groups: Sequence[str]) -> tuple[Rejection, ...]:
    """The cells of a survey file that the run will leave out, read before anything starts.

    Raises:
        UserError: `strict` is set and there is one, or a group has not one usable answer.
    """
    if config.survey == GENERATED_SURVEY:
        return ()
    from appa_flwr.survey.read import read_survey

    return read_survey(
        config.survey,
        groups=groups,
        refusals=config.data.refusals,
        strict=config.data.strict,
        min_respondents=config.data.min_respondents,
        min_questions=config.data.min_questions,
    ).rejections


def _show_left_out(rejections: Sequence[Rejection]) -> None:
    for cell in rejections[:SHOWN_REJECTIONS]:
        print(f"left out: {cell.source}, row {cell.row}, {cell.group}, {cell.question_id}: {cell.reason}", flush=True)
    if len(rejections) > SHOWN_REJECTIONS:
        print(f"left out: {len(rejections)} cells in all; `appa survey` counts them by reason", flush=True)


def _survey_groups(config: Config) -> tuple[str, ...]:
    if config.survey == GENERATED_SURVEY:
        from appa_flwr.survey.generate import generate

        return generate(
            num_questions=config.data.num_questions, num_groups=config.data.num_groups, seed=config.seed
        ).groups
    path = Path(config.survey)
    if config.survey != HUB_SURVEY and not path.exists():
        raise UserError(f'survey = "{path}" does not exist; give "{GENERATED_SURVEY}" or the path of a survey file')
    from appa_flwr.survey.read import group_names

    return group_names(
        config.survey,
        refusals=config.data.refusals,
        min_respondents=config.data.min_respondents,
        # A group asked for by name is not left out silently: `left_out` refuses it, and says why.
        min_questions=1 if config.group_names else config.data.min_questions,
    )


def flower_environment(home: Path, port: int) -> dict[str, str]:
    """Environment in which Flower runs offline, silent, and apart from any other Flower on this machine.

    Args:
        home: FLWR_HOME; what a run installs, its database and logs go there.
        port: of the local SuperLink on the loopback interface.

    Returns:
        This process's environment with what must differ.
    """
    own = os.environ.copy()
    here = sysconfig.get_path("scripts")  # Flower starts its parts by name, also when no environment is activated
    bypass = ",".join(filter(None, (own.get("NO_PROXY") or own.get("no_proxy"), _LOOPBACK, "localhost")))
    changed = {
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": os.pathsep.join(filter(None, (here, own.get("PATH")))),
        "NO_PROXY": bypass,
        "no_proxy": bypass,
        "PYTHONUNBUFFERED": "1",
        # One thread unless the user says otherwise: sums then come out the same on machines with more cores.
        "OMP_NUM_THREADS": own.get("OMP_NUM_THREADS") or "1",
    }
    if len(str(home)) <= MAX_RAY_FOLDER:
        changed["RAY_TMPDIR"] = str(home)
    return own | changed


def free_port() -> int:
    """A loopback port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])


# --- how far the run is ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgressRecord:
    """One line of `progress.jsonl`.

    Attributes:
        phase: such as "sft" or "ppo".
        step: steps of the phase that are done.
        of: steps the phase has.
        message: what there is to say about this step.
        seconds_left: estimate for the whole run, None where unknown.
    """

    phase: str
    step: int
    of: int
    message: str
    seconds_left: float | None

    @property
    def left(self) -> str:
        """Time left in words, empty where unknown."""
        if self.seconds_left is None:
            return ""
        minutes, seconds = divmod(max(0, round(self.seconds_left)), 60)
        return f"{minutes} min {seconds:02d} s left" if minutes else f"{seconds} s left"

    @property
    def line(self) -> str:
        """The record as one plain line."""
        text = f"[{self.phase} {self.step}/{self.of}] {self.message}".rstrip()
        return f"{text} ({self.left})" if self.left else text


class Tail:
    """Reads what is appended to a file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def text(self) -> str:
        """What was written since the last call, up to the last complete line."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return ""
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode("utf-8", errors="replace")


def read_progress(tail: Tail) -> Iterator[ProgressRecord]:
    """New records of a progress file."""
    for line in tail.text().splitlines():
        yield ProgressRecord(**json.loads(line))


class _Display(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, record: ProgressRecord) -> None: ...


class Lines:
    """One plain line a record, for logs and pipes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, record: ProgressRecord) -> None:
        """Print the record."""
        print(record.line, flush=True)


class Bars:
    """One bar a phase, for a terminal."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.fields[message]}", markup=False),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, record: ProgressRecord) -> None:
        """Move the phase's bar; a phase seen for the first time gets one."""
        for phase, task in self._tasks.items():
            if phase != record.phase:
                self._progress.update(task, left="")  # time left stands beside the phase that runs
        if record.phase not in self._tasks:
            self._tasks[record.phase] = self._progress.add_task(record.phase, total=record.of, left="", message="")
        self._progress.update(
            self._tasks[record.phase],
            completed=record.step,
            total=record.of,
            left=record.left,
            message=record.message,
        )


# --- the run --------------------------------------------------------------------------------------


def launch(config: Config, *, app_folder: Path, verbose: bool = False) -> Path:
    """Run the whole loop in a local Flower simulation and wait for its end.

    Args:
        config: with absolute paths, as `appa_flwr.config.assemble` makes it, or `appa_flwr.run.resume.resumable`
            to go on with a run that was stopped.
        app_folder: the checkout; see `find_app_folder`.
        verbose: copy Flower's log to standard output too.

    Returns:
        The run folder, which holds everything the run wrote.

    Raises:
        UserError: before anything is started or written: see `participants`; or the run folder is in use, or holds
            nothing that could be resumed.
        RunFailed: Flower did not report the run as completed.
        Stopped: SIGINT, SIGTERM or SIGHUP came; all that was started has been ended.
    """
    config = config.named(datetime.now())
    groups = participants(config)
    rejections = left_out(config, groups)
    folder = _reopen_folder(config) if config.run.resume else _create_folder(config)
    _show_left_out(rejections)
    with _flower_home() as home:
        port = free_port()
        environment = flower_environment(home, port)
        superlink = _start_superlink(home, port, environment)
        print(f"run folder: {folder}", flush=True)
        console = Console()
        show: _Display = Bars(console) if console.is_terminal and not verbose else Lines()
        with show:
            status = _run(
                config,
                app_folder=app_folder,
                num_groups=len(groups),
                home=home,
                environment=environment,
                superlink=superlink,
                display=show,
                verbose=verbose,
            )
        if status != COMPLETED or (folder / ERROR_FILE).exists():
            shutil.copy(home / SUPERLINK_LOG, folder / SUPERLINK_LOG)
            raise RunFailed(_why(folder, status))
    return folder


def _create_folder(config: Config) -> Path:
    folder = config.run_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as error:
        raise UserError(f'run.output-dir = "{config.run.output_dir}": cannot write there ({error})') from None
    if used:
        raise UserError(
            f'run-name = "{config.run_name}": {folder} holds a run already; choose another run-name, or go on with it: '
            f"appa run --resume {folder}"
        )
    # From here on the run can be resumed, whatever ends it.
    write_config(folder, config)
    return folder


def _reopen_folder(config: Config) -> Path:
    folder = config.run_folder
    lock(folder / LOG_FILE, patience=LOCK_SECONDS).close()
    with writing(folder):
        (folder / ERROR_FILE).unlink(missing_ok=True)
    return folder


def _start_superlink(home: Path, port: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the local SuperLink and wait until it answers; `flwr run` then starts none of its own."""
    command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
    command += ["--host", _LOOPBACK, "--port", str(port)]
    with (home / SUPERLINK_LOG).open("wb") as log:
        superlink = _start(command, home=home, environment=environment, log=log.fileno())
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + SUPERLINK_START_SECONDS
    while time.monotonic() < deadline and superlink.poll() is None:
        try:
            with direct.open(f"http://{_LOOPBACK}:{port}/health", timeout=1.0):
                return superlink
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(POLL_SECONDS)
    raise RunFailed(f"Flower's SuperLink did not start; its last lines:\n{_last_lines(home / SUPERLINK_LOG)}")


def _run(
    config: Config,
    *,
    app_folder: Path,
    num_groups: int,
    home: Path,
    environment: Mapping[str, str],
    superlink: subprocess.Popen[bytes],
    display: _Display,
    verbose: bool,
) -> str:
    """Submit the run, follow it to its end and return Flower's status of it."""
    settings = home / "run-config.toml"
    settings.write_text(to_toml_table(config.flat()), encoding="utf-8")
    nodes = min(num_groups, os.cpu_count() or 1)
    # By default a client asks for two CPUs: it could not run on one, and would run alone on two.
    simulation = f"num-supernodes={nodes} init-args-num-cpus={nodes} client-resources-num-cpus=1"
    command = ["flwr", "run", str(app_folder), "--stream"]
    command += ["--run-config", str(settings), "--federation-config", simulation]
    log_path = config.run_folder / FLOWER_LOG
    progress, log_tail = Tail(config.run_folder / PROGRESS.name), Tail(log_path)
    for earlier in (progress, log_tail):
        earlier.text()  # of a resumed run: shown when it was written
    with log_path.open("ab") as log:
        client = _start(command, home=home, environment=environment, log=log.fileno())

    def follow() -> None:
        if verbose:
            print(log_tail.text(), end="", flush=True)
        for record in read_progress(progress):
            display.show(record)

    while client.poll() is None:
        follow()
        time.sleep(POLL_SECONDS)
    # The stream can break while the run goes on, and ends with 0 when the run failed: only the status tells.
    status = _status(home, environment)
    while status.split(":")[0] in ("pending", "starting", "running") and superlink.poll() is None:
        follow()
        time.sleep(STATUS_SECONDS)
        status = _status(home, environment)
    follow()
    return status


def _status(home: Path, environment: Mapping[str, str]) -> str:
    """Flower's status of this SuperLink's only run, such as "finished:completed"; empty if there is none."""
    command = ["flwr", "list", "--format", "json"]
    answer = subprocess.run(
        command,
        env=dict(environment),
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        runs = json.loads(answer.stdout).get("runs", [])
    except json.JSONDecodeError:
        return ""
    return str(runs[0]["status"]) if runs else ""


def _start(command: list[str], *, home: Path, environment: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
    # A session of its own keeps the terminal's Ctrl-C from the children: the launcher ends them in order.
    # The home as working folder keeps Flower's workers from importing what lies in the user's folder.
    return subprocess.Popen(
        command,
        env=dict(environment),
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _why(folder: Path, status: str) -> str:
    error = folder / ERROR_FILE
    if error.exists():
        return error.read_text(encoding="utf-8").strip()
    log = folder / FLOWER_LOG
    mistakes = _MISTAKE.findall(_last_lines(log))
    if mistakes:  # with a full disk, nothing else could be written
        return str(mistakes[-1])
    said = f'Flower reports "{status}"' if status else "Flower did not accept the run"
    return f"the run did not complete: {said}; the last lines of {log}:\n{_last_lines(log)}"


def _last_lines(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "(no log)"
    lines = [line for line in _COLOUR.sub("", text).splitlines() if line.strip()]
    return "\n".join(lines[-TAIL_LINES:])


# --- ending what was started ----------------------------------------------------------------------


@contextmanager
def _flower_home() -> Iterator[Path]:
    """A temporary Flower home; at the end every process that was started with it has ended and it is removed.

    A watchdog sees to that where this process is killed.

    SIGINT, SIGTERM and SIGHUP raise `Stopped` inside, and are ignored while things are being ended.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signum)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="appa-", ignore_cleanup_errors=True) as folder,
            watched(Path(folder)),
        ):
            try:
                yield Path(folder)
            finally:
                for number in STOP_SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                end_processes(Path(folder))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
