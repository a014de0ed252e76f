"""Ends the processes of a Flower home: by the launcher, or by a watchdog where the launcher itself was killed.

Run as a file, it is the watchdog; so it imports nothing of this project.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

END_SECONDS = 5.0  # between asking a process to end and killing it
END_ROUNDS = 5  # a process can start another one while it is being ended
LOOK_SECONDS = 0.1  # between the two looks that must find nothing
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def flower_home() -> Iterator[Path]:
    """A temporary Flower home; at the end every process that was started with it has ended and it is removed.

    A watchdog sees to that where this process is killed. SIGINT, SIGTERM and SIGHUP raise `Stopped` inside, and are
    ignored while things are being ended.
    """
    from appa_flwr.launch.endings import Stopped  # not for the watchdog

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signum)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="appa-", ignore_cleanup_errors=True) as folder,
            _watchdog_of(home := Path(folder)),
        ):
            try:
                yield home
            finally:
                _ignore_signals()
                end_processes(home)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watchdog_of(home: Path) -> subprocess.Popen[bytes]:
    """A process that ends all processes of `home` once this one has ended, be it by kill -9.

    It reads from a pipe that this process alone can write to, and that the system closes with this process.
    """
    return subprocess.Popen(
        # -P keeps this file's folder, whose modules have common names, off the path.
        [sys.executable, "-P", __file__, str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=home.parent,
        start_new_session=True,
    )


def _ignore_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def processes_of(home: Path) -> list[psutil.Process]:
    """Every living process that was started, directly or not, with `home`, or a folder in it, as its FLWR_HOME.

    Ray's workers overwrite the memory in which a process shows its environment, so who works in `home` is counted
    in, and so are the sessions and the children of all these.
    """
    marked = [process for process in psutil.process_iter(["environ", "cwd"]) if _marked(process.info, str(home))]
    found = set(marked)
    for process in marked:
        with suppress(psutil.Error):
            found.update(process.children(recursive=True))
    sessions = {_session(process.pid) for process in marked} - {None, os.getsid(0)}
    found.update(process for process in psutil.process_iter() if _session(process.pid) in sessions)
    return [process for process in found if _alive(process)]


def _marked(shown: dict[str, Any], home: str) -> bool:
    # Both are None for a zombie and for somebody else's process.
    own = str((shown["environ"] or {}).get("FLWR_HOME", ""))
    return bool(own == home or own.startswith(home + os.sep) or shown["cwd"] == home)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE) and process.pid != os.getpid()
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


if __name__ == "__main__":
    _ignore_signals()
    sys.stdin.buffer.read()
    end_processes(Path(sys.argv[1]))
    shutil.rmtree(sys.argv[1], ignore_errors=True)
