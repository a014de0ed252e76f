"""Ends the processes of a Flower home, by the launcher that started them."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from appa_flwr.launch.terminal import Stopped

END_SECONDS = 5.0  # between asking a process to end and killing it
END_ROUNDS = 5  # a process can start another one while it is being ended
LOOK_SECONDS = 0.1  # between the two looks that must find nothing
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def flower_home() -> Iterator[Path]:
    """A temporary Flower home; at the end every process that was started with it has ended and it is removed.

    SIGINT, SIGTERM and SIGHUP raise `Stopped` inside, and are ignored while things are being ended.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signum)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        # Not below TMPDIR: Ray puts sockets some 75 characters below its folder, and a socket's path can have 107.
        with tempfile.TemporaryDirectory(prefix="appa-", dir="/tmp", ignore_cleanup_errors=True) as folder:
            try:
                yield Path(folder)
            finally:
                for number in STOP_SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                end_processes(Path(folder))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def processes_of(home: Path) -> list[psutil.Process]:
    """Every living process that was started, directly or not, with `home`, or a folder in it, as its FLWR_HOME.

    Ray's workers overwrite the memory in which a process shows its environment, so the children of all these are
    counted in, and so are the sessions that one of these leads. The launcher's session is led by none.
    """
    marked = [
        process
        for process in psutil.process_iter(["environ"])  # None for a zombie and for somebody else's process
        if Path((process.info["environ"] or {}).get("FLWR_HOME", "")).is_relative_to(home)
    ]
    descendants = set(marked)
    for process in marked:
        with suppress(psutil.Error):
            descendants.update(process.children(recursive=True))
    led = {process.pid for process in marked if _session(process.pid) == process.pid}
    descendants.update(process for process in psutil.process_iter() if _session(process.pid) in led)
    return [process for process in descendants if _alive(process)]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def end_processes(home: Path) -> None:
    """End every process of this Flower home: asked first, killed after a few seconds.

    A process that is just beginning its program shows no environment for a moment, so nobody is taken for gone
    before a second look.
    """
    for _ in range(END_ROUNDS):
        left = processes_of(home)
        if not left:
            time.sleep(LOOK_SECONDS)
            left = processes_of(home)
        if not left:
            return
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in left:
                with suppress(psutil.Error):
                    end(process)
            _, left = psutil.wait_procs(left, timeout=END_SECONDS)
