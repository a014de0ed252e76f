"""One process of a node stays ready and forks for each message, which runs once, with what it was started with."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from appa_flwr.launch.sites import CLIENT_APP
from appa_flwr.owner import ready

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every message imports for itself")

# Stands for the guard, whose import takes a second: says who has imported it, and what a message has run with.
PROGRAM = """
    import json, os, sys, types

    class Guard(types.ModuleType):
        def main(self):
            seen = {"pid": os.getpid(), "argv": sys.argv, "name": os.environ["NAME"], "cwd": os.getcwd()}
            seen["signal"] = repr(__import__("signal").getsignal(2))
            seen["torch"] = getattr(sys.modules.get("torch"), "by", None)
            print(json.dumps(seen | {"imported_by": imported_by}), flush=True)
            if "train" in sys.argv:
                import torch
            sys.exit()

    class Finder:
        def find_spec(self, name, path=None, target=None):
            global imported_by
            import importlib.machinery
            if name == "appa_flwr.owner.guard":
                imported_by = os.getpid()
            if name in ("appa_flwr.owner.guard", "torch"):
                return importlib.machinery.ModuleSpec(name, self)
        def create_module(self, spec):
            module = Guard(spec.name)
            module.by = os.getpid()
            return module
        def exec_module(self, module):
            pass

    sys.meta_path.insert(0, Finder())
    from appa_flwr.owner import ready
    ready.IDLE_SECONDS = float(os.environ.get("IDLE", 60))
    ready.main()
"""


class Node:
    """Starts the program as a SuperNode would, which never waits for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []

    def start(self, name: str, *arguments: str, cwd: Path | None = None) -> Path:
        output = self.folder / f"{name}.out"
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(self.folder / "guard"), *arguments]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=os.environ | {"NAME": name}, cwd=cwd
            )
        self.started.append(process)
        return output

    def ran(self, name: str, *arguments: str, cwd: Path | None = None) -> dict[str, object]:
        return seen(self.start(name, *arguments, cwd=cwd))


def seen(output: Path) -> dict[str, object]:
    deadline = time.monotonic() + 30
    while not output.read_text().endswith("\n"):
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)
    (line,) = output.read_text().splitlines()  # once, and no complaint
    return json.loads(line)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    folder = tmp_path / ("a long name " * 15)  # longer than a socket's path can be
    (folder / "guard").mkdir(parents=True)
    node = Node(folder)
    yield node
    for process in node.started:
        process.kill()
        process.wait()


def test_the_first_stays_and_later_messages_run_in_forks_of_it_as_they_were_started(node, tmp_path):
    first = node.ran("first", "--token", "a")
    second = node.ran("second", "--token", "b", "--insecure", cwd=tmp_path)
    stays = node.started[0].pid
    assert first["imported_by"] == second["imported_by"] == stays
    assert len({stays, first["pid"], second["pid"]}) == 3
    assert (first["argv"], second["argv"]) == (
        ["flwr-clientapp", "--token", "a"],
        ["flwr-clientapp", "--token", "b", "--insecure"],
    )
    assert (first["name"], second["name"]) == ("first", "second")
    assert (first["cwd"], second["cwd"]) == (os.getcwd(), str(tmp_path))
    assert "default_int_handler" in str(second["signal"])
    assert node.started[1].wait(10) == 0
    assert psutil.Process(stays).is_running()
    assert {(node.folder / "guard" / name).stat().st_mode & 0o777 for name in ("ready.sock", "ready.lock")} == {0o600}
    assert ready.PROGRAM == CLIENT_APP


def test_after_a_message_that_needed_torch_the_others_find_it_there(node):
    assert [node.ran(name)["torch"] for name in ("first", "second")] == [None, None]
    assert node.ran("third", "train")["torch"] is None
    deadline = time.monotonic() + 30
    while (message := node.ran("later"))["torch"] is None:
        assert time.monotonic() < deadline
        (node.folder / "later.out").unlink()
    assert message["torch"] == node.started[0].pid


def test_messages_that_come_at_once_run_once_each(node):
    outputs = [node.start(f"message {number}") for number in range(6)]
    messages = [seen(output) for output in outputs]
    assert [message["name"] for message in messages] == [f"message {number}" for number in range(6)]
    assert len({message["pid"] for message in messages}) == 6


def test_after_the_one_that_stays_was_killed_the_next_stays(node):
    node.ran("first")
    node.started[0].send_signal(signal.SIGKILL)
    node.started[0].wait()
    assert (node.folder / "guard" / "ready.sock").exists()
    assert node.ran("second")["imported_by"] == node.started[1].pid
    assert node.ran("third")["imported_by"] == node.started[1].pid


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_when_told_to(node, end):
    node.ran("first")
    node.started[0].send_signal(end)
    assert node.started[0].wait(10) == -end
    assert (node.folder / "first.out").read_text().count("\n") == 1  # no traceback


def test_it_ends_with_its_node(node):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(node.folder / "guard")]
    code = f"""
        import subprocess, sys
        print(subprocess.Popen({command!r}, stdout=subprocess.DEVNULL).pid, flush=True)
        sys.stdin.read()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"NAME": "message"},
    )
    stays = psutil.Process(int(parent.stdout.readline()))
    time.sleep(2 * ready.LOOK_SECONDS)
    assert stays.is_running()
    parent.communicate()
    stays.wait(10)


def test_one_that_takes_a_message_and_dies_has_not_run_it(node):
    guard = node.folder / "guard"
    with (guard / "ready.lock").open("w") as lock, ready._listener(guard) as listener:
        fcntl.flock(lock, fcntl.LOCK_EX)
        output = node.start("message")
        listener.settimeout(30)
        listener.accept()[0].close()
        message = seen(output)
    assert message["pid"] == message["imported_by"] == node.started[0].pid


def test_a_lock_without_a_socket_does_not_keep_a_message_from_running(node):
    with (node.folder / "guard" / "ready.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert node.ran("message")["pid"] == node.started[0].pid


def test_a_folder_that_is_not_there_or_cannot_be_written_does_not_either(node):
    (node.folder / "guard").rmdir()
    assert node.ran("message")["pid"] == node.started[0].pid


def test_an_idle_one_ends(node, monkeypatch):
    monkeypatch.setenv("IDLE", "2")
    node.ran("first")
    assert node.started[0].wait(20) == 0


def test_handing_over_imports_next_to_nothing():
    code = "import sys; from appa_flwr.owner import ready; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"flwr", "numpy", "pydantic", "torch"} & set(done.stdout.split())
