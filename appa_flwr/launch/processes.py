"""Ends the processes of a Flower home: by the launcher, or by a watchdog where the launcher itself was killed.

Run as a file, it is the watchdog; so it imports nothing of this project.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

END_SECONDS = 5.0  # between asking a process to end and killing it
END_ROUNDS = 5  # a process can start another one while it is being ended
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def watched(home: Path) -> Iterator[None]:
    """Within the block a second process waits for this one's end, and then ends all processes of `home`.

    It reads from a pipe that this process alone can write to. However this process ends, kill -9 included, the system
    closes the pipe, and the watchdog sees its end.

    Args:
        home: the FLWR_HOME of the processes; the watchdog removes it too.
    """
    # -P keeps this file's folder, whose modules have common names, off the path.
    command = [sys.executable, "-P", __file__, str(home)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=home.parent,
        start_new_session=True,
    ):
        yield


def _watchdog(home: Path) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_processes(home)
    shutil.rmtree(home, ignore_errors=True)


def processes_of(home: Path) -> list[psutil.Process]:
    """Every living process that was started, directly or not, with `home` as its FLWR_HOME.

    Ray's workers overwrite the memory in which a process shows its environment, so the sessions and the
    children of the processes that do show it are counted in.
    """
    marked: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME") == str(home):
                marked.append(process)
        except psutil.Error:  # gone, a zombie, or somebody else's
            continue
    found = set(marked)
    for process in marked:
        try:
            found.update(process.children(recursive=True))
        except psutil.Error:
            continue
    sessions = {_session(process.pid) for process in marked} - {None, os.getsid(0)}
    found.update(process for process in psutil.process_iter() if _session(process.pid) in sessions)
    return [process for process in found if _alive(process)]


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
    """End every process of this Flower home: asked first, killed after a few seconds."""
    for _ in range(END_ROUNDS):
        left = processes_of(home)
        if not left:
            return
        for process in left:
            try:
                process.terminate()
            except psutil.Error:
                continue
        _, stubborn = psutil.wait_procs(left, timeout=END_SECONDS)
        for process in stubborn:
            try:
                process.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(stubborn, timeout=END_SECONDS)


if __name__ == "__main__":
    _watchdog(Path(sys.argv[1]))
