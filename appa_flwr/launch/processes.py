"""A temporary Flower home, and the termination of all processes that were started for it.

Flower and Ray start processes in sessions of their own, whose parents can end first. On Linux the launcher adopts such
orphans as a child subreaper, so that all processes that it has started, directly or not, stay its descendants.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from appa_flwr.launch import watchdog
from appa_flwr.launch.terminal import Stopped

END_SECONDS = 5.0  # between terminating and killing a process
LOOK_SECONDS = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl.h


@contextmanager
def flower_home() -> Iterator[Path]:
    """Make a temporary Flower home; at its end all processes started meanwhile are ended, and the home is removed.

    SIGINT, SIGTERM and SIGHUP raise `Stopped` inside, and are ignored while processes are being ended. If this process
    is killed, a watchdog ends those whose FLWR_HOME is there.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signum)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        # Not in TMPDIR: Ray's sockets add about 75 characters to their folder, and a socket's path can have 107.
        with tempfile.TemporaryDirectory(prefix="appa-", dir="/tmp", ignore_cleanup_errors=True) as folder, all_ended():
            command = [sys.executable, "-P", watchdog.__file__, folder]
            guarding = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            try:
                yield Path(folder)
            finally:
                for number in STOP_SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                guarding.kill()
                guarding.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def all_ended() -> Iterator[None]:
    """End every process started within the block, directly or not: first terminated, after a few seconds killed.

    On macOS, orphaned processes are not ended.

    Raises:
        OSError: Linux does not let this process adopt orphans.
    """
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is not None and prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    before = {*psutil.Process().children(recursive=True)}
    try:
        yield
    finally:
        for end in (psutil.Process.terminate, psutil.Process.kill):
            deadline, asked = time.monotonic() + END_SECONDS, set[psutil.Process]()
            while (left := descendants(besides=before)) and time.monotonic() < deadline:
                for process in left - asked:
                    with suppress(psutil.Error):
                        end(process)
                asked |= left
                time.sleep(LOOK_SECONDS)
        # Reap adopted orphans, since no other parent does.
        psutil.wait_procs({*psutil.Process().children()} - before, timeout=END_SECONDS)


def descendants(*, besides: Collection[psutil.Process] = ()) -> set[psutil.Process]:
    """Living descendants of this process."""
    living = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process not in besides and process.status() != psutil.STATUS_ZOMBIE:
                living.add(process)
    return living
