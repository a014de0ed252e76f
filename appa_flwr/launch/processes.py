"""A Flower home, and the end of all processes that were started for it.

Flower and Ray start processes in sessions of their own, whose parents end before them. Linux gives such orphans to the
launcher, once it asks for them: so whatever it has started, directly or not, stays below it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from appa_flwr.launch.terminal import Stopped

END_SECONDS = 5.0  # between asking a process to end and killing it
LOOK_SECONDS = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl.h


@contextmanager
def flower_home() -> Iterator[Path]:
    """A temporary Flower home; at the end every process that was started meanwhile has ended and it is removed.

    SIGINT, SIGTERM and SIGHUP raise `Stopped` inside, and are ignored while things are being ended.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped(signum)

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        # Not below TMPDIR: Ray puts sockets some 75 characters below its folder, and a socket's path can have 107.
        with tempfile.TemporaryDirectory(prefix="appa-", dir="/tmp", ignore_cleanup_errors=True) as folder, all_ended():
            try:
                yield Path(folder)
            finally:
                for number in STOP_SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def all_ended() -> Iterator[None]:
    """End every process that is started within the block, directly or not: asked first, killed after a few seconds.

    On macOS, processes whose parents have ended stay.

    Raises:
        OSError: Linux does not tell which they are.
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
        # Orphans have no other parent that would take them off the list of processes.
        psutil.wait_procs({*psutil.Process().children()} - before, timeout=END_SECONDS)


def descendants(*, besides: Collection[psutil.Process] = ()) -> set[psutil.Process]:
    """The living processes below this one."""
    living = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process not in besides and process.status() != psutil.STATUS_ZOMBIE:
                living.add(process)
    return living
