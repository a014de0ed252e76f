"""Stands in for Flower's `flwr-clientapp` at a group, which Flower starts anew for every message.

The group's start script puts it first on the PATH.

Starting it takes more than a second, nearly all of it imports. So the first one stays: it forks a process for each
message, its own the first, and a later one only hands over what it was started with. Every message still has a process
to itself, in which the guard decides what runs; the one that stays never reads a message.

Imports nothing at the top but what a process needs that hands over.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

PROGRAM = "flwr-clientapp"
TORCH = "torch"
SOCKET_FILE, LOCK_FILE = "ready.sock", "ready.lock"
LOOK_SECONDS = 1.0  # between two looks at whether the node is still there
IDLE_SECONDS = 600.0  # without a message; the next one's program stays then
HAND_OVER_SECONDS = 10.0  # while the first program is still importing; Flower gives a message 30 to begin
_HEADER = 8  # bytes, of the length of what follows


def main() -> None:
    """Run Flower's program for one message, here or in a process that is ready for it.

    The first argument is the folder of the process that stays; the others are Flower's.
    """
    folder, sys.argv = Path(sys.argv[1]), [PROGRAM, *sys.argv[2:]]
    if sys.platform == "linux":
        _ready(folder)
    from appa_flwr.owner import guard

    guard.main()


def _ready(folder: Path) -> None:
    """Return in the process that is to run a message."""
    import fcntl

    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        # Held as long as the process lives, so a socket without one is never mistaken for one that answers.
        lock = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _handed_over(folder):
                sys.exit()
            return
        listener = _listener(folder)
    except OSError:
        return  # a folder that cannot be written to: every message imports for itself
    _serve(listener, lock)


def _at(folder: Path, listener: socket.socket, *, connect: bool) -> None:
    """Bind or connect by a short name: a socket's path can have 107 characters, fewer than a folder's."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        if connect:
            listener.connect(SOCKET_FILE)
        else:
            Path(SOCKET_FILE).unlink(missing_ok=True)
            listener.bind(SOCKET_FILE)
    finally:
        os.fchdir(here)
        os.close(here)


def _listener(folder: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)  # the owner's alone
    try:
        _at(folder, listener, connect=False)
    finally:
        os.umask(before)
    listener.listen()
    return listener


def _handed_over(folder: Path) -> bool:
    """Whether another process has begun to run this message."""
    asked = json.dumps({"argv": sys.argv, "environ": dict(os.environ), "cwd": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(HAND_OVER_SECONDS)
        _at(folder, connection, connect=True)
        socket.send_fds(connection, [len(asked).to_bytes(_HEADER, "big")], [1, 2])
        connection.sendall(asked)
        return connection.recv(1) != b""


def _serve(listener: socket.socket, lock: int) -> None:
    """Fork for this program's own message, then for those that are handed over; return in each fork."""
    node = os.getppid()
    from appa_flwr.owner import guard  # noqa: F401 - what takes long, once

    # NumPy's threads, which Python warns of, know what a fork is.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    _share()
    try:
        told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        fork = os.fork()
    except OSError:
        return listener.close()  # the next message tries again
    if fork == 0:
        return _leave(listener, (lock, told), tell)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    last = time.monotonic()
    while os.getppid() == node and time.monotonic() - last < IDLE_SECONDS:
        heard, _, _ = select.select([listener.fileno(), told], [], [], LOOK_SECONDS)
        if told in heard and os.read(told, 1):
            with suppress(Exception):  # whatever it is, a message that needs torch meets it too
                importlib.import_module(TORCH)
                _share()
        with suppress(ChildProcessError):  # there is none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            last = time.monotonic()
        if listener.fileno() not in heard:
            continue
        connection, _ = listener.accept()
        last = time.monotonic()
        with connection:
            try:
                fork = os.fork()
            except OSError:
                continue  # no room for another process: the other end runs the message
            if fork == 0:
                _leave(listener, (lock, told), tell)
                return _take_over(connection)
    os._exit(0)


def _share() -> None:
    """Keep what is there from being copied into every fork by its garbage collector."""
    gc.collect()
    gc.freeze()


def _leave(listener: socket.socket, files: tuple[int, ...], tell: int) -> None:
    """Close what the process that stays has open, and tell it at the end whether this message has needed torch.

    Its import takes seconds, which scoring can do without: it stays from the first training message on.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    listener.close()
    for file in files:
        os.close(file)
    if TORCH in sys.modules:  # its generator would draw the same in every fork
        sys.modules[TORCH].seed()
    atexit.register(_tell, tell)


def _tell(tell: int) -> None:
    if TORCH in sys.modules:
        with suppress(OSError):  # it has gone
            os.write(tell, b"1")


def _take_over(connection: socket.socket) -> None:
    """Become the program that is at the other end, which ends once it hears so; end here if it no longer waits."""
    connection.settimeout(HAND_OVER_SECONDS)
    try:
        header, outputs, _, _ = socket.recv_fds(connection, _HEADER, 2)
        with connection.makefile("rb") as stream:
            asked = json.loads(stream.read(int.from_bytes(header, "big")))
        for output, number in zip(outputs, (1, 2), strict=True):
            os.dup2(output, number)
            os.close(output)
        sys.argv = asked["argv"]
        os.environ.clear()
        os.environ.update(asked["environ"])
        os.chdir(asked["cwd"])
        connection.sendall(b"1")
    except (OSError, ValueError):
        os._exit(0)


if __name__ == "__main__":
    main()
